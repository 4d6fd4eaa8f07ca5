"""The reference backend: float64, one query at a time, nothing clever. Every other backend is tested against it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..kernels.kv_format import format_of, read, read_keys, turn_back
from .exact_keys import by_channel, row_keys, seen_keys
from .layer import Batch, visible

if TYPE_CHECKING:
    import torch


def attend_one(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor,
    *,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one query over its whole context, in float64.

    query [H, Dk], keys [K, Hkv, Dk], values [K, Hkv, Dv], seen bool [K], sinks [H] or None; returns [H, Dv] float64.
    A sink is a logit that takes part in the softmax and carries no value (gpt-oss model card, arXiv:2508.10925).
    """
    import torch

    group = query.shape[0] // keys.shape[1]
    keys = keys.double().repeat_interleave(group, dim=1)
    values = values.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("hd,khd->hk", query.double(), keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen[None, :], float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
    probabilities = torch.softmax(scores, dim=1)[:, : keys.shape[0]]
    return torch.einsum("hk,khd->hd", probabilities, values)


def paged_attention_reference(
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
    new_keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [T, H, Dk], key_cache [N, B, Hkv, Dk], value_cache [N, B, Hkv, Dv] → [T, H, Dv] in the query's dtype.

    The batch's own keys and values are in the caches already. Quantized caches are dequantized first. new_keys: see
    `op.paged_backend`.
    """
    import torch

    block_size, fmt = value_cache.shape[1], format_of(key_cache.dtype)
    value_dim = value_cache.shape[-1] if fmt is None else fmt.dim_of(value_cache.shape[-1])
    out = query.new_empty(query.shape[0], query.shape[1], value_dim)
    for row, length in enumerate(batch.lengths):
        first, last = batch.query_bounds[row], batch.query_bounds[row + 1]
        positions = torch.arange(length, device=query.device)
        table = batch.block_tables[row, : -(-length // block_size)].long()
        values = turn_back(read(value_cache, table, fmt, torch.float64).flatten(0, 1)[:length], fmt)
        if by_channel(key_cache.dtype) and new_keys is not None:
            keys, positions = row_keys(new_keys[first:last], key_cache, value_cache, batch, row, torch.float64)
            values = values[positions]
        else:
            keys = read_keys(key_cache, table, block_size, fmt, torch.float64).flatten(0, 1)[:length]
        for token in range(first, last):
            at = torch.tensor([length - (last - token)], device=query.device)
            if new_keys is not None:
                seen = seen_keys(at, positions, length, block_size, window, chunk, sink_tokens)[0]
            else:
                seen = visible(at, positions, window, chunk, sink_tokens)[0]
            out[token] = attend_one(query[token], keys, values, seen, scale=scale, softcap=softcap, sinks=sinks).to(
                query.dtype
            )
    return out


def gathered_attention_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    batch: Batch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """As above over keys [ΣK, H, Dk] and values [ΣK, H, Dv] that lie together, sequence after sequence."""
    import torch

    out = query.new_empty(query.shape[0], query.shape[1], value.shape[-1])
    offset = 0
    for row, length in enumerate(batch.lengths):
        first, last = batch.query_bounds[row], batch.query_bounds[row + 1]
        keys, values = key[offset : offset + length], value[offset : offset + length]
        positions = torch.arange(length, device=query.device)
        for token in range(first, last):
            at = torch.tensor([length - (last - token)], device=query.device)
            seen = visible(at, positions, window, 0, 0)[0]
            out[token] = attend_one(query[token], keys, values, seen, scale=scale, softcap=softcap, sinks=None).to(
                query.dtype
            )
        offset += length
    return out
