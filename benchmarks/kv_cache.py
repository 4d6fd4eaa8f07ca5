"""What a quantized KV cache costs and saves: quality, tokens in a fixed pool, decode speed; and what a cache is for.

    python benchmarks/kv_cache.py --model FOLDER [--text FILE] [--windows 16] [--parts quality capacity speed]
    python benchmarks/kv_cache.py --model FOLDER --parts seed --plot docs/kv_cache.svg

quality   perplexity over the second halves of windows of 1,024 tokens, whose first halves lie in the cache, and the
          KL divergence from the bfloat16 cache's logits: llmopt's engine with float32 between the products
          (`rounding="none"`) in all rows, so that they differ in the cache alone.
capacity  tokens that fit into a pool of `--pool-mib`.
speed     milliseconds of a decode step of one request whose context has `--context` tokens, all formats in turn,
          the least and the median of `--rounds`; ratios to bfloat16 within each round.
seed      time per new token as the context grows, with the cache and recomputing everything.

Each format is a runner of its own, so `speed` holds as many packed models in memory as there are formats.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import llmopt
import torch
from kernels import idle_seconds
from llmopt.evaluation.cached import cached_logits
from llmopt.evaluation.divergence import DivergenceMeter
from llmopt.evaluation.perplexity import PerplexityMeter
from llmopt.evaluation.texts import read_text, token_windows
from llmopt.runtime.engine.plan import Row, StepPlan
from scheduler import line_plot

FORMATS = ("bfloat16", "fp8_e4m3", "int8", "int4")
LENGTH = 1024
TAIL = 2
"""Blocks that a request has beyond those of its tokens, where keys are by channel."""
PARTS = ("quality", "capacity", "speed", "seed")


def load(options: argparse.Namespace, kv_dtype: str, **more: Any) -> llmopt.LLM:
    if options.runner == "native":
        more["rounding"] = "none"
    return llmopt.load(
        options.model, engine="native", runner=options.runner, device="cpu", draft=False, verify=False,
        kv_dtype=kv_dtype, **more,
    )  # fmt: skip


def runner_of(llm: llmopt.LLM) -> Any:
    """The runner of an engine that `load` opened; it has more than the protocol says."""
    return llm.runner


def quality(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Perplexity and divergence by format; the bfloat16 cache's logits, kept as float16, are the reference."""
    rows: list[dict[str, Any]] = []
    text, kept = read_text(options.text), []
    blocks = LENGTH // 32 + TAIL
    for name in options.formats:
        with load(options, name, num_blocks=blocks) as llm:
            bos = llm.tokenizer.bos_token_id is not None and "gemma" in str(llm.module.config.model_type)
            windows = token_windows(text, llm.tokenizer, LENGTH, options.windows, add_bos=bos)
            own, apart = PerplexityMeter(), DivergenceMeter()
            for index, (ids, logits) in enumerate(cached_logits(runner_of(llm), windows)):
                own.update(ids, logits)
                if name == options.formats[0]:
                    kept.append(logits.half())
                else:
                    apart.update(kept[index].float(), logits)
        row = {"format": name, "perplexity": own.result().perplexity, "windows": len(windows)}
        row["increase"] = row["perplexity"] / (rows[0]["perplexity"] if rows else row["perplexity"]) - 1
        if name != options.formats[0]:
            row.update(apart.result().as_dict())
        rows.append(row)
        print(
            f"{name:10} perplexity {row['perplexity']:9.4f}  {100 * row['increase']:+7.3f}%  "
            f"KL {row.get('mean_kl', 0):.5f}  top-1 {row.get('top1_agreement', 1):.4f}"
        )
    return rows


def capacity(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens in a pool of the same bytes, as the runner sizes it."""
    rows: list[dict[str, Any]] = []
    for name in options.formats:
        with load(options, name, kv_cache_memory=options.pool_mib << 20) as llm:
            runner = runner_of(llm)
            tokens = (runner.num_blocks - runner.tail_blocks) * runner.block_size
        rows.append({"format": name, "tokens": tokens, "ratio": tokens / (rows[0]["tokens"] if rows else tokens)})
        print(f"{name:10} {tokens:9,} tokens in {options.pool_mib} MiB  {rows[-1]['ratio']:.3f}")
    return rows


def fill(runner: Any) -> None:
    """Random keys and values everywhere: pages that were never written read faster than memory does."""
    for half in runner.decoder.kv_cache:
        if half.dtype.itemsize > 1:
            half.normal_(0, 1)
            continue
        values = half.dim() == 5  # [L, N, H, B, bytes]; keys by channel are [L, N, H, bytes]
        whole = half.view(torch.uint8).flatten(3) if values else half.view(torch.uint8).flatten(2)
        whole.random_(0, 120)
        if values:  # a head's codes, then its scales
            whole[..., -2 * runner.block_size :].view(torch.bfloat16).fill_(0.02)
        else:  # all heads' codes, then their scales, then their zeros
            channels = whole.shape[-1] // (runner.block_size // 2 + 3)
            whole[..., -3 * channels : -channels].view(torch.bfloat16).fill_(0.02)


def speed(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Decode steps by format, interleaved."""
    count, runners = -(-options.context // 32) + TAIL, {}
    for name in options.formats:
        runners[name] = load(options, name, num_blocks=count)
        fill(runner_of(runners[name]))
    step = StepPlan((Row(0, options.context - 1, (7,), tuple(range(count)), 1),))
    times: dict[str, list[float]] = {name: [] for name in options.formats}
    for _ in range(options.rounds):
        for name, llm in runners.items():
            runner = runner_of(llm)
            runner.execute(step)
            started = time.perf_counter()
            for _ in range(options.steps):
                runner.execute(step)
            times[name].append((time.perf_counter() - started) / options.steps * 1e3)
    rows = []
    for name in options.formats:
        base_times = times[options.formats[0]]
        ratios = [own / base for own, base in zip(times[name], base_times)]
        rows.append(
            {
                "format": name, "context": options.context, "least_ms": min(times[name]),
                "median_ms": statistics.median(times[name]), "ratio": statistics.median(ratios),
                "ratio_of_least": min(times[name]) / min(base_times),
            }
        )  # fmt: skip
        row = rows[-1]
        print(
            f"{name:10} least {row['least_ms']:7.3f} ms  median {row['median_ms']:7.3f} ms  "
            f"ratio to bfloat16: median {row['ratio']:.3f}, of the least {row['ratio_of_least']:.3f}"
        )
    for llm in runners.values():
        llm.close()
    return rows


def seed(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds of one more token by context: from the cache, and computing all of it again."""
    rows = []
    longest = max(options.contexts)
    with load(options, "auto", num_blocks=-(-longest // 32)) as llm:
        runner = runner_of(llm)
        fill(runner)
        for context in options.contexts:
            table = tuple(range(-(-context // 32)))
            ids = tuple(i % 1000 + 10 for i in range(context))
            cached = StepPlan((Row(0, context - 1, ids[-1:], table, 1),))
            whole = StepPlan((Row(0, 0, ids, table, 1),))
            found = {}
            for name, plan in (("cached_ms", cached), ("recomputed_ms", whole)):
                runner.execute(plan)
                least = []
                for _ in range(3):
                    started = time.perf_counter()
                    runner.execute(plan)
                    least.append((time.perf_counter() - started) * 1e3)
                found[name] = min(least)
            rows.append({"context": context, **found})
            print(
                f"context {context:5d}: {found['cached_ms']:8.2f} ms from the cache, {found['recomputed_ms']:9.2f} ms "
                "recomputed"
            )
    if options.plot:
        series = {
            label: [(row["context"], row[key]) for row in rows]
            for label, key in (("with the KV cache", "cached_ms"), ("recomputing everything", "recomputed_ms"))
        }
        options.plot.write_text(
            line_plot("One more token by context", "tokens of context", "milliseconds", series) + "\n"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, default=Path("../shared/data/wikitext2-raw-test.txt"))
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="the first is the baseline"
    )
    parser.add_argument("--runner", choices=("native", "eager"), default="native", help="for quality and capacity")
    parser.add_argument("--pool-mib", type=int, default=256)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--contexts", type=int, nargs="+", default=[16, 64, 128, 256, 512, 1024, 2048])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=5, help="decode steps of a round and format")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--plot", type=Path, help="draw `seed` into this SVG file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    began, cpu, idle, results = time.perf_counter(), os.times(), idle_seconds(), {}
    for part in options.parts:
        print(f"-- {part}")
        results[part] = globals()[part](options)
    wall, used = time.perf_counter() - began, sum(os.times()[:2]) - sum(cpu[:2])
    foreign = max(0.0, wall * (os.cpu_count() or 1) - (idle_seconds() - idle) - used) / wall
    conditions = (
        f"{options.model.name}, {options.threads} threads of {os.cpu_count()}, foreign load {foreign:.2f} cores on "
        f"average, {wall:.0f} s in all, Python {platform.python_version()}, torch {torch.__version__}"
    )
    print(conditions)
    if options.output:
        options.output.write_text(json.dumps({"conditions": conditions, **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
