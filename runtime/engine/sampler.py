"""From a step's logits to each request's next tokens: one call for a batch whose rows all differ.

A row with drafts has 1 + drafts logits. Each position is sampled as plain decoding would sample it, with the random
number of its own position and with a history that includes the earlier drafts; drafts are accepted as long as they
equal what was sampled. So the tokens are those of plain decoding, one by one, greedy or not, whatever was drafted. A
draft x that is proposed as certain (n-gram, suffix) is accepted with its probability p(x), and where it is rejected the
token comes from p without x: the rule of rejection sampling (Leviathan et al. 2023) for a point mass, and all that any
lossless rule can do. Drafts of a model are drawn with the position's own random number too (`next_tokens`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...optimizer.errors import RunError
from .history import History
from .random_numbers import SAMPLE, uniforms
from .request import Request

if TYPE_CHECKING:
    import torch

    from .distribution import Processing, Sparse
    from .logprobs import TokenLogprobs


class SampleItem(NamedTuple):
    """One request's share of the logits: rows `first … first + len(drafts)`."""

    request: Request
    drafts: tuple[int, ...]
    first: int


@dataclass(slots=True)
class Sampled:
    """What one item gained: accepted drafts and one token more, with the logprobs of each if asked for."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: Exception | None = None
    """Set where this request alone has failed (non-finite logits, a grammar that admits no token)."""


class _Position(NamedTuple):
    """One logits row: the item it belongs to and the drafts that precede it."""

    request: Request
    drafts: tuple[int, ...]

    @property
    def num_output_tokens(self) -> int:
        return self.request.num_output_tokens + len(self.drafts)


def sample(logits: torch.Tensor, items: Sequence[SampleItem]) -> list[Sampled]:
    """Sample for every item from `logits` float32 [N, V], which is left as it is.

    Item rows must be disjoint. Raises whatever a request's own data raises (its grammar, say); the engine then calls
    with one item at a time to find whose it is.
    """
    if not items:
        return []
    positions = [_Position(item.request, item.drafts[:j]) for item in items for j in range(1 + len(item.drafts))]
    indices = [item.first + j for item in items for j in range(1 + len(item.drafts))]
    tokens = _draw(logits, indices, positions)
    results, place = [], 0
    for item in items:
        results.append(_accept(item, tokens[place : place + 1 + len(item.drafts)]))
        place += 1 + len(item.drafts)
    _add_logprobs(logits, items, results)
    return results


def next_tokens(logits: torch.Tensor, places: Sequence[tuple[Request, tuple[int, ...]]]) -> list[int]:
    """What would be sampled from row i of `logits` float32 [N, V] after the request and the drafts of place i: with its
    processing, and the random number of that position. -1 where nothing can be. `logits` is left as it is."""
    return _draw(logits, range(len(places)), [_Position(request, drafts) for request, drafts in places])


def _draw(logits: torch.Tensor, indices: Sequence[int], positions: Sequence[_Position]) -> list[int]:
    """The token of each position from its row of `logits`; -1 where none can be sampled."""
    special = [i for i, position in enumerate(positions) if not position.request.params.plain_greedy]
    tokens = [-1] * len(positions)
    if len(special) < len(positions):
        in_special = set(special)
        plain = [i for i in range(len(positions)) if i not in in_special]
        for i, token in zip(plain, _greedy(_select(logits, [indices[i] for i in plain]))):
            tokens[i] = token
    if special:
        rows = _select(logits, [indices[i] for i in special])
        chosen = _sample_special(rows.clone() if rows is logits else rows, [positions[i] for i in special])
        for i, token in zip(special, chosen):
            tokens[i] = token
    return tokens


def _accept(item: SampleItem, tokens: Sequence[int]) -> Sampled:
    accepted: list[int] = []
    for token, draft in zip(tokens, (*item.drafts, None)):
        if token < 0:
            reason = "its grammar admits no token" if item.request.params.constrained else "its logits are not finite"
            return Sampled(error=RunError(f"no token can be sampled: {reason}", where=f"request {item.request.id}"))
        accepted.append(token)
        if token != draft:
            break
    return Sampled(tuple(accepted))


def _sample_special(logits: torch.Tensor, positions: Sequence[_Position]) -> list[int]:
    """Tokens of rows that need more than an argmax; -1 where none can be sampled. `logits` is overwritten."""
    import torch

    from .distribution import adjust_logits, draw, truncate_logits

    adjust_logits(logits, adjustments(positions, logits))
    random = [i for i, position in enumerate(positions) if not position.request.params.greedy]
    tokens = [-1] * len(positions)
    if len(random) < len(positions):
        in_random = set(random)
        greedy = [i for i in range(len(positions)) if i not in in_random]
        for i, token in zip(greedy, _greedy(_select(logits, greedy))):
            tokens[i] = token
    if random:
        rows = _select(logits, random)
        chosen = [positions[i] for i in random]
        good = rows.amax(dim=-1).isfinite()
        probabilities = truncate_logits(rows, truncations(chosen, logits)).softmax(dim=-1)
        numbers = uniforms(
            [p.request.key for p in chosen], [p.request.num_tokens + len(p.drafts) for p in chosen], SAMPLE
        )
        drawn = draw(probabilities, torch.from_numpy(numbers).to(logits.device))
        for i, token in zip(random, torch.where(good, drawn, -1).tolist()):
            tokens[i] = token
    return tokens


def adjustments(positions: Sequence[Any], logits: torch.Tensor) -> Processing:
    """Bias, penalties and masks of logits rows (`logits` gives device and vocabulary; its values are not read)."""
    from .distribution import Processing

    return Processing(
        bias=_sparse(positions, logits, lambda p: p.request.params.logit_bias, _bias),
        repetition=_sparse(positions, logits, lambda p: p.request.params.repetition_penalty != 1.0, _repetition),
        penalties=_sparse(
            positions,
            logits,
            lambda p: p.request.params.presence_penalty != 0.0 or p.request.params.frequency_penalty != 0.0,
            _penalties,
        ),
        banned=_sparse(positions, logits, lambda p: p.num_output_tokens < p.request.params.min_tokens, _banned),
        allowed=_allowed(positions, logits),
    )


def truncations(positions: Sequence[Any], logits: torch.Tensor) -> Processing:
    """Temperature, top-k, top-p and min-p of rows that are sampled."""
    import torch

    from .distribution import Processing

    def column(values: list[float], off: float, dtype: torch.dtype) -> torch.Tensor | None:
        if all(value == off for value in values):
            return None
        return torch.tensor(values, dtype=dtype, device=logits.device)

    params = [p.request.params for p in positions]
    vocabulary = logits.shape[-1]
    return Processing(
        temperature=column([p.temperature for p in params], 1.0, torch.float32),
        top_k=column([p.top_k if p.top_k > 0 else vocabulary for p in params], vocabulary, torch.int64),
        top_p=column([p.top_p for p in params], 1.0, torch.float32),
        min_p=column([p.min_p for p in params], 0.0, torch.float32),
    )


def _bias(position: _Position) -> tuple[np.ndarray, np.ndarray]:
    bias = position.request.params.logit_bias
    return np.fromiter(bias.keys(), np.int64, len(bias)), np.fromiter(bias.values(), np.float32, len(bias))


def _repetition(position: _Position) -> tuple[np.ndarray, np.ndarray]:
    seen = _history(position.request).seen(position.drafts)
    return seen, np.full(len(seen), position.request.params.repetition_penalty, np.float32)


def _penalties(position: _Position) -> tuple[np.ndarray, np.ndarray]:
    tokens, counts = _history(position.request).counts(position.drafts)
    params = position.request.params
    return tokens, counts * np.float32(params.frequency_penalty) + np.float32(params.presence_penalty)


def _banned(position: _Position) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.fromiter(position.request.stop_ids, np.int64, len(position.request.stop_ids))
    return tokens, np.zeros(len(tokens), np.float32)


def _history(request: Request) -> History:
    if request.history is None:
        request.history = History(request.token_ids[: request.num_prompt_tokens])
    request.history.update(request.token_ids)
    return request.history


def _sparse(
    positions: Sequence[_Position],
    logits: torch.Tensor,
    applies: Callable[[_Position], object],
    values: Callable[[_Position], tuple[np.ndarray, np.ndarray]],
) -> Sparse | None:
    import torch

    from .distribution import Sparse

    parts = [(row, *values(position)) for row, position in enumerate(positions) if applies(position)]
    if not parts:
        return None
    rows = np.repeat([row for row, _, _ in parts], [len(tokens) for _, tokens, _ in parts])
    return Sparse(
        torch.from_numpy(rows.astype(np.int64)).to(logits.device),
        torch.from_numpy(np.concatenate([tokens for _, tokens, _ in parts])).to(logits.device),
        torch.from_numpy(np.concatenate([numbers for _, _, numbers in parts])).to(logits.device),
    )


def _allowed(positions: Sequence[_Position], logits: torch.Tensor) -> torch.Tensor | None:
    import torch

    constrained = [row for row, position in enumerate(positions) if position.request.grammar is not None]
    if not constrained:
        return None
    allowed = torch.ones(len(positions), logits.shape[-1], dtype=torch.bool)
    for row in constrained:
        position = positions[row]
        allowed[row] = position.request.grammar.allowed_tokens(position.drafts, logits.shape[-1])
    return allowed.to(logits.device)


def _add_logprobs(logits: torch.Tensor, items: Sequence[SampleItem], results: Sequence[Sampled]) -> None:
    from .logprobs import token_logprobs

    wanted = [i for i, item in enumerate(items) if item.request.params.logprobs is not None and results[i].tokens]
    rows = [items[i].first + j for i in wanted for j in range(len(results[i].tokens))]
    if not rows:
        return
    tokens = [token for i in wanted for token in results[i].tokens]
    counts = [items[i].request.params.logprobs or 0 for i in wanted for _ in results[i].tokens]
    values = iter(token_logprobs(_select(logits, rows), tokens, counts))
    for i in wanted:
        results[i].logprobs = tuple(next(values) for _ in results[i].tokens)


def _greedy(logits: torch.Tensor) -> list[int]:
    """The best token of each row; -1 where no maximum is finite."""
    from .distribution import best_tokens

    values, tokens = best_tokens(logits)
    return [token if good else -1 for token, good in zip(tokens.tolist(), values.isfinite().tolist())]


def _select(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """The given rows; `logits` itself, uncopied, where that is all of them in order."""
    import torch

    if len(rows) == len(logits) and all(row == i for i, row in enumerate(rows)):
        return logits
    return logits.index_select(0, torch.tensor(rows, dtype=torch.int64, device=logits.device))
