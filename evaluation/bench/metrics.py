"""Metrics of a run from its records, as vLLM's `bench serve` defines them.

TTFT: from sending to the first chunk of content. TPOT: (E2EL - TTFT) / (output tokens - 1), one value a request of
more than one token. ITL: the gaps between chunks, pooled over all requests; with speculation a chunk holds several
tokens, so that ITL exceeds TPOT. E2EL: from sending to the last piece. Throughputs divide by the run's duration, from
the start of the load to the end of the last request. Goodput: requests a second that meet every service-level
objective; an answer of one token counts as TPOT 0. Standard deviations are those of a population, percentiles
interpolate linearly (numpy's defaults). Failed requests are counted and enter nothing else.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from ...optimizer.errors import UsageError, did_you_mean
from .records import RequestRecord

LATENCIES = ("ttft", "tpot", "itl", "e2el")
OBJECTIVES = ("ttft", "tpot", "e2el")
PERCENTILES = (90, 99)
Objectives = dict[str, float]
"""Latency name → largest value in milliseconds."""


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile of at least one value, linearly interpolated between the two nearest."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def distribution(values: Sequence[float]) -> dict[str, float] | None:
    """mean, median, std, min, max, p90 and p99; None of no values."""
    if not values:
        return None
    return {
        "mean": statistics.fmean(values),
        "median": statistics.median(values),
        "std": statistics.pstdev(values),
        "min": min(values),
        "max": max(values),
        **{f"p{percent}": percentile(values, percent) for percent in PERCENTILES},
    }


def latencies(records: Iterable[RequestRecord]) -> dict[str, list[float]]:
    """Milliseconds by latency name, of the completed requests."""
    done = [record for record in records if record.completed]
    found = {
        "ttft": [record.ttft for record in done],
        "tpot": [record.tpot for record in done if record.tpot is not None],
        "itl": [gap for record in done for gap in record.itl],
        "e2el": [record.e2el for record in done],
    }
    return {name: [1e3 * value for value in values] for name, values in found.items()}


def meets(record: RequestRecord, objectives: Objectives) -> bool:
    """Whether a completed request meets every objective."""
    own = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.e2el}
    return all(1e3 * own[name] <= limit for name, limit in objectives.items())


def parse_objectives(texts: Iterable[str]) -> Objectives:
    """`["ttft:200", "tpot:50"]` → milliseconds by name. Raises UsageError."""
    found: Objectives = {}
    for text in texts:
        name, colon, value = text.partition(":")
        if name not in OBJECTIVES or not colon:
            hint = did_you_mean(name, OBJECTIVES)
            raise UsageError(f"{text!r} is no objective of the form NAME:MILLISECONDS", "--goodput", hint)
        try:
            limit = float(value)
        except ValueError:
            limit = 0.0
        if not limit > 0:
            raise UsageError(f"{value!r} is no positive number of milliseconds", f"--goodput {name}")
        if name in found:
            raise UsageError(f"{name} is named twice", "--goodput")
        found[name] = limit
    return found


def peak_concurrency(records: Iterable[RequestRecord]) -> int:
    """Most completed requests that were under way at once; one that ends as another starts does not count with it."""
    events = []
    for record in records:
        if record.completed and record.end is not None:
            events += [(record.sent, 1), (record.end, -1)]
    running = peak = 0
    for _, change in sorted(events):
        running += change
        peak = max(peak, running)
    return peak


def run_metrics(
    records: Sequence[RequestRecord], duration: float, objectives: Objectives | None = None
) -> dict[str, Any]:
    """All metrics of one run of `duration` seconds (or of several runs, with their durations summed).

    Keys: `completed`, `failed`, `duration_s`, `total_input`, `total_output` (tokens), `request_throughput`,
    `request_goodput` (None without objectives), `output_throughput`, `total_token_throughput` (a second),
    `peak_concurrent_requests`, `tokens_per_chunk` (None where no stream says), and `ttft_ms`, `tpot_ms`, `itl_ms`,
    `e2el_ms` (see `distribution`).
    """
    done = [record for record in records if record.completed]
    total_input = sum(record.prompt_tokens for record in done)
    total_output = sum(record.output_tokens for record in done)
    rate = (lambda count: count / duration) if duration > 0 else (lambda count: 0.0)
    good = sum(meets(record, objectives) for record in done) if objectives else None
    known = [n for record in done for n in record.chunk_tokens if n is not None]
    return {
        "completed": len(done),
        "failed": len(records) - len(done),
        "duration_s": duration,
        "total_input": total_input,
        "total_output": total_output,
        "request_throughput": rate(len(done)),
        "request_goodput": None if good is None else rate(good),
        "output_throughput": rate(total_output),
        "total_token_throughput": rate(total_input + total_output),
        "peak_concurrent_requests": peak_concurrency(done),
        "tokens_per_chunk": statistics.fmean(known) if known else None,
        **{f"{name}_ms": distribution(values) for name, values in latencies(done).items()},
    }


def acceptance(drafts: int, draft_tokens: int, accepted_tokens: int) -> dict[str, Any] | None:
    """Speculation's figures of a run; None where nothing was drafted.

    `acceptance_rate`: accepted over drafted tokens. `acceptance_length`: tokens a verification step gave, the model's
    own one included.
    """
    if not draft_tokens:
        return None
    return {
        "num_drafts": drafts,
        "num_draft_tokens": draft_tokens,
        "num_accepted_tokens": accepted_tokens,
        "acceptance_rate": accepted_tokens / draft_tokens,
        "acceptance_length": 1 + accepted_tokens / drafts if drafts else None,
    }
