"""Linear layers with eight-bit weights whose inputs are quantized too, as they come in (W8A8).

    Int8Linear     `int-quantized`: weight int8 [N, K], one scale an output channel; inputs int8, one scale a token
    Float8Linear   `float-quantized`: weight float8_e4m3fn [N, K], one scale a channel or a square block; inputs
                   float8_e4m3fn, one scale a token, or a token and block of columns

Their state dict is the module's part of a compressed-tensors checkpoint: `weight`, `weight_scale` (model dtype; [N, 1]
a channel, [ceil(N / B), K / B] a block of B x B), `bias`, and `input_scale` [1] where inputs have a fixed scale.

An input x gets the scale max|x| / 127 (int8) or max|x| / 448 (e4m3), in float32, and is rounded to nearest even. This
is vLLM's arithmetic; compressed-tensors' own emulation, which plain transformers runs, takes max|x| / 127.5 for int8
and computes in the model's dtype. Products are summed exactly (int8) or in float32, then scaled in float32. A layer
whose `emulates` is true computes as that emulation does, operation by operation (slower, for comparisons).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from .packed import QuantScheme, QuantState, WeightHolder, fixed

FLOAT8 = torch.float8_e4m3fn
LARGEST = {torch.int8: 127.0, FLOAT8: 448.0}
EMULATED_RANGE = {torch.int8: 127.5, FLOAT8: 448.0}
"""Half the range of the codes, by which compressed-tensors divides max|x|."""
KINDS = {"int8": torch.int8, "float8": FLOAT8}
CPU_MULTIPLIES_BYTES = bool(getattr(torch.cpu, "_is_vnni_supported", lambda: False)())
"""Whether this CPU sums products of bytes exactly; older instructions saturate in between."""
CUDA_INT_ROWS = 32
"""`torch._int_mm` takes no fewer than 17 rows on CUDA; fewer are padded to this many."""

Layer = TypeVar("Layer", bound="ScaledLinear")


@dataclass(frozen=True)
class ScaledScheme(QuantScheme):
    """Eight-bit weights and inputs of the type `kind`: `int8` or `float8`.

    group_size: -1 for one scale an output channel and a token; B for one a block of B x B weights, and a token and B
        columns (`float8` only).
    per_tensor: one scale for the whole weight; static_input: one for all inputs, from calibration (`float8` only). Read
        in other tools' checkpoints, never written.
    Raises ValueError for a combination that no layer here runs.
    """

    bits: int = 8
    kind: str = "int8"
    per_tensor: bool = False
    static_input: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.bits != 8 or not self.symmetric or self.g_idx:
            raise ValueError(f"no scaled scheme of {self.bits} bits, {self.kind}, symmetric={self.symmetric}")
        if self.kind == "int8" and (self.group_size != -1 or self.per_tensor or self.static_input):
            raise ValueError("int8 weights with int8 inputs have one scale an output channel and a token")
        if self.group_size != -1 and (self.per_tensor or self.static_input):
            raise ValueError("scales of blocks go with neither a scale of the whole weight nor a fixed input scale")

    @property
    def format(self) -> str:
        """compressed-tensors' name of the format."""
        return "int-quantized" if self.kind == "int8" else "float-quantized"

    @property
    def activation(self) -> str:
        """What inputs are quantized to."""
        return self.kind

    def scale_shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        """Shape of `weight_scale`. Raises ValueError where the block size does not divide `in_features`."""
        groups = self.num_groups(in_features)
        if self.per_tensor:
            return (1,)
        return (out_features, 1) if self.group_size == -1 else (-(-out_features // self.group_size), groups)

    def nbytes(self, out_features: int, in_features: int, dtype_bytes: int) -> int:
        count = 1
        for size in self.scale_shape(out_features, in_features):
            count *= size
        return out_features * in_features + (count + self.static_input) * dtype_bytes


def quantize_tokens(
    x: torch.Tensor, dtype: torch.dtype, group_size: int = -1, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize `x` [M, K], any floating dtype, to `dtype` (int8 or float8_e4m3fn).

    group_size: columns that share a scale, -1 for a whole row. scale: a fixed one for everything, float [1].
    Returns codes [M, K] and scales float32 [M, G] ([1, 1] where fixed); a row of zeros has the scale 1.
    """
    largest = LARGEST[dtype]
    values = x.float().unflatten(-1, (-1, x.shape[-1] if group_size == -1 else group_size))
    if scale is None:
        scales = values.abs().amax(-1) / largest
        scales = torch.where(scales == 0, 1.0, scales)
    else:
        scales = scale.float().view(1, 1)
    codes = values / scales.unsqueeze(-1)
    if dtype == torch.int8:
        codes = codes.round_()
    return codes.clamp_(-largest - (dtype == torch.int8), largest).to(dtype).view(x.shape), scales


def emulate_quantized(
    x: torch.Tensor, dtype: torch.dtype, group_size: int = -1, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """What compressed-tensors' emulation makes of the inputs `x` [..., K]: quantized and dequantized in x's own dtype.

    The arguments are those of `quantize_tokens`.
    """
    values = x if group_size == -1 else x.unflatten(-1, (-1, group_size))
    if scale is None:
        scale = values.abs().amax(-1, keepdim=True) / EMULATED_RANGE[dtype]
        scale = torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)
    codes = (values / scale).clamp(-LARGEST[dtype] - (dtype == torch.int8), LARGEST[dtype])
    codes = codes.round() if dtype == torch.int8 else codes.to(dtype).to(scale.dtype)
    return (codes * scale).to(x.dtype).view(x.shape)


class ScaledLinear(WeightHolder):
    """What the two layers share. Make one with `from_linear`, or with `empty` to load a state dict into."""

    activation: str
    """What inputs are quantized to; the native kernels run `int8` as this module does."""
    emulates = False
    """Whether it computes as compressed-tensors' emulation does in transformers, bit for bit."""
    inputs_kept = False
    """Whether inputs are not quantized then: transformers stacks experts, and computes with their weights alone."""
    scheme: ScaledScheme
    weight: nn.Parameter
    weight_scale: nn.Parameter
    input_scale: nn.Parameter

    def __init__(self, in_features: int, out_features: int, scheme: QuantScheme) -> None:
        if not isinstance(scheme, ScaledScheme) or scheme.kind != self.activation:
            raise ValueError(f"{type(self).__name__} holds no weight of the scheme {scheme}")
        super().__init__(in_features, out_features, scheme)

    def allocate(self, new: Callable[..., nn.Parameter], dtype: torch.dtype) -> None:
        own = self.scheme
        self.weight = new(self.out_features, self.in_features, dtype=KINDS[own.kind])
        self.weight_scale = new(*own.scale_shape(self.out_features, self.in_features), dtype=dtype)
        if own.static_input:
            self.input_scale = new(1, dtype=dtype)

    @classmethod
    def from_linear(
        cls: type[Layer],
        linear: nn.Linear,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        scheme: QuantScheme,
    ) -> Layer:
        """From codes [N, K] (int8 layers: uint8 with the zero at 128; float8 layers: float8_e4m3fn) and scales.

        The linear gives its shape and its bias. Raises ValueError where dtype or shapes do not fit the scheme.
        """
        layer = cls(linear.in_features, linear.out_features, scheme)
        shape = (linear.out_features, linear.in_features)
        wanted = layer.scheme.scale_shape(*shape)
        dtype = torch.uint8 if layer.scheme.kind == "int8" else FLOAT8
        if tuple(codes.shape) != shape or codes.dtype != dtype or tuple(scales.shape) != wanted or zeros is not None:
            raise ValueError(
                f"codes {codes.dtype} {tuple(codes.shape)} and scales {tuple(scales.shape)} do not fit {dtype} "
                f"{list(shape)} with scales {list(wanted)} and no zero points"
            )
        if dtype == torch.uint8:
            codes = (codes ^ 128).view(torch.int8)
        layer.weight, layer.weight_scale = fixed(codes), fixed(scales)
        layer.keep_bias(linear)
        return layer

    def dequantize(self) -> torch.Tensor:
        """The weight's values, float32 [N, K]."""
        scale, block = self.weight_scale.float(), self.scheme.group_size
        if block != -1:
            scale = scale.repeat_interleave(block, 0)[: self.out_features].repeat_interleave(block, 1)
        return self.weight.float() * scale

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        fixed = self.input_scale if self.scheme.static_input else None
        if self.emulates:
            values = input
            if not self.inputs_kept:
                values = emulate_quantized(input, self.weight.dtype, self.scheme.group_size, fixed)
            return nn.functional.linear(values, self.dequantize().to(input.dtype), self.bias)
        flat = input.reshape(-1, self.in_features)
        codes, scales = quantize_tokens(flat, self.weight.dtype, self.scheme.group_size, fixed)
        output = self._product(codes, scales, input.dtype)
        if self.bias is not None:
            output = output + self.bias
        return output.to(input.dtype).view(*input.shape[:-1], self.out_features)

    def _product(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`(codes scales) W^T` [M, N], in float32 or, where a kernel has rounded it already, in `dtype`."""
        raise NotImplementedError

    def describe(self) -> str:
        scales = "tensor" if self.scheme.per_tensor else "channel"
        if self.scheme.group_size != -1:
            scales = f"block of {self.scheme.group_size} x {self.scheme.group_size}"
        return f"{self.activation}, a scale per {scales}"


class Int8Linear(ScaledLinear):
    """`y = s_x (x_int8 W_int8^T) s_w + b`, the product of integers exact wherever the machine has one."""

    activation = "int8"

    def quant_state(self) -> QuantState:
        """Codes uint8 with the zero at 128, and one scale a row, for kernels that lay them out anew."""
        codes = self.weight.view(torch.uint8) ^ 128
        return QuantState(codes, self.weight_scale.detach(), None, bits=8, group_size=self.in_features)

    def _product(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return integer_product(codes, self.weight).mul_(scales).mul_(self.weight_scale.float().t())


def integer_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x weight^T` of int8 [M, K] and [N, K], as float32 [M, N].

    Summed in int32 where the machine multiplies bytes exactly (CUDA; CPUs with VNNI), else in float32.
    """
    if x.is_cuda and x.shape[1] % 8 == 0 and weight.shape[0] % 8 == 0:
        rows = x.shape[0]
        padded = nn.functional.pad(x, (0, 0, 0, CUDA_INT_ROWS - rows)) if rows < CUDA_INT_ROWS else x
        return torch._int_mm(padded, weight.t())[:rows].float()
    if x.device.type == "cpu" and CPU_MULTIPLIES_BYTES:
        return torch._int_mm(x, weight.t()).float()
    return x.float() @ weight.float().t()


class Float8Linear(ScaledLinear):
    """`y = (s_x x_e4m3) (s_w W_e4m3)^T + b`: one scaled product on GPUs that have it, dequantized values elsewhere."""

    activation = "float8"

    def _product(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if dtype == torch.bfloat16 and self._has_kernel(codes):
            rows = (codes.shape[0], self.out_features)
            return torch._scaled_mm(
                codes,
                self.weight.t(),
                scale_a=scales.expand(rows[0], 1).contiguous(),
                scale_b=self.weight_scale.float().view(1, -1).expand(1, rows[1]).contiguous(),
                out_dtype=dtype,
            )
        values = (codes.float().unflatten(-1, (scales.shape[1], -1)) * scales.unsqueeze(-1)).flatten(1)
        return nn.functional.linear(values, self.dequantize())

    def _has_kernel(self, codes: torch.Tensor) -> bool:
        """Whether the GPU multiplies e4m3 with a scale a row and column: compute capability 8.9, multiples of 16."""
        if not codes.is_cuda or self.scheme.group_size != -1 or self.in_features % 16 or self.out_features % 16:
            return False
        return torch.cuda.get_device_capability(codes.device) >= (8, 9)
