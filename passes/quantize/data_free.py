"""The methods that round a layer from its weight alone, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import nn

from ...runtime.kernels.float4 import NVFP4Linear
from ...runtime.kernels.packed import QuantScheme
from ...runtime.kernels.scaled import ScaledScheme
from .fp8 import LARGEST_E4M3, FloatQuantized, quantize_fp8
from .hqq import quantize_hqq
from .library_formats import quantize_dynamic_int8, quantize_llm_int8, quantize_nf4
from .microscaling import LARGEST_E2M1, quantize_mxfp4, quantize_nvfp4
from .rtn import Quantized, quantize_rtn

DataFree = Callable[[torch.Tensor, QuantScheme, int, Sequence[nn.Module]], Quantized | FloatQuantized]
"""(weight [N, K], scheme, steps of the scale search, layers fused with it) → codes and scales.

Scales that the scheme keeps in the model's dtype get the weight's."""

FUSED = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}, {"w1", "w3"})
"""Layers that engines run as one, and that share nvfp4's divisor for that."""


def fused_key(name: str) -> tuple[str, object]:
    """The same for layers that engines run as one, another for every other layer."""
    parent, _, leaf = name.rpartition(".")
    return parent, next((number for number, names in enumerate(FUSED) if leaf in names), leaf)


def fused_with(model: nn.Module, name: str) -> list[nn.Module]:
    """The named layer, and those beside it in its parent that engines fuse with it."""
    parent, _, leaf = name.rpartition(".")
    names = next((names for names in FUSED if leaf in names), {leaf})
    return [module for child, module in model.get_submodule(parent).named_children() if child in names]


def shared_magnitude(layers: Sequence[nn.Module]) -> torch.Tensor:
    """The largest magnitude of the layers' weights, float32 scalar.

    One that is nvfp4 already has a divisor for all of them, which gives that magnitude back.
    """
    largest: list[torch.Tensor] = []
    for layer in layers:
        if isinstance(layer, NVFP4Linear):
            largest.append(LARGEST_E4M3 * LARGEST_E2M1 / layer.weight_global_scale.detach()[0])
        elif isinstance(layer, nn.Linear) and not layer.weight.is_meta:
            largest.append(layer.weight.detach().abs().amax().float())
    return torch.stack(largest).amax()


METHODS: dict[str, DataFree] = {
    "rtn": lambda weight, scheme, steps, _: quantize_rtn(weight, scheme, weight.dtype, steps),
    "hqq": lambda weight, scheme, _, __: quantize_hqq(weight, scheme, weight.dtype),
    "fp8": lambda weight, scheme, steps, _: quantize_fp8(weight, cast(ScaledScheme, scheme), weight.dtype, steps),
    "mxfp4": lambda weight, _, steps, __: quantize_mxfp4(weight, steps > 0),
    "nvfp4": lambda weight, _, steps, fused: quantize_nvfp4(weight, steps, shared_magnitude(fused)),
    "bnb-nf4": lambda weight, *_: quantize_nf4(weight),
    "bnb-int8": lambda weight, *_: quantize_llm_int8(weight),
    "dynamic-int8": lambda weight, *_: quantize_dynamic_int8(weight),
}
