"""HQQ, half-quadratic quantization (Badri & Shaji 2023): grids fitted to the weights alone, outliers set apart.

Each group's grid is to minimize `sum |w - s (q - z)|^p` with p < 1, which cares less for a few large errors than
squares do. Half-quadratic splitting gives every weight an auxiliary error e and alternates

    e       = shrink(w - s (q - z))               the proximal operator of |.|^p / beta: small residuals vanish
    (s, z)  = argmin sum (w - e - s (q - z))^2    the grid, fitted to what e leaves
    q       = round(w / s) + z, clamped           the codes

while beta grows slowly. The authors keep s at the group's full range and let z be any number. pack-quantized stores z
as an integer of `bits` bits, and a symmetric grid has none, so here s takes over: it has the closed form
`<q - z, w - e> / <q - z, q - z>`, and z is the rounded mean of `q - (w - e) / s`, taken together with the new s. What
the fixed scale gives the authors, a grid that spans the whole group, is a constraint here: s is at least what brings
every weight within half a step. Without it the p-norm falls further, because it lets large weights be clipped, and the
model gets worse: SmolLM2-135M, W4 g64 symmetric, has on 8 windows of WikiText-2 the perplexity 43.0 by rounding to
nearest (29.2 unquantized), 40.7 so, and 44.7 without the constraint.

Each iterate is offered with the old and the new z, and the grid with the least p-norm is kept, the start (the full
range) included. Residuals are measured in steps, so that beta means the same for every group and model.
"""

from __future__ import annotations

import torch

from ...runtime.kernels.packed import QuantScheme
from .grid import CHUNK, dequantize_groups, minmax_grid, quantize_groups, round_scales, to_groups
from .rtn import Quantized

NORM = 0.7
BETA = 10.0
BETA_GROWTH = 1.01
ITERATIONS = 20


def quantize_hqq(
    weight: torch.Tensor, scheme: QuantScheme, dtype: torch.dtype, norm: float = NORM, iterations: int = ITERATIONS
) -> Quantized:
    """Quantize `weight` [N, K] (any floating dtype) with scales stored in `dtype`.

    norm: p, above 0 and at most 1. Raises ValueError where the group size does not divide K.
    """
    groups = to_groups(weight.float(), scheme.num_groups(weight.shape[1]))
    rows = max(1, CHUNK // groups[0].numel())
    parts = [_solve(part, scheme, dtype, norm, iterations) for part in groups.split(rows)]
    scales = torch.cat([part[0] for part in parts])
    zeros = None if scheme.symmetric else torch.cat([part[1] for part in parts]).to(torch.uint8)
    codes = quantize_groups(groups, scales, zeros, scheme.bits).view(weight.shape)
    return Quantized(codes, scales.to(dtype), zeros)


def shrink(residuals: torch.Tensor, norm: float, beta: float) -> torch.Tensor:
    """The generalized soft threshold: `sign(r) max(|r| - |r|^(norm - 1) / beta, 0)`, in the shape of `residuals`."""
    size = residuals.abs()
    kept = size - size.clamp(min=torch.finfo(size.dtype).tiny).pow(norm - 1) / beta
    return kept.clamp_(min=0.0).copysign_(residuals)


def spanning_scales(low: torch.Tensor, high: torch.Tensor, zeros: torch.Tensor, top: float) -> torch.Tensor:
    """The least scales with which codes 0 … `top` reach within half a step of `low` (at most 0) and `high`, [N, G]."""
    return torch.maximum(-low / (zeros + 0.5), high / (top - zeros + 0.5))


def _solve(
    groups: torch.Tensor, scheme: QuantScheme, dtype: torch.dtype, norm: float, iterations: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points, float32 [N, G], of the best grids found for `groups` float32 [N, G, S]."""
    bits, top = scheme.bits, 2.0**scheme.bits - 1
    low, high = groups.amin(-1).clamp(max=0.0), groups.amax(-1).clamp(min=0.0)
    scales, start = minmax_grid(groups, bits, scheme.symmetric, dtype)
    zeros = torch.full_like(scales, 2.0 ** (bits - 1)) if start is None else start.float()
    best = _Best(groups, bits, norm, scales, zeros)
    beta = BETA
    for _ in range(iterations):
        step, zero = scales.unsqueeze(-1), zeros.unsqueeze(-1)
        codes = quantize_groups(groups, scales, zeros, bits).float()
        steps = codes - zero
        target = groups - shrink((groups - steps * step) / step, norm, beta) * step
        square = steps.square().sum(-1)
        fitted = torch.where(square > 0, (steps * target).sum(-1) / square, scales)
        scales = round_scales(torch.maximum(fitted, spanning_scales(low, high, zeros, top)), dtype)
        best.offer(scales, zeros)
        if not scheme.symmetric:
            zeros = (codes - target / scales.unsqueeze(-1)).mean(-1).round_().clamp_(0.0, top)
            scales = round_scales(torch.maximum(scales, spanning_scales(low, high, zeros, top)), dtype)
            best.offer(scales, zeros)
        beta *= BETA_GROWTH
    return best.scales, best.zeros


class _Best:
    """The grid with the least p-norm so far of each group: scales and zeros float32 [N, G]."""

    def __init__(self, groups: torch.Tensor, bits: int, norm: float, scales: torch.Tensor, zeros: torch.Tensor) -> None:
        self.groups, self.bits, self.norm = groups, bits, norm
        self.scales, self.zeros = scales, zeros
        self.error = self._error(scales, zeros)

    def _error(self, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
        codes = quantize_groups(self.groups, scales, zeros, self.bits)
        values = dequantize_groups(codes, scales, zeros, self.bits)
        return values.sub_(self.groups).abs_().pow_(self.norm).sum(-1)

    def offer(self, scales: torch.Tensor, zeros: torch.Tensor) -> None:
        """Take the candidate wherever it is better."""
        error = self._error(scales, zeros)
        better = error < self.error
        self.error = torch.where(better, error, self.error)
        self.scales = torch.where(better, scales, self.scales)
        self.zeros = torch.where(better, zeros, self.zeros)
