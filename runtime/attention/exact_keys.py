"""Keys by channel in the torch backends: blocks that are full become codes, the last one's keys are kept as they are.

The format, and which keys a query reads, is defined in `runtime/kernels/kv_format.py`. Nothing here reads a length back
from an accelerator: sizes depend on the numbers of tokens and of sequences alone, and what has no place goes to the
pool's last block, which is scratch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..kernels.kv_format import format_of, quantize_keys, read_keys, split_keys, tail_quarters
from .layer import Batch, visible

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def by_channel(dtype: torch.dtype) -> bool:
    """Whether caches of this dtype keep keys by channel."""
    fmt = format_of(dtype)
    return fmt is not None and fmt.by_channel


@dataclass
class Places:
    """Where a step's keys go; int64. T tokens, S sequences, R blocks of which the step computes a token.

    tail: [S, 2], the blocks that hold a sequence's tail. own: [S], index of its last block. offset: [T] of each token
    in its block. tail_block: [2, T], the block of the token's quarter of the tail among keys and among values, scratch
    where it has none. tokens: [R, B], the step's token at each place of a block. new: bool [R, B], whether there is
    one; else the key is in the tail of `sequence` [R]. target: [R], where the codes go.
    """

    tail: Tensor
    own: Tensor
    offset: Tensor
    tail_block: Tensor
    tokens: Tensor
    new: Tensor
    sequence: Tensor
    target: Tensor


def places(batch: Batch, block_size: int, scratch: int) -> Places:
    """Made once a step. scratch: number of the pool's last block."""
    if "key_places" not in batch.memo:
        batch.memo["key_places"] = _places(batch, block_size, scratch)
    return batch.memo["key_places"]


def _places(batch: Batch, size: int, scratch: int) -> Places:
    import torch

    device, tokens, count = batch.slots.device, batch.slots.shape[0], batch.seq_lens.shape[0]
    ends, lengths, tables = batch.cu_seqlens_q.long()[1:], batch.seq_lens.long(), batch.block_tables.long()
    begins = batch.cu_seqlens_q.long()[:-1]
    start = lengths - (ends - begins)
    own = (lengths - 1) // size
    tail = tables.gather(1, torch.stack((own + 1, own + 2), dim=1))
    index = torch.arange(tokens, device=device)
    owner = torch.searchsorted(ends, index, right=True).clamp_max(count - 1)
    position = start[owner] + index - begins[owner]
    offset = position % size
    quarter = offset // (size // 4)
    block = torch.where(position // size == own[owner], tail[owner].gather(1, quarter[:, None] // 2)[:, 0], scratch)
    among_keys = quarter % 2 == 0
    tail_block = torch.stack((torch.where(among_keys, block, scratch), torch.where(among_keys, scratch, block)))
    first = start // size
    blocks = own - first + 1
    after = blocks.cumsum(0)
    rows = torch.arange(tokens // size + 2 * count, device=device)
    sequence = torch.searchsorted(after, rows, right=True)
    valid, sequence = sequence < count, sequence.clamp_max(count - 1)
    number = first[sequence] + rows - (after - blocks)[sequence]
    full = valid & ((number + 1) * size <= lengths[sequence])
    if device.type == "cpu":  # reading back costs nothing here, and most steps fill no block
        keep = full.nonzero()[:, 0]
        sequence, number, full = sequence[keep], number[keep], full[keep]
    target = torch.where(full, tables[sequence, number.clamp_max(tables.shape[1] - 1)], scratch)
    inside = number[:, None] * size + torch.arange(size, device=device) - start[sequence, None]
    new = (inside >= 0) & (inside < (ends - begins)[sequence, None])
    at = (begins[sequence, None] + inside).clamp(0, tokens - 1)
    return Places(tail, own, offset, tail_block, at, new, sequence, target)


def write_keys(key: Tensor, key_cache: Tensor, value_cache: Tensor, batch: Batch) -> None:
    """Keys [T, H, D] of a step: those of each sequence's last block into its tail, full blocks as codes.

    key_cache [N, H, key_bytes], value_cache [N, B, H, vector_bytes]; block N - 1 is scratch.
    """
    import torch

    size = value_cache.shape[1]
    at = places(batch, size, value_cache.shape[0] - 1)
    exact = key.to(torch.bfloat16)
    for quarter, block in zip(tail_quarters(key_cache, value_cache), at.tail_block):
        quarter[block, at.offset % (size // 4)] = exact
    if not at.target.numel():
        return
    kept = read_tail(key_cache, value_cache, at.tail[at.sequence])
    whole = torch.where(at.new[..., None, None], exact[at.tokens], kept)
    codes, scales, zeros = quantize_keys(whole.transpose(1, 2))
    code_cache, scale_cache, zero_cache = split_keys(key_cache, size)
    code_cache[at.target] = codes.transpose(1, 2)
    scale_cache[at.target] = scales
    zero_cache[at.target] = zeros


def read_tail(key_cache: Tensor, value_cache: Tensor, tail: Tensor) -> Tensor:
    """Exact keys bfloat16 [..., B, H, D] from the tails in blocks [..., 2]."""
    import torch

    keys, values = tail_quarters(key_cache, value_cache)
    parts = [part[tail[..., half]] for half in (0, 1) for part in (keys, values)]
    return torch.cat(parts, dim=-3)


def last_keys(key_cache: Tensor, value_cache: Tensor, batch: Batch, rows: Tensor) -> Tensor:
    """Exact keys bfloat16 [rows, B, H, D] of the last blocks of some sequences; 0 behind their ends."""
    import torch

    size = value_cache.shape[1]
    at = places(batch, size, value_cache.shape[0] - 1)
    there = torch.arange(size, device=rows.device) <= (batch.seq_lens[rows, None] - 1) % size
    return read_tail(key_cache, value_cache, at.tail[rows]).masked_fill(~there[..., None, None], 0)


def row_keys(
    new_keys: Tensor, key_cache: Tensor, value_cache: Tensor, batch: Batch, row: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys [K, H, D] that the queries of a row read, and the positions [K] of their tokens: first those before the
    row's last block, from codes, then those from the block on in which the row begins, as they are.

    new_keys [n, H, D]: the row's own. `seen_keys` says which of them a query sees.
    """
    import torch

    size, length = value_cache.shape[1], batch.lengths[row]
    start = length - new_keys.shape[0]
    table = batch.block_tables[row].long()
    own, begin = (length - 1) // size, start // size * size
    keys = read_keys(key_cache, table[:own], size, format_of(key_cache.dtype), dtype).flatten(0, 1)
    kept = read_tail(key_cache, value_cache, table[own + 1 : own + 3])[: start - begin]
    exact = torch.cat((kept, new_keys.to(torch.bfloat16))).to(dtype)
    positions = torch.cat((torch.arange(own * size), torch.arange(begin, length))).to(keys.device)
    return torch.cat((keys, exact)), positions


def seen_keys(
    queries: Tensor, positions: Tensor, length: int, block_size: int, window: int, chunk: int, sink_tokens: int
) -> Tensor:
    """Boolean [Q, K]: which keys of `row_keys`, of a row of `length` tokens, queries at positions int64 [Q] see."""
    import torch

    coded = torch.arange(positions.shape[0], device=positions.device) < (length - 1) // block_size * block_size
    before = positions[None, :] < queries[:, None] // block_size * block_size
    return visible(queries, positions, window, chunk, sink_tokens) & (before == coded[None, :])
