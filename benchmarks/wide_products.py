"""A model's forward in 16 bits with and without `runtime/kernels/wide_products.py`, in turn: seconds, ratio, error.

    python benchmarks/wide_products.py --model FOLDER [--rounds 5] [--threads 1]

Each round runs 4 sequences of 512 random tokens through the decoder in every way; a cell is the median of the rounds.
Errors are relative to the same weights in float32. `forced` says that this processor has the instructions, so that
nothing would be converted by itself.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from llmopt.runtime.kernels.wide_products import WideProducts, slow_dtypes


def hidden(model: Any, ids: torch.Tensor, wide: bool) -> tuple[torch.Tensor, float]:
    began = time.perf_counter()
    with torch.inference_mode():
        if wide:
            with WideProducts({model.dtype}):
                out = model(ids, use_cache=False).last_hidden_state
        else:
            out = model(ids, use_cache=False).last_hidden_state
    return out.float(), time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    own = transformers.AutoModel.from_pretrained(args.model, dtype="auto").eval()
    ids = torch.randint(0, own.config.vocab_size, (4, 512), generator=torch.Generator().manual_seed(0))
    slow = ", ".join(sorted(str(d).removeprefix("torch.") for d in slow_dtypes())) or "no dtype"
    print(f"{platform.machine()}, torch {torch.__version__}, {args.threads} thread(s); slow: {slow}\n")
    print("| dtype | plain, s | in float32, s | ratio | error plain | error in float32 |\n|---|---|---|---|---|---|")
    exact = hidden(own.float(), ids, wide=False)[0]
    for dtype in (torch.bfloat16, torch.float16):
        model = own.to(dtype)
        seconds: dict[bool, list[float]] = {False: [], True: []}
        errors: dict[bool, float] = {}
        for _ in range(args.rounds):
            for wide in (False, True):
                out, took = hidden(model, ids, wide)
                seconds[wide].append(took)
                errors[wide] = float((out - exact).norm() / exact.norm())
        plain, in_float32 = (statistics.median(seconds[w]) for w in (False, True))
        forced = "" if dtype in slow_dtypes() else " (forced)"
        cells = f"{plain:.2f} | {in_float32:.2f} | {plain / in_float32:.2f} | {errors[False]:.4f} | {errors[True]:.4f}"
        print(f"| {str(dtype).removeprefix('torch.')}{forced} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
