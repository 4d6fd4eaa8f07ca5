"""Measures targets side by side: round by round in one run, so that what the machine does meets them alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...optimizer.errors import RunError
from ...optimizer.events import Event, Listener, silent
from .machine import NOISY, Meter
from .metrics import Objectives, acceptance, run_metrics
from .records import RequestRecord
from .run import Load, Target

COMPARED = (
    "output_throughput",
    "total_token_throughput",
    "request_throughput",
    "ttft_ms",
    "tpot_ms",
    "itl_ms",
    "e2el_ms",
)
"""Metrics that get ratios: throughputs, and the medians of latencies."""


@dataclass(frozen=True)
class Case:
    """One load to measure, new in every round. `about` names it in the report."""

    about: dict[str, Any]
    make: Callable[[int], Load]
    """From the round's number."""


def measure(
    targets: Sequence[Target],
    cases: Sequence[Case],
    *,
    rounds: int = 3,
    warmup: int = 2,
    objectives: Objectives | None = None,
    listener: Listener = silent,
) -> list[dict[str, Any]]:
    """Every case on every target in every round; targets take turns at being first.

    warmup: requests of the first case that each target answers beforehand, unmeasured. Returns one dict a case, in
    order: `case`, `results` (a dict a target: `target`, `rounds`, `summary`) and `ratios` (each target to the first).
    Raises RunError where a target answers no warm-up request.
    """
    for target in targets:
        warm_up(target, cases[0], warmup)
    taken: dict[tuple[int, str], list[dict[str, Any]]] = {}
    total, done = rounds * len(cases) * len(targets), 0
    listener(Event("stage_started", "bench"))
    for number in range(rounds):
        for place, case in enumerate(cases):
            load = case.make(number)
            turn = number % len(targets)
            for target in [*targets[turn:], *targets[:turn]]:
                taken.setdefault((place, target.name), []).append(one_round(target, load, number, objectives))
                done += 1
                listener(Event("progress", "bench", target.name, done, total))
    listener(Event("stage_finished", "bench", f"{done} runs"))
    found = []
    for place, case in enumerate(cases):
        results = [
            {
                "target": target.name,
                "rounds": taken[place, target.name],
                "summary": summary(taken[place, target.name], objectives),
            }
            for target in targets
        ]
        found.append({"case": case.about, "results": results, "ratios": ratios(results)})
    return found


def warm_up(target: Target, case: Case, count: int) -> None:
    """A few requests that nobody measures. Raises RunError where none of them is answered."""
    if count <= 0:
        return
    load = case.make(-1)
    requests = load.requests[:count]
    result = target.run(Load(requests, [0.0] * len(requests), load.max_concurrency))
    if not any(record.completed for record in result.records):
        raise RunError(f"the first requests failed: {result.records[0].error}", target.name)


def one_round(target: Target, load: Load, number: int, objectives: Objectives | None = None) -> dict[str, Any]:
    """Run a load and measure: `round`, `metrics`, `speculation`, `memory`, `foreign_cpu`, `energy`, `records`.

    The records are `RequestRecord`s; `plain` makes them JSON.
    """
    meter = Meter(target.pids()).start()
    result = target.run(load)
    machine = meter.read()
    return {
        "round": number,
        "metrics": run_metrics(result.records, result.duration, objectives),
        "speculation": result.speculation,
        "memory": result.memory,
        **machine,
        "records": result.records,
    }


def summary(rounds: Sequence[dict[str, Any]], objectives: Objectives | None = None) -> dict[str, Any]:
    """The rounds as one: `metrics` over all records, durations summed; peaks of memory; the noisiest foreign share."""
    records = [record for one in rounds for record in one["records"]]
    metrics = run_metrics(records, sum(one["metrics"]["duration_s"] for one in rounds), objectives)
    metrics["peak_concurrent_requests"] = max(one["metrics"]["peak_concurrent_requests"] for one in rounds)
    drafted = [one["speculation"] for one in rounds if one["speculation"]]
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    shares = [one["foreign_cpu"] for one in rounds if one["foreign_cpu"] is not None]
    return {
        "metrics": metrics,
        "speculation": acceptance(*(sum(one[name] for one in drafted) for name in names)) if drafted else None,
        "memory": _peaks([one["memory"] for one in rounds]),
        "foreign_cpu": max(shares) if shares else None,
        "energy": _energy([one["energy"] for one in rounds], metrics["total_output"]),
        "errors": errors(records),
    }


def errors(records: Sequence[RequestRecord]) -> dict[str, int]:
    """How often each error came, the most frequent first."""
    counts: dict[str, int] = {}
    for record in records:
        if not record.completed:
            why = record.error or "unfinished"
            counts[why] = counts.get(why, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _peaks(memories: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found = dict(memories[-1])
    for name in ("rss_bytes", "device_bytes"):
        known = [one[name] for one in memories if one.get(name) is not None]
        found[name] = max(known) if known else None
    return found


def _energy(energies: Sequence[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """Joules summed, and joules a token of output, by source."""
    found: dict[str, Any] = {}
    for name in ("cpu", "gpu"):
        known = [one[name] for one in energies]
        whole = None if not known or None in known else sum(known)
        found[name] = whole
        found[f"{name}_per_output_token"] = whole / tokens if whole is not None and tokens else None
        if whole is None:
            found[f"{name}_note"] = next((one[f"{name}_note"] for one in energies if f"{name}_note" in one), "")
    return found


def value(metrics: dict[str, Any], name: str) -> float | None:
    """A compared metric of a run: the number, or the median of a distribution."""
    found = metrics[name]
    return found["median"] if isinstance(found, dict) else found


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median and range of one value a round."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "rounds": list(values)}


def ratios(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For every target but the first: its metrics over the first one's, round by round (`target`, `to`, `metrics`).

    A round in which either has no value (no request completed, no answer of two tokens) gives no ratio.
    """
    found = []
    for other in results[1:]:
        metrics = {}
        for name in COMPARED:
            pairs = [
                (value(own["metrics"], name), value(base["metrics"], name))
                for own, base in zip(other["rounds"], results[0]["rounds"])
            ]
            known = [own / base for own, base in pairs if own and base]
            if known:
                metrics[name] = spread(known)
        found.append({"target": other["target"], "to": results[0]["target"], "metrics": metrics})
    return found


def warnings(cases: Sequence[dict[str, Any]]) -> list[str]:
    """What a reader must know before the figures: neighbours, failures."""
    found = []
    results = [result for case in cases for result in case["results"]]
    noisy = [r for r in results if (r["summary"]["foreign_cpu"] or 0.0) > NOISY]
    if noisy:
        worst = max(r["summary"]["foreign_cpu"] for r in noisy)
        found.append(
            f"other processes used up to {worst:.0%} of this machine's CPU time while figures were taken: they are too "
            "slow, and their ratios may be off; measure again on a quiet machine"
        )
    if any(r["summary"]["foreign_cpu"] is None for r in results):
        found.append("the CPU share of other processes is not known")
    for result in results:
        metrics = result["summary"]["metrics"]
        if metrics["failed"]:
            first = next(iter(result["summary"]["errors"]))
            count = metrics["failed"] + metrics["completed"]
            found.append(f"{result['target']}: {metrics['failed']} of {count} requests failed, such as: {first}")
    return list(dict.fromkeys(found))


def plain(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cases with their records as JSON."""
    return [
        {
            **case,
            "results": [
                {
                    **result,
                    "rounds": [
                        {**one, "records": [record.as_dict() for record in one["records"]]} for one in result["rounds"]
                    ],
                }
                for result in case["results"]
            ],
        }
        for case in cases
    ]
