"""The processed distribution: pure functions of tensors, each row with parameters of its own.

`R` rows of logits float32 `[R, V]`; the parameters are tensors of `R` entries on the same device, or None where no row
uses them. Sampling and the verification of drafts both start from `process_logits`, so speculation cannot sample from
another distribution than plain decoding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

_FIRST_CANDIDATES = 256
"""Best tokens among which top-p's cut is looked for before a row is sorted whole: enough for nearly all text, and a
tenth of the time."""
_MOST_BY_SELECTION = 1024
"""Best tokens up to which selecting them is faster than sorting the row."""


@dataclass(slots=True)
class Sparse:
    """Values for single (row, token) pairs, each pair at most once."""

    rows: torch.Tensor
    """int64 [N]."""
    tokens: torch.Tensor
    """int64 [N]."""
    values: torch.Tensor
    """float32 [N]."""


@dataclass(slots=True)
class Processing:
    """What to do to `R` rows of logits, in the order of the fields."""

    bias: Sparse | None = None
    """Added (logit_bias)."""
    repetition: Sparse | None = None
    """Factors of CTRL's repetition penalty, on tokens seen in prompt or output."""
    penalties: Sparse | None = None
    """Subtracted: presence + frequency * count, on tokens of the output."""
    banned: Sparse | None = None
    """Impossible (end-of-text before min_tokens); the values do not count."""
    allowed: torch.Tensor | None = None
    """bool [R, V]: the grammar's mask, all true for rows without a grammar."""
    temperature: torch.Tensor | None = None
    """float32 [R], all > 0."""
    top_k: torch.Tensor | None = None
    """int64 [R]; V where it is off."""
    top_p: torch.Tensor | None = None
    """float32 [R]; 1 where it is off."""
    min_p: torch.Tensor | None = None
    """float32 [R]; 0 where it is off."""


def adjust_logits(logits: torch.Tensor, processing: Processing) -> torch.Tensor:
    """Bias, penalties and masks, in place: all that greedy rows need. Returns `logits`."""
    if (term := processing.bias) is not None:
        logits[term.rows, term.tokens] += term.values
    if (term := processing.repetition) is not None:
        seen = logits[term.rows, term.tokens]
        logits[term.rows, term.tokens] = torch.where(seen > 0, seen / term.values, seen * term.values)
    if (term := processing.penalties) is not None:
        logits[term.rows, term.tokens] -= term.values
    if (term := processing.banned) is not None:
        logits[term.rows, term.tokens] = -torch.inf
    if processing.allowed is not None:
        logits.masked_fill_(~processing.allowed, -torch.inf)
    return logits


def truncate_logits(logits: torch.Tensor, processing: Processing) -> torch.Tensor:
    """Temperature, then top-k, top-p and min-p: dropped tokens become -inf. In place; returns `logits`.

    Tokens that tie with the last one kept are kept too, so the result depends on the row's values alone, not on a
    sort's order. top-p counts the probability that top-k leaves, as transformers does. Rows must have a finite maximum
    and no NaN.
    """
    if processing.temperature is not None:
        logits.div_(processing.temperature[:, None])
    if processing.top_k is not None:
        k = processing.top_k.clamp(1, logits.shape[-1])
        active = k < logits.shape[-1]
        best = _best(logits, int(torch.where(active, k, 1).max()))
        lowest = best.gather(1, torch.where(active, k - 1, 0)[:, None])
        _drop_below(logits, torch.where(active[:, None], lowest, -torch.inf))
    if processing.top_p is not None:
        _drop_below(logits, nucleus_floor(logits, processing.top_p))
    if processing.min_p is not None:
        _drop_below(logits, logits.amax(dim=-1, keepdim=True) + processing.min_p[:, None].log())
    return logits


def nucleus_floor(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The logit of the last token in each row's nucleus, float32 [R, 1]; -inf where `top_p` is 1.

    The nucleus is the smallest set of best tokens whose probability reaches `top_p` (Holtzman et al. 2020).
    """
    total = logits.logsumexp(dim=-1, keepdim=True)
    floor = torch.full_like(total, -torch.inf)
    rows = (top_p < 1).nonzero().squeeze(1)
    for candidates in (min(_FIRST_CANDIDATES, logits.shape[-1]), logits.shape[-1]):
        if not rows.numel():
            break
        best = _best(logits if len(rows) == len(logits) else logits.index_select(0, rows), candidates)
        mass = (best - total[rows]).double().exp().cumsum(dim=-1)
        reached = mass >= top_p[rows, None].double()
        inside = reached[:, -1] | (candidates == logits.shape[-1])
        last = torch.where(reached[:, -1], reached.int().argmax(dim=-1), candidates - 1)
        floor[rows] = torch.where(inside[:, None], best.gather(1, last[:, None]), floor[rows])
        rows = rows[~inside]
    return floor


def best_tokens(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit of each row, float32 [R], and its first place, int64 [R]. A NaN counts as the largest.

    numpy's argmax is vectorized, torch's on the CPU is not (13 times the time over 49k logits).
    """
    if logits.device.type != "cpu":
        values, tokens = logits.max(dim=-1)
        return values, tokens
    tokens = torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.gather(1, tokens[:, None]).squeeze(1), tokens


def _best(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` largest of each row, in descending order, float32 [R, count]."""
    if count <= _MOST_BY_SELECTION:
        return logits.topk(count, dim=-1).values
    if logits.device.type != "cpu":
        return logits.sort(dim=-1, descending=True).values[:, :count]
    ascending = np.sort(logits.numpy(), axis=-1)  # vectorized, unlike torch's
    return torch.from_numpy(ascending[:, ::-1][:, :count].copy())


def _drop_below(logits: torch.Tensor, floor: torch.Tensor) -> None:
    """Set what is below `floor` [R, 1] to -inf, in place."""
    if logits.device.type != "cpu":
        logits.masked_fill_(logits < floor, -torch.inf)
        return
    for row, lowest in zip(logits, floor.squeeze(1).numpy()):
        if lowest > -np.inf:  # one vectorized pass; a mask takes nine times as long
            torch.threshold_(row, float(np.nextafter(lowest, -np.float32(np.inf))), -torch.inf)


def process_logits(logits: torch.Tensor, processing: Processing) -> torch.Tensor:
    """All of the above, in place: `softmax` of the result is the distribution that is sampled. Returns `logits`."""
    return truncate_logits(adjust_logits(logits, processing), processing)


def processed_distribution(logits: torch.Tensor, processing: Processing) -> torch.Tensor:
    """Probabilities float32 [R, V] of rows that are sampled (temperature > 0); `logits` is left as it is."""
    return process_logits(logits.clone(), processing).softmax(dim=-1)


def draw(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Tokens int64 [R] by inversion of the cumulative distribution, from one float64 uniform in [0, 1) a row.

    The sum runs in float64 in the order of the vocabulary; a token of probability 0 is never drawn. Rows need not be
    normalized.
    """
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    target = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)
