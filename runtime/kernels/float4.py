"""Linear layers whose weight is four-bit floating-point numbers with a scale a group: MXFP4 and NVFP4, weight-only.

An element is E2M1: sign, two exponent bits, one mantissa bit, the values of `E2M1` and their negatives. The groups:

    MXFP4Linear  32 columns, a power of two E8M0 (OCP Microscaling Formats MX v1.0): byte b stands for 2**(b - 127)
    NVFP4Linear  16 columns, an E4M3 number, divided by one float32 of the whole weight

Their state dict is the module's part of compressed-tensors' `mxfp4-pack-quantized` and `nvfp4-pack-quantized`:

    weight_packed        uint8 [N, K / 2]    two elements a byte, the even column in the low half
    weight_scale         [N, K / group]      uint8 exponents (mxfp4) or float8_e4m3fn (nvfp4)
    weight_global_scale  float32 [1]         nvfp4 only; the divisor
    bias                 model dtype [N]     where the layer has one
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from .packed import QuantScheme, QuantState, WeightHolder, fixed

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0 to 7; bit 3 is the sign."""
E8M0_BIAS = 127
GROUP_SIZES = {"mxfp4": 32, "nvfp4": 16}
SCALE_DTYPES = {"mxfp4": torch.uint8, "nvfp4": torch.float8_e4m3fn}

Layer = TypeVar("Layer", bound="Float4Linear")


@dataclass(frozen=True)
class Float4Scheme(QuantScheme):
    """Four-bit floats of the `kind` `mxfp4` or `nvfp4`. Raises ValueError for another kind or group size."""

    bits: int = 4
    group_size: int = 0
    kind: str = "mxfp4"

    def __post_init__(self) -> None:
        if GROUP_SIZES.get(self.kind) != self.group_size or self.bits != 4 or not self.symmetric or self.g_idx:
            raise ValueError(f"no four-bit float scheme {self.kind} of {self.bits} bits in groups of {self.group_size}")

    @classmethod
    def of(cls, kind: str) -> Float4Scheme:
        return cls(group_size=GROUP_SIZES.get(kind, 0), kind=kind)

    @property
    def format(self) -> str:
        """compressed-tensors' name of the format."""
        return f"{self.kind}-pack-quantized"

    def nbytes(self, out_features: int, in_features: int, dtype_bytes: int) -> int:
        scales = out_features * self.num_groups(in_features)
        return out_features * in_features // 2 + scales + (4 if self.kind == "nvfp4" else 0)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Pack uint8 codes below 16, [N, K] with K even, as uint8 [N, K / 2], the even column in the low half."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_nibbles`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


def e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    """The values, float32, of E2M1 codes uint8 of any shape."""
    table = torch.tensor((*E2M1, *(-value for value in E2M1)), device=codes.device)
    return table[codes.int()]


def e8m0_values(exponents: torch.Tensor) -> torch.Tensor:
    """The powers of two, float32, of E8M0 bytes uint8 of any shape; 255 is NaN."""
    powers = torch.exp2(exponents.double() - E8M0_BIAS).float()
    return torch.where(exponents == 255, torch.nan, powers)


class Float4Linear(WeightHolder):
    """What the two layers share. Make one with `from_linear`, or with `empty` to load a state dict into."""

    kind: str
    scheme: Float4Scheme
    weight_packed: nn.Parameter
    weight_scale: nn.Parameter
    weight_global_scale: nn.Parameter

    def __init__(self, in_features: int, out_features: int, scheme: QuantScheme) -> None:
        if not isinstance(scheme, Float4Scheme) or scheme.kind != self.kind:
            raise ValueError(f"{type(self).__name__} holds no weight of the scheme {scheme}")
        super().__init__(in_features, out_features, scheme)

    def allocate(self, new: Callable[..., nn.Parameter], dtype: torch.dtype) -> None:
        groups = self.scheme.num_groups(self.in_features)
        self.weight_packed = new(self.out_features, self.in_features // 2, dtype=torch.uint8)
        self.weight_scale = new(self.out_features, groups, dtype=SCALE_DTYPES[self.kind])
        if self.kind == "nvfp4":
            self.weight_global_scale = new(1, dtype=torch.float32)

    @classmethod
    def from_linear(
        cls: type[Layer],
        linear: nn.Linear,
        codes: torch.Tensor,
        scales: torch.Tensor,
        global_scale: torch.Tensor | None,
        scheme: QuantScheme,
    ) -> Layer:
        """From E2M1 codes uint8 [N, K], scales in the stored dtype [N, G] and the divisor float32 [1] (nvfp4 only).

        The linear gives its shape and its bias. Raises ValueError where dtypes or shapes do not fit the scheme.
        """
        layer = cls(linear.in_features, linear.out_features, scheme)
        shape, groups = (linear.out_features, linear.in_features), scheme.num_groups(linear.in_features)
        if tuple(codes.shape) != shape or tuple(scales.shape) != (shape[0], groups):
            raise ValueError(
                f"codes {tuple(codes.shape)} and scales {tuple(scales.shape)} do not fit {list(shape)}, {groups} groups"
            )
        if scales.dtype != SCALE_DTYPES[cls.kind] or (global_scale is None) != (cls.kind == "mxfp4"):
            raise ValueError(f"{cls.kind} has scales of {SCALE_DTYPES[cls.kind]}, and a global one if it is nvfp4")
        layer.weight_packed, layer.weight_scale = fixed(pack_nibbles(codes)), fixed(scales)
        if global_scale is not None:
            layer.weight_global_scale = fixed(global_scale.float().view(1))
        layer.keep_bias(linear)
        return layer

    @property
    def weight(self) -> torch.Tensor:
        """The dequantized weight, float32 [N, K], computed anew at each access."""
        return self.dequantize()

    def group_scales(self) -> torch.Tensor:
        """What each group's elements are multiplied by, float32 [N, G]."""
        raise NotImplementedError

    def dequantize(self) -> torch.Tensor:
        """The weight's values, float32 [N, K]."""
        values = e2m1_values(unpack_nibbles(self.weight_packed))
        return (values.unflatten(1, (-1, self.scheme.group_size)) * self.group_scales().unsqueeze(-1)).flatten(1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input, self.dequantize().to(input.dtype), self.bias)

    def describe(self) -> str:
        return f"{self.kind}, group_size={self.scheme.group_size}"


class MXFP4Linear(Float4Linear):
    """Groups of 32 with a power of two each. Its values are exact in bfloat16."""

    kind = "mxfp4"

    def group_scales(self) -> torch.Tensor:
        return e8m0_values(self.weight_scale)

    def quant_state(self) -> QuantState:
        """The same values as integers, for kernels that have no four-bit floats: twice an element is -12 to 12."""
        codes = (e2m1_values(unpack_nibbles(self.weight_packed)) * 2 + 16).to(torch.uint8)
        return QuantState(codes, self.group_scales() / 2, None, bits=5, group_size=self.scheme.group_size)


class NVFP4Linear(Float4Linear):
    """Groups of 16 with an E4M3 scale each, and one divisor for the whole weight."""

    kind = "nvfp4"

    def group_scales(self) -> torch.Tensor:
        return self.weight_scale.float() / self.weight_global_scale
