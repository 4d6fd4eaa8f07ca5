"""FP8: weights as float8_e4m3fn with a scale an output channel, or a block of B x B weights. No calibration data.

E4M3 (OCP 8-bit Floating Point Specification 1.0; Micikevicius et al. 2022, arXiv:2209.05433) has four exponent and
three mantissa bits, 448 at most and no infinities.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...runtime.kernels.scaled import FLOAT8, LARGEST, ScaledScheme
from .grid import round_scales

LARGEST_E4M3 = LARGEST[FLOAT8]
SMALLEST_SHARE = 0.5
"""Smaller scales than half the full range's repeat the same mantissas one exponent up, and clip."""


@dataclass(frozen=True)
class FloatQuantized:
    """A weight as floating-point codes: codes [N, K], scales as stored, and nvfp4's divisor float32 [1].

    codes: float8_e4m3fn (fp8), or E2M1 codes as uint8 (mxfp4, nvfp4).
    """

    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor | None = None


def quantize_fp8(
    weight: torch.Tensor, scheme: ScaledScheme, dtype: torch.dtype, search_steps: int = 0
) -> FloatQuantized:
    """Quantize `weight` [N, K] (any floating dtype) with scales stored in `dtype`, in the shape `scheme` gives them.

    search_steps: 0 maps each channel's or block's largest magnitude to 448; more also try that many smaller scales, and
    the least squared error wins. Raises ValueError where the block size does not divide K.
    """
    shape = scheme.scale_shape(*weight.shape)
    blocks = to_blocks(weight.float(), scheme.group_size)
    full = blocks.abs().amax(-1) / LARGEST_E4M3
    scales = round_scales(full, dtype)
    if search_steps > 0:
        best = _errors(blocks, scales)
        for share in torch.linspace(SMALLEST_SHARE, 1.0, search_steps + 1)[:-1].tolist():
            candidate = round_scales(full * share, dtype)
            error = _errors(blocks, candidate)
            scales = torch.where(error < best, candidate, scales)
            best = torch.minimum(error, best)
    codes = from_blocks(_round(blocks, scales), weight.shape[0], weight.shape[1], scheme.group_size)
    return FloatQuantized(codes, scales.to(dtype).view(shape))


def to_blocks(weight: torch.Tensor, size: int) -> torch.Tensor:
    """`[N, K]` as `[N, 1, K]` (size -1), or as `[R, C, size²]`: blocks of rows and columns, the last row of blocks
    filled up with zeros."""
    if size == -1:
        return weight.unsqueeze(1)
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -weight.shape[0] % size))
    return padded.view(-1, size, weight.shape[1] // size, size).transpose(1, 2).flatten(2)


def from_blocks(blocks: torch.Tensor, rows: int, columns: int, size: int) -> torch.Tensor:
    """The inverse of `to_blocks`: `[rows, columns]`."""
    if size == -1:
        return blocks.squeeze(1)
    return blocks.unflatten(2, (size, size)).transpose(1, 2).reshape(-1, columns)[:rows].contiguous()


def _round(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Nearest codes, float8_e4m3fn in the shape of `blocks` [R, C, S], on scales float32 [R, C]."""
    return (blocks / scales.unsqueeze(-1)).clamp_(-LARGEST_E4M3, LARGEST_E4M3).to(FLOAT8)


def _errors(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Squared error of each block, float32 [R, C]."""
    return (_round(blocks, scales).float() * scales.unsqueeze(-1) - blocks).square_().sum(-1)
