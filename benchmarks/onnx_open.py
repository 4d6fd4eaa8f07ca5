"""Greedy texts of an ONNX folder in everything that opens it: `llmopt.load`, torch, optimum, transformers.js.

    python benchmarks/onnx_open.py FOLDER [FOLDER …] --source MODEL
    python benchmarks/onnx_open.py FOLDER --optimum VENV/bin/python --transformers-js NPM_FOLDER

Prompts are passages of the shipped text, each of another length, and run as one batch through `llmopt.load`; what it
writes is held against each of the others, and against further folders of the same model. --source: the model that the
folder was exported from, in torch, float32, a prompt at a time. --optimum: a Python with optimum-onnx
(ORTModelForCausalLM; one batch, padded on the left). --transformers-js: a folder with `npm install
@huggingface/transformers` in it (onnxruntime-node; a prompt at a time).
Exits with 1 where a text differs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llmopt

OPTIMUM = """
import json, sys, torch
from optimum.onnxruntime import ORTModelForCausalLM

asked = json.load(sys.stdin)
model = ORTModelForCausalLM.from_pretrained(asked["folder"])
width = max(map(len, asked["prompts"]))
pads = [width - len(prompt) for prompt in asked["prompts"]]
ids = torch.tensor([[0] * pad + prompt for pad, prompt in zip(pads, asked["prompts"])])
mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads])
out = model.generate(ids, attention_mask=mask, max_new_tokens=asked["tokens"], do_sample=False, pad_token_id=0)
print(json.dumps([row[width:] for row in out.tolist()]))
"""
NODE = """
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import { basename, dirname } from "node:path";
import { pathToFileURL } from "node:url";

const asked = JSON.parse(readFileSync(0, "utf8"));
const found = createRequire(asked.library + "/package.json").resolve("@huggingface/transformers");
const { AutoModelForCausalLM, Tensor, env } = await import(pathToFileURL(found));
env.allowRemoteModels = false;
env.localModelPath = dirname(asked.folder);
const model = await AutoModelForCausalLM.from_pretrained(basename(asked.folder), {
  subfolder: "", model_file_name: "model", dtype: "fp32", device: "cpu", use_external_data_format: true,
  session_options: { intraOpNumThreads: asked.threads },
});
const texts = [];
for (const prompt of asked.prompts) {
  const shape = [1, prompt.length];
  const input_ids = new Tensor("int64", BigInt64Array.from(prompt.map(BigInt)), shape);
  const attention_mask = new Tensor("int64", BigInt64Array.from(prompt.map(() => 1n)), shape);
  const out = await model.generate({ input_ids, attention_mask, max_new_tokens: asked.tokens, do_sample: false });
  texts.push(out.tolist()[0].slice(prompt.length).map(Number));
}
console.log(JSON.stringify(texts));
"""


def make_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """Token ids of passages of 3, 8, 13 … tokens."""
    text = (Path(llmopt.__file__).parent / "data" / "calibration.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if len(line) > 20 * count][:count]
    return [tokenizer(line)["input_ids"][: 3 + 5 * number] for number, line in enumerate(lines)]


def by_load(folder: str, prompts: list[list[int]], tokens: int, **options: Any) -> list[list[int]]:
    with llmopt.load(folder, **options) as llm:
        found: Any = llm.generate(prompts, max_new_tokens=tokens)  # a list for a list
        return [one.token_ids for one in found]


def by_program(command: Sequence[str], asked: dict[str, Any]) -> list[list[int]]:
    """What a program answers on its last line."""
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command[0]}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def report(name: str, found: list[list[int]], ours: list[list[int]], ends: set[int]) -> bool:
    """Print how many texts are equal: up to an end-of-text token, behind which a batch is filled up."""

    def cut(text: list[int]) -> list[int]:
        return next((text[: i + 1] for i, token in enumerate(text) if token in ends), text)

    equal = [cut(a) == cut(b) for a, b in zip(found, ours)]
    print(f"{name}: {sum(equal)} of {len(equal)} texts equal", flush=True)
    for number, (same, a, b) in enumerate(zip(equal, found, ours)):
        if not same:
            print(f"  prompt {number}: {a}\n  llmopt.load: {b}")
    return all(equal)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="FOLDER")
    parser.add_argument("--source", help="model to run in torch")
    parser.add_argument("--optimum", help="Python that has optimum-onnx")
    parser.add_argument("--transformers-js", help="folder with node_modules")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    folder = str(Path(args.folders[0]).resolve())
    with llmopt.load(folder, num_threads=args.threads) as llm:
        prompts = make_prompts(llm.tokenizer, args.prompts)
        ends = set(llm._opened.eos_token_ids)
        found: Any = llm.generate(prompts, max_new_tokens=args.tokens)  # a list for a list
        ours = [one.token_ids for one in found]
    print(f"llmopt.load: {len(ours)} prompts of {[len(prompt) for prompt in prompts]} tokens in one batch")
    asked = {"folder": folder, "prompts": prompts, "tokens": args.tokens, "threads": args.threads}
    good = True
    for other in args.folders[1:]:
        good &= report(f"llmopt.load {other}", by_load(other, prompts, args.tokens), ours, ends)
    if args.source:
        found = by_load(args.source, prompts, args.tokens, engine="static", dtype="float32", device="cpu")
        good &= report("torch float32", found, ours, ends)
    if args.optimum:
        good &= report("optimum", by_program([args.optimum, "-c", OPTIMUM], asked), ours, ends)
    if args.transformers_js:
        library = str(Path(args.transformers_js).resolve())
        command = ["node", "--input-type=module", "-e", NODE]
        good &= report("transformers.js", by_program(command, {**asked, "library": library}), ours, ends)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
