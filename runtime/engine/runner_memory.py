"""How large the KV pool is: from a stated budget, or from what the device has left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...optimizer.errors import RunError
from ..attention.layer import AttentionLayer
from ..attention.pool import block_bytes

if TYPE_CHECKING:
    import torch

DEFAULT_CPU_BYTES = 1 << 30
"""Budget on the CPU where none is stated. Pages are only touched as blocks are used."""


def blocks_for(
    layers: Sequence[AttentionLayer],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    num_blocks: int | None,
    kv_cache_memory: int | None,
    memory_utilization: float,
    max_useful_blocks: int,
    warm_up: Callable[[], None],
) -> int:
    """Blocks of the pool.

    num_blocks, or else kv_cache_memory (bytes), decides; where neither is given: on the CPU 1 GiB, on CUDA
    `memory_utilization` (0 … 1) of the device's memory less the peak that `warm_up`, the largest step, was measured
    to reach. Never more than `max_useful_blocks`. Raises RunError where not one block fits.
    """
    if num_blocks is not None:
        return num_blocks
    per_block = block_bytes(layers, block_size, dtype)
    if kv_cache_memory is None:
        kv_cache_memory = (
            measured_free_memory(device, memory_utilization, warm_up) if device.type == "cuda" else DEFAULT_CPU_BYTES
        )
    blocks = min(kv_cache_memory // per_block - 1, max_useful_blocks)  # less the scratch block
    if blocks < 1:
        raise RunError(
            f"a KV budget of {kv_cache_memory / 2**20:.1f} MiB holds no block of {block_size} tokens "
            f"({per_block / 2**20:.2f} MiB each, and one is scratch)",
            what_to_do="Raise kv_cache_memory or memory_utilization, or use a smaller block_size",
        )
    return int(blocks)


def measured_free_memory(device: torch.device, utilization: float, warm_up: Callable[[], None]) -> int:
    """Bytes left for the pool on a CUDA device after the largest step's peak and everything that others hold there."""
    import torch

    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    warm_up()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return int(total * utilization) - peak - max(others, 0)
