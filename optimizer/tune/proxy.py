"""Cheap looks at a trial before it is made and measured: its plan, and its passes' result on a few windows.

A trial is given up where a rough figure is further beyond a limit than it can be off, or where it cannot come up to the
best trial so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..planning import Plan
from .target import Condition, Target

if TYPE_CHECKING:
    from ..model import LoadedModel

PLANNED = ("size", "folder_size", "compression")
"""Metrics that follow from the bytes of the plan; a folder holds its weights and more."""
ROUGH = ("mean_kl", "median_kl", "p99_kl", "max_kl", "top1_agreement", "perplexity", "perplexity_increase")
"""Metrics that a few windows tell roughly."""
PLAN_MARGIN, QUALITY_MARGIN = 0.02, 0.5
"""Shares by which planned bytes, and quality on a few windows, may be off."""
PART = 4
"""A look takes one in so many of the windows."""


class Pruned(Exception):
    """A trial that is given up. figures: what is known of it, by metric."""

    def __init__(self, reason: str, figures: dict[str, float]) -> None:
        super().__init__(reason)
        self.reason, self.figures = reason, figures


@dataclass(frozen=True)
class Bar:
    """A limit that a trial has to hold to be of use, and the words for what is beyond it."""

    limit: Condition
    words: str


def bars_of(target: Target, best: int | None, figures: Mapping[str, float]) -> list[Bar]:
    """The target's limits, and that the best trial so far is not better already.

    best: its number, None where it sets no bar. figures: its own, of the kind that will be held against it.
    """
    bars = [Bar(limit, f"is beyond {limit}") for limit in target.limits]
    value = figures.get(target.metric.name)
    if best is not None and value is not None:
        words = f"cannot come up to trial {best} with {target.metric.show(value)}"
        bars.append(Bar(target.as_good_as(value), words))
    return bars


def planned(plan: Plan) -> dict[str, float]:
    """Figures that follow from a plan."""
    after = max(1, plan.bytes_after)
    return {"size": after, "folder_size": after, "compression": plan.bytes_before / after}


def prune_by_plan(plan: Plan, bars: Sequence[Bar]) -> None:
    """Raise Pruned where the planned size is beyond a bar by more than PLAN_MARGIN."""
    figures = planned(plan)
    for bar in bars:
        metric = bar.limit.metric
        least_only = metric.name == "folder_size" and not bar.limit.upper
        if metric.name in PLANNED and not least_only and bar.limit.beyond(figures[metric.name], PLAN_MARGIN):
            reason = f"by its plan, {metric.name} {metric.show(figures[metric.name])} {bar.words}"
            raise Pruned(reason, {"size": figures["size"]})


def asks_quality(target: Target) -> bool:
    """Whether a look at the quality can decide anything."""
    return any(metric.name in ROUGH for metric in target.metrics)


def look(model: LoadedModel, reference: Path) -> dict[str, float]:
    """Quality of the passes' result, in this process, on a quarter of the reference's windows, spread over the text.

    The first is left out where there are others: a book's title page is like no other. What is set for the runtime
    alone, such as the dtype of the KV cache, does not show: it can only make a trial worse.
    """
    from ...evaluation.divergence import DivergenceMeter
    from ...evaluation.logits import window_logits
    from ...evaluation.perplexity import PerplexityMeter
    from ...evaluation.reference import Reference
    from ...evaluation.streamed import streamed_logits

    file = Reference(reference)
    chosen = range(min(PART // 2, len(file) - 1), len(file), PART)
    windows = file.windows[list(chosen)]
    references = (logits for index, logits in enumerate(file.logits()) if index in chosen)
    lazy = model.weights is not None
    scored = streamed_logits(model, windows) if lazy else window_logits(model.module, windows)  # type: ignore[arg-type]
    own, source, divergence = PerplexityMeter(), PerplexityMeter(), DivergenceMeter()
    for (ids, logits), expected in zip(scored, references):
        expected = expected.to(logits.device)
        own.update(ids, logits)
        source.update(ids, expected)
        divergence.update(expected, logits)
    after, before = own.result().perplexity, source.result().perplexity
    found = divergence.result().as_dict()
    figures = {name: float(found[name]) for name in ROUGH if name in found}
    return {**figures, "perplexity": after, "perplexity_increase": after / before - 1}


def prune_by_look(figures: dict[str, float], bars: Sequence[Bar]) -> None:
    """Raise Pruned where a rough figure is beyond a bar by more than QUALITY_MARGIN."""
    for bar in bars:
        metric = bar.limit.metric
        value = figures.get(metric.name)
        if value is not None and bar.limit.beyond(value, QUALITY_MARGIN):
            raise Pruned(f"on a few windows, {metric.name} {metric.show(value)} {bar.words}", figures)
