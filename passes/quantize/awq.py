"""AWQ (Lin et al. 2023, arXiv:2306.00978): input channels with large activations are scaled up before rounding.

For a layer y = x W^T the product is the same with x / s and W diag(s), but the rounding error of W's column k then
enters the output divided by s_k. Scales are s = m^a, where m is a channel's mean |x| and the exponent a, between 0 (no
scaling) and 1, is the one of a grid with which nearest rounding gives the least squared output error over the layers
that read x. After scaling, each group's range is clipped where that lowers the error further (`quantize_rtn` with
squared inputs as importance), or the layer is rounded by GPTQ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...runtime.kernels.packed import QuantScheme
from .rtn import quantize_rtn

SMALLEST = 1e-4
"""Least scale before normalization."""
DEAD = 1e-5
"""A channel at or below this share of the median channel tells nothing about its values on other text."""

Layer = tuple[torch.Tensor, QuantScheme]
"""A weight, any floating dtype [N, K], and how it will be quantized."""


@dataclass(frozen=True)
class ScaleChoice:
    """scales: float32 [C]; exponent: the grid value they come from; error: the loss with them, error_unscaled: without,
    both relative to the energy of what they are errors of."""

    scales: torch.Tensor
    exponent: float
    error: float
    error_unscaled: float


def revived(values: torch.Tensor) -> torch.Tensor:
    """Statistics of channels, float32 [C], where those that are dead have the median of the others; ones if all are.

    What no calibration token activates (units behind a ReLU, say) another text may. A scale from its 0 would give it
    no share of its group's grid, or, where inputs are quantized, a value beyond all others' there.
    """
    values = values.float()
    living = values[values > 0]
    if not len(living):
        return torch.ones_like(values)
    middle = living.median()
    return torch.where(values > DEAD * middle, values, middle)


def activation_scales(magnitude: torch.Tensor, exponent: float) -> torch.Tensor:
    """`magnitude ** exponent`, float32 [C], divided by the geometric mean of its extremes; ones for the exponent 0.

    Dead channels are scaled as the median channel is.
    """
    scales = revived(magnitude).pow(exponent).clamp(min=SMALLEST)
    return scales / (scales.max() * scales.min()).sqrt()


def output_error(layers: Sequence[Layer], hessian: torch.Tensor, columns: torch.Tensor, dtype: torch.dtype) -> float:
    """`sum tr(E H E^T)` over layers for nearest rounding with input columns scaled by `columns`, float32 [K].

    hessian: `mean(x x^T)` of the unscaled inputs, float32 [K, K]; dtype: that of the stored group scales.
    """
    total = torch.zeros((), dtype=torch.float64)
    for weight, scheme in layers:
        values = weight.float()
        rounded = quantize_rtn(values * columns, scheme, dtype).dequantize(scheme.bits)
        error = values - rounded / columns
        total += ((error @ hessian) * error).sum().double().cpu()
    return float(total)


def search_scales(
    layers: Sequence[Layer],
    hessian: torch.Tensor,
    magnitude: torch.Tensor,
    channels: torch.Tensor,
    dtype: torch.dtype,
    steps: int = 20,
) -> ScaleChoice:
    """The scales of C channels with the least output error over `steps` exponents up to 1, and no scaling.

    magnitude: mean |x| of each channel, float32 [C]; channels: int64 [K], the channel of each input column. Every
    second exponent is tried first, then the two beside the best of them.
    """

    def loss(exponent: float) -> float:
        return output_error(layers, hessian, activation_scales(magnitude, exponent)[channels], dtype)

    exponent, error, unscaled = search_exponent(loss, steps)
    energy = sum(float(((w.float() @ hessian) * w.float()).sum()) for w, _ in layers)
    energy = max(energy, torch.finfo(torch.float32).tiny)
    return ScaleChoice(activation_scales(magnitude, exponent), exponent, error / energy, unscaled / energy)


def search_exponent(loss: Callable[[float], float], steps: int) -> tuple[float, float, float]:
    """The best of 0, 1/steps, …, 1, its loss and that of 0: every second one is tried, then the best's neighbours."""
    losses = {i: loss(i / steps) for i in range(0, steps + 1, 2)}
    coarse = min(losses, key=losses.__getitem__)
    losses.update({i: loss(i / steps) for i in (coarse - 1, coarse + 1) if 0 <= i <= steps and i not in losses})
    best = min(losses, key=losses.__getitem__)
    return best / steps, losses[best], losses[0]
