"""Log-probabilities of chosen and best tokens, of the model's own distribution (before penalties and temperature)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One position's log-probabilities (natural logarithm)."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most probable token (ties share the better rank)."""
    top: tuple[tuple[int, float], ...]
    """The best (token id, logprob), best first."""


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """For each row of `logits` float32 [R, V]: the logprob and rank of `tokens[i]` and the best `counts[i]` tokens.

    `logits` is left as it is. Memory: a few float32 [R, V]; callers bound R (prompt logprobs come in chunks).
    """
    if not tokens:
        return []
    chosen = torch.tensor(tokens, dtype=torch.int64, device=logits.device)[:, None]
    total = logits.logsumexp(dim=-1, keepdim=True)
    own = logits.gather(1, chosen)
    ranks = (logits > own).sum(dim=-1) + 1
    most = min(max(counts), logits.shape[-1])
    best = logits.topk(most, dim=-1) if most else None
    own_list = (own - total).squeeze(1).tolist()
    best_ids = best.indices.tolist() if best else [[]] * len(tokens)
    best_values = (best.values - total).tolist() if best else [[]] * len(tokens)
    return [
        TokenLogprobs(token, value, rank, tuple(zip(ids[:count], values[:count])))
        for token, value, rank, ids, values, count in zip(
            tokens, own_list, ranks.tolist(), best_ids, best_values, counts
        )
    ]
