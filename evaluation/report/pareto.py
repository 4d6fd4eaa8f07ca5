"""Which of several artifacts are beaten in everything by another one (Pareto dominance)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .values import number, percent, short, size, times


@dataclass(frozen=True)
class Objective:
    """A figure to compare by. brief: a narrow column's head; place: its keys in `measured`; more: whether more is
    better; show: how it is written."""

    name: str
    brief: str
    title: str
    place: tuple[str, str]
    more: bool
    show: Any

    def of(self, manifest: dict[str, Any]) -> float | None:
        part = (manifest.get("measured") or {}).get(self.place[0]) or {}
        return number(part.get(self.place[1]))


OBJECTIVES = {
    found.name: found
    for found in (
        Objective("size", "size", "size on disk", ("after", "disk_bytes"), False, size),
        Objective("memory", "memory", "weights in memory", ("after", "memory_bytes"), False, size),
        Objective("kl", "mean KL", "mean KL, nats a token", ("divergence", "mean_kl"), False, short),
        Objective("perplexity", "perplexity", "perplexity", ("after", "perplexity"), False, short),
        Objective(
            "top1", "top-1", "same top token", ("divergence", "top1_agreement"), True, lambda value: percent(value, 2)
        ),
        Objective("speed", "speed", "decode speed ÷ source's", ("divergence", "decode_speedup"), True, times),
        Objective("tokens", "tok/s", "decode speed, tok/s", ("after", "decode_tokens_per_second"), True, short),
    )
}
DEFAULT = ("size", "kl", "speed")


def dominates(one: Sequence[float | None], other: Sequence[float | None], more: Sequence[bool]) -> bool:
    """Whether `one` is at least as good as `other` in every figure and better in one.

    A figure that either lacks settles nothing: an artifact without it dominates none that has it, and the other way
    round it counts as not worse only where both lack it.
    """
    better = False
    for a, b, up in zip(one, other, more):
        if a is None and b is None:
            continue
        if a is None or b is None:
            return False
        if a != b:
            if (a > b) != up:
                return False
            better = True
    return better


def dominators(rows: Sequence[Sequence[float | None]], more: Sequence[bool]) -> list[list[int]]:
    """For each row the indices of the rows that dominate it; empty for those on the Pareto front."""
    return [
        [place for place, other in enumerate(rows) if place != own and dominates(other, row, more)]
        for own, row in enumerate(rows)
    ]
