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
    """A quantized weight: codes uint8 [N, K], scales in the stored dtype [N, G], zeros uint8 [N, G] or None.

    g_idx: group of each column, int32 [K]; None where groups follow one another.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    g_idx: torch.Tensor | None = None

    def rows(self, rows: slice) -> Quantized:
        """The part of some output rows."""
        zeros = None if self.zeros is None else self.zeros[rows]
        return Quantized(self.codes[rows], self.scales[rows], zeros, self.g_idx)

    def nearest(self, weight: torch.Tensor, bits: int) -> torch.Tensor:
        """What rounding `weight` [N, K] to nearest on the same grid would give, float32 [N, K]."""
        groups, scales, zeros = self._grouped(weight.float())
        codes = quantize_groups(groups, scales, zeros, bits)
        return dequantize_groups(codes, scales, zeros, bits).view(weight.shape)

    def dequantize(self, bits: int) -> torch.Tensor:
        """The values as float32 [N, K], before the rounding to the stored dtype that a layer applies."""
        return dequantize_groups(*self._grouped(self.codes), bits).view(self.codes.shape)

    def _grouped(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Values [N, K] as groups, with the scales and zero points of each; with g_idx every column is one."""
        if self.g_idx is None:
            return to_groups(values, self.scales.shape[1]), self.scales.float(), self.zeros
        index = self.g_idx.long()
        zeros = None if self.zeros is None else self.zeros[:, index]
        return values.unsqueeze(-1), self.scales.float()[:, index], zeros


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
