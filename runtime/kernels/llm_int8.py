"""LLM.int8(): int8 weights and inputs, and columns with outliers apart, as bitsandbytes stores and computes them.

Dettmers et al. 2022 (arXiv:2208.07339): a column of the inputs with a magnitude of the threshold or above in any row is
multiplied in the model's dtype, with the weight's column dequantized; the rest are int8, one scale a row on both sides.
What is an outlier depends on all rows of a call, so a token's values depend a little on what it is batched with. The
state dict is the module's part of a checkpoint of transformers and bitsandbytes:

    weight         int8 [N, K]
    SCB            float32 [N]       the rows' largest magnitudes; a weight is code * SCB / 127
    weight_format  uint8 []          0: row-major
    bias           model dtype [N]   where the layer has one
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from .packed import QuantScheme, WeightHolder, fixed
from .scaled import integer_product

THRESHOLD = 6.0
PRODUCT_SCALE = 6.200124e-05
"""1 / 127² as bitsandbytes has it: a zero is missing, so that it is 1.8e-5 too large."""
STEP = 7.874015718698502e-3
"""1 / 127 as bitsandbytes has it."""


@dataclass(frozen=True)
class LLMInt8Scheme(QuantScheme):
    """int8 weights, a scale a row. threshold: magnitudes of inputs that are outliers; 0 for none.

    Raises ValueError for other figures.
    """

    bits: int = 8
    threshold: float = THRESHOLD

    def __post_init__(self) -> None:
        if self.bits != 8 or self.group_size != -1 or not self.symmetric or self.g_idx:
            raise ValueError(f"LLM.int8() has 8 bits and a scale a channel, not {self.bits} and {self.group_size}")

    @property
    def format(self) -> str:
        return "bitsandbytes-int8"

    def nbytes(self, out_features: int, in_features: int, dtype_bytes: int) -> int:
        return out_features * in_features + out_features * 4 + 1


def quantize_inputs(x: torch.Tensor, threshold: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes int8 [M, K], scales float32 [M] and a mask bool [K] of columns with outliers, None without a threshold.

    x: [M, K], any floating dtype; it is rounded to float16 first. Codes of masked columns are zero.
    """
    half = x.to(torch.float16)
    outliers = half.abs() >= threshold if threshold > 0 else None
    if outliers is not None:
        half = half.masked_fill(outliers, 0)
    scales = half.abs().amax(1).float()
    codes = torch.round(half * (127.0 / scales.unsqueeze(1)).nan_to_num(posinf=0)).to(torch.int8)
    if outliers is None:
        return codes, scales, None
    columns = outliers.any(0)
    return codes.masked_fill(columns, 0), scales, columns


def llm_int8_product(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, threshold: float
) -> torch.Tensor:
    """`x W^T + b` [M, N] in x's dtype: x [M, K], weight int8 [N, K], scales float32 [N], bias [N]."""
    codes, rows, outliers = quantize_inputs(x, threshold)
    output = integer_product(codes, weight).mul_(rows.unsqueeze(1) * scales).mul_(PRODUCT_SCALE)
    if bias is not None:
        output += bias
    output = output.to(x.dtype)
    if outliers is None:
        return output
    columns = outliers.nonzero().squeeze(1)
    if not columns.numel():
        return output
    rest = (weight[:, columns] * scales.unsqueeze(1) * STEP).to(x.dtype)
    return output.addmm(x[:, columns], rest.t())


@torch.library.custom_op("llmopt::llm_int8", mutates_args=())
def llm_int8_op(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, threshold: float
) -> torch.Tensor:
    """`llm_int8_product` as one operator of a compiled graph: the number of outliers is no constant of it."""
    return llm_int8_product(x, weight, scales, bias, threshold)


@llm_int8_op.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, threshold: float
) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


class LLMInt8Linear(WeightHolder):
    """`y = x W^T + b` by LLM.int8(). Make one with `from_linear`, or with `empty` to load a state dict into."""

    scheme: LLMInt8Scheme
    weight: nn.Parameter
    SCB: nn.Parameter
    weight_format: nn.Parameter

    def __init__(self, in_features: int, out_features: int, scheme: QuantScheme) -> None:
        if not isinstance(scheme, LLMInt8Scheme):
            raise ValueError(f"{type(self).__name__} holds no weight of the scheme {scheme}")
        super().__init__(in_features, out_features, scheme)

    def allocate(self, new: Callable[..., nn.Parameter], dtype: torch.dtype) -> None:
        self.weight = new(self.out_features, self.in_features, dtype=torch.int8)
        self.SCB = new(self.out_features, dtype=torch.float32)
        self.weight_format = new(dtype=torch.uint8)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        scheme: QuantScheme,
    ) -> LLMInt8Linear:
        """From codes int8 [N, K] and the rows' largest magnitudes float32 [N]; the linear gives its shape and bias.

        Raises ValueError where dtypes or shapes do not fit.
        """
        layer = cls(linear.in_features, linear.out_features, scheme)
        shape = (linear.out_features, linear.in_features)
        fits = tuple(codes.shape) == shape and codes.dtype == torch.int8 and zeros is None
        if not fits or tuple(scales.shape) != shape[:1] or scales.dtype != torch.float32:
            raise ValueError(f"codes {codes.dtype} {tuple(codes.shape)} and scales {scales.dtype} do not fit {shape}")
        layer.weight, layer.SCB = fixed(codes), fixed(scales)
        layer.weight_format = fixed(torch.zeros((), dtype=torch.uint8, device=codes.device))
        layer.keep_bias(linear)
        return layer

    def group_scales(self) -> torch.Tensor:
        """What a row's codes are multiplied by, float32 [N]."""
        return self.SCB.detach() * STEP

    def dequantize(self) -> torch.Tensor:
        """The weight's values, float32 [N, K]."""
        return self.weight * self.SCB.unsqueeze(1) * STEP

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        flat = input.reshape(-1, self.in_features)
        product = llm_int8_op if torch.compiler.is_compiling() else llm_int8_product
        output = product(flat, self.weight, self.SCB, self.bias, self.scheme.threshold)
        return output.view(*input.shape[:-1], self.out_features)

    def describe(self) -> str:
        return f"LLM.int8(), threshold={self.scheme.threshold:g}"
