"""Runs the engine's steps on an ONNX decoder.

A graph has no block table: it takes the keys and values of a batch as one tensor a layer. So the pool's blocks are
whole sequences: `block_size` is the context, and a request's one block is the number of its place. Sequences that
decode share a batch of caches; it is put together anew only when one joins or leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .session import OnnxCache, OnnxSession

if TYPE_CHECKING:
    import torch

    from ..engine.plan import Row, StepPlan

LOGIT_BYTES = 256 * 2**20
"""Most bytes of logits that one call may give; a graph computes them for every token of a prompt."""
SHORTEST = 64
"""Tokens that a call may have in any case."""


class OnnxRunner:
    """Implements `ModelRunner`. max_num_seqs: sequences that run at once."""

    kv_dtype = "auto"

    def __init__(self, session: OnnxSession, max_model_len: int, max_num_seqs: int) -> None:
        self.session, self.dtype, self.device = session, session.element, session.device
        self.max_model_len = self.block_size = max_model_len
        self.num_blocks, self.vocab_size = max_num_seqs, session.vocab_size
        self.chunk = max(SHORTEST, LOGIT_BYTES // (4 * self.vocab_size))
        """Tokens of one call, padding included."""
        self._places: dict[int, tuple[OnnxCache, int]] = {}
        """Block → where its keys and values are: a batch and the row in it."""
        self._failed: frozenset[Row] = frozenset()
        """Rows of a step that raised, and is now tried in parts."""

    def execute(self, plan: StepPlan) -> torch.Tensor:
        """See `ModelRunner`."""
        import torch

        if not self._failed or not self._failed.issuperset(plan.rows):
            self._failed = frozenset()
            self._keep(plan)
        found: dict[int, np.ndarray] = {}
        try:
            for group in self._groups(plan.rows):
                found.update(self._run(group))
        except Exception:
            self._failed = self._failed or frozenset(plan.rows)
            raise
        kept = [found[row.request_id][len(row.token_ids) - row.num_logits :] for row in plan.rows if row.num_logits]
        if not kept:
            return torch.empty(0, self.vocab_size)
        return torch.from_numpy(kept[0] if len(kept) == 1 else np.concatenate(kept))

    def close(self) -> None:
        """Let go of the keys and values."""
        self._places.clear()

    def _groups(self, rows: Sequence[Row]) -> list[list[Row]]:
        """Rows that run as one call: those with one token behind a cache; new ones, by length, so that little is
        padded, up to `chunk` tokens; every other by itself."""
        decoding = [row for row in rows if row.start and len(row.token_ids) == 1]
        groups = [decoding] if decoding else []
        groups += [[row] for row in rows if row.start and len(row.token_ids) > 1]
        group: list[Row] = []
        for row in sorted((row for row in rows if not row.start), key=lambda row: len(row.token_ids)):
            if group and (len(group) + 1) * len(row.token_ids) > self.chunk:
                groups.append(group)
                group = []
            group.append(row)
        return [*groups, group] if group else groups

    def _run(self, group: Sequence[Row]) -> dict[int, np.ndarray]:
        """Logits of every token of the rows, by request."""
        cache = self._cache(group)
        parts = [self._run_piece(group, cache, start) for start in self._starts(group)]
        for number, row in enumerate(group):
            self._places[row.block_table[0]] = (cache, number)
        logits = parts[0] if len(parts) == 1 else [np.concatenate([part[0] for part in parts])]
        return {row.request_id: each for row, each in zip(group, logits)}

    def _starts(self, group: Sequence[Row]) -> range:
        """Where the calls of a group begin: one row may be longer than a call."""
        return range(0, len(group[0].token_ids), self.chunk) if len(group) == 1 else range(1)

    def _run_piece(self, group: Sequence[Row], cache: OnnxCache, start: int) -> list[np.ndarray]:
        end = start + self.chunk if len(group) == 1 else None
        return self.session.run([row.token_ids[start:end] for row in group], cache)

    def _cache(self, group: Sequence[Row]) -> OnnxCache:
        """The batch that holds each row's first `start` tokens, in the group's order."""
        if not group[0].start:
            return self.session.new_cache(len(group))
        places = [self._places[row.block_table[0]] for row in group]
        cache = places[0][0]
        whole = [(cache, number) for number in range(cache.rows)]
        if places == whole and list(cache.lengths) == [row.start for row in group]:
            return cache
        return self.session.join([(held, number, row.start) for (held, number), row in zip(places, group)])

    def _keep(self, plan: StepPlan) -> None:
        """Drop the caches of sequences that have ended: every one that runs is in every step."""
        running = {row.block_table[0] for row in plan.rows if row.start}
        self._places = {block: place for block, place in self._places.items() if block in running}
