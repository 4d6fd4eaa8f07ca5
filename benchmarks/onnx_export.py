"""Decode speed and size of ONNX folders in onnxruntime-genai, and of ours through `llmopt.load`, in turns.

    python benchmarks/onnx_export.py --genai PEERS/ortgenai/bin/python OUR_EXPORT ... PEERS/models/ort-int4

Each round opens every folder in a fresh process, gives it the same prompt of random tokens, and times `--new` further
tokens of one greedy sequence, without the first one; end of text is ignored. Prints medians over `--rounds` with the
lowest and highest, as a markdown table. Threads are OMP_NUM_THREADS's, where it is set.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

GENAI = """
import json, os, random, sys, time
import onnxruntime_genai as og

folder, prompt, new = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
config = og.Config(folder)
threads = int(os.environ.get("OMP_NUM_THREADS") or 0)
if threads:
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
model = og.Model(config)
total = prompt + new + 1
params = og.GeneratorParams(model)
params.set_search_options(max_length=total, min_length=total, do_sample=False)
generator = og.Generator(model, params)
picks = random.Random(0)
generator.append_tokens([picks.randrange(100, 20000) for _ in range(prompt)])
generator.generate_next_token()
start = time.perf_counter()
for _ in range(new):
    generator.generate_next_token()
print(json.dumps(new / (time.perf_counter() - start)))
"""
OURS = """
import json, random, sys, time
import llmopt

folder, prompt, new = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
picks = random.Random(0)
ids = [picks.randrange(100, 20000) for _ in range(prompt)]
with llmopt.load(folder, verify=False) as llm:
    chunks = llm.stream(ids, max_new_tokens=new + 1, ignore_eos=True)
    next(chunks)
    start = time.perf_counter()
    for chunk in chunks:
        pass
    print(json.dumps(new / (time.perf_counter() - start)))
"""


def run(python: str, code: str, folder: Path, prompt: int, new: int) -> float:
    """Tokens a second, from a fresh process. Raises CalledProcessError where it fails."""
    command = [python, "-c", code, str(folder), str(prompt), str(new)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ)
    return float(json.loads(done.stdout.strip().splitlines()[-1]))


def megabytes(folder: Path) -> float:
    """Of the graph and its weights."""
    return sum(path.stat().st_size for path in folder.glob("model.onnx*")) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--genai", required=True, help="python of an environment with onnxruntime-genai")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    subjects = [(f"onnxruntime-genai: {folder.name}", options.genai, GENAI, folder) for folder in options.folders]
    ours = [folder for folder in options.folders if (folder / "config.json").is_file()]
    subjects += [(f"llmopt.load: {folder.name}", sys.executable, OURS, folder) for folder in ours]
    figures: dict[str, list[float]] = {name: [] for name, *_ in subjects}
    for _ in range(options.rounds):
        for name, python, code, folder in subjects:
            figures[name].append(run(python, code, folder, options.prompt, options.new))
    print("| | decode tok/s, median (lowest-highest) | MB |\n|---|---|---|")
    for name, _, _, folder in subjects:
        found = figures[name]
        middle = f"{statistics.median(found):.1f} ({min(found):.1f}-{max(found):.1f})"
        print(f"| {name} | {middle} | {megabytes(folder):.1f} |")
    print(f"\n{options.prompt} prompt tokens, {options.new} timed, {options.rounds} rounds in turns, ", end="")
    print(f"load average {os.getloadavg()[0]:.2f} at the end")


if __name__ == "__main__":
    main()
