"""The compiled backend: the native paged kernels of `runtime/kernels` (CPU), called once a layer.

The pool has the kernels' own layout (`kernels.attention.allocate_kv`), so its block size is a multiple of 32. Arguments
that are the same for all layers of a step are prepared once and kept in the batch's memo.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..kernels.kv_format import format_of
from .exact_keys import by_channel
from .layer import AttentionLayer, Batch

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def refusal(layers: Sequence[AttentionLayer], dtype: torch.dtype, block_size: int | None) -> str:
    """Why the native kernels cannot run these layers here; empty where they can. Compiles them at first use."""
    from ..kernels.attention import BLOCK_MULTIPLE
    from ..kernels.build import NativeUnavailable
    from ..kernels.native import CACHE_FORMATS, library

    if dtype not in CACHE_FORMATS:
        return f"its cache holds float32, bfloat16 or codes, not {str(dtype).removeprefix('torch.')}"
    if block_size is not None and block_size % BLOCK_MULTIPLE:
        return f"block_size {block_size} is not a multiple of {BLOCK_MULTIPLE}"
    for layer in layers:
        if layer.kind != "paged":
            return "latent attention runs in gather mode"
        if layer.key_dim != layer.value_dim:
            return f"keys of {layer.key_dim} and values of {layer.value_dim} elements"
        if layer.chunk:
            return "chunked attention has no argument there"
    try:
        library()
    except NativeUnavailable as error:
        return str(error)
    return ""


def allocate(
    num_layers: int, num_blocks: int, block_size: int, heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Zeroed (keys, values) of one group of layers, outermost dimension the layer."""
    from ..kernels.attention import allocate_kv

    return allocate_kv(num_blocks, block_size, heads, head_dim, dtype, num_layers=num_layers)


def _geometry(key_cache: Tensor, value_cache: Tensor, head_dim: int) -> tuple[int, int, int, int, int]:
    """(format, blocks, block size, KV heads, head dim) of a cache [N, H, dp/2, B, 2] (bfloat16), [N, H, dp, B]
    (float32), [N, H, B, bytes of a vector] or, by channel, [N, H, bytes of a block]."""
    from ..kernels.native import CACHE_FORMATS

    size = key_cache.shape[3] if format_of(key_cache.dtype) is None else value_cache.shape[2]
    return CACHE_FORMATS[key_cache.dtype], key_cache.shape[0], size, key_cache.shape[1], head_dim


def _rows(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """starts, lengths and block tables as the kernels take them; made once a step."""
    import torch

    if "compiled" not in batch.memo:
        batch.memo["compiled"] = tuple(
            t.to(torch.int32).contiguous() for t in (batch.cu_seqlens_q, batch.seq_lens, batch.block_tables)
        )
    return batch.memo["compiled"]


def write_kv_compiled(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, batch: Batch) -> None:
    """A step's key and value [T, H, D] into their slots. Raises MemoryError where the kernel has none."""
    import torch

    from ..kernels.native import library

    where, geometry = batch.slots.to(torch.int32), _geometry(key_cache, value_cache, key.shape[-1])
    keys, values = key.to(torch.float32).contiguous(), value.to(torch.float32).contiguous()
    if library().llmopt_write_kv(
        *geometry, key_cache.data_ptr(), value_cache.data_ptr(), where.numel(), where.data_ptr(), keys.data_ptr(),
        values.data_ptr(),
    ):  # fmt: skip
        raise MemoryError("no memory for the native cache write")
    if by_channel(key_cache.dtype):
        starts, lengths, tables = _rows(batch)
        if library().llmopt_write_keys(
            *geometry, key_cache.data_ptr(), value_cache.data_ptr(), lengths.shape[0], starts.data_ptr(),
            lengths.data_ptr(), tables.data_ptr(), tables.shape[1], keys.data_ptr(),
        ):  # fmt: skip
            raise MemoryError("no memory for the native cache write")


def paged_attention_compiled(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: Batch,
    *,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    sink_tokens: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    new_keys: Tensor | None = None,
) -> Tensor:
    """query [T, H, D] → [T, H, D] in the query's dtype, over caches of `allocate` (one layer of them).

    new_keys: see `op.paged_backend`. The batch comes from a runner, which has checked its blocks. Raises MemoryError
    where the kernel has no memory.
    """
    import torch

    from ..kernels.native import library

    if chunk:
        raise ValueError("the native kernels take no chunk")
    starts, lengths, tables = _rows(batch)
    keys = None if new_keys is None else new_keys.to(torch.float32).contiguous()
    extra = None if sinks is None else sinks.detach().to(torch.float32).contiguous()
    rows = query.to(torch.float32).contiguous()
    out = torch.empty_like(rows)
    if library().llmopt_attention(
        *_geometry(key_cache, value_cache, query.shape[-1]), key_cache.data_ptr(), value_cache.data_ptr(),
        query.shape[1], rows.data_ptr(), out.data_ptr(), lengths.shape[0], starts.data_ptr(), lengths.data_ptr(),
        tables.data_ptr(), tables.shape[1], scale, softcap, window, sink_tokens,
        None if extra is None else extra.data_ptr(), 0, None if keys is None else keys.data_ptr(),
    ):  # fmt: skip
        raise MemoryError("no memory for native attention")
    return out.to(query.dtype)
