"""The torch backend: vectorized with torch's own operators, on any device; the CPU's fallback where no compiler is.

Rows of one token (plain decode) are attended together, in groups of like length, over keys gathered through their block
tables. Longer rows (prompt chunks, verification) are attended one by one. Keys are gathered, so the pool is read twice;
a compiled kernel reads it once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..kernels.kv_format import format_of, read, read_keys, turn_back
from .exact_keys import last_keys, row_keys, seen_keys
from .layer import Batch, visible

if TYPE_CHECKING:
    import torch

GATHER_TOKENS = 32_768
"""Most (padded) context tokens that one group of decode rows gathers at once: bounds the scratch memory."""


def decode_groups(batch: Batch) -> tuple[list[tuple[list[int], int]], list[int]]:
    """Split the rows: ([(rows of one token, longest context of theirs)], [other rows]).

    One-token rows are sorted by length and cut where a group would gather more than `GATHER_TOKENS`, or where its
    shortest member would be less than half its longest (padding costs memory traffic).
    """
    if "decode_groups" in batch.memo:
        return batch.memo["decode_groups"]
    bounds, lengths = batch.query_bounds, batch.lengths
    single = [r for r in range(len(lengths)) if bounds[r + 1] - bounds[r] == 1]
    others = [r for r in range(len(lengths)) if bounds[r + 1] - bounds[r] > 1]
    single.sort(key=lambda r: -lengths[r])
    groups: list[tuple[list[int], int]] = []
    for row in single:
        if groups:
            rows, longest = groups[-1]
            if (len(rows) + 1) * longest <= GATHER_TOKENS and lengths[row] * 2 >= longest:
                rows.append(row)
                continue
        groups.append(([row], lengths[row]))
    batch.memo["decode_groups"] = (groups, others)
    return groups, others


def blocks_in_reach(
    tables: torch.Tensor, lengths: torch.Tensor, window: int, sink_tokens: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the last token of each row may see: of tables int64 [R, W] the blocks [R, C], and the positions
    int64 [R, C * block_size] that they hold. Columns beyond a row's end repeat its last block, at later positions."""
    import torch

    width, kept = tables.shape[1], -(-sink_tokens // block_size)
    span = (window + block_size - 2) // block_size + 1
    if not window or kept + span >= width:
        columns = torch.arange(width, device=tables.device).expand(tables.shape[0], -1)
    else:
        first = ((lengths - window) // block_size).clamp_min(kept)
        head = torch.arange(kept, device=tables.device).expand(tables.shape[0], -1)
        columns = torch.cat([head, first[:, None] + torch.arange(span, device=tables.device)], dim=1)
        tables = tables.gather(1, columns.clamp_max(width - 1))
    inside = torch.arange(block_size, device=tables.device)
    return tables, (columns[:, :, None] * block_size + inside).flatten(1)


def scaled_dot_product(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float,
    causal: bool = False,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [S, H, Q, Dk], key [S, Hkv, K, Dk], value [S, Hkv, K, Dv], mask bool broadcastable to [S, H, Q, K].

    Returns [S, H, Q, Dv]. torch's fused attention where it applies; soft-capping (Gemma 2, arXiv:2408.00118) and sinks
    are computed in float32.
    """
    import torch

    if not softcap and sinks is None:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    size, heads, queries, _ = query.shape
    kv_heads = key.shape[1]
    grouped = query.float().reshape(size, kv_heads, heads // kv_heads * queries, -1)
    scores = torch.matmul(grouped, key.float().transpose(-1, -2)) * scale
    scores = scores.view(size, heads, queries, -1)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        mask = torch.ones(queries, key.shape[2], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        extra = sinks.float().view(1, heads, 1, 1).expand(size, heads, queries, 1)
        scores = torch.cat([scores, extra], dim=-1)
    probabilities = torch.softmax(scores, dim=-1)[..., : key.shape[2]]
    out = torch.matmul(probabilities.reshape(size, kv_heads, heads // kv_heads * queries, -1), value.float())
    return out.view(size, heads, queries, -1).to(query.dtype)


def paged_attention_torch(
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

    The batch's own keys and values are in the caches already. Of quantized caches only the gathered blocks are
    dequantized, to the query's dtype. new_keys: see `op.paged_backend`.
    """
    import torch

    block_size, device, fmt, dtype = value_cache.shape[1], query.device, format_of(key_cache.dtype), query.dtype
    value_dim = value_cache.shape[-1] if fmt is None else fmt.dim_of(value_cache.shape[-1])
    out = query.new_empty(query.shape[0], query.shape[1], value_dim)
    groups, others = decode_groups(batch)
    for number, (rows, longest) in enumerate(groups):
        blocks = -(-longest // block_size)
        memo = f"decode_group_{number}"
        if memo not in batch.memo:
            index = torch.tensor(rows, device=device)
            tables = batch.block_tables[index, :blocks].long()
            batch.memo[memo] = (index, tables, batch.cu_seqlens_q[index].long(), batch.seq_lens[index].long())
        index, tables, tokens, lengths = batch.memo[memo]
        reach = batch.memo.setdefault(f"{memo}_reach", {})
        if (window, chunk, sink_tokens) not in reach:
            inside, positions = blocks_in_reach(tables, lengths, window, sink_tokens, block_size)
            mask = visible(lengths[:, None] - 1, positions, window, chunk, sink_tokens)[:, None]
            last = (positions[:, ::block_size] == (lengths[:, None] - 1) // block_size * block_size).int().argmax(1)
            reach[window, chunk, sink_tokens] = (inside, mask, last)
        tables, mask, last = reach[window, chunk, sink_tokens]
        keys = read_keys(key_cache, tables, block_size, fmt, dtype)
        if new_keys is not None:
            exact = last_keys(key_cache, value_cache, batch, index)
            keys[torch.arange(len(rows), device=device), last] = exact.to(dtype)
        keys = keys.flatten(1, 2).transpose(1, 2)
        values = read(value_cache, tables, fmt, dtype).flatten(1, 2).transpose(1, 2)
        out[tokens] = scaled_dot_product(
            query[tokens][:, :, None],
            keys,
            values,
            mask,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
        )[:, :, 0]
    for row in others:
        first, last, length = batch.query_bounds[row], batch.query_bounds[row + 1], batch.lengths[row]
        table = batch.block_tables[row, : -(-length // block_size)].long()
        if new_keys is not None:
            out[first:last] = channel_attention(
                query[first:last], new_keys[first:last], key_cache, value_cache, batch, row, scale=scale, window=window,
                chunk=chunk, sink_tokens=sink_tokens, softcap=softcap, sinks=sinks,
            )  # fmt: skip
            continue
        kept = -(-sink_tokens // block_size)
        gone = max(0, (length - (last - first) - window + 1) // block_size - kept) if window and sink_tokens else 0
        if gone:  # blocks between the kept ones and the first query's window
            table = torch.cat([table[:kept], table[kept + gone :]])
        seen = length - gone * block_size
        keys = read(key_cache, table, fmt, dtype).flatten(0, 1)[None, :seen].transpose(1, 2)
        values = read(value_cache, table, fmt, dtype).flatten(0, 1)[None, :seen].transpose(1, 2)
        out[first:last] = chunk_attention(
            query[first:last], keys, values, scale=scale, window=window, chunk=chunk, sink_tokens=sink_tokens,
            softcap=softcap, sinks=sinks, gap=(kept * block_size, gone * block_size),
        )  # fmt: skip
    return turn_back(out, fmt)


def channel_attention(
    query: torch.Tensor,
    new_keys: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: Batch,
    row: int,
    *,
    scale: float,
    window: int,
    chunk: int,
    sink_tokens: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """A row's queries [Q, H, Dk] over keys by channel, its own new_keys [Q, Hkv, Dk] among them: [Q, H, Dv], of rotated
    values."""
    import torch

    size, length, fmt, device = value_cache.shape[1], batch.lengths[row], format_of(key_cache.dtype), query.device
    keys, positions = row_keys(new_keys, key_cache, value_cache, batch, row, query.dtype)
    table = batch.block_tables[row, : -(-length // size)].long()
    values = read(value_cache, table, fmt, query.dtype).flatten(0, 1)[positions]
    queries = torch.arange(length - query.shape[0], length, device=device)
    mask = seen_keys(queries, positions, length, size, window, chunk, sink_tokens)[None, None]
    attended = scaled_dot_product(
        query.transpose(0, 1)[None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None], mask, scale=scale,
        softcap=softcap, sinks=sinks,
    )  # fmt: skip
    return attended[0].transpose(0, 1)


def chunk_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    sink_tokens: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    gap: tuple[int, int] = (0, 0),
) -> torch.Tensor:
    """The last Q tokens of one sequence: query [Q, H, Dk], keys [1, Hkv, K, Dk], values [1, Hkv, K, Dv].

    gap: (g, n): after the first g keys n are left out, which no query sees. Returns [Q, H, Dv].
    """
    import torch

    count, length = query.shape[0], keys.shape[2]
    if window and not sink_tokens and length - count - window + 1 > 0:  # keys that no query of this chunk sees
        unseen = length - count - window + 1
        keys, values = keys[:, :, unseen:], values[:, :, unseen:]
    else:
        unseen = 0
    mask = None
    causal = count == length and (not window or window >= length) and (not chunk or chunk >= length)
    if not causal:
        positions = torch.arange(unseen, length, device=query.device)
        positions = positions + gap[1] * (positions >= gap[0])
        mask = visible(positions[-count:], positions, window, chunk, sink_tokens)[None, None]
    result = scaled_dot_product(
        query.transpose(0, 1)[None], keys, values, mask, scale=scale, causal=causal, softcap=softcap, sinks=sinks
    )
    return result[0].transpose(0, 1)


def gathered_attention_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    batch: Batch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """query [T, H, Dk] over keys [ΣK, Hkv, Dk] and values [ΣK, Hkv, Dv] that lie sequence after sequence.

    Returns [T, H, Dv].
    """
    out = query.new_empty(query.shape[0], query.shape[1], value.shape[-1])
    offset = 0
    for row, length in enumerate(batch.lengths):
        first, last = batch.query_bounds[row], batch.query_bounds[row + 1]
        keys = key[None, offset : offset + length].transpose(1, 2)
        values = value[None, offset : offset + length].transpose(1, 2)
        out[first:last] = chunk_attention(query[first:last], keys, values, scale=scale, window=window, softcap=softcap)
        offset += length
    return out
