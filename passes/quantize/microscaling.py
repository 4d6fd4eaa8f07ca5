"""MXFP4 and NVFP4: weights as E2M1 numbers in groups with a small scale each. No calibration data.

MXFP4 (OCP Microscaling Formats MX Specification v1.0): groups of 32, the scale a power of two (E8M0). NVFP4: groups of
16, the scale an E4M3 number, divided by a float32 of the whole weight that makes the scales fill E4M3's range.
`runtime/kernels/float4.py` has the tables and the layers.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from ...runtime.kernels.float4 import E2M1, E8M0_BIAS, GROUP_SIZES, e2m1_values, e8m0_values
from .fp8 import LARGEST_E4M3, FloatQuantized
from .grid import to_groups

LARGEST_E2M1 = E2M1[-1]
LARGEST_EXPONENT = 2
"""Exponent of the largest E2M1 number, 6 = 1.5 * 2**2."""
LARGEST_BYTE = 254
"""The largest finite E8M0 exponent; 255 is NaN."""
SMALLEST_E4M3 = 2.0**-9
SPAN = (0.7, 1.6)
"""nvfp4: scales tried, as shares of the one that maps the largest magnitude to 6. 1.5 maps it to 4."""
CHUNK = 1 << 18
"""Weights searched at once, so that temporaries stay in the cache."""


def nearest_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Codes uint8 of the nearest E2M1 numbers: ties to the even code, magnitudes above 6 to 6. values: float32."""
    bounds = torch.tensor([(a + b) / 2 for a, b in pairwise(E2M1)], device=values.device)
    bounds[1::2] = torch.nextafter(bounds[1::2], torch.zeros_like(bounds[1::2]))  # a tie here goes up
    return torch.bucketize(values.abs(), bounds, out_int32=True).to(torch.uint8) | (torch.signbit(values).byte() << 3)


def quantize_mxfp4(weight: torch.Tensor, search: bool = False) -> FloatQuantized:
    """Quantize `weight` [N, K] (any floating dtype): E2M1 codes uint8 [N, K], exponents uint8 [N, K / 32].

    The exponent is that of the largest magnitude less 2 (section 6.3 of the specification), so that values above 6
    times the scale are clipped; with `search` also one less and one more, and the least squared error wins. Raises
    ValueError where 32 does not divide K.
    """
    groups = _groups(weight, "mxfp4")
    largest = groups.abs().amax(-1)
    exponent = torch.where(largest > 0, torch.frexp(largest).exponent - 1 - LARGEST_EXPONENT, -E8M0_BIAS)
    exponent = exponent.clamp_(-E8M0_BIAS, LARGEST_BYTE - E8M0_BIAS)
    candidates = [exponent]
    if search:
        candidates += [(exponent + step).clamp_(-E8M0_BIAS, LARGEST_BYTE - E8M0_BIAS) for step in (1, -1)]
    stored = [(e + E8M0_BIAS).to(torch.uint8) for e in candidates]
    codes, choice = _best(groups, [e8m0_values(byte) for byte in stored])
    scales = torch.stack(stored).gather(0, choice.unsqueeze(0)).squeeze(0)
    return FloatQuantized(codes.view(weight.shape), scales)


def quantize_nvfp4(weight: torch.Tensor, search_steps: int = 0, largest: torch.Tensor | None = None) -> FloatQuantized:
    """Quantize `weight` [N, K] (any floating dtype): E2M1 codes uint8 [N, K], scales float8_e4m3fn [N, K / 16], divisor

    `448 * 6 / largest`. largest: the largest magnitude of all weights that must share the divisor, float32 scalar, by
    default this weight's own. search_steps: 0 maps each group's largest magnitude to 6; more also try that many scales
    around it, and the least squared error wins. Raises ValueError where 16 does not divide K.
    """
    groups = _groups(weight, "nvfp4")
    magnitude = groups.abs().amax(-1)
    divisor = global_scale(magnitude.amax() if largest is None else largest)
    full = magnitude / LARGEST_E2M1 * divisor
    shares = [1.0] + (torch.linspace(*SPAN, search_steps).tolist() if search_steps > 0 else [])
    stored = [(full * share).clamp_(SMALLEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn) for share in shares]
    codes, choice = _best(groups, [scale.float() / divisor for scale in stored])
    scales = torch.stack([s.view(torch.uint8) for s in stored]).gather(0, choice.unsqueeze(0)).squeeze(0)
    return FloatQuantized(codes.view(weight.shape), scales.view(torch.float8_e4m3fn), divisor)


def global_scale(largest: torch.Tensor) -> torch.Tensor:
    """nvfp4's divisor, float32 [1], for weights of at most this magnitude; 1 where they are all zero."""
    largest = largest.float().view(1)
    divisor = LARGEST_E4M3 * LARGEST_E2M1 / largest
    return torch.where(torch.isfinite(divisor), divisor, torch.ones_like(divisor))


def dequantize(quantized: FloatQuantized) -> torch.Tensor:
    """The values float32 [N, K] of either format."""
    if quantized.global_scale is None:
        scales = e8m0_values(quantized.scales)
    else:
        scales = quantized.scales.float() / quantized.global_scale
    groups = to_groups(e2m1_values(quantized.codes), scales.shape[1])
    return (groups * scales.unsqueeze(-1)).flatten(1)


def _groups(weight: torch.Tensor, kind: str) -> torch.Tensor:
    size = GROUP_SIZES[kind]
    if weight.shape[1] % size:
        raise ValueError(f"{kind} has groups of {size}, which do not divide {weight.shape[1]} input features")
    return to_groups(weight.float(), weight.shape[1] // size)


def _best(groups: torch.Tensor, candidates: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [N, G, S] on the best of the candidate scales, float32 [N, G] each, and its number int64 [N, G]."""
    choice = torch.zeros(groups.shape[:2], dtype=torch.int64, device=groups.device)
    best = candidates[0].clone()
    rows = max(1, CHUNK // groups[0].numel())
    for start in range(0, groups.shape[0] if len(candidates) > 1 else 0, rows):
        part = slice(start, start + rows)
        sizes = groups[part].abs()
        least = _error(sizes, best[part])
        for number, scales in enumerate(candidates[1:], start=1):
            error = _error(sizes, scales[part])
            better = error < least
            least = torch.where(better, error, least)
            choice[part][better] = number
            best[part][better] = scales[part][better]
    return nearest_e2m1(groups / best.unsqueeze(-1)), choice


def _error(sizes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Squared error float32 [N, G] of rounding magnitudes float32 [N, G, S] to E2M1 numbers times `scales` [N, G].

    As `nearest_e2m1`: numbers below 2 lie 1/2 apart, below 4 by 1, above by 2.
    """
    values = sizes / scales.unsqueeze(-1)
    step = torch.where(values < 2, 0.5, torch.where(values < 4, 1.0, 2.0))
    rounded = values.div_(step).round_().mul_(step).clamp_(max=LARGEST_E2M1)
    return rounded.mul_(scales.unsqueeze(-1)).sub_(sizes).square_().sum(-1)
