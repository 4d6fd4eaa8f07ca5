"""Which tokens a request has seen, and how often, kept up incrementally for the penalties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class _Growing:
    """An int64 or float32 array that grows by doubling."""

    __slots__ = ("data", "size")

    def __init__(self, dtype: type) -> None:
        self.data: np.ndarray = np.empty(16, dtype)
        self.size = 0

    def append(self, value: float) -> None:
        if self.size == len(self.data):
            self.data = np.concatenate([self.data, np.empty_like(self.data)])
        self.data[self.size] = value
        self.size += 1

    def view(self) -> np.ndarray:
        return self.data[: self.size]


class History:
    """Distinct tokens of prompt and output, and the counts of the output's tokens."""

    __slots__ = ("_counts", "_places", "_seen", "_seen_set", "_tokens", "num_counted")

    def __init__(self, prompt: Sequence[int]) -> None:
        self._seen_set: set[int] = set()
        self._seen = _Growing(np.int64)
        self._places: dict[int, int] = {}
        self._tokens, self._counts = _Growing(np.int64), _Growing(np.float32)
        self.num_counted = len(prompt)
        for token in prompt:
            self._see(token)

    def update(self, token_ids: Sequence[int]) -> None:
        """Count the tokens of prompt + output that have come since the last call."""
        for i in range(self.num_counted, len(token_ids)):
            token = token_ids[i]
            self._see(token)
            place = self._places.get(token)
            if place is None:
                self._places[token] = self._tokens.size
                self._tokens.append(token)
                self._counts.append(1)
            else:
                self._counts.data[place] += 1
        self.num_counted = max(self.num_counted, len(token_ids))

    def seen(self, drafts: Sequence[int] = ()) -> np.ndarray:
        """Distinct tokens of prompt, output and `drafts`, int64 [N]."""
        extra = [token for token in dict.fromkeys(drafts) if token not in self._seen_set]
        view = self._seen.view()
        return np.concatenate([view, np.asarray(extra, np.int64)]) if extra else view

    def counts(self, drafts: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Distinct tokens of output and `drafts`, int64 [N], and their counts, float32 [N]."""
        tokens, counts = self._tokens.view(), self._counts.view()
        if not drafts:
            return tokens, counts
        counts = counts.copy()
        extra: dict[int, int] = {}
        for token in drafts:
            place = self._places.get(token)
            if place is None:
                extra[token] = extra.get(token, 0) + 1
            else:
                counts[place] += 1
        return (
            np.concatenate([tokens, np.fromiter(extra.keys(), np.int64, len(extra))]),
            np.concatenate([counts, np.fromiter(extra.values(), np.float32, len(extra))]),
        )

    def _see(self, token: int) -> None:
        if token not in self._seen_set:
            self._seen_set.add(token)
            self._seen.append(token)
