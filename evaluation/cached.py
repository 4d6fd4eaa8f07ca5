"""Quality as a KV cache gives it: one half of a window is computed into the cache, the other half is scored against it.

A model's single forward never reads a cache. Here the first half of each window is one step of the engine's runner, and
the tokens of the second half read it, through the cache's own format.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .logits import runner_logits

if TYPE_CHECKING:
    import torch

    from ..runtime.engine.protocols import ModelRunner


def cached_logits(
    runner: ModelRunner, windows: torch.Tensor, chunk: int = 64
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For each row of `windows` (int64 `[n, length]`): the ids `[half + 1]` of which all but the first are scored, the
    last `half = length // 2` of the window, and the logits `[half, vocab]` for them, which the next window overwrites.

    chunk: tokens a step of the second half. Raises what `runner_logits` does.
    """
    length = windows.shape[1]
    half = length // 2
    for ids, logits in runner_logits(runner, windows, first=length - half, chunk=chunk):
        yield ids[length - half - 1 :], logits[length - half - 1 :]


def measure_cached(runner: ModelRunner, reference: Path) -> dict[str, Any]:
    """Over the second halves of a reference's windows: `perplexity` and `divergence` of the runner, and the source's
    `reference_perplexity` there."""
    from .divergence import DivergenceMeter
    from .perplexity import PerplexityMeter
    from .reference import Reference

    file = Reference(reference)
    own, source, divergence = PerplexityMeter(), PerplexityMeter(), DivergenceMeter()
    for (ids, logits), expected in zip(cached_logits(runner, file.windows), file.logits(), strict=True):
        expected = expected[-len(logits) :].to(logits.device)
        own.update(ids, logits)
        source.update(ids, expected)
        divergence.update(expected, logits)
    return {
        "perplexity": own.result().perplexity,
        "reference_perplexity": source.result().perplexity,
        "divergence": divergence.result().as_dict(),
    }


def cached_figures(cached: dict[str, Any]) -> dict[str, float]:
    """The same under the names that a manifest has beside those of whole windows."""
    divergence = cached["divergence"]
    return {
        "cached_perplexity_increase": cached["perplexity"] / cached["reference_perplexity"] - 1,
        **{f"cached_{key}": divergence[key] for key in ("mean_kl", "p99_kl", "max_kl", "top1_agreement")},
    }
