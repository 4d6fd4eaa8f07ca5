"""Quantization grids: scales and zero points of groups of weights, codes, and the way back.

Every function takes a weight viewed as groups, `[N, G, S]` (N outputs, G groups of S input columns), and works in
float32. Codes and zero points are uint8 in 0 … 2**bits - 1; a symmetric grid has its zero at 2**(bits - 1). A scale is
rounded to the dtype it is stored in before any code is computed against it, so that codes fit the stored scale.
"""

from __future__ import annotations

import torch


def to_groups(weight: torch.Tensor, num_groups: int) -> torch.Tensor:
    """View `[N, K]` as `[N, G, K / G]`."""
    return weight.reshape(weight.shape[0], num_groups, -1)


def minmax_grid(
    groups: torch.Tensor, bits: int, symmetric: bool, dtype: torch.dtype, shrink: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The grid that spans each group's smallest to largest value (zero included), its range times `shrink`.

    groups: float32 [N, G, S]. Returns scales float32 [N, G] (values that `dtype` holds exactly, never zero) and zero
    points uint8 [N, G], None if symmetric. A symmetric scale is the largest magnitude over `(2**bits - 1) / 2`, so that
    the extreme value of either sign is off by half a step.
    """
    low = groups.amin(-1).clamp(max=0.0) * shrink
    high = groups.amax(-1).clamp(min=0.0) * shrink
    return range_grid(low, high, bits, symmetric, dtype)


def range_grid(
    low: torch.Tensor, high: torch.Tensor, bits: int, symmetric: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The grid for ranges `low` ≤ 0 ≤ `high`, float32 [N, G]; returns as `minmax_grid`."""
    top = 2**bits - 1
    if symmetric:
        scales = round_scales(torch.maximum(-low, high) / (top / 2), dtype)
        return scales, None
    scales = round_scales((high - low) / top, dtype)
    zeros = torch.round(-low / scales).clamp_(0, top).to(torch.uint8)
    return scales, zeros


def round_scales(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scales rounded to `dtype` and back to float32; where that gives zero, the dtype's smallest normal number."""
    return scales.to(dtype).float().clamp_(min=torch.finfo(dtype).tiny)


def quantize_groups(
    groups: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int
) -> torch.Tensor:
    """Nearest codes, uint8 [N, G, S], of float32 groups [N, G, S] on the grid (scales, zeros) of [N, G]."""
    offset = 2.0 ** (bits - 1) if zeros is None else zeros.float().unsqueeze(-1)
    codes = groups / scales.unsqueeze(-1)
    return codes.round_().add_(offset).clamp_(0, 2**bits - 1).to(torch.uint8)


def dequantize_groups(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int
) -> torch.Tensor:
    """Values float32 [N, G, S] of codes on the grid (scales, zeros) of [N, G]."""
    offset = 2.0 ** (bits - 1) if zeros is None else zeros.float().unsqueeze(-1)
    return (codes.float() - offset) * scales.unsqueeze(-1)


def search_grid(
    groups: torch.Tensor,
    bits: int,
    symmetric: bool,
    dtype: torch.dtype,
    importance: torch.Tensor | None = None,
    steps: int = 20,
    smallest: float = 0.6,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The best of `steps` grids between the full range and `smallest` of it, group by group.

    Best is the least squared error of nearest rounding, each column weighted by `importance` (float32 [G, S], for
    example the diagonal of a layer's Hessian; None weights all alike).
    Returns as `minmax_grid`.
    """
    best_scales, best_zeros = minmax_grid(groups, bits, symmetric, dtype)
    best = _error(groups, best_scales, best_zeros, bits, importance)
    low, high = groups.amin(-1).clamp(max=0.0), groups.amax(-1).clamp(min=0.0)
    for step in range(1, steps):
        shrink = 1.0 - (1.0 - smallest) * step / (steps - 1)
        scales, zeros = range_grid(low * shrink, high * shrink, bits, symmetric, dtype)
        error = _error(groups, scales, zeros, bits, importance)
        better = error < best
        best = torch.where(better, error, best)
        best_scales = torch.where(better, scales, best_scales)
        if zeros is not None and best_zeros is not None:
            best_zeros = torch.where(better, zeros, best_zeros)
    return best_scales, best_zeros


def _error(
    groups: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bits: int,
    importance: torch.Tensor | None,
) -> torch.Tensor:
    """Weighted squared error of nearest rounding, float32 [N, G]."""
    offset = 2.0 ** (bits - 1) if zeros is None else zeros.float().unsqueeze(-1)
    scale = scales.unsqueeze(-1)
    values = (groups / scale).round_()
    values = torch.clamp_(values, -offset, 2**bits - 1 - offset) if zeros is None else _clamp(values, offset, bits)
    difference = values.mul_(scale).sub_(groups).square_()
    if importance is not None:
        difference *= importance
    return difference.sum(-1)


def _clamp(values: torch.Tensor, offset: torch.Tensor, bits: int) -> torch.Tensor:
    return torch.minimum(torch.maximum(values, -offset), 2**bits - 1 - offset)
