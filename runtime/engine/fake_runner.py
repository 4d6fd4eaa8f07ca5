"""A `ModelRunner` without a model, for tests and simulations of everything above it.

Its KV pool stores, by slot, the token and the position that were written there. Logits of a position are a function of
the tokens that the row's block table leads to, so a wrong table, slot, start or a lost write shows up as wrong text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from ...optimizer.errors import RunError
from .plan import Row, StepPlan

if TYPE_CHECKING:
    import torch


def history_logits(token_ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """Logits float32 [vocab_size] after these tokens: normal deviates (σ = 2), seeded with a hash of the history."""
    digest = blake2b(np.asarray(token_ids, np.int64).tobytes(), digest_size=8).digest()
    generator = np.random.Generator(np.random.SFC64(int.from_bytes(digest, "little")))
    return generator.standard_normal(vocab_size, np.float32) * np.float32(2)


def greedy_continuation(prompt: Sequence[int], count: int, vocab_size: int) -> list[int]:
    """What greedy decoding must produce after `prompt`, computed without any engine."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(history_logits(tokens, vocab_size).argmax()))
    return tokens[len(prompt) :]


class FakeRunner:
    """Implements `ModelRunner`.

    fault: called with every row before anything is written; what it returns (an exception) is raised.
    Raises `RunError` where a row reads a slot that does not hold the position it stands for, where two rows of a step
    write one slot, and where a block number is outside the pool.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        vocab_size: int = 64,
        max_model_len: int = 128,
        fault: Callable[[Row], Exception | None] | None = None,
        num_host_blocks: int = 0,
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self.fault = fault
        self.num_executions = 0
        self.num_tokens_run = 0
        self.closed = False
        self._tokens = np.full(num_blocks * block_size, -1, np.int64)
        self._positions = np.full(num_blocks * block_size, -1, np.int64)
        self.num_host_blocks, self.swap_seconds = num_host_blocks, 0.0
        self._host = np.full((2, num_host_blocks, block_size), -1, np.int64)

    def swap(self, out: Sequence[tuple[int, int]], back: Sequence[tuple[int, int]]) -> None:
        """See `ModelRunner`."""
        for number, slots in enumerate((self._tokens, self._positions)):
            blocks = slots.reshape(self.num_blocks, self.block_size)
            for block, place in out:
                self._host[number, place] = blocks[block]
            for block, place in back:
                blocks[block] = self._host[number, place]

    def execute(self, plan: StepPlan) -> torch.Tensor:
        import torch

        if self.closed:
            raise RunError("the runner is closed", where="FakeRunner")
        self.num_executions += 1
        for row in plan.rows:
            error = self.fault(row) if self.fault is not None else None
            if error is not None:
                raise error
        written: set[int] = set()
        for row in plan.rows:
            positions = np.arange(row.start, row.end)
            slots = self._slots(row, positions)
            if not written.isdisjoint(slots.tolist()):
                raise RunError(f"request {row.request_id} writes a slot of another row", where="FakeRunner")
            written.update(slots.tolist())
            self._tokens[slots], self._positions[slots] = row.token_ids, positions
        self.num_tokens_run += len(written)
        logits = [
            history_logits(self._history(row, end), self.vocab_size)
            for row in plan.rows
            for end in range(row.end - row.num_logits + 1, row.end + 1)
        ]
        return torch.from_numpy(np.stack(logits)) if logits else torch.empty(0, self.vocab_size)

    def close(self) -> None:
        self.closed = True

    def _slots(self, row: Row, positions: np.ndarray) -> np.ndarray:
        table = np.asarray(row.block_table, np.int64)
        if len(table) != -(-row.end // self.block_size):
            raise RunError(f"request {row.request_id} has {len(table)} blocks for {row.end} tokens", where="FakeRunner")
        if len(table) and not (table.min() >= 0 and table.max() < self.num_blocks):
            raise RunError(f"request {row.request_id} names a block outside the pool", where="FakeRunner")
        return table[positions // self.block_size] * self.block_size + positions % self.block_size

    def _history(self, row: Row, end: int) -> np.ndarray:
        positions = np.arange(end)
        slots = self._slots(row, positions)
        if not np.array_equal(self._positions[slots], positions):
            raise RunError(f"request {row.request_id} reads slots of other positions", where="FakeRunner")
        return self._tokens[slots]
