"""Perplexity and bits per byte over sliding windows, and divergence from another model on the same positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..optimizer.errors import RunError
from .divergence import DivergenceMeter
from .perplexity import token_logprobs
from .slices import places
from .windows import TextWindows, Window

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TextScore:
    """How well a model predicts a text.

    perplexity: exp of `mean_nll`, nats a token, weighted over windows as in transformers' guide (see `Window.weight`).
    bits_per_byte: `total_nll` in bits over the UTF-8 bytes of the scored tokens' text, so that models with other
    tokenizers compare.
    """

    perplexity: float
    bits_per_byte: float
    mean_nll: float
    total_nll: float
    num_tokens: int
    num_bytes: int
    num_windows: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class TextMeter:
    """Adds up negative log-likelihoods in float64, slice by slice."""

    def __init__(self, text: TextWindows) -> None:
        self._text = text
        self._sums = [0.0] * len(text)

    def update(self, number: int, start: int, end: int, logits: torch.Tensor) -> None:
        """Score tokens `start … end - 1` of a window; logits `[end - start, vocab]`, row i for token start + i."""
        targets = self._text.windows[number].ids[start:end].to(logits.device)
        self._sums[number] -= token_logprobs(logits, targets).double().sum().item()

    def result(self) -> TextScore:
        """Raises RunError where nothing was scored or the sum is not a number."""
        windows: list[Window] = self._text.windows
        weight = sum(window.weight for window in windows)
        if not weight:
            raise RunError("no token was scored, so there is no perplexity")
        mean = sum(nll / w.num_scored * w.weight for nll, w in zip(self._sums, windows)) / weight
        total = sum(self._sums)
        if not math.isfinite(mean) or not math.isfinite(total):
            raise RunError("the perplexity is not a number", what_to_do="Look for NaN or infinite weights.")
        if not self._text.num_bytes:
            raise RunError("the scored tokens have no text, so there are no bits per byte")
        return TextScore(
            perplexity=math.exp(min(mean, 700.0)),
            bits_per_byte=total / math.log(2) / self._text.num_bytes,
            mean_nll=mean,
            total_nll=total,
            num_tokens=self._text.num_scored,
            num_bytes=self._text.num_bytes,
            num_windows=len(windows),
        )


Progress = Callable[[int, int], None]
"""Called with the number of windows that are done, and of all."""


def score(text: TextWindows, rows: int, slices: Iterable[torch.Tensor], progress: Progress | None = None) -> TextScore:
    """Score one model. `slices` are those of `slices.py` over the text's windows with the same `rows`."""
    meter = TextMeter(text)
    for (number, start, end), logits in _paired(text, rows, slices, progress):
        meter.update(number, start, end, logits)
    return meter.result()


def compare(
    text: TextWindows,
    rows: int,
    slices: Iterable[torch.Tensor],
    others: Iterable[torch.Tensor],
    progress: Progress | None = None,
) -> tuple[TextScore, TextScore, DivergenceMeter]:
    """Score a model and the one it is compared with, side by side: both scores, and KL(other || model).

    Raises RunError where the vocabularies differ.
    """
    own, theirs, divergence = TextMeter(text), TextMeter(text), DivergenceMeter()
    both = zip(slices, others, strict=True)
    for (number, start, end), (logits, other) in _paired(text, rows, both, progress):
        own.update(number, start, end, logits)
        theirs.update(number, start, end, other)
        divergence.update(other.to(logits.device), logits)
    return own.result(), theirs.result(), divergence


def _paired(
    text: TextWindows, rows: int, slices: Iterable[Any], progress: Progress | None
) -> Iterator[tuple[tuple[int, int, int], Any]]:
    for place, item in zip(places(text.windows, rows), slices, strict=True):
        yield place, item
        if progress is not None and place[2] == len(text.windows[place[0]].ids):
            progress(place[0] + 1, len(text))
