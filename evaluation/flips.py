"""Positions where two models name another most likely token, and in which contexts."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any

from .divergence import kl_rows

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

CONTEXT = 24
"""Tokens before a flip that are shown."""


class FlipMeter:
    """Keeps the `most` flips of the greatest KL(a || b), and counts all."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, most: int = 100) -> None:
        self._tokenizer, self._most = tokenizer, most
        self._heap: list[tuple[float, int, dict[str, Any]]] = []
        self.num_flips = 0
        self.num_positions = 0

    def update(self, window: int, ids: torch.Tensor, start: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """Logits `[n, vocab]` of both models, row i predicting token `start + i` of ids int64 `[length]`."""
        import torch

        kl, agrees = kl_rows(a, b)
        self.num_positions += len(kl)
        for row in (~agrees).nonzero().flatten().tolist():
            self.num_flips += 1
            harm = kl[row].item()
            entry = (harm, -self.num_flips)
            if len(self._heap) == self._most and entry <= self._heap[0][:2]:
                continue
            both = torch.stack([a[row].float(), b[row].float()]).log_softmax(-1).exp()
            found = self._record(window, ids, start + row, both)
            push = heapq.heappush if len(self._heap) < self._most else heapq.heapreplace
            push(self._heap, (*entry, {**found, "kl": harm}))

    def worst(self) -> list[dict[str, Any]]:
        """The kept flips, worst first: `window`, `position` (of the predicted token), `context` (decoded text before),
        `actual` (the text's own token), `a` and `b` (each model's choice, with its probability in both) and `kl`."""
        return [record for _, _, record in sorted(self._heap, key=lambda item: item[:2], reverse=True)]

    def _record(self, window: int, ids: torch.Tensor, position: int, both: torch.Tensor) -> dict[str, Any]:
        tokens = ids.tolist()
        decode = self._tokenizer.decode

        def choice(token: int) -> dict[str, Any]:
            p = both[:, token].tolist()
            return {"token_id": token, "text": decode([token]), "probability_a": p[0], "probability_b": p[1]}

        first, second = both.argmax(-1).tolist()
        return {
            "window": window,
            "position": position,
            "context": decode(tokens[max(0, position - CONTEXT) : position]),
            "actual": choice(tokens[position]),
            "a": choice(first),
            "b": choice(second),
        }
