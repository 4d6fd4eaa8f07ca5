"""Round to nearest: each weight takes the nearest code of its group's grid. No calibration data."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...runtime.kernels.packed import QuantScheme
from .grid import dequantize_groups, minmax_grid, quantize_groups, search_grid, to_groups

CHUNK = 1 << 18
"""Weights rounded at once, so that temporaries stay in the cache."""


@dataclass(frozen=True)
class Quantized:
    """A quantized weight: codes uint8 [N, K], scales in the stored dtype [N, G], zeros uint8 [N, G] or None."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None

    def rows(self, rows: slice) -> Quantized:
        """The part of some output rows."""
        return Quantized(self.codes[rows], self.scales[rows], None if self.zeros is None else self.zeros[rows])

    def nearest(self, weight: torch.Tensor, bits: int) -> torch.Tensor:
        """What rounding `weight` [N, K] to nearest on the same grid would give, float32 [N, K]."""
        groups, scales = to_groups(weight.float(), self.scales.shape[1]), self.scales.float()
        codes = quantize_groups(groups, scales, self.zeros, bits)
        return dequantize_groups(codes, scales, self.zeros, bits).view(weight.shape)

    def dequantize(self, bits: int) -> torch.Tensor:
        """The values as float32 [N, K], before the rounding to the stored dtype that a layer applies."""
        groups = to_groups(self.codes, self.scales.shape[1])
        return dequantize_groups(groups, self.scales.float(), self.zeros, bits).view(self.codes.shape)


def quantize_rtn(
    weight: torch.Tensor,
    scheme: QuantScheme,
    dtype: torch.dtype,
    search_steps: int = 0,
    importance: torch.Tensor | None = None,
) -> Quantized:
    """Quantize `weight` [N, K] (any floating dtype) with scales stored in `dtype`.

    search_steps: 0 takes each group's full range, more search that many ranges for the least squared error,
    columns weighted by `importance` (float32 [K]). Raises ValueError where the group size does not divide K.
    """
    step = max(1, CHUNK // weight.shape[1])
    parts = [_round_rows(rows, scheme, dtype, search_steps, importance) for rows in weight.split(step)]
    zeros = None if scheme.symmetric else torch.cat([part.zeros for part in parts if part.zeros is not None])
    return Quantized(torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts]), zeros)


def _round_rows(
    weight: torch.Tensor, scheme: QuantScheme, dtype: torch.dtype, search_steps: int, importance: torch.Tensor | None
) -> Quantized:
    num_groups = scheme.num_groups(weight.shape[1])
    groups = to_groups(weight.float(), num_groups)
    if search_steps > 0:
        per_column = None if importance is None else importance.float().view(num_groups, -1)
        scales, zeros = search_grid(groups, scheme.bits, scheme.symmetric, dtype, per_column, search_steps)
    else:
        scales, zeros = minmax_grid(groups, scheme.bits, scheme.symmetric, dtype)
    codes = quantize_groups(groups, scales, zeros, scheme.bits).view(weight.shape)
    return Quantized(codes, scales.to(dtype), zeros)
