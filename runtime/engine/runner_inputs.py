"""From a `StepPlan` to the tensors of one flat batch, with little Python per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from ...optimizer.errors import RunError
from ..attention.layer import Batch
from ..kernels.kv_format import KVFormat
from .plan import Row, StepPlan

if TYPE_CHECKING:
    import torch


@dataclass
class StepArrays:
    """One step in numpy, rows in plan order. T tokens, S rows, W blocks in the widest table.

    token_ids, positions, slots: int64 [T]. cu_seqlens_q: int32 [S + 1]. seq_lens: int32 [S]. block_tables: int32
    [S, W], zero beyond a row's blocks. logit_rows: int64 [num_logits], indices into the flat batch.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    cu_seqlens_q: np.ndarray
    seq_lens: np.ndarray
    block_tables: np.ndarray
    logit_rows: np.ndarray
    max_q: int
    max_k: int


@dataclass
class StepTensors:
    """The same on the model's device: token_ids and positions int64 [1, T], logit_rows int64 [num_logits]."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    batch: Batch


class BatchBuilder:
    """Lays plans out. Remembers each request's block table as an array, so that a step only adds what is new."""

    def __init__(self, block_size: int, num_blocks: int, min_width: int = 1, fmt: KVFormat | None = None) -> None:
        self.block_size, self.num_blocks, self.min_width = block_size, num_blocks, min_width
        self.format = fmt if fmt is not None and fmt.tail_blocks else None
        self._tables: dict[int, tuple[tuple[int, ...], np.ndarray]] = {}

    def table(self, row: Row) -> np.ndarray:
        """The row's block table, int32. Raises RunError where it is too short or names a block outside the pool."""
        known = self._tables.get(row.request_id)
        if known is not None and known[0] == row.block_table:
            return known[1]
        array = np.asarray(row.block_table, dtype=np.int32)
        if len(array) and (array.min() < 0 or array.max() >= self.num_blocks):
            raise RunError(
                f"block table names block {int(array.max())} of a pool of {self.num_blocks}",
                f"request {row.request_id}",
            )
        self._tables[row.request_id] = (row.block_table, array)
        return array

    def check_tails(self, rows: Sequence[Row]) -> None:
        """Raises RunError for a row that lacks the blocks of its tail, or needs two tails (`kv_format.py`)."""
        fmt, size = self.format, self.block_size
        assert fmt is not None
        for row in rows:
            if (len(row.block_table) - fmt.tail_blocks) * size < row.end:
                what = f"{len(row.block_table)} blocks of {size} for {row.end} tokens and a tail of {fmt.tail_blocks}"
            elif fmt.crosses(row.start, row.end, row.num_drafts, size):
                what = f"tokens {row.start} … {row.end - 1} with {row.num_drafts} drafts cross a block of {size}"
            else:
                continue
            raise RunError(f"malformed row for a KV cache {fmt.name}: {what}", f"request {row.request_id}")

    def arrays(self, plan: StepPlan) -> StepArrays:
        """Raises RunError for a row without tokens, or whose block table does not cover it."""
        rows = plan.rows
        size = self.block_size
        if len(self._tables) > 4 * len(rows) + 1024:
            current = {row.request_id for row in rows}
            self._tables = {k: v for k, v in self._tables.items() if k in current}
        tables = [self.table(row) for row in rows]
        for row, table in zip(rows, tables):
            if not row.token_ids or len(table) * size < row.end or not 0 <= row.num_logits <= len(row.token_ids):
                raise RunError(
                    f"malformed row: {len(row.token_ids)} tokens from position {row.start}, {len(table)} blocks of "
                    f"{size}, {row.num_logits} logits",
                    f"request {row.request_id}",
                )
        if self.format is not None:
            self.check_tails(rows)
        count = len(rows)
        lengths = np.fromiter((len(row.token_ids) for row in rows), np.int64, count)
        starts = np.fromiter((row.start for row in rows), np.int64, count)
        width = max(max(map(len, tables)), self.min_width)
        block_tables = np.zeros((count, width), np.int32)
        for i, table in enumerate(tables):
            block_tables[i, : len(table)] = table
        ends = lengths.cumsum()
        total = int(ends[-1])
        token_ids = np.fromiter(chain.from_iterable(row.token_ids for row in rows), np.int64, total)
        if total == count:
            positions, owner = starts, np.arange(count)
        else:
            owner = np.repeat(np.arange(count), lengths)
            positions = np.arange(total) + (starts - ends + lengths)[owner]
        slots = block_tables[owner, positions // size].astype(np.int64) * size + positions % size
        cu_seqlens_q = np.zeros(count + 1, np.int32)
        cu_seqlens_q[1:] = ends
        return StepArrays(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=(starts + lengths).astype(np.int32),
            block_tables=block_tables,
            logit_rows=_logit_rows(rows, ends),
            max_q=int(lengths.max()),
            max_k=int((starts + lengths).max()),
        )


def _logit_rows(rows: Sequence[Row], ends: np.ndarray) -> np.ndarray:
    wanted = np.fromiter((row.num_logits for row in rows), np.int64, len(rows))
    if (wanted == 1).all():
        return ends - 1
    total = int(wanted.sum())
    offsets = wanted.cumsum()
    return np.arange(total) + np.repeat(ends - offsets, wanted)


def to_device(arrays: StepArrays, device: torch.device) -> StepTensors:
    """Two copies a step to an accelerator (one of int64, one of int32), none on the CPU."""
    import torch

    wide = [arrays.token_ids, arrays.positions, arrays.slots, arrays.logit_rows]
    narrow = [arrays.cu_seqlens_q, arrays.seq_lens, arrays.block_tables.reshape(-1)]
    if device.type == "cpu":
        token_ids, positions, slots, logit_rows = map(torch.from_numpy, wide)
        cu_seqlens_q, seq_lens, tables = map(torch.from_numpy, narrow)
    else:
        first = torch.from_numpy(np.concatenate(wide)).pin_memory().to(device, non_blocking=True)
        second = torch.from_numpy(np.concatenate(narrow)).pin_memory().to(device, non_blocking=True)
        token_ids, positions, slots, logit_rows = first.split([len(a) for a in wide])
        cu_seqlens_q, seq_lens, tables = second.split([len(a) for a in narrow])
    return StepTensors(
        token_ids=token_ids[None],
        positions=positions[None],
        logit_rows=logit_rows,
        batch=Batch(
            slots=slots,
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=seq_lens,
            block_tables=tables.view(arrays.block_tables.shape),
            max_q=arrays.max_q,
            max_k=arrays.max_k,
        ),
    )
