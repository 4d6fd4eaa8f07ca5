"""Scheduler time per step against the number of running requests: `python benchmarks/scheduler.py`.

No model: a step's result is one made-up token per row, and with `--drafts k` k more: all drafts are accepted, or, with
`--accept mixed`, 1, 2, 3 or 5 tokens are gained of 1 + 4. `--pressed` leaves no KV blocks but those in hand: an n-gram
drafter is asked in each step as the engine asks it (that time is in `draft us`), and must make none. Prints a table;
--output writes the figures as JSON, --plot draws them as an SVG.
Times are microseconds of the thread's CPU time in schedule() and commit() (a busy machine counts less so), median
and 99th percentile over the steps after warm-up, garbage collection left on.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import statistics
import time

from llmopt.runtime.engine.draft_costs import StepCosts
from llmopt.runtime.engine.draft_lookup import LookupSource
from llmopt.runtime.engine.draft_speculator import Speculator
from llmopt.runtime.engine.drafting import propose
from llmopt.runtime.engine.request import Request
from llmopt.runtime.engine.scheduler import Scheduler
from llmopt.runtime.engine.scheduler_config import SchedulerConfig


def measure(
    num_seqs: int,
    context: int,
    steps: int,
    drafts: int,
    block_size: int = 16,
    mixed: bool = False,
    pressed: bool = False,
) -> dict[str, float]:
    """Decode `steps` steps with `num_seqs` running requests of about `context` tokens each.

    mixed: some drafts are rejected. pressed: the pool has no block beyond those of the steps themselves and the
    watermark. Raises RuntimeError where drafts are made all the same.
    """
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
    schedule_us, commit_us, draft_us = [], [], []
    drafter = Speculator(LookupSource("ngram"), None, CPU)
    for step in range(steps):
        began = time.thread_time()
        if pressed:
            scheduler.watermark = scheduler.pool.num_free
            propose(drafter, scheduler)
            if any(request.drafts for request in scheduler.running):
                raise RuntimeError("drafts are made although no block is free")
        elif drafts:
            for request in scheduler.running:
                request.drafts = (2,) * drafts
        started = time.thread_time()
        plan = scheduler.schedule()
        planned = time.thread_time()
        tokens = [
            tuple(range(min(row.num_logits, rng.choice(GAINS)) if mixed else row.num_logits)) for row in plan.rows
        ]
        ready = time.thread_time()
        scheduler.commit(plan, tokens)
        ended = time.thread_time()
        if step >= steps // 10:
            schedule_us.append((planned - started) * 1e6)
            commit_us.append((ended - ready) * 1e6)
            draft_us.append((started - began) * 1e6 if pressed else 0.0)
    total = sorted(map(sum, zip(schedule_us, commit_us, draft_us)))
    return {
        "running": num_seqs,
        "context": context,
        "drafts": drafts,
        "draft_us": statistics.median(draft_us),
        "schedule_us": statistics.median(schedule_us),
        "commit_us": statistics.median(commit_us),
        "total_us": statistics.median(total),
        "total_p99_us": total[int(len(total) * 0.99)],
    }


GAINS = (1, 1, 2, 3, 5)
"""Tokens that a verified row of four drafts gains in turn by chance."""
CPU = StepCosts((1, 8, 24, 48), (9e-3, 11e-3, 22e-3, 42e-3))
"""Steps of a small model on two cores."""
COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#7a4f9e", "#b8860b", "#444444")


def line_plot(title: str, across: str, up: str, lines: dict[str, list[tuple[float, float]]], limit: float = 0) -> str:
    """An SVG of lines over two logarithmic axes; `limit`, if given, is a dashed horizontal line."""
    width, height, left, top, right, bottom = 720, 420, 70, 40, 230, 50
    points = [point for line in lines.values() for point in line]
    low = [min(p[axis] for p in points) for axis in (0, 1)]
    high = [max(*(p[axis] for p in points), limit if axis else 0) for axis in (0, 1)]

    def at(value: float, axis: int) -> float:
        share = math.log(value / low[axis]) / math.log(high[axis] / low[axis]) if high[axis] > low[axis] else 0.5
        return left + share * (width - left - right) if axis == 0 else height - bottom - share * (height - top - bottom)

    def text(x: float, y: float, words: str, more: str = "") -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" {more}>{words}</text>'

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
           'font-size="12"><rect width="100%" height="100%" fill="white"/>',
           text(left, 22, title, 'font-size="15"'),
           text(left, height - 10, across), text(8, top - 6, up)]  # fmt: skip
    for x in sorted({p[0] for p in points}):
        out.append(f'<path d="M{at(x, 0):.1f} {top}V{height - bottom}" stroke="#eee"/>')
        out.append(text(at(x, 0), height - bottom + 16, f"{x:g}", 'text-anchor="middle"'))
    first, last = math.floor(math.log10(low[1])), math.ceil(math.log10(high[1]))
    for y in (digit * 10.0**power for power in range(first, last + 1) for digit in (1, 2, 5)):
        if low[1] <= y <= high[1]:
            out.append(f'<path d="M{left} {at(y, 1):.1f}H{width - right}" stroke="#ddd"/>')
            out.append(text(left - 6, at(y, 1) + 4, f"{y:g}", 'text-anchor="end"'))
    if limit:
        out.append(f'<path d="M{left} {at(limit, 1):.1f}H{width - right}" stroke="black" stroke-dasharray="5 4"/>')
    for number, (name, line) in enumerate(lines.items()):
        colour, y = COLOURS[number % len(COLOURS)], top + 18 * number + 10
        path = " ".join(f"{at(px, 0):.1f},{at(py, 1):.1f}" for px, py in line)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out.append(f'<rect x="{width - right + 14}" y="{y - 8}" width="12" height="4" fill="{colour}"/>')
        out.append(text(width - right + 32, y, name))
    return "\n".join([*out, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, nargs="+", default=[1, 8, 32, 128, 256, 512, 1000, 2000])
    parser.add_argument("--context", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--accept", choices=("all", "mixed"), default="all", help="what becomes of the drafts")
    parser.add_argument("--pressed", action="store_true", help="no KV blocks to spare, and a drafter that is asked")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", help="write the figures to this JSON file")
    parser.add_argument("--plot", help="draw the medians into this SVG file")
    args = parser.parse_args()
    rows = []
    columns = ("running", "context", "drafts", "draft us", "schedule us", "commit us", "total us", "p99 us")
    print(" ".join(f"{name:>12}" for name in columns))
    for context in args.context:
        for drafts in args.drafts:
            for num_seqs in args.running:
                mixed = args.accept == "mixed"
                row = measure(num_seqs, context, args.steps, drafts, mixed=mixed, pressed=args.pressed)
                rows.append(row)
                times = ("draft_us", "schedule_us", "commit_us", "total_us", "total_p99_us")
                print(f"{num_seqs:12d} {context:12d} {drafts:12d} " + " ".join(f"{row[name]:12.1f}" for name in times))
    if args.plot:
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            name = f"context {row['context']}, {row['drafts']} drafts"
            lines.setdefault(name, []).append((row["running"], row["total_us"]))
        svg = line_plot("Scheduler time of a step", "running requests", "microseconds (dashed: 2 ms)", lines, 2000)
        with open(args.plot, "w", encoding="utf-8") as file:
            file.write(svg)
    if args.output:
        result = {"python": platform.python_version(), "machine": platform.machine(), "rows": rows}
        with open(args.output, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
