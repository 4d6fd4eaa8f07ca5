"""Perplexity of model folders and artifacts over a text, side by side, and what each costs against the first.

    python benchmarks/perplexity.py --text wikitext2-raw-test.txt SOURCE ARTIFACT ...

Windows of `--length` tokens, without overlap and without BOS; `--windows 8:28` takes some of them. Each model answers
through the runner that `llmopt.load` gives it, so that what is measured is what runs. Prints a markdown table.
"""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path

import llmopt
from llmopt.evaluation.logits import runner_logits, window_logits
from llmopt.evaluation.perplexity import PerplexityMeter
from llmopt.evaluation.texts import read_text, token_windows
from llmopt.runtime.llm import EngineName
from llmopt.runtime.weight_files import weight_files


def measure(folder: Path, text: str, length: int, part: slice, engine: EngineName) -> dict[str, float]:
    """Perplexity, scored tokens, bytes of weight files and seconds of one model."""
    with llmopt.load(folder, engine=engine) as llm:
        windows = token_windows(text, llm.tokenizer, length)[part]
        scored = window_logits(llm.module, windows) if llm.runner is None else runner_logits(llm.runner, windows)
        meter, start = PerplexityMeter(), time.perf_counter()
        for ids, logits in scored:
            meter.update(ids, logits)
        result = meter.result()
    size = sum(file.stat().st_size for file in weight_files(folder))
    seconds = time.perf_counter() - start
    return {"perplexity": result.perplexity, "tokens": result.num_tokens, "bytes": size, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--text", required=True)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--windows", default=":", help="first:last, such as 8:28")
    parser.add_argument("--engine", default="auto", choices=["auto", "native", "static"])
    options = parser.parse_args()
    first, last = (int(part) if part else None for part in options.windows.split(":"))
    text = read_text(options.text)
    rows = [measure(m, text, options.length, slice(first, last), options.engine) for m in options.models]
    import torch
    import transformers

    print(f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}\n")
    print("| model | perplexity | against the first | weights MB | against the first | tokens | s |")
    print("|---|---|---|---|---|---|---|")
    for model, row in zip(options.models, rows):
        rise, share = row["perplexity"] / rows[0]["perplexity"] - 1, row["bytes"] / rows[0]["bytes"]
        print(
            f"| {model.name} | {row['perplexity']:.3f} | {rise:+.2%} | {row['bytes'] / 1e6:.1f} | {share:.1%} "
            f"| {row['tokens']} | {row['seconds']:.0f} |"
        )


if __name__ == "__main__":
    main()
