"""Checkpoints made here and elsewhere, each opened by every tool that reads its format: do they answer alike?

    python benchmarks/cross_loading.py --model FOLDER --peers FOLDER --output out.json

model: SmolLM2-135M in bf16 or another small model. peers: a folder with a venv for each tool (`gptqmodel`, `optimum`,
`llmcompressor`, `vllm`); what is not there is left out, and said. Checkpoints are W4 g64 symmetric unless
their names say otherwise, with the head as it is; calibration is 32 sequences of 128 tokens. Each is read by llmopt
(the reference of its row, in the same dtype) and by others: greedy tokens of 8 prompts, and a window of text scored.
Nothing is timed. Checkpoints that are in `--work` already are taken as they are. The tables are printed and can be had
again from the JSON by `--report`. Layers that quantize their inputs have our torch layers as the reference, those of
compressed-tensors with its emulation's arithmetic; for these a second table says how far any two readers are from each
other.

A reader whose arithmetic is ours should give every token; elsewhere bfloat16 kernels round otherwise and texts part at
a near-tie. How far readers are from each other is said by the mean KL over the window and by the mean difference of the
log-probability of the window's own tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WORKER = HERE / "cross_loading_peers.py"
PROMPTS = (
    "The capital of France is", "Water boils when", "Once upon a time there was a", "To make bread you need",
    "The theory of evolution says that", "In the year 1900", "A computer is a machine that", "My favourite season is",
)  # fmt: skip
NEW, WINDOW, SAMPLES, LENGTH = 32, 256, 32, 128
W4: dict[str, Any] = {"bits": 4, "group_size": 64}
CALIBRATION = {"num_samples": SAMPLES, "sequence_length": LENGTH}


def ours(export: str, **quantize: Any) -> dict[str, Any]:
    made = {"method": "gptq", **W4, **quantize}
    return {"quantize": made, "export": {"quantization_format": export}, **CALIBRATION}


def nearest(**quantize: Any) -> dict[str, Any]:
    """A method that needs no calibration, with the figures that are its own."""
    return {"quantize": quantize, "export": {}, **CALIBRATION}


CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llmopt compressed-tensors": ("llmopt", ours("compressed-tensors")),
    "llmopt gptq": ("llmopt", ours("gptq")),
    "llmopt gptq asymmetric": ("llmopt", ours("gptq", symmetric=False)),
    "llmopt gptq desc_act": ("llmopt", ours("gptq", static_groups=False)),
    "GPTQModel": ("gptqmodel", {**W4, "sym": True, "desc_act": False}),
    "GPTQModel desc_act": ("gptqmodel", {**W4, "sym": True, "desc_act": True, "act_group_aware": False}),
    "llm-compressor": ("llmcompressor", W4),
    "llmopt W8A8": ("llmopt", nearest(method="rtn", activations="int8")),
    "llmopt smoothquant": ("llmopt", nearest(method="smoothquant")),
    "llmopt fp8": ("llmopt", nearest(method="fp8")),
    "llmopt mxfp4": ("llmopt", nearest(method="mxfp4")),
    "llmopt nvfp4": ("llmopt", nearest(method="nvfp4")),
    "llmopt bnb-nf4": ("llmopt", nearest(method="bnb-nf4")),
    "llmopt bnb-int8": ("llmopt", nearest(method="bnb-int8")),
    "llmopt dynamic-int8": ("llmopt", nearest(method="dynamic-int8")),
}
"""Name → who makes it, and the maker's options."""
GPTQ_READERS = (
    ("llmopt", "bfloat16"), ("llmopt", "float32"), ("gptqmodel", "bfloat16"), ("gptqmodel-dense", "float32"),
    ("optimum", "bfloat16"), ("vllm", "bfloat16"),
)  # fmt: skip
TENSORS_READERS = (
    ("llmopt", "bfloat16"), ("llmopt", "float32"), ("transformers", "bfloat16"), ("transformers", "float32"),
    ("vllm", "bfloat16"),
)  # fmt: skip
LIBRARY_READERS = TENSORS_READERS[:4]
"""Of bitsandbytes' and torchao's layers, which transformers reads with those libraries, in this environment."""
LIBRARY_INPUTS_READERS = (("llmopt-static", "bfloat16"), ("llmopt-static", "float32"), *TENSORS_READERS[:4])
"""Of bitsandbytes' and torchao's layers that quantize their inputs. Our torch layers are the reference; how far the
native engine is from them says what roundings before such a layer do.
"""
INPUTS_READERS = (
    ("llmopt-emulated", "bfloat16"), ("llmopt-emulated", "float32"), *LIBRARY_INPUTS_READERS, ("vllm", "bfloat16"),
    ("vllm", "float32"),
)  # fmt: skip
"""Of compressed-tensors' layers that quantize their inputs. The reference is our torch layers with the arithmetic of
compressed-tensors' emulation (`emulate=True`), which transformers runs.
"""
READERS = {
    # name → the worker's kind, and the venv it runs in ("" for this one)
    "llmopt": ("read-llmopt", ""),
    "llmopt-static": ("read-llmopt-static", ""),
    "llmopt-emulated": ("read-llmopt-emulated", ""),
    "transformers": ("read-transformers", ""),
    "gptqmodel": ("read-gptqmodel", "gptqmodel"),
    "gptqmodel-dense": ("read-gptqmodel-dense", "gptqmodel"),
    "optimum": ("read-transformers", "optimum"),
    "vllm": ("read-vllm", "vllm"),
}


def quantizes_inputs(name: str) -> bool:
    """Whether the checkpoint's layers quantize their inputs."""
    return name in ("llmopt bnb-int8", "llmopt dynamic-int8", "llmopt W8A8", "llmopt smoothquant", "llmopt fp8")


def readers_of(name: str) -> Sequence[tuple[str, str]]:
    """Who opens a checkpoint, and in which dtype."""
    if quantizes_inputs(name):
        return LIBRARY_INPUTS_READERS if "int8" in name else INPUTS_READERS
    if "bnb" in name:
        return LIBRARY_READERS
    return GPTQ_READERS if "gptq" in name.lower() else TENSORS_READERS


class Peers:
    """Starts workers, each in its venv."""

    def __init__(self, folder: Path, scratch: Path, timeout: int) -> None:
        self.folder, self.scratch, self.timeout = folder, scratch, timeout

    def python(self, venv: str) -> str | None:
        found = Path(sys.executable) if not venv else self.folder / venv / "bin" / "python"
        return str(found) if found.exists() else None

    def call(self, kind: str, venv: str, job: dict[str, Any]) -> dict[str, Any]:
        """The worker's answer, or `{"error": its last line}`."""
        python = self.python(venv)
        if python is None:
            return {"error": f"there is no venv {venv}"}
        path = self.scratch / "job.json"
        path.write_text(json.dumps(job))
        # no tool may go out for what it was given as a folder
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        try:
            done = subprocess.run(
                [python, str(WORKER), kind, str(path)], env=environment, cwd=self.scratch, capture_output=True,
                text=True, timeout=self.timeout, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"error": f"no answer in {self.timeout} s"}
        if done.returncode:
            return {"error": reason(done.stderr) or f"exit code {done.returncode}"}
        return json.loads(done.stdout.strip().splitlines()[-1])


def reason(text: str) -> str:
    """The last line of a traceback that names an error; vLLM logs its own around it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if ("Error: " in line or "Exception: " in line) and not line.startswith("File")]
    inner = [line.partition(" [type=")[0] for line in lines if line.startswith("Value error, ")]  # pydantic's
    return (inner or named or lines or [""])[-1][-300:]


def texts(model: Path, text: Path) -> dict[str, Any]:
    """Prompts, a window and calibration sequences as token ids, the same for all."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(text.read_text(encoding="utf-8"))["input_ids"]
    step = (len(ids) - LENGTH) // SAMPLES
    calibration = [ids[i * step : i * step + LENGTH] for i in range(SAMPLES)]
    start = step // 2 + LENGTH
    return {
        "prompts": [tokenizer(prompt)["input_ids"] for prompt in PROMPTS],
        "window": ids[start : start + WINDOW],
        "calibration": calibration,
    }


def agreement(reference: dict[str, Any], other: dict[str, Any], logits: dict[str, Path]) -> dict[str, Any]:
    """How `other` answers beside `reference`. logits: files of full log-probabilities by role, where there are."""
    import numpy

    pairs = list(zip(reference["tokens"], other["tokens"], strict=True))
    same = [next((i for i, (a, b) in enumerate(zip(x, y)) if a != b), len(x)) for x, y in pairs]
    out: dict[str, Any] = {
        "texts_equal": sum(n == len(x) for n, (x, _) in zip(same, pairs)),
        "tokens_before_parting": sum(same),
        "top1": float(numpy.mean([a == b for a, b in zip(reference["top"], other["top"], strict=True)])),
        "chosen": float(numpy.mean([abs(a - b) for a, b in zip(reference["chosen"], other["chosen"], strict=True)])),
    }
    if all(path.is_file() for path in logits.values()):
        out["mean_kl"], out["kl_positions"] = mean_kl(logits["reference"], logits["other"])
    return out


def mean_kl(reference: Path, other: Path) -> tuple[float, int]:
    """In nats, over the positions that both files of log-probabilities have, and how many those are."""
    import numpy

    p, q = (numpy.load(path).astype("float64") for path in (reference, other))
    count = min(len(p), len(q))  # some give full distributions at the first positions alone
    p, q = p[:count], q[:count]
    return float((numpy.exp(p) * (p - q)).sum(-1).mean()), count


def make(peers: Peers, args: argparse.Namespace, name: str, calibration: Path) -> dict[str, Any] | None:
    """Make a checkpoint, unless it is there; what went wrong."""
    maker, options = CHECKPOINTS[name]
    out = args.work / name.replace(" ", "-")
    if (out / "config.json").is_file():
        return None
    job = {"model": str(args.model), "out": str(out), "tokens": str(calibration), "options": options}
    if maker == "llmopt":
        job["options"] = {**options, "text": str(args.text.resolve())}
    answer = peers.call(f"make-{maker}", "" if maker == "llmopt" else maker, job)
    return answer if "error" in answer else None


def read(peers: Peers, args: argparse.Namespace, name: str, given: dict[str, Any]) -> list[dict[str, Any]]:
    """Every reader's answer to one checkpoint, each held against llmopt's in the same dtype."""
    folder, lines = args.work / name.replace(" ", "-"), []
    answers: dict[str, dict[str, Any]] = {}
    files: dict[str, Path] = {}
    every: dict[str, Path] = {}
    for reader, dtype in readers_of(name):
        if args.readers and not reader.startswith("llmopt") and reader not in args.readers.split(","):
            continue
        kind, venv = READERS[reader]
        path = peers.scratch / f"{reader}-{dtype}.npy"
        path.unlink(missing_ok=True)
        job = {"model": str(folder), "source": str(args.model), "dtype": dtype, "new": NEW, "logits": str(path)}
        answer = peers.call(kind, venv, {**job, "prompts": given["prompts"], "window": given["window"]})
        line: dict[str, Any] = {"checkpoint": name, "reader": reader, "dtype": dtype}
        if "error" in answer:
            line["error"] = answer["error"]
        elif reader.startswith("llmopt") and dtype not in answers:
            answers[dtype], files[dtype] = answer, path
            line |= {"about": answer["about"], "tokens": answer["tokens"]}
        else:
            line |= {"about": answer["about"], "tokens": answer["tokens"]}
            if dtype in answers:
                line |= agreement(answers[dtype], answer, {"reference": files[dtype], "other": path})
        if quantizes_inputs(name) and path.is_file():
            line["kl_from"] = {before: mean_kl(file, path)[0] for before, file in every.items()}
            every[f"{reader} {dtype}"] = path
        lines.append(line)
        print(json.dumps({k: v for k, v in line.items() if k != "tokens"}), file=sys.stderr, flush=True)
    return lines


def report(result: dict[str, Any]) -> str:
    """The table, as markdown."""
    count, total = len(PROMPTS), len(PROMPTS) * NEW
    rows = [
        "| checkpoint | read by | dtype | texts equal | tokens before they part | top-1 | mean KL | mean diff. log p |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for line in result["lines"]:
        where = f"| {line['checkpoint']} | {line['reader']} | {line['dtype']} |"
        if "error" in line:
            rows.append(f"{where} {line['error'].replace('|', '/')} | | | | |")
        elif "texts_equal" not in line:
            rows.append(f"{where} the reference ({line['about'].get('runner', '')}) | | | | |")
        else:
            kl = f"{line['mean_kl']:.6f}" if "mean_kl" in line else ""
            rows.append(
                f"{where} {line['texts_equal']} of {count} | {line['tokens_before_parting']} of {total} | "
                f"{line['top1']:.1%} | {kl} | {line['chosen']:.5f} |"
            )
    return "\n\n".join(["\n".join(rows), *pairs(result)])


def pairs(result: dict[str, Any]) -> list[str]:
    """Mean KL between any two readers of each checkpoint whose layers quantize their inputs, as markdown."""
    tables = []
    for name in dict.fromkeys(line["checkpoint"] for line in result["lines"]):
        lines = [line for line in result["lines"] if line["checkpoint"] == name and "kl_from" in line]
        if len(lines) < 2:
            continue
        names = [f"{line['reader']} {line['dtype']}" for line in lines]
        tables.append(f"| {name}: mean KL from | " + " | ".join(names[1:]) + " |\n" + "|---" * len(names) + "|")
        for first in names[:-1]:
            cells = [f"{line['kl_from'][first]:.4f}" if first in line["kl_from"] else "" for line in lines[1:]]
            tables[-1] += f"\n| {first} | " + " | ".join(cells) + " |"
    return tables


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a small model in bf16")
    parser.add_argument("--peers", type=Path, help="folder with the tools' venvs")
    parser.add_argument("--output", type=Path, default=Path("cross_loading.json"))
    parser.add_argument("--text", type=Path, default=HERE.parent / "data" / "calibration.txt")
    parser.add_argument("--work", type=Path, help="folder of the checkpoints (default: a temporary one)")
    parser.add_argument("--only", default="", help="checkpoints whose name is one of these, comma-separated")
    parser.add_argument("--readers", default="", help="readers beside llmopt, comma-separated; all by default")
    parser.add_argument("--timeout", type=int, default=3600, help="seconds for one process")
    parser.add_argument("--append", action="store_true", help="add to the lines of an earlier piece of the run")
    parser.add_argument("--report", type=Path, help="print the table of this JSON and do nothing else")
    args = parser.parse_args()
    if args.report is None and (args.model is None or args.peers is None):
        parser.error("--model and --peers are needed")
    return args


def main() -> None:
    args = arguments()
    if args.report is not None:
        print(report(json.loads(args.report.read_text())))
        return
    earlier = args.append and args.output.is_file()
    result = json.loads(args.output.read_text()) if earlier else {"lines": []}
    with tempfile.TemporaryDirectory(prefix="cross-loading-") as scratch:
        args.model = args.model.resolve()
        args.work = (args.work or Path(scratch) / "checkpoints").resolve()
        args.work.mkdir(parents=True, exist_ok=True)
        peers = Peers(args.peers.resolve(), Path(scratch), args.timeout)
        given = texts(args.model, args.text)
        calibration = Path(scratch) / "calibration.json"
        calibration.write_text(json.dumps(given.pop("calibration")))
        chosen = args.only.split(",") if args.only else list(CHECKPOINTS)
        for name in chosen:
            failure = make(peers, args, name, calibration)
            if failure is not None:
                lines = [{"checkpoint": name, "reader": "(making it)", "dtype": "", "error": failure["error"]}]
            else:
                lines = read(peers, args, name, given)
            places = {(line["checkpoint"], line["reader"], line["dtype"]) for line in lines}
            kept = [x for x in result["lines"] if (x["checkpoint"], x["reader"], x["dtype"]) not in places]
            result["lines"] = kept + lines
            args.output.write_text(json.dumps(result, indent=1))
    print(report(result))


if __name__ == "__main__":
    main()
