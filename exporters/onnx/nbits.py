"""Packed integer weights as the tensors of the operator MatMulNBits (com.microsoft, opset 1), value for value.

MatMulNBits computes `x W^T` of `W = (code - zero) * scale`, in blocks of a power of two columns from 16 on, in 4 or 8
bits, with the zero `2**(bits - 1)` where none is given. Codes of 2 and 3 bits go into 4 bits and those of 5 to 7 into
8; groups that are no such block are split into blocks with equal scales. No value changes by any of that.

https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.MatMulNBits
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...runtime.kernels.packed import QuantState

if TYPE_CHECKING:
    import torch

LARGEST_BLOCK = 128
SMALLEST_BLOCK = 16


@dataclass
class BlockWeight:
    """Tensors of one MatMulNBits.

    packed: uint8 [N, B, block * bits / 8]; scales: float32 [N, B]; zeros: uint8 [N, ceil(B * bits / 8)] or None;
    columns: K. order: int64 [K], the order in which input columns enter; None: as they are.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    block: int
    columns: int
    order: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return self.packed.shape[0]

    def fits(self, other: BlockWeight) -> bool:
        """Whether rows of both can stand in one product."""
        mine, its = ((w.bits, w.block, w.columns, w.zeros is None) for w in (self, other))
        same_order = (self.order is None) == (other.order is None)
        if self.order is not None and other.order is not None:
            same_order = bool((self.order == other.order).all())
        return mine == its and same_order


def block_size(group_size: int, columns: int) -> int | None:
    """The largest block that divides a group; a single group of all columns may end inside its last block. None where
    there is no block."""
    block = LARGEST_BLOCK
    while block >= SMALLEST_BLOCK:
        if group_size % block == 0:
            return block
        block //= 2
    return 32 if group_size == columns else None


def columns_of_groups(state: QuantState) -> int | None:
    """Columns of each group; None where a group index gives groups of unequal size."""
    import torch

    if state.g_idx is None:
        return state.group_size
    counts = torch.bincount(state.g_idx.long(), minlength=state.scales.shape[1])
    return state.codes.shape[1] // len(counts) if bool((counts == counts[0]).all()) else None


def fits_blocks(state: QuantState) -> bool:
    """Whether `to_blocks` can write it."""
    size = columns_of_groups(state)
    return size is not None and block_size(size, state.codes.shape[1]) is not None


def to_blocks(state: QuantState) -> BlockWeight | None:
    """The weight of a packed layer for MatMulNBits; None where its groups cannot be written as blocks: they are no
    multiple of 16 columns, or have unequal numbers of columns by a group index."""
    import torch

    columns, codes, order = state.codes.shape[1], state.codes, None
    size = columns_of_groups(state)
    block = None if size is None else block_size(size, columns)
    if size is None or block is None:
        return None
    rows = len(codes)
    if state.g_idx is not None:
        order = torch.argsort(state.g_idx.long(), stable=True)
        codes = codes[:, order]
    bits = 4 if state.bits <= 4 else 8
    blocks = -(-columns // block)
    repeat = max(1, size // block) if size != columns else blocks
    scales = state.scales.float().repeat_interleave(repeat, 1)
    zeros = None
    if state.zeros is None:
        codes = codes + (2 ** (bits - 1) - 2 ** (state.bits - 1))
    else:
        zeros = pack(state.zeros.repeat_interleave(repeat, 1), bits)
    padding = blocks * block - columns
    codes = torch.nn.functional.pad(codes, (0, padding))
    packed = pack(codes, bits).view(rows, blocks, block * bits // 8)
    return BlockWeight(packed, scales.contiguous(), zeros, bits, block, columns, order)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 codes [N, n] of 4 or 8 bits, two in a byte where they fit, the first in its low half: uint8
    [N, ceil(n * bits / 8)]."""
    import torch

    if bits == 8:
        return codes.contiguous()
    codes = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).contiguous()


def join(weights: list[BlockWeight]) -> BlockWeight:
    """The rows of weights that fit each other, one after another."""
    import torch

    first = weights[0]
    zeros = None if first.zeros is None else torch.cat([w.zeros for w in weights if w.zeros is not None])
    packed, scales = torch.cat([w.packed for w in weights]), torch.cat([w.scales for w in weights])
    return BlockWeight(packed, scales, zeros, first.bits, first.block, first.columns, first.order)
