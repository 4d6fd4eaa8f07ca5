"""The varlen backends: torch's own `varlen_attn` with block tables, and flash-attn where it is installed (CUDA only).

torch's FlashAttention-2 takes pages of a multiple of 256 tokens, float16 or bfloat16, one head dim up to 256 that 8
divides, int32 tables, and has no soft-capping. Attention sinks are applied to the result: a sink `s` joins the
normalizer, which multiplies the output by sigmoid(lse - s).
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from .layer import Batch

if TYPE_CHECKING:
    import torch


@cache
def takes_block_table() -> bool:
    """Whether this torch's `varlen_attn` reads a paged cache (2.11 and later)."""
    from torch.nn.attention.varlen import varlen_attn

    parameters = inspect.signature(varlen_attn).parameters
    return "block_table" in parameters and "seqused_k" in parameters


def window_size(window: int, max_q: int) -> tuple[int, int]:
    """(left, right) keys around a query. A single query at the end needs no causal limit, which costs a slower path."""
    if window:
        return window - 1, 0
    return (-1, -1) if max_q == 1 else (-1, 0)


def apply_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """out [T, H, D], lse [H, T] or [T, H] float32, sinks [H] → out with the sinks in its normalizer."""
    import torch

    if lse.shape != out.shape[:2]:
        lse = lse.transpose(0, 1)
    return (out.float() * torch.sigmoid(lse.float() - sinks.float())[..., None]).to(out.dtype)


def paged_attention_varlen(
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
    num_splits: int | None = None,
) -> torch.Tensor:
    """query [T, H, D], caches [N, B, Hkv, D] with B a multiple of 256 → [T, H, D].

    num_splits=1 makes a row's result independent of its batch. `chunk`, `sink_tokens` and `softcap` are not taken;
    `select.py` does not choose this backend for layers that have them.
    """
    from torch.nn.attention.varlen import varlen_attn

    if chunk or sink_tokens or softcap:
        raise ValueError("varlen attention takes no chunk, sink_tokens or softcap")
    extra: dict[str, Any] = {}
    if num_splits is not None:
        extra["num_splits"] = num_splits
    if sinks is not None:
        from torch.nn.attention.varlen import AuxRequest

        extra["return_aux"] = AuxRequest(lse=True)
    result = varlen_attn(
        query.contiguous(),
        key_cache,
        value_cache,
        batch.cu_seqlens_q,
        None,
        batch.max_q,
        batch.max_k,
        scale=scale,
        window_size=window_size(window, batch.max_q),
        enable_gqa=query.shape[1] != key_cache.shape[2],
        seqused_k=batch.seq_lens,
        block_table=batch.block_tables,
        **extra,
    )
    if sinks is None:
        return cast("torch.Tensor", result)  # one tensor where no `return_aux` is given
    out, lse = result
    return apply_sinks(out, lse, sinks)


def paged_attention_flash_attn(
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
) -> torch.Tensor:
    """The same with flash-attn's `flash_attn_varlen_func`, which also soft-caps."""
    import torch
    from flash_attn import flash_attn_varlen_func

    if chunk or sink_tokens or sinks is not None:
        raise ValueError("flash-attn takes no chunk, sink_tokens or sinks")
    lengths = torch.nn.functional.pad(batch.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
    return flash_attn_varlen_func(
        query.contiguous(),
        key_cache,
        value_cache,
        cu_seqlens_q=batch.cu_seqlens_q,
        cu_seqlens_k=lengths,
        max_seqlen_q=batch.max_q,
        max_seqlen_k=batch.max_k,
        softmax_scale=scale,
        causal=True,
        window_size=(window - 1 if window else -1, 0 if window else -1),
        softcap=softcap,
        block_table=batch.block_tables,
    )
