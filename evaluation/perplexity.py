"""Perplexity over fixed token windows."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..optimizer.errors import RunError
from .logits import window_logits

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

CHUNK = 32
"""Positions whose float32 log-probabilities are in memory at a time."""


@dataclass(frozen=True)
class Perplexity:
    """`perplexity` is exp of `mean_nll`, the mean negative log-likelihood in nats over `num_tokens` scored tokens."""

    perplexity: float
    mean_nll: float
    num_tokens: int
    num_windows: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class PerplexityMeter:
    """Adds up negative log-likelihoods, window by window, in float64."""

    total: float = 0.0
    num_tokens: int = 0
    num_windows: int = 0
    per_window: list[float] = field(default_factory=list)

    def update(self, ids: torch.Tensor, logits: torch.Tensor) -> None:
        """Score one window: ids int64 `[length]`, logits `[length - 1, vocab]`, row i predicting token i + 1."""
        nll = -token_logprobs(logits, ids[1:]).double().sum().item()
        self.total += nll
        self.num_tokens += len(ids) - 1
        self.num_windows += 1
        self.per_window.append(nll / (len(ids) - 1))

    def result(self) -> Perplexity:
        """Raises RunError where nothing was scored or the sum is not a number."""
        if self.num_tokens == 0:
            raise RunError("no token was scored, so there is no perplexity")
        mean = self.total / self.num_tokens
        if not math.isfinite(mean):
            raise RunError("the perplexity is not a number", what_to_do="Look for NaN or infinite weights.")
        return Perplexity(math.exp(min(mean, 700.0)), mean, self.num_tokens, self.num_windows)


def token_logprobs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Natural log-probability of `targets` (int64 `[n]`) under `logits` (`[n, vocab]`): float32 `[n]`.

    The softmax is computed in float32 over chunks of positions.
    """
    import torch

    parts = []
    for start in range(0, len(targets), CHUNK):
        rows = logits[start : start + CHUNK].float()
        picked = rows.gather(1, targets[start : start + CHUNK, None])[:, 0]
        parts.append(picked - torch.logsumexp(rows, dim=-1))
    return torch.cat(parts) if parts else logits.new_zeros(0, dtype=torch.float32)


def perplexity(model: PreTrainedModel, windows: torch.Tensor) -> Perplexity:
    """Perplexity of a causal model over `windows` (int64 `[n, length]`); `length - 1` tokens scored in each."""
    meter = PerplexityMeter()
    for ids, logits in window_logits(model, windows):
        meter.update(ids, logits)
    return meter.result()
