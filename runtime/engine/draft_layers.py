"""Which of its own layers a model drafts best with: candidates, tried on text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .draft_costs import StepCosts, least_time
from .draft_policy import LONGEST
from .plan import Row, StepPlan

DEPTH = 8
"""Tokens at the end of each text on which the layers are tried, as drafts of that depth would be."""


@dataclass(frozen=True)
class LayerTrial:
    """One candidate: how often its best token is the whole model's, its seconds a draft, and what both promise."""

    layers: tuple[int, ...]
    agreement: float
    seconds: float
    speedup: float


def candidates(count: int) -> list[tuple[int, ...]]:
    """Sets of layers out of `count`: the first n (early exit), and all but one run of layers in the middle
    (Zhang et al. 2023, "Draft & Verify", https://arxiv.org/abs/2309.08168)."""
    found = {tuple(range(max(1, round(count * share)))) for share in (0.25, 0.375, 0.5, 0.625, 0.75, 0.875)}
    for share in (0.125, 0.25, 0.375, 0.5):
        skipped = max(1, round(count * share))
        step = max(1, count // 8)
        for start in range(1, count - skipped, step):
            found.add((*range(start), *range(start + skipped, count)))
    return sorted(layers for layers in found if len(layers) < count)


def promised_speedup(agreement: float, seconds: float, costs: StepCosts) -> float:
    """The best tokens a second of any depth, over plain decoding's, for one request with this acceptance."""
    best, expected, power = 1.0, 1.0, 1.0
    for depth in range(1, LONGEST + 1):
        power *= agreement
        expected += power
        best = max(best, expected * costs.of(1) / (costs.of(1 + depth) + depth * seconds))
    return best


def try_layers(
    runner: Any, part: Callable[[Sequence[int]], Any], costs: StepCosts, texts: Sequence[Sequence[int]]
) -> list[LayerTrial]:
    """Every candidate on the last tokens of the texts (each longer than DEPTH), the most promising first.

    The whole model computes a text; then a part of the layers its last tokens, on the keys and values of the whole
    model before them, which is what a draft pass does. runner: `runs_parts`; its pool must be unused. part: gives
    `execute` for some layers.
    """
    size, tail, trials = runner.block_size, getattr(runner, "tail_blocks", 0), []
    plans, expected, first = [], [], 0
    for text in texts:
        if tail and 0 < len(text) % size < DEPTH < len(text) - size:  # the last tokens are a row inside one block
            text = text[: len(text) // size * size]
        blocks = -(-len(text) // size) + tail
        table = tuple(range(first, first + blocks))
        first += blocks
        start = len(text) - DEPTH
        runner.execute(StepPlan((Row(-1, 0, tuple(text[:start]), table[: -(-start // size) + tail], 0),)))
        plans.append(StepPlan((Row(-1, start, tuple(text[start:]), table, DEPTH),)))
        expected.append(runner.execute(plans[-1]).argmax(-1).tolist())
    for layers in candidates(_count(runner)):
        execute = part(layers)
        same = sum(
            a == b for plan, wanted in zip(plans, expected) for a, b in zip(execute(plan).argmax(-1).tolist(), wanted)
        )
        agreement = same / (DEPTH * len(plans))
        seconds = least_time(runner, execute, [1])
        trials.append(LayerTrial(layers, agreement, seconds, promised_speedup(agreement, seconds, costs)))
    return sorted(trials, key=lambda trial: (-trial.speedup, -trial.agreement))


def _count(runner: Any) -> int:
    from ..draft_setup import num_layers

    return num_layers(runner)
