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
    groups: torch.Tensor, bits: int, symmetric: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The grid that spans each group's smallest to largest value, zero included.

    groups: float32 [N, G, S]. Returns scales float32 [N, G] (values that `dtype` holds exactly, never zero) and zero
    points uint8 [N, G], None if symmetric. A symmetric scale is the largest magnitude over `(2**bits - 1) / 2`, so that
    the extreme value of either sign is off by half a step.
    """
    low, high = groups.amin(-1).clamp(max=0.0), groups.amax(-1).clamp(min=0.0)
    top = 2**bits - 1
    if symmetric:
        return round_scales(torch.maximum(-low, high) / (top / 2), dtype), None
    scales = round_scales((high - low) / top, dtype)
    return scales, torch.round(-low / scales).clamp_(0, top).to(torch.uint8)


def round_scales(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scales rounded to `dtype` and back to float32; what is too small becomes the smallest number, of the same sign.

    That is a normal one, but float16's subnormal numbers count: its normal ones end at 6e-5, and steps of 8 bits are as
    small wherever a group's weights stay below 0.008.
    """
    info, rounded = torch.finfo(dtype), scales.to(dtype).float()
    least = info.tiny * (info.eps if dtype == torch.float16 else 1.0)
    return torch.where(rounded.abs() < least, torch.full_like(scales, least).copysign_(scales), rounded)


def quantize_groups(groups: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int) -> torch.Tensor:
    """Nearest codes, uint8 [N, G, S], of float32 groups [N, G, S] on the grid (scales, zeros) of [N, G]."""
    offset = 2.0 ** (bits - 1) if zeros is None else zeros.float().unsqueeze(-1)
    codes = groups / scales.unsqueeze(-1)
    return codes.round_().add_(offset).clamp_(0, 2**bits - 1).to(torch.uint8)


def dequantize_groups(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int) -> torch.Tensor:
    """Values float32 [N, G, S] of codes on the grid (scales, zeros) of [N, G]."""
    offset = 2.0 ** (bits - 1) if zeros is None else zeros.float().unsqueeze(-1)
    return (codes.float() - offset) * scales.unsqueeze(-1)


SPAN = {True: (0.65, 1.15), False: (0.7, 1.25)}
"""Ranges tried, as shares of the full one, by symmetry. Above 1 the codes at the ends stay unused."""
REFINEMENTS = 2
CHUNK = 1 << 18
"""Weights searched at once, so that temporaries stay in the cache."""


def search_grid(
    groups: torch.Tensor,
    bits: int,
    symmetric: bool,
    dtype: torch.dtype,
    importance: torch.Tensor | None = None,
    steps: int = 16,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The grid with the least squared error of nearest rounding that a search finds, group by group.

    groups: float32 [N, G, S]; importance: weight of each column's error, float32 [G, S] (for example the diagonal of a
    layer's Hessian), None for equal weights. Tried are the full range, `steps` shares of it, and two least-squares
    refinements of the best scale, with the zero point one up and down. A symmetric scale may come out negative: the far
    code -2**(bits - 1) then stands for the largest positive value. Returns as `minmax_grid`, never worse than it.
    """
    rows = max(1, CHUNK // groups[0].numel())
    parts = [_search(chunk, bits, symmetric, dtype, importance, steps) for chunk in groups.split(rows)]
    scales = torch.cat([part.scales for part in parts])
    return scales, None if symmetric else torch.cat([part.zeros for part in parts]).to(torch.uint8)


class _Best:
    """The best grid so far of each group: scales and zeros float32 [N, G], and its error."""

    def __init__(self, groups: torch.Tensor, bits: int, importance: torch.Tensor | None) -> None:
        self.groups, self.bits, self.importance = groups, bits, importance
        self.error = torch.full(groups.shape[:2], torch.inf, device=groups.device)
        self.scales = torch.ones_like(self.error)
        self.zeros = torch.full_like(self.error, 2.0 ** (bits - 1))

    def steps(self, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
        """`code - zero` of nearest rounding, float32 [N, G, S]."""
        zeros = zeros.unsqueeze(-1)
        codes = (self.groups / scales.unsqueeze(-1)).round_().add_(zeros)
        return codes.clamp_(0.0, 2.0**self.bits - 1).sub_(zeros)

    def offer(self, scales: torch.Tensor, zeros: torch.Tensor) -> None:
        """Take the candidate wherever it is better."""
        difference = self.steps(scales, zeros).mul_(scales.unsqueeze(-1)).sub_(self.groups).square_()
        error = (difference if self.importance is None else difference.mul_(self.importance)).sum(-1)
        better = error < self.error
        self.error = torch.where(better, error, self.error)
        self.scales = torch.where(better, scales, self.scales)
        self.zeros = torch.where(better, zeros, self.zeros)

    def least_squares(self, dtype: torch.dtype) -> torch.Tensor:
        """The scale that fits the current codes best."""
        steps = self.steps(self.scales, self.zeros)
        weighted = steps if self.importance is None else steps * self.importance
        square = (weighted * steps).sum(-1)
        fitted = (weighted * self.groups).sum(-1) / square
        return torch.where(square > 0, round_scales(fitted, dtype), self.scales)


def _search(
    groups: torch.Tensor,
    bits: int,
    symmetric: bool,
    dtype: torch.dtype,
    importance: torch.Tensor | None,
    steps: int,
) -> _Best:
    best = _Best(groups, bits, importance)
    middle = best.zeros
    scales, zeros = minmax_grid(groups, bits, symmetric, dtype)
    best.offer(scales, middle if zeros is None else zeros.float())
    low, high = groups.amin(-1).clamp(max=0.0), groups.amax(-1).clamp(min=0.0)
    full = torch.where(-low >= high, -low, -high) / 2 ** (bits - 1) if symmetric else (high - low) / (2**bits - 1)
    for share in torch.linspace(*SPAN[symmetric], steps).tolist():
        scales = round_scales(full * share, dtype)
        best.offer(scales, middle if symmetric else torch.round(-low / scales).clamp_(0, 2**bits - 1))
    for _ in range(REFINEMENTS):
        scales, zeros = best.least_squares(dtype), best.zeros
        best.offer(scales, zeros)
        if not symmetric:
            best.offer(scales, (zeros - 1).clamp_(min=0))
            best.offer(scales, (zeros + 1).clamp_(max=2**bits - 1))
    return best
