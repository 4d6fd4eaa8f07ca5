"""Scheduler time per step against the number of running requests: `python benchmarks/scheduler.py`.

No model: a step's result is one made-up token per row. Prints a table and, with --output, writes the figures as JSON.
Times are microseconds of the thread's CPU time in schedule() and commit() (a busy machine counts less so), median
and 99th percentile over the steps after warm-up, garbage collection left on.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time

from llmopt.runtime.engine.request import Request
from llmopt.runtime.engine.scheduler import Scheduler
from llmopt.runtime.engine.scheduler_config import SchedulerConfig


def measure(num_seqs: int, context: int, steps: int, drafts: int, block_size: int = 16) -> dict[str, float]:
    """Decode `steps` steps with `num_seqs` running requests of about `context` tokens each."""
    rng = random.Random(0)
    length = context + steps * (1 + drafts) + 64
    blocks = num_seqs * (length // block_size + 2)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=max(65536, num_seqs * (1 + drafts))),
        blocks,
        block_size,
    )
    for i in range(num_seqs):
        prompt = [rng.randrange(32000) for _ in range(rng.randrange(context // 2, context))]
        scheduler.add(Request(id=i, token_ids=prompt))
    while scheduler.num_waiting or any(r.num_tokens - r.num_computed > 1 for r in scheduler.running):
        plan = scheduler.schedule()
        scheduler.commit(plan, [(1,) if row.num_logits else () for row in plan.rows])
    schedule_us, commit_us = [], []
    for step in range(steps):
        if drafts:
            for request in scheduler.running:
                request.drafts = (2,) * drafts
        started = time.thread_time()
        plan = scheduler.schedule()
        planned = time.thread_time()
        tokens = [tuple(range(row.num_logits)) for row in plan.rows]
        ready = time.thread_time()
        scheduler.commit(plan, tokens)
        ended = time.thread_time()
        if step >= steps // 10:
            schedule_us.append((planned - started) * 1e6)
            commit_us.append((ended - ready) * 1e6)
    total = sorted(a + b for a, b in zip(schedule_us, commit_us))
    return {
        "running": num_seqs,
        "context": context,
        "drafts": drafts,
        "schedule_us": statistics.median(schedule_us),
        "commit_us": statistics.median(commit_us),
        "total_us": statistics.median(total),
        "total_p99_us": total[int(len(total) * 0.99)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, nargs="+", default=[1, 8, 32, 128, 256, 512, 1000, 2000])
    parser.add_argument("--context", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", help="write the figures to this JSON file")
    args = parser.parse_args()
    rows = []
    columns = ("running", "context", "drafts", "schedule us", "commit us", "total us", "p99 us")
    print(" ".join(f"{name:>12}" for name in columns))
    for context in args.context:
        for drafts in args.drafts:
            for num_seqs in args.running:
                row = measure(num_seqs, context, args.steps, drafts)
                rows.append(row)
                print(
                    f"{num_seqs:12d} {context:12d} {drafts:12d} {row['schedule_us']:12.1f} {row['commit_us']:12.1f} "
                    f"{row['total_us']:12.1f} {row['total_p99_us']:12.1f}"
                )
    if args.output:
        result = {"python": platform.python_version(), "machine": platform.machine(), "rows": rows}
        with open(args.output, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
