"""Triton kernels over the paged pool: split-K decode with its reduction, and varlen prefill.

Flash attention's online softmax (arXiv:2205.14135), keys and values read through block tables (arXiv:2309.06180), the
query heads of one KV head packed into the rows of one tile, decode split along the context (Flash-Decoding). Imported
only where the triton backend runs: importing this module needs triton.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_vectors(pointer, dims, inside, scale_pointer, DIM: tl.constexpr, FORMAT: tl.constexpr):
    """Keys or values [N, BLOCK_D] from pointers [N]: as they are, or dequantized to float32 (`kv_format.py`).

    FORMAT: 0 plain, 1 int8, 2 fp8_e4m3, 3 int4, whose byte i holds dimensions i (low bits) and i + DIM / 2.
    """
    mask = inside[:, None] & (dims[None, :] < DIM)
    if FORMAT == 0:
        vectors = tl.load(pointer[:, None] + dims[None, :], mask=mask, other=0.0)
    else:
        if FORMAT == 3:
            code = tl.load(pointer[:, None] + (dims % (DIM // 2))[None, :], mask=mask, other=0).to(tl.int32)
            value = ((code >> (dims // (DIM // 2) * 4)[None, :]) & 15).to(tl.float32) - 7.5
        else:
            code = tl.load(pointer[:, None] + dims[None, :], mask=mask, other=0).to(tl.int32)
            if FORMAT == 1:
                value = (code - ((code >> 7) << 8)).to(tl.float32)
            else:  # the bits moved into a float32; where the exponent is 0, 2^-7 (1 + m/8) stands for m 2^-9
                value = (((code & 127) << 20) + (120 << 23)).to(tl.float32, bitcast=True)
                value = tl.where((code & 120) == 0, 2.0 * (value - 0.0078125), value)
                value = tl.where(code > 127, -value, value)
        scale = tl.load(scale_pointer, mask=inside, other=0).to(tl.int32) << 16
        vectors = value * scale.to(tl.float32, bitcast=True)[:, None]
    return vectors


@triton.jit
def attend_tile(
    query,  # [M, BLOCK_D]
    query_position,  # [M]
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    table_ptr,
    stride_block,
    stride_slot,
    stride_value_block,
    stride_value_slot,
    stride_scale_block,
    stride_value_scale_block,
    stride_scale_slot,
    low,
    high,
    skip,
    scale,
    softcap,
    window,
    chunk,
    sink_tokens,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Online softmax of one tile over context positions low … high - 1: (unnormalized sum, maximum, normalizer).

    skip: positions after the first `sink_tokens` that are left out; low and the loop count as if they were not there.
    """
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_DV)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for start in range(low, high - skip, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        position += tl.where(position >= sink_tokens, skip, 0)
        inside = position < high
        block = tl.load(table_ptr + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        offset = position % BLOCK_SIZE
        scale_at = offset * stride_scale_slot
        key = load_vectors(
            key_ptr + block * stride_block + offset * stride_slot, dims, inside,
            key_scale_ptr + block * stride_scale_block + scale_at, KEY_DIM, FORMAT,
        )  # fmt: skip
        if UPCAST:
            key = key.to(tl.float32)
        elif FORMAT > 0:
            key = key.to(query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if SOFTCAP:
            # tanh(x) = 1 - 2 / (exp(2x) + 1); saturates instead of overflowing
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
        behind = query_position[:, None] - position[None, :]
        seen = inside[None, :] & (behind >= 0)
        if window > 0:
            seen = seen & ((behind < window) | (position[None, :] < sink_tokens))
        if chunk > 0:
            seen = seen & (position[None, :] // chunk == query_position[:, None] // chunk)
        scores = tl.where(seen, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        safe = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weight = tl.exp(scores - safe[:, None])
        keep = tl.exp(maximum - safe)
        total = total * keep + tl.sum(weight, 1)
        value = load_vectors(
            value_ptr + block * stride_value_block + offset * stride_value_slot, value_dims, inside,
            value_scale_ptr + block * stride_value_scale_block + scale_at, VALUE_DIM, FORMAT,
        )  # fmt: skip
        if UPCAST:
            value = value.to(tl.float32)
        elif FORMAT > 0:
            value = value.to(query.dtype)
        result = result * keep[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        maximum = new_maximum
    return result, maximum, total


@triton.jit
def lowest_position(query_position, window, chunk, sink_tokens):
    """First context position that a tile beginning at `query_position` can see."""
    low = query_position * 0
    if window > 0 and sink_tokens == 0:
        low = tl.maximum(query_position - window + 1, 0)
    if chunk > 0:
        low = tl.maximum(low, query_position // chunk * chunk)
    return low


@triton.jit
def skipped_positions(query_position, window, chunk, sink_tokens):
    """Context positions after the first `sink_tokens` that no query from `query_position` on can see."""
    skip = query_position * 0
    if window > 0 and sink_tokens > 0 and chunk == 0:
        skip = tl.maximum(query_position - window + 1 - sink_tokens, 0)
    return skip


@triton.jit
def decode_kernel(
    partial_ptr,  # [S, H, SPLITS, Dv] float32
    maximum_ptr,  # [S, H, SPLITS] float32
    total_ptr,  # [S, H, SPLITS] float32
    query_ptr,  # [S, H, Dk]
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    table_ptr,
    lengths_ptr,
    stride_query,
    stride_query_head,
    stride_block,
    stride_slot,
    stride_head,
    stride_value_block,
    stride_value_slot,
    stride_value_head,
    stride_scale_block,
    stride_value_scale_block,
    stride_scale_slot,
    stride_table,
    heads,
    splits,
    scale,
    softcap,
    window,
    chunk,
    sink_tokens,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """One sequence's one query, one KV head, one share of its context."""
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths_ptr + row)
    low = lowest_position(length - 1, window, chunk, sink_tokens)
    skip = skipped_positions(length - 1, window, chunk, sink_tokens)
    share = tl.cdiv(tl.cdiv(length - skip - low, splits), BLOCK_N) * BLOCK_N
    first = low + split * share
    last = tl.minimum(first + share + skip, length)
    members = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + members
    query = tl.load(
        query_ptr + row.to(tl.int64) * stride_query + head[:, None] * stride_query_head + dims[None, :],
        mask=(members[:, None] < GROUP) & (dims[None, :] < KEY_DIM),
        other=0.0,
    )
    if UPCAST:
        query = query.to(tl.float32)
    position = tl.zeros([BLOCK_M], tl.int32) + length - 1
    result, maximum, total = attend_tile(
        query, position, key_ptr + kv_head * stride_head, value_ptr + kv_head * stride_value_head,
        key_scale_ptr + kv_head, value_scale_ptr + kv_head, table_ptr + row * stride_table, stride_block, stride_slot,
        stride_value_block, stride_value_slot, stride_scale_block, stride_value_scale_block, stride_scale_slot, first,
        last, skip, scale, softcap, window, chunk, sink_tokens, KEY_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M,
        BLOCK_N, BLOCK_SIZE, SOFTCAP, UPCAST, FORMAT,
    )  # fmt: skip
    value_dims = tl.arange(0, BLOCK_DV)
    at = (row.to(tl.int64) * heads + head) * splits + split
    tl.store(maximum_ptr + at, maximum, mask=members < GROUP)
    tl.store(total_ptr + at, total, mask=members < GROUP)
    tl.store(
        partial_ptr + at[:, None] * VALUE_DIM + value_dims[None, :],
        result,
        mask=(members[:, None] < GROUP) & (value_dims[None, :] < VALUE_DIM),
    )


@triton.jit
def reduce_kernel(
    out_ptr,  # [S, H, Dv]
    partial_ptr,
    maximum_ptr,
    total_ptr,
    sinks_ptr,
    heads,
    splits,
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Put the shares of one (sequence, head) together; a sink joins the normalizer here."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    share = tl.arange(0, BLOCK_SPLITS)
    dims = tl.arange(0, BLOCK_DV)
    at = (row.to(tl.int64) * heads + head) * splits + share
    maxima = tl.load(maximum_ptr + at, mask=share < splits, other=float("-inf"))
    totals = tl.load(total_ptr + at, mask=share < splits, other=0.0)
    maximum = tl.max(maxima, 0)
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        maximum = tl.maximum(maximum, sink)
    safe = tl.where(maximum == float("-inf"), 0.0, maximum)
    weight = tl.exp(maxima - safe)
    total = tl.sum(weight * totals, 0)
    if SINKS:
        total += tl.exp(sink - safe)
    partial = tl.load(
        partial_ptr + at[:, None] * VALUE_DIM + dims[None, :],
        mask=(share[:, None] < splits) & (dims[None, :] < VALUE_DIM),
        other=0.0,
    )
    result = tl.sum(partial * weight[:, None], 0) / total
    tl.store(out_ptr + (row.to(tl.int64) * heads + head) * VALUE_DIM + dims, result, mask=dims < VALUE_DIM)


@triton.jit
def prefill_kernel(
    out_ptr,  # [T, H, Dv]
    query_ptr,  # [T, H, Dk]
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    table_ptr,
    bounds_ptr,  # [S + 1]
    lengths_ptr,  # [S]
    sinks_ptr,
    stride_query,
    stride_query_head,
    stride_block,
    stride_slot,
    stride_head,
    stride_value_block,
    stride_value_slot,
    stride_value_head,
    stride_scale_block,
    stride_value_scale_block,
    stride_scale_slot,
    stride_table,
    sequences,
    heads,
    scale,
    softcap,
    window,
    chunk,
    sink_tokens,
    GROUP: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    UPCAST: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """One tile of BLOCK_Q consecutive queries of one sequence and one KV head; rows of any length, one included.

    Sequence s owns tiles bounds[s] // BLOCK_Q + s …, found by binary search; surplus tiles return at once.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    left = tile * 0
    right = tile * 0 + sequences
    while left < right:
        middle = (left + right) // 2
        if tl.load(bounds_ptr + middle) // BLOCK_Q + middle <= tile:
            left = middle + 1
        else:
            right = middle
    row = left - 1
    begin = tl.load(bounds_ptr + row)
    end = tl.load(bounds_ptr + row + 1)
    first = begin + (tile - begin // BLOCK_Q - row) * BLOCK_Q
    if first < end:
        length = tl.load(lengths_ptr + row)
        members = tl.arange(0, BLOCK_M)
        token = first + members // GROUP
        head = kv_head * GROUP + members % GROUP
        valid = (members < BLOCK_Q * GROUP) & (token < end)
        position = length - end + token
        dims = tl.arange(0, BLOCK_D)
        query = tl.load(
            query_ptr + token[:, None].to(tl.int64) * stride_query + head[:, None] * stride_query_head + dims[None, :],
            mask=valid[:, None] & (dims[None, :] < KEY_DIM),
            other=0.0,
        )
        if UPCAST:
            query = query.to(tl.float32)
        first_position = length - end + first
        low = lowest_position(first_position, window, chunk, sink_tokens)
        skip = skipped_positions(first_position, window, chunk, sink_tokens)
        high = tl.minimum(first_position + BLOCK_Q, length)
        result, maximum, total = attend_tile(
            query, position, key_ptr + kv_head * stride_head, value_ptr + kv_head * stride_value_head,
            key_scale_ptr + kv_head, value_scale_ptr + kv_head, table_ptr + row * stride_table, stride_block,
            stride_slot, stride_value_block, stride_value_slot, stride_scale_block, stride_value_scale_block,
            stride_scale_slot, low, high, skip, scale, softcap, window, chunk, sink_tokens, KEY_DIM, VALUE_DIM, BLOCK_D,
            BLOCK_DV, BLOCK_M, BLOCK_N, BLOCK_SIZE, SOFTCAP, UPCAST, FORMAT,
        )  # fmt: skip
        if SINKS:
            sink = tl.load(sinks_ptr + head, mask=valid, other=0.0).to(tl.float32)
            joint = tl.maximum(maximum, sink)
            keep = tl.exp(maximum - joint)
            total = total * keep + tl.exp(sink - joint)
            result = result * keep[:, None]
        value_dims = tl.arange(0, BLOCK_DV)
        tl.store(
            out_ptr + (token[:, None].to(tl.int64) * heads + head[:, None]) * VALUE_DIM + value_dims[None, :],
            result / total[:, None],
            mask=valid[:, None] & (value_dims[None, :] < VALUE_DIM),
        )
