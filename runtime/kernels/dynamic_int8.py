"""Linear layers with int8 weights and dynamically quantized int8 inputs, as torchao stores and computes them.

torchao's `Int8Tensor` under `Int8DynamicActivationInt8WeightConfig`: one scale an output channel and one a token, each
the largest magnitude over 127.5 in the dtype of what is quantized. Its name for the parts in a safetensors file:

    _weight_qdata       int8 [N, K]
    _weight_scale       float32 [N, 1]
    _weight_zero_point  int8 [N, 1]        zeros; absent from some files
    bias                model dtype [N]    where the layer has one
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from .packed import QuantScheme, QuantState, WeightHolder, fixed
from .scaled import integer_product

HALF_RANGE = 127.5
LEAST_SCALE = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class DynamicInt8Scheme(QuantScheme):
    """int8 weights and inputs, a scale a channel and a token. zero_point: whether the file has one, all zeros.

    Raises ValueError for other figures.
    """

    bits: int = 8
    zero_point: bool = True

    def __post_init__(self) -> None:
        if self.bits != 8 or self.group_size != -1 or not self.symmetric or self.g_idx:
            raise ValueError(f"dynamic int8 has 8 bits and a scale a channel, not {self.bits} and {self.group_size}")

    @property
    def format(self) -> str:
        return "torchao-int8"

    def nbytes(self, out_features: int, in_features: int, dtype_bytes: int) -> int:
        return out_features * in_features + out_features * (5 if self.zero_point else 4)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 [M, K] and scales float32 [M, 1] of x [M, K], any floating dtype."""
    scales = (x.abs().amax(1, keepdim=True) / HALF_RANGE).clamp(min=LEAST_SCALE).float()
    return torch.round(x * (1.0 / scales)).clamp_(-128, 127).to(torch.int8), scales


class DynamicInt8Linear(WeightHolder):
    """`y = s_w (s_x x_int8 W_int8^T) + b`. Make one with `from_linear`, or with `empty` to load a state dict into."""

    activation = "int8"
    """Inputs are quantized; the native kernels do it with 127 in the place of 127.5."""
    scheme: DynamicInt8Scheme
    _weight_qdata: nn.Parameter
    _weight_scale: nn.Parameter
    _weight_zero_point: nn.Parameter

    def __init__(self, in_features: int, out_features: int, scheme: QuantScheme) -> None:
        if not isinstance(scheme, DynamicInt8Scheme):
            raise ValueError(f"{type(self).__name__} holds no weight of the scheme {scheme}")
        super().__init__(in_features, out_features, scheme)

    def allocate(self, new: Callable[..., nn.Parameter], dtype: torch.dtype) -> None:
        self._weight_qdata = new(self.out_features, self.in_features, dtype=torch.int8)
        self._weight_scale = new(self.out_features, 1, dtype=torch.float32)
        if self.scheme.zero_point:
            self._weight_zero_point = new(self.out_features, 1, dtype=torch.int8)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        scheme: QuantScheme,
    ) -> DynamicInt8Linear:
        """From codes int8 [N, K] and scales float32 [N, 1]; the linear gives its shape and its bias.

        Raises ValueError where dtypes or shapes do not fit.
        """
        layer = cls(linear.in_features, linear.out_features, scheme)
        shape = (linear.out_features, linear.in_features)
        fits = tuple(codes.shape) == shape and codes.dtype == torch.int8 and zeros is None
        if not fits or tuple(scales.shape) != (shape[0], 1) or scales.dtype != torch.float32:
            raise ValueError(f"codes {codes.dtype} {tuple(codes.shape)} and scales {scales.dtype} do not fit {shape}")
        layer._weight_qdata, layer._weight_scale = fixed(codes), fixed(scales)
        if layer.scheme.zero_point:
            layer._weight_zero_point = fixed(torch.zeros(shape[0], 1, dtype=torch.int8, device=codes.device))
        layer.keep_bias(linear)
        return layer

    @property
    def weight(self) -> torch.Tensor:
        """The dequantized weight, float32 [N, K], computed anew at each access."""
        return self.dequantize()

    def group_scales(self) -> torch.Tensor:
        """What a row's codes are multiplied by, float32 [N, 1]."""
        return self._weight_scale.detach()

    def dequantize(self) -> torch.Tensor:
        """The weight's values, float32 [N, K]."""
        return self._weight_qdata.float() * self._weight_scale

    def quant_state(self) -> QuantState:
        """Codes uint8 with the zero at 128, and one scale a row, for kernels that lay them out anew."""
        codes = self._weight_qdata.view(torch.uint8) ^ 128
        return QuantState(codes, self._weight_scale.detach(), None, bits=8, group_size=self.in_features)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        codes, scales = quantize_rows(input.reshape(-1, self.in_features))
        output = integer_product(codes, self._weight_qdata).mul_(scales).to(input.dtype)
        output = output * self._weight_scale.view(-1)
        if self.bias is not None:
            output += self.bias
        return output.to(input.dtype).view(*input.shape[:-1], self.out_features)

    def describe(self) -> str:
        return "dynamic int8, a scale per channel"
