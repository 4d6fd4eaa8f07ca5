"""The dynamic eight-bit data type by which bitsandbytes stores the scales of four-bit blocks (double quantization).

A byte is a sign, a unary exponent and a linear fraction that gets the bits the exponent leaves (Dettmers 2015,
arXiv:1511.04561): the exponent falls from 10^0 to 10^-6 as the fraction shrinks from seven bits to one. Scales are
stored less their mean, in blocks of `BLOCK` with the largest magnitude of each as a float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

BLOCK = 256
EXPONENTS = 7
EPSILON = 1e-38


@dataclass(frozen=True)
class Compressed:
    """Scales in eight bits. codes: uint8 [B]; largest: float32 [ceil(B / 256)]; table: float32 [256]; offset: mean."""

    codes: torch.Tensor
    largest: torch.Tensor
    table: torch.Tensor
    offset: float


@cache
def _values() -> tuple[float, ...]:
    found = [0.0, 1.0]
    for exponent in range(EXPONENTS):
        edges = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        middles = 10.0 ** (exponent - EXPONENTS + 1) * ((edges[:-1] + edges[1:]) / 2.0)
        found += middles.tolist() + (-middles).tolist()
    return tuple(sorted(found))


def dynamic_map(device: torch.device | str = "cpu") -> torch.Tensor:
    """The 256 values in order, float32: 127 negative ones, zero, 127 positive ones and 1.0."""
    return torch.tensor(_values(), dtype=torch.float32, device=device)


def compress(scales: torch.Tensor) -> Compressed:
    """Scales float32 [B] in eight bits: nearest values of each block's share of its largest magnitude.

    bitsandbytes' own bits, except where a share lies within 2e-5 of the middle between two values: its CPU code looks
    them up in a coarser table.
    """
    offset = scales.mean()
    table = dynamic_map(scales.device)
    blocks = _blocks(scales - offset)
    largest = blocks.abs().amax(1)
    codes = nearest((blocks * (1.0 / largest.clamp(min=EPSILON)).unsqueeze(1)).clamp_(-1, 1), table)
    return Compressed(codes.view(-1)[: scales.numel()].contiguous(), largest, table, float(offset))


def expand(codes: torch.Tensor, largest: torch.Tensor, table: torch.Tensor, offset: float) -> torch.Tensor:
    """The scales float32 [B] of what `compress` gives."""
    values = torch.nn.functional.embedding(codes.int(), table.unsqueeze(1)).squeeze(1)
    return values * largest.repeat_interleave(BLOCK)[: codes.numel()] + offset


def nearest(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Numbers uint8 of the nearest entries of a sorted table, float32; the lower one of two as near."""
    return torch.bucketize(values, (table[:-1] + table[1:]) / 2, out_int32=True).to(torch.uint8)


def _blocks(scales: torch.Tensor) -> torch.Tensor:
    """`[B]` as `[ceil(B / 256), 256]`, filled up with zeros."""
    return torch.nn.functional.pad(scales, (0, -scales.numel() % BLOCK)).view(-1, BLOCK)
