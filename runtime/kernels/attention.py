"""Paged attention on the CPU through the native kernels: float32, bfloat16 or quantized keys and values, any rows."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import nn

from .kv_format import format_of
from .native import CACHE_FORMATS, contiguous, library

BLOCK_MULTIPLE = 32
HUGE_PAGE = 2 << 20


def allocate_kv(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    num_layers: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeroed key and value caches, in the layout that the kernels read without a transpose; with dp = head_dim rounded
    up
    to a multiple of 32:

    * bfloat16: keys [num_blocks, num_kv_heads, dp/2, block_size, 2], values [num_blocks, num_kv_heads, block_size/2,
      dp, 2]
    * float32: keys [num_blocks, num_kv_heads, dp, block_size], values [num_blocks, num_kv_heads, block_size, dp]
    * quantized (int8, float8_e4m3fn, or uint8 for int4, see `runtime/kernels/kv_format.py`): keys and values
      [num_blocks, num_kv_heads, block_size, bytes of a vector of dp], keys by channel [num_blocks, num_kv_heads,
      bytes]; what lies inside a block says attention_codes.h

    num_layers, if given, is a further outermost dimension. Blocks may be copied or moved whole along the dimension
    `num_blocks`. Raises ValueError for another dtype or a block_size that is no multiple of 32.
    """
    if dtype not in CACHE_FORMATS:
        raise ValueError(f"the native cache holds float32 or bfloat16, or int8, fp8_e4m3 or int4 codes, not {dtype}")
    if block_size < 1 or block_size % BLOCK_MULTIPLE:
        raise ValueError(f"block_size must be a multiple of {BLOCK_MULTIPLE}, not {block_size}")
    if min(num_blocks, num_kv_heads, head_dim) < 1:
        raise ValueError(f"a cache of {num_blocks} blocks, {num_kv_heads} heads of {head_dim}")
    dp = -(-head_dim // 32) * 32
    lead = ([] if num_layers is None else [num_layers]) + [num_blocks, num_kv_heads]
    codes = format_of(dtype)
    if codes is not None:
        keys = [codes.key_bytes(block_size, dp)] if codes.by_channel else [block_size, codes.vector_bytes(dp)]
        shapes = keys, [block_size, codes.vector_bytes(dp)]
    elif dtype == torch.bfloat16:
        shapes = [dp // 2, block_size, 2], [block_size // 2, dp, 2]
    else:
        shapes = [dp, block_size], [block_size, dp]
    return _zeros(lead + shapes[0], dtype), _zeros(lead + shapes[1], dtype)


def block_bytes(block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one layer's keys and values in one block."""
    dp, codes = -(-head_dim // 32) * 32, format_of(dtype)
    if codes is None:
        return 2 * num_kv_heads * block_size * dp * dtype.itemsize
    return num_kv_heads * (codes.key_bytes(block_size, dp) + block_size * codes.vector_bytes(dp))


def _zeros(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that become resident as they are written, on huge pages where the system has them and the size merits
    it."""
    bytes_needed = math.prod(shape) * dtype.itemsize
    if bytes_needed < HUGE_PAGE:
        return torch.zeros(shape, dtype=dtype)
    space = torch.from_numpy(np.zeros(bytes_needed + HUGE_PAGE, np.uint8))  # torch.zeros would write every page
    offset = -space.data_ptr() % HUGE_PAGE
    library().llmopt_advise_huge(space.data_ptr() + offset, bytes_needed)
    return space[offset : offset + bytes_needed].view(dtype).view(shape)


def _cache_arguments(k_cache: torch.Tensor, v_cache: torch.Tensor, head_dim: int) -> tuple[int, int, int, int, int]:
    if k_cache.dtype not in CACHE_FORMATS or v_cache.dtype != k_cache.dtype:
        raise ValueError(
            f"the native cache holds float32 or bfloat16, or codes, not {k_cache.dtype} and {v_cache.dtype}"
        )
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("the native cache must be contiguous, as allocate_kv makes it")
    dp, codes = -(-head_dim // 32) * 32, format_of(k_cache.dtype)
    channels = codes is not None and codes.by_channel
    rank = 5 if k_cache.dtype == torch.bfloat16 else 4
    if (
        k_cache.dim() != rank - channels
        or v_cache.dim() != rank
        or v_cache.shape[3] != (codes.vector_bytes(dp) if codes else dp)
        or k_cache.shape[:2] != v_cache.shape[:2]
    ):
        raise ValueError(
            f"caches {tuple(k_cache.shape)}, {tuple(v_cache.shape)} are not of allocate_kv for head_dim {head_dim}"
        )
    block_size = v_cache.shape[2] if codes else k_cache.shape[3]
    return CACHE_FORMATS[k_cache.dtype], k_cache.shape[0], block_size, k_cache.shape[1], head_dim


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Writes k, v [tokens, num_kv_heads, head_dim] of any float type into slots [tokens] (block * block_size + offset).

    Keys by channel (int4) are written by `write_keys`, values here. Raises ValueError where shapes do not fit or a slot
    lies outside the cache.
    """
    arguments = _cache_arguments(k_cache, v_cache, k.shape[-1])
    _, num_blocks, block_size, num_kv_heads, head_dim = arguments
    if k.shape != v.shape or k.shape != (slots.numel(), num_kv_heads, head_dim):
        raise ValueError(f"k {tuple(k.shape)}, v {tuple(v.shape)}, slots {tuple(slots.shape)} do not fit the cache")
    if slots.numel() == 0:
        return
    where = contiguous(slots, torch.int32)
    if int(where.min()) < 0 or int(where.max()) >= num_blocks * block_size:
        raise ValueError(f"slots must lie in [0, {num_blocks * block_size})")
    keys, values = contiguous(k, torch.float32), contiguous(v, torch.float32)
    if library().llmopt_write_kv(
        *arguments,
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        len(where),
        where.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
    ):
        raise MemoryError("no memory for the native cache write")


def write_keys(
    k: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    block_tables: torch.Tensor,
) -> None:
    """Writes keys by channel: k [tokens, num_kv_heads, head_dim] of sequences as in `paged_attention`, whose tables
    have two more blocks than their tokens need. Raises ValueError where shapes do not fit, or for another format."""
    arguments = _cache_arguments(k_cache, v_cache, k.shape[-1])
    codes = format_of(k_cache.dtype)
    if codes is None or not codes.by_channel:
        raise ValueError(f"a cache of {k_cache.dtype} has no keys by channel")
    first, total, tables = (contiguous(x, torch.int32) for x in (starts, lengths, block_tables))
    _check_rows(k.shape[0], first, total, tables, arguments, codes.tail_blocks)
    keys = contiguous(k, torch.float32)
    if library().llmopt_write_keys(
        *arguments, k_cache.data_ptr(), v_cache.data_ptr(), len(total), first.data_ptr(), total.data_ptr(),
        tables.data_ptr(), tables.shape[1], keys.data_ptr(),
    ):  # fmt: skip
        raise MemoryError("no memory for the native cache write")


def _check_rows(
    tokens: int,
    first: torch.Tensor,
    total: torch.Tensor,
    tables: torch.Tensor,
    arguments: tuple[int, int, int, int, int],
    tail_blocks: int,
) -> None:
    """Raises ValueError for sequences that do not cover the tokens, or whose blocks are not in the cache."""
    _, num_blocks, block_size, _, _ = arguments
    sequences = len(total)
    if len(first) != sequences + 1 or tables.dim() != 2 or tables.shape[0] != sequences:
        raise ValueError(f"starts {len(first)}, lengths {sequences}, block_tables {tuple(tables.shape)} do not agree")
    counts = first.diff()
    if int(first[0]) != 0 or int(first[-1]) != tokens or bool((counts < 1).any()) or bool((total < counts).any()):
        raise ValueError(
            "every sequence needs at least one token, starts must cover them all, and lengths include them"
        )
    blocks = (total + block_size - 1) // block_size + tail_blocks
    if int(blocks.max()) > tables.shape[1]:
        raise ValueError(f"block_tables of {tables.shape[1]} blocks are too short for {int(total.max())} tokens")
    used = tables[torch.arange(tables.shape[1]) < blocks.unsqueeze(1)]
    if int(used.min()) < 0 or int(used.max()) >= num_blocks:
        raise ValueError(f"blocks must lie in [0, {num_blocks})")


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    kept: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    as_torch: bool = False,
    new_keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of a flat batch over the paged cache.

    q [tokens, num_heads, head_dim] of any float type; sequence r owns tokens starts[r] … starts[r+1]-1, which are the
    last of its lengths[r] tokens, all of them already written (`write_kv`). starts int [sequences+1], lengths int
    [sequences], block_tables int [sequences, max_blocks]. Scores are scale * q·k, then softcap * tanh(score / softcap)
    where softcap > 0; a token sees the last `window` positions, itself included (0: all), and with a window
    the first `kept` positions too. sinks [num_heads]: one more
    logit a head that takes part in the softmax and carries no value (Xiao et al. 2023; gpt-oss).

    Returns [tokens, num_heads, head_dim] in q's dtype. With a float32 cache all arithmetic is float32; with bfloat16,
    queries (times the scale, where that is a power of two) and softmax numerators are rounded to bfloat16 and products
    are summed in float32. as_torch, with bfloat16: the numerators are those of torch's scaled_dot_product_attention on
    the CPU to the bit, for a sequence that it would see as a whole. With a quantized cache the arithmetic is that of
    bfloat16 over the dequantized values, and a row's result depends on its own sequence alone.
    new_keys [tokens, num_kv_heads, head_dim]: with keys by channel, what `write_keys` was given.
    Raises ValueError for inconsistent shapes, lengths or blocks.
    """
    tokens, num_heads, head_dim = q.shape
    arguments = _cache_arguments(k_cache, v_cache, head_dim)
    num_kv_heads = arguments[3]
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads over {num_kv_heads} KV heads")
    first, total = contiguous(starts, torch.int32), contiguous(lengths, torch.int32)
    tables = contiguous(block_tables, torch.int32)
    sequences = len(total)
    if tokens == 0:
        return torch.empty_like(q)
    codes = format_of(k_cache.dtype)
    channels = codes is not None and codes.by_channel
    _check_rows(tokens, first, total, tables, arguments, codes.tail_blocks if codes else 0)
    if channels and (new_keys is None or new_keys.shape != (tokens, num_kv_heads, head_dim)):
        raise ValueError(f"keys by channel need new_keys [{tokens}, {num_kv_heads}, {head_dim}]")
    own = contiguous(new_keys, torch.float32) if channels and new_keys is not None else None
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"sinks {tuple(sinks.shape)} for {num_heads} heads")
    extra = None if sinks is None else contiguous(sinks, torch.float32)
    query = contiguous(q, torch.float32)
    out = torch.empty_like(query)
    if library().llmopt_attention(
        *arguments, k_cache.data_ptr(), v_cache.data_ptr(), num_heads, query.data_ptr(), out.data_ptr(), sequences,
        first.data_ptr(), total.data_ptr(), tables.data_ptr(), tables.shape[1], scale, softcap, window, kept,
        None if extra is None else extra.data_ptr(), int(as_torch), None if own is None else own.data_ptr(),
    ):  # fmt: skip
        raise MemoryError("no memory for native attention")
    return out.to(q.dtype)


@lru_cache(maxsize=1)
def matches_torch() -> bool:
    """Whether `as_torch` gives the bits of torch's own attention on this machine, found by trial on random sequences:
    a few tokens, one after many, and more than a tile; another instruction set or library sums in other orders. Some of
    these show in one value of ten thousand, so the last cases have many heads."""
    generator = torch.Generator().manual_seed(11)
    few = all(equals_torch(*case, generator) for case in ((5, 5), (40, 40), (41, 1), (230, 1), (70, 66)))
    many = ((300, 200, 18, 6), (1000, 1, 96, 32), (1000, 1, 96, 32))
    return few and all(equals_torch(n, new, generator, heads, kv) for n, new, heads, kv in many)


def equals_torch(length: int, new: int, generator: torch.Generator, heads: int = 6, kv_heads: int = 3) -> bool:
    """Whether attention of the last `new` of `length` random bfloat16 tokens has the bits of torch's."""
    head_dim, block_size = 64, 32
    q = torch.randn(1, heads, new, head_dim, generator=generator).mul_(2.0).bfloat16()
    k, v = torch.randn(2, 1, kv_heads, length, head_dim, generator=generator).bfloat16().unbind(0)
    mask = None if new == 1 else torch.ones(new, length, dtype=torch.bool).tril(length - new)
    wanted = nn.functional.scaled_dot_product_attention(
        q,
        k.repeat_interleave(heads // kv_heads, 1),
        v.repeat_interleave(heads // kv_heads, 1),
        attn_mask=mask if new < length else None,
        is_causal=new == length,
        scale=head_dim**-0.5,
    )
    keys, values = allocate_kv(-(-length // block_size), block_size, kv_heads, head_dim, torch.bfloat16)
    write_kv(k[0].transpose(0, 1), v[0].transpose(0, 1), keys, values, torch.arange(length))
    got = paged_attention(
        q[0].transpose(0, 1).contiguous(),
        keys,
        values,
        torch.tensor([0, new]),
        torch.tensor([length]),
        torch.arange(keys.shape[0]).unsqueeze(0),
        scale=head_dim**-0.5,
        as_torch=True,
    )
    return torch.equal(got, wanted[0].transpose(0, 1))
