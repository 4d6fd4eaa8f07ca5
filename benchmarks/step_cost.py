"""What a step of the engine costs as work grows: by batch size, by context length, and the scheduler's own share.

    python benchmarks/step_cost.py --model FOLDER [ARTIFACT ...] [--plot docs/step_cost.svg] [--output step_cost.json]

Each model runs under `llmopt.load`'s native engine as it is. A cell is the median of `Engine.step` (schedule, run,
sample, commit) over decode steps of `batch` requests whose contexts have `context` tokens, greedy, and beside it the
least of them. Prompts are not computed: the first step of a cell writes nothing (`Decoding`), and the cache holds a
constant instead, which costs a decode step what real keys and values do. Cells of more than `--tokens` tokens of
context in all are left out. The scheduler's time is that of `benchmarks/scheduler.py`: no model, its thread's CPU time.
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
from llmopt.runtime.engine.engine import Engine
from llmopt.runtime.engine.plan import StepPlan
from llmopt.runtime.engine.sampling_params import SamplingParams
from llmopt.runtime.engine.scheduler_config import SchedulerConfig
from scheduler import line_plot
from scheduler import measure as measure_scheduler

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 512, 2048, 8192)
SPARE = 40
"""Decode steps that a cell may take, at most; its contexts end with `context` tokens."""


class Decoding:
    """A runner that computes decode steps and answers prompts with zeros; it adds up the seconds of the former."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.block_size, self.num_blocks = runner.block_size, runner.num_blocks
        self.vocab_size, self.max_model_len = runner.vocab_size, runner.max_model_len
        self.seconds = 0.0

    def execute(self, plan: StepPlan) -> torch.Tensor:
        if any(len(row.token_ids) > 1 for row in plan.rows):
            return torch.zeros(plan.num_logits, self.vocab_size)
        started = time.perf_counter()
        logits = self._runner.execute(plan)
        self.seconds = time.perf_counter() - started
        return logits

    def close(self) -> None:
        """The runner belongs to the caller."""


def cell(runner: Any, batch: int, context: int, seconds: float) -> dict[str, float]:
    """Milliseconds of a step and of the runner in it."""
    decoding = Decoding(runner)
    budget = batch * context + 1
    config = SchedulerConfig(max_num_seqs=batch, max_num_batched_tokens=budget, prefix_caching=False, watermark=0.0)
    engine = Engine(decoding, scheduler=config)
    generator = torch.Generator().manual_seed(context)
    prompt = context - SPARE
    for _ in range(batch):
        ids = torch.randint(0, runner.vocab_size, (prompt,), generator=generator).tolist()
        engine.add_request(ids, SamplingParams(max_new_tokens=SPARE, temperature=0.0, ignore_eos=True))
    engine.step()  # the prompts
    engine.step()  # one decode step to warm up
    steps: list[float] = []
    inner, until = [], time.perf_counter() + seconds
    while len(steps) < SPARE - 3 and (len(steps) < 3 or time.perf_counter() < until):
        started = time.perf_counter()
        outputs = engine.step()
        steps.append(time.perf_counter() - started)
        inner.append(decoding.seconds)
        if len(outputs) != batch or any(output.error for output in outputs):
            raise SystemExit(f"a step of {batch} requests gave {len(outputs)} outputs: {outputs[:1]}")
    engine.close()
    return {
        "batch": batch,
        "context": context,
        "steps": len(steps),
        "step_ms": statistics.median(steps) * 1e3,
        "least_ms": min(steps) * 1e3,
        "runner_ms": statistics.median(inner) * 1e3,
    }


def measure(folder: Path, options: argparse.Namespace) -> list[dict[str, float]]:
    """All cells of one model, with a KV pool that just holds the largest."""
    cells = [(b, c) for c in CONTEXTS for b in BATCHES if b * c <= options.tokens]
    blocks = max(b * (-(-c // 32) + 1) for b, c in cells)
    with llmopt.load(folder, engine="native", runner="native", device="cpu", draft=False, num_blocks=blocks,
                     max_num_seqs=max(BATCHES), verify=False) as llm:  # fmt: skip
        runner: Any = llm.runner
        for half in runner.decoder.kv_cache:
            half.fill_(0.01)  # pages that were never written read faster than memory does
        rows = []
        for batch, context in cells:
            rows.append(cell(runner, batch, context, options.seconds))
            row = rows[-1]
            python, speed = row["step_ms"] - row["runner_ms"], batch / row["step_ms"] * 1e3
            print(f"{batch:7d} {context:8d} {row['step_ms']:9.2f} {row['least_ms']:9.2f} {python:9.3f} {speed:9.0f}")
    return rows


def plot(models: dict[str, list[dict[str, float]]], scheduler: list[dict[str, float]], limit_us: float) -> str:
    """One SVG of three panels, one below the other."""
    by_batch: dict[str, list[tuple[float, float]]] = {}
    by_context: dict[str, list[tuple[float, float]]] = {}
    for name, rows in models.items():
        for row in rows:
            if row["context"] in (128, 2048):
                by_batch.setdefault(f"{name}, context {row['context']}", []).append((row["batch"], row["step_ms"]))
            if row["batch"] in (1, 8):
                by_context.setdefault(f"{name}, batch {row['batch']}", []).append((row["context"], row["step_ms"]))
    own = {"schedule + commit": [(row["running"], row["total_us"]) for row in scheduler]}
    panels = [
        line_plot("Engine step by batch size", "requests in the batch", "milliseconds", by_batch),
        line_plot("Engine step by context length", "tokens of context a request", "milliseconds", by_context),
        line_plot("Scheduler's share of a step", "running requests", "microseconds (dashed: 2 ms)", own, limit_us),
    ]
    height = 430
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="720" height="{height * len(panels)}">']
    out += [f'<g transform="translate(0 {height * number})">{panel}</g>' for number, panel in enumerate(panels)]
    return "\n".join([*out, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", type=Path, required=True)
    parser.add_argument("--names", nargs="+", help="what the models are called in the plot")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.6, help="for each cell, at most; at least three steps")
    parser.add_argument("--tokens", type=int, default=65536, help="most tokens of context in a batch")
    parser.add_argument("--running", type=int, nargs="+", default=[1, 8, 32, 128, 512, 1000])
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--plot", type=Path, help="draw them into this SVG file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    names = options.names or [folder.name for folder in options.model]
    began, cpu, idle = time.perf_counter(), os.times(), idle_seconds()
    models = {}
    for name, folder in zip(names, options.model, strict=True):
        print(f"{name}\n{'batch':>7} {'context':>8} {'step ms':>9} {'least':>9} {'python':>9} {'tok/s':>9}")
        models[name] = measure(folder, options)
    scheduler = [measure_scheduler(count, 512, 60, 0) for count in options.running]
    for row in scheduler:
        print(
            f"scheduler, {row['running']} running: {row['total_us']:.1f} us (99th percentile {row['total_p99_us']:.1f})"
        )
    wall, used = time.perf_counter() - began, sum(os.times()[:2]) - sum(cpu[:2])
    foreign = max(0.0, wall * (os.cpu_count() or 1) - (idle_seconds() - idle) - used) / wall
    policy = {0: "SCHED_OTHER", 1: "SCHED_FIFO", 2: "SCHED_RR"}.get(os.sched_getscheduler(0), "?")
    conditions = (
        f"{options.threads} threads of {os.cpu_count()}, {policy}, foreign load {foreign:.2f} cores on average, "
        f"{wall:.0f} s in all, Python {platform.python_version()}, torch {torch.__version__}"
    )
    print(conditions)
    if options.output:
        result = {"conditions": conditions, "models": models, "scheduler": scheduler}
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot:
        options.plot.write_text(plot(models, scheduler, 2000))


if __name__ == "__main__":
    main()
