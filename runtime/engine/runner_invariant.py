"""Batch-invariant logits: what a token gets depends on its request alone, not on company, chunking or preemption.

A matrix product sums in an order that depends on its number of rows, and attention splits a context by what else there
is to do; so the same token's logits differ in the last bits from batch to batch (arXiv:2408.04667 measures what that
does to text). Here every forward has one shape: a tile of 16 consecutive positions of one request, aligned to
multiples of 16, filled up with tokens that write into the scratch block. A token always stands in the same row of a
product of the same size, and attends in a call of its own.

The cost: rows are not batched. A decode step of S requests is S forwards of 16 rows, and the head runs for all of them.
Mixtures of experts (whose products have as many rows as tokens chose the expert) and latent attention (which expands
as many keys as the context is long) take tiles of one token: prefill then runs at the speed of decode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...optimizer.errors import UsageError
from ..attention.op import active_batch
from .plan import Row, StepPlan
from .runner import EagerRunner
from .runner_inputs import StepArrays, to_device

if TYPE_CHECKING:
    import torch

TILE = 16


def tile_size(runner: EagerRunner) -> int:
    """Tokens of a tile: 16, or 1 where a product's size depends on more than the number of tokens."""
    experts = any(name.rsplit(".", 1)[-1] == "experts" for name, _ in runner.model.named_modules())
    gathers = any(layer.kind == "gather" for layer in runner.probe.layers)
    return 1 if experts or gathers else TILE


class BatchInvariantRunner(EagerRunner):
    """`EagerRunner` whose logits for a token are the same bits whatever runs beside it. Takes the same options."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.tile = 0
        if options.get("linears", "plain") != "plain":
            raise UsageError("batch-invariant logits need linears='plain': other kernels depend on the number of rows")
        super().__init__(model, **options)
        self.probe.attach(f"invariant:{self.attention.name}")
        self.tile = tile_size(self)
        if self.tail_blocks and self.block_size % self.tile:
            self.close()
            raise UsageError(f"keys by channel need blocks of a multiple of {self.tile} tokens here")
        self.notes.append(
            f"batch-invariant: each request runs by itself in tiles of {self.tile} token{'s' * (self.tile > 1)}; "
            "throughput does not grow with the batch"
        )

    def execute(self, plan: StepPlan) -> torch.Tensor:
        """See `ModelRunner.execute`."""
        import torch

        pool = self.pool
        if not self.tile or not plan.rows:
            return super().execute(plan)
        for row in plan.rows:  # checks each row before the first is computed
            self._builder.arrays(StepPlan((row,)))
        out = torch.empty(plan.num_logits, self.vocab_size, device=self.device)
        at = 0
        with torch.inference_mode():
            for row in plan.rows:
                first_wanted = row.end - row.num_logits
                for begin in range(row.start // self.tile * self.tile, row.end, self.tile):
                    step = to_device(self._tile_arrays(row, begin), self.device)
                    with active_batch(step.batch, pool.tensors):
                        logits = self._forward(step, pool)
                    low, high = max(begin, first_wanted), min(begin + self.tile, row.end)
                    if low < high:
                        out[at : at + high - low] = logits[low - begin : high - begin]
                        at += high - low
        return out

    def _tile_arrays(self, row: Row, begin: int) -> StepArrays:
        """Positions begin … begin + tile - 1 of a row, each token a sequence of its own; fillers see one token."""
        size, tile = self.block_size, self.tile
        low, high = max(begin, row.start), min(begin + tile, row.end)
        real = slice(low - begin, high - begin)
        positions = np.zeros(tile, np.int64)
        positions[real] = np.arange(low, high)
        token_ids = np.zeros(tile, np.int64)
        token_ids[real] = row.token_ids[low - row.start : high - row.start]
        table = self._builder.table(row)[: -(-high // size) + self.tail_blocks]
        block_tables = np.full((tile, max(len(table), 1 + self.tail_blocks)), self.num_blocks, np.int32)
        block_tables[real] = table
        slots = np.full(tile, self.num_blocks * size, np.int64)
        slots[real] = table[positions[real] // size].astype(np.int64) * size + positions[real] % size
        seq_lens = np.ones(tile, np.int32)
        seq_lens[real] = positions[real] + 1
        return StepArrays(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            cu_seqlens_q=np.arange(tile + 1, dtype=np.int32),
            seq_lens=seq_lens,
            block_tables=block_tables,
            logit_rows=np.arange(tile),
            max_q=1,
            max_k=int(seq_lens.max()),
        )
