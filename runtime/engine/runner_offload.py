"""The host memory of an offloaded KV cache (`offload.py`), and the copies between it and a runner's pool."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...optimizer.errors import RunError, UsageError

if TYPE_CHECKING:
    import torch

Pairs = Sequence[tuple[int, int]]
"""(block of the pool, host block)."""


class HostBlocks:
    """As many blocks as `gib` GiB hold, in pinned memory where the pool is on CUDA.

    pool: the runner's tensors, each [layers, blocks, …] of any dtype, and as yet unused: one block is copied to measure
    `seconds_per_block`. Raises RunError where not one block fits, or the memory cannot be had.
    """

    def __init__(self, pool: Sequence[torch.Tensor], gib: float) -> None:
        import torch

        self._pool = [tensor.view(torch.uint8) for tensor in pool]
        per_block = sum(tensor[:, 0].nbytes for tensor in self._pool)
        self.count = int(gib * 2**30 // per_block)
        if self.count < 1:
            raise RunError(f"offload_gib={gib:g} holds no block of {per_block / 2**20:.2f} MiB", "", "Raise it.")
        self._cuda = self._pool[0].device.type == "cuda"
        try:
            self._host = [
                torch.empty((self.count, t.shape[0], *t.shape[2:]), dtype=torch.uint8, pin_memory=self._cuda)
                for t in self._pool
            ]
        except RuntimeError as error:
            raise RunError(f"there are no {gib:g} GiB of host memory for it", "", "Lower offload_gib") from error
        self.swap([(0, 0)], [(0, 0)])  # what the first copy sets up is not measured
        began = time.perf_counter()
        self.swap([(0, 0)], [(0, 0)])
        self.seconds_per_block = (time.perf_counter() - began) / 2

    def swap(self, out: Pairs, back: Pairs) -> None:
        """Copy blocks out, then in; done when it returns."""
        import torch

        for pool, host in zip(self._pool, self._host):
            for block, place in out:
                host[place].copy_(pool[:, block], non_blocking=self._cuda)
            for block, place in back:
                pool[:, block].copy_(host[place], non_blocking=self._cuda)
        if self._cuda:
            torch.cuda.current_stream(self._pool[0].device).synchronize()


def host_blocks(pool: Sequence[torch.Tensor], offload_gib: float, sliding: object) -> HostBlocks | None:
    """The host memory that a runner's options ask for; None for 0 GiB. Raises UsageError beside a sliding cache."""
    if offload_gib < 0:
        raise UsageError(f"offload_gib={offload_gib} is below 0", "load")
    if not offload_gib:
        return None
    if sliding is not None:
        raise UsageError("offload_gib and kv_window: a KV cache is sliding or offloaded, not both", "load")
    return HostBlocks(pool, offload_gib)
