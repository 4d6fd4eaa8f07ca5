"""The quantized linear layers by scheme: which class holds a weight, and what a scheme's figures stand for."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import nn

from .dynamic_int8 import DynamicInt8Linear, DynamicInt8Scheme
from .float4 import Float4Linear, Float4Scheme, MXFP4Linear, NVFP4Linear
from .four_bit import FourBitLinear, FourBitScheme
from .gptq_linear import GPTQLinear
from .llm_int8 import LLMInt8Linear, LLMInt8Scheme
from .packed import PackedLinear, QuantScheme
from .scaled import Float8Linear, Int8Linear, ScaledLinear, ScaledScheme

LibraryLinear: TypeAlias = FourBitLinear | LLMInt8Linear | DynamicInt8Linear
"""Layers in the formats of bitsandbytes and torchao."""
QuantizedLinear: TypeAlias = PackedLinear | ScaledLinear | Float4Linear | LibraryLinear
LIBRARY_FORMATS: dict[str, tuple[type[QuantScheme], type[LibraryLinear]]] = {
    "bitsandbytes-nf4": (FourBitScheme, FourBitLinear),
    "bitsandbytes-int8": (LLMInt8Scheme, LLMInt8Linear),
    "torchao-int8": (DynamicInt8Scheme, DynamicInt8Linear),
}
QUANTIZED = (PackedLinear, ScaledLinear, Float4Linear, *(layer for _, layer in LIBRARY_FORMATS.values()))
"""All of them, for `isinstance`."""
PACKED_INTEGERS = (PackedLinear, GPTQLinear)
"""Layers whose `quant_state` is packed integers with scales and zero points, this package's and a GPTQ checkpoint's."""


def layer_class(scheme: QuantScheme) -> type[QuantizedLinear]:
    """The class that holds a weight of this scheme."""
    for kind, layer in LIBRARY_FORMATS.values():
        if isinstance(scheme, kind):
            return layer
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
    """The scheme of these figures in a format that a scheme has named. Raises ValueError where there is none."""
    if format in LIBRARY_FORMATS:
        return LIBRARY_FORMATS[format][0](bits, group_size, symmetric)
    if format == "pack-quantized":
        return QuantScheme(bits, group_size, symmetric, g_idx)
    if format in ("int-quantized", "float-quantized"):
        return ScaledScheme(bits, group_size, symmetric, kind="int8" if format == "int-quantized" else "float8")
    return Float4Scheme(bits, group_size, symmetric, kind=format.removesuffix("-pack-quantized"))


def scale_values(layer: QuantizedLinear) -> torch.Tensor:
    """What the layer's codes are multiplied by, float32, in the shape of its scales."""
    if isinstance(layer, (PackedLinear, ScaledLinear)):
        return layer.weight_scale.detach().float()
    return layer.group_scales()
