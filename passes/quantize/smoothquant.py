"""SmoothQuant (Xiao et al. 2022, arXiv:2211.10438): activation outliers move into weights before both become int8.

Where inputs are quantized too, one scale a token, a channel with large activations takes the range of all others. The
scales `s = max|x|^a / max|w|^(1 - a)`, by which inputs are divided and weight columns multiplied, share the difficulty
between the two. The migration strength a is searched: the layers' outputs, computed with int8 weights and inputs as the
runtime does, are compared with the unquantized ones on a sample of calibration inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...runtime.kernels.scaled import quantize_tokens
from .awq import Layer, ScaleChoice, revived
from .rtn import quantize_rtn

SMALLEST = 1e-5
"""Least scale."""


def smoothing_scales(activations: torch.Tensor, weights: torch.Tensor, strength: float) -> torch.Tensor:
    """`max|x|^a / max|w|^(1 - a)` of every channel, float32 [C], from both maxima [C] and the strength a.

    A maximum of a dead channel counts as that of the median channel.
    """
    return (revived(activations).pow(strength) / revived(weights).pow(1 - strength)).clamp(min=SMALLEST)


def smoothed_error(layers: Sequence[Layer], inputs: torch.Tensor, columns: torch.Tensor, dtype: torch.dtype) -> float:
    """Squared error of the layers' outputs with inputs divided and weights multiplied by `columns`, both int8.

    inputs: any floating dtype [R, K]; columns: float32 [K]; dtype: that of the weights' scales. Summed over layers,
    rows and outputs.
    """
    values = inputs.float()
    codes, steps = quantize_tokens(values / columns, torch.int8)
    rounded = codes.float() * steps
    total = 0.0
    for weight, scheme in layers:
        exact = weight.float()
        quantized = quantize_rtn(exact * columns, scheme, dtype).dequantize(scheme.bits)
        total += float((rounded @ quantized.t() - values @ exact.t()).square().sum())
    return total


def search_strength(
    layers: Sequence[Layer],
    inputs: torch.Tensor,
    activations: torch.Tensor,
    channels: torch.Tensor,
    dtype: torch.dtype,
    steps: int = 20,
) -> ScaleChoice:
    """The scales of C channels with the least output error over the strengths 0, 1/steps, …, 1, or none at all.

    inputs: a sample of the layers' inputs [R, K]; activations: max |x| of each channel over all inputs, float32 [C];
    channels: int64 [K], the channel of each input column. The choice's exponent is the strength, -1 where unscaled
    layers are as good.
    """
    largest = torch.stack([weight.detach().float().abs().amax(0) for weight, _ in layers]).amax(0)
    weights = torch.zeros_like(activations).scatter_reduce_(0, channels, largest, "amax")
    none = torch.ones_like(activations)
    energy = sum(float((inputs.float() @ weight.float().t()).square().sum()) for weight, _ in layers)
    energy = max(energy, torch.finfo(torch.float32).tiny)
    unscaled = smoothed_error(layers, inputs, none[channels], dtype)
    best = (unscaled, -1.0, none)
    for strength in (i / steps for i in range(steps + 1)):
        scales = smoothing_scales(activations, weights, strength)
        error = smoothed_error(layers, inputs, scales[channels], dtype)
        if error < best[0]:
            best = (error, strength, scales)
    return ScaleChoice(best[2], best[1], best[0] / energy, unscaled / energy)
