"""The quantized linear layers by scheme: which class holds a weight, and what a scheme's figures stand for."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import nn

from .float4 import Float4Linear, Float4Scheme, MXFP4Linear, NVFP4Linear
from .packed import PackedLinear, QuantScheme
from .scaled import Float8Linear, Int8Linear, ScaledLinear, ScaledScheme

QuantizedLinear: TypeAlias = PackedLinear | ScaledLinear | Float4Linear
QUANTIZED = (PackedLinear, ScaledLinear, Float4Linear)
"""All of them, for `isinstance`."""


def layer_class(scheme: QuantScheme) -> type[PackedLinear] | type[ScaledLinear] | type[Float4Linear]:
    """The class that holds a weight of this scheme."""
    if isinstance(scheme, ScaledScheme):
        return Int8Linear if scheme.kind == "int8" else Float8Linear
    if isinstance(scheme, Float4Scheme):
        return MXFP4Linear if scheme.kind == "mxfp4" else NVFP4Linear
    return PackedLinear


def empty_like(linear: nn.Linear, scheme: QuantScheme, dtype: torch.dtype | None = None) -> QuantizedLinear:
    """A layer with uninitialized tensors in the place of `linear`, on its device and in its mode.

    dtype: of scales and bias, by default the weight's. Raises ValueError where the scheme does not fit its columns.
    """
    layer = layer_class(scheme).empty(
        linear.in_features,
        linear.out_features,
        scheme,
        bias=linear.bias is not None,
        dtype=dtype or linear.weight.dtype,
        device=linear.weight.device,
    )
    return layer.train(linear.training)


def make_scheme(format: str, bits: int, group_size: int, symmetric: bool = True, g_idx: bool = False) -> QuantScheme:
    """The scheme of these figures in a compressed-tensors format. Raises ValueError where there is none."""
    if format == "pack-quantized":
        return QuantScheme(bits, group_size, symmetric, g_idx)
    if format in ("int-quantized", "float-quantized"):
        return ScaledScheme(bits, group_size, symmetric, kind="int8" if format == "int-quantized" else "float8")
    return Float4Scheme(bits, group_size, symmetric, kind=format.removesuffix("-pack-quantized"))


def scale_values(layer: QuantizedLinear) -> torch.Tensor:
    """What the layer's codes are multiplied by, float32, in the shape of its scales."""
    return layer.group_scales() if isinstance(layer, Float4Linear) else layer.weight_scale.detach().float()
