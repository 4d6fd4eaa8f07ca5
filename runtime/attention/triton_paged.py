"""The triton backend: our own paged kernels (`triton_kernels.py`), launched for one layer of one batch.

Runs on CUDA, and on the CPU in Triton's interpreter (`TRITON_INTERPRET=1`, set before triton is first imported), where
the tests run it. The interpreter's `tl.dot` is wrong in bfloat16: operands are cast to float32 there.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING

from ..kernels.kv_format import FORMATS, format_of, split, turn_back
from .layer import Batch

if TYPE_CHECKING:
    import torch

TILE_ROWS = 64
"""Rows of a prefill tile: queries times the query heads of one KV head."""
SPLIT_TOKENS = 256
"""Fewest context tokens a decode split is worth."""
MAX_SPLITS = 64


def interpreted() -> bool:
    """Whether Triton runs in its interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def _processors(device_index: int) -> int:
    import torch

    return torch.cuda.get_device_properties(device_index).multi_processor_count


def num_splits(sequences: int, kv_heads: int, max_k: int, processors: int) -> int:
    """Splits of the context that fill the device twice, none shorter than `SPLIT_TOKENS`."""
    wanted = -(-2 * processors // max(1, sequences * kv_heads))
    return max(1, min(wanted, -(-max_k // SPLIT_TOKENS), MAX_SPLITS))


def _power(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def paged_attention_triton(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: Batch,
    *,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    sink_tokens: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """query [T, H, Dk], key_cache [N, B, Hkv, Dk], value_cache [N, B, Hkv, Dv] → [T, H, Dv] in the query's dtype.

    splits: shares of the context in decode; None chooses by the device, 1 makes a row independent of its batch.
    """
    import torch

    from .triton_kernels import decode_kernel, prefill_kernel, reduce_kernel

    tokens, heads, key_dim = query.shape
    block_size, kv_heads, value_dim = key_cache.shape[1], key_cache.shape[2], value_cache.shape[-1]
    group, sequences, fmt = heads // kv_heads, batch.seq_lens.shape[0], format_of(key_cache.dtype)
    query = turn_back(query, fmt)
    if query.stride(-1) != 1:
        query = query.contiguous()
    key_scales, value_scales = batch.seq_lens, batch.seq_lens  # plain caches have none: never read
    if fmt is not None:
        value_dim = fmt.dim_of(value_dim)
        key_cache, key_scales = split(key_cache, fmt)
        value_cache, value_scales = split(value_cache, fmt)
        key_scales, value_scales = key_scales.view(torch.int16), value_scales.view(torch.int16)
    elif query.dtype != key_cache.dtype:
        query = query.to(key_cache.dtype)
    out = torch.empty(tokens, heads, value_dim, dtype=query.dtype, device=query.device)
    shapes = {
        "GROUP": group,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_D": _power(key_dim),
        "BLOCK_DV": _power(value_dim),
        "BLOCK_N": 32 if max(key_dim, value_dim) > 128 else 64,
        "BLOCK_SIZE": block_size,
        "SOFTCAP": softcap > 0,
        "UPCAST": interpreted(),
        "FORMAT": 0 if fmt is None else 1 + list(FORMATS).index(fmt.name),
    }
    strides = (
        *query.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3], key_scales.stride(0),
        value_scales.stride(0), key_scales.stride(1) if fmt else 0, batch.block_tables.stride(0),
    )  # fmt: skip
    caches = (key_cache, value_cache, key_scales, value_scales, batch.block_tables)
    limits = (scale, softcap, window, chunk, sink_tokens)
    if batch.max_q == 1 and tokens == sequences:
        if splits is None:
            processors = 1 if query.device.type == "cpu" else _processors(query.device.index or 0)
            reach = min(batch.max_k, window + sink_tokens if window else batch.max_k)
            splits = num_splits(sequences, kv_heads, reach, processors)
        partial = torch.empty(sequences, heads, splits, value_dim, dtype=torch.float32, device=query.device)
        maximum, total = torch.empty(2, sequences, heads, splits, dtype=torch.float32, device=query.device)
        decode_kernel[(sequences, kv_heads, splits)](
            partial, maximum, total, query, *caches, batch.seq_lens, *strides, heads, splits, *limits,
            BLOCK_M=_power(group), **shapes,
        )  # fmt: skip
        reduce_kernel[(sequences, heads)](
            out, partial, maximum, total, sinks if sinks is not None else out, heads, splits,
            VALUE_DIM=value_dim, BLOCK_DV=shapes["BLOCK_DV"], BLOCK_SPLITS=_power(splits), SINKS=sinks is not None,
        )  # fmt: skip
        return turn_back(out, fmt)
    rows = max(_power(group), TILE_ROWS)
    queries = rows // group
    tiles = tokens // queries + sequences
    prefill_kernel[(tiles, kv_heads)](
        out, query, *caches, batch.cu_seqlens_q, batch.seq_lens,
        sinks if sinks is not None else out, *strides, sequences, heads, *limits,
        BLOCK_Q=queries, BLOCK_M=rows, SINKS=sinks is not None, **shapes,
    )  # fmt: skip
    return turn_back(out, fmt)
