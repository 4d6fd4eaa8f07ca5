"""What can compute a packed linear layer: for each way, when it is available and how it lays the weight out.

    dequantize  unpack the weight, then one matrix product: always there, exact by definition, and no second copy
    native      the C++ kernels of linear.py (CPU)
    int8pack    torch's weight-only int8 product (one scale a row, symmetric)
    int4pack    torch's weight-only int4 product (groups of 32 to 256)
    triton      our Triton kernel for a few rows of 4 bits (CUDA, or the CPU in Triton's interpreter)
    native-int8, int-mm   int8 activations, scaled at run time: C++ kernels; torch._int_mm (one scale a row)

The last two quantize activations, so they are used only where that is allowed.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from .packed import PackedLinear, QuantScheme

Run = Callable[[torch.Tensor], torch.Tensor]
"""x [rows, K] → [rows, N] in the dtype of x, the bias included."""

INT4_GROUPS = (32, 64, 128, 256)
INT_MM_ROWS_CUDA = 17
"""Fewest rows that `torch._int_mm` takes on CUDA."""


@dataclass(frozen=True)
class LinearCase:
    """All that a choice of kernel may depend on besides the number of rows. group_size is -1 for one scale a row."""

    out_features: int
    in_features: int
    bits: int
    group_size: int
    symmetric: bool
    g_idx: bool
    bias: bool
    dtype: torch.dtype
    device: str

    @classmethod
    def of(cls, layer: PackedLinear) -> LinearCase:
        scheme, scale = layer.scheme, layer.weight_scale
        return cls(
            layer.out_features, layer.in_features, scheme.bits, scheme.group_size, scheme.symmetric, scheme.g_idx,
            layer.bias is not None, scale.dtype, scale.device.type,
        )  # fmt: skip

    @property
    def per_row(self) -> bool:
        return self.group_size in (-1, self.in_features)

    @property
    def format(self) -> str:
        """Such as `int4 g64` or `int8 row asymmetric`."""
        grid = "row" if self.per_row else f"g{self.group_size}"
        more = {"asymmetric": not self.symmetric, "g_idx": self.g_idx, "bias": self.bias}
        return " ".join([f"int{self.bits}", grid, *(word for word, there in more.items() if there)])

    def synthetic(self, seed: int = 0) -> PackedLinear:
        """A layer of this case with random codes, on its device."""
        generator = torch.Generator().manual_seed(seed)
        rows, columns, most = self.out_features, self.in_features, 2**self.bits
        scheme = QuantScheme(self.bits, self.group_size, self.symmetric)
        groups = scheme.num_groups(columns)
        codes = torch.randint(0, most, (rows, columns), generator=generator, dtype=torch.uint8)
        scales = (torch.rand(rows, groups, generator=generator) + 0.5).mul_(0.02 / most).to(self.dtype)
        zeros = None
        if not self.symmetric:
            zeros = torch.randint(most // 4, most - most // 4, (rows, groups), generator=generator, dtype=torch.uint8)
        with torch.device("meta"):
            shape = nn.Linear(columns, rows, bias=False)
        if self.bias:
            shape.bias = nn.Parameter(torch.randn(rows, generator=generator).to(self.dtype), requires_grad=False)
        layer = PackedLinear.from_linear(shape, codes, scales, zeros, scheme)
        if self.g_idx:
            layer.scheme = QuantScheme(self.bits, self.group_size, self.symmetric, True)
            order = torch.arange(columns, dtype=torch.int32).div(columns // groups, rounding_mode="floor")
            layer.weight_g_idx = nn.Parameter(order, requires_grad=False)
        return layer.to(self.device)


@dataclass(frozen=True)
class Candidate:
    """One way. unavailable(case, rows): why not, or None. prepare: the weight laid out for it. copies: whether that is
    a second copy of the weight."""

    name: str
    unavailable: Callable[[LinearCase, int], str | None]
    prepare: Callable[[PackedLinear], Run]
    copies: bool = True
    quantizes: bool = False
    """Whether activations are quantized."""


# -- dequantize


def _dequantize(layer: PackedLinear) -> Run:
    return lambda x: nn.functional.linear(x, layer.dequantize(), layer.bias)


# -- C++ kernels


def _no_native(case: LinearCase, rows: int) -> str | None:
    from .build import unavailable_reason

    if case.device != "cpu":
        return "CPU only"
    if case.g_idx:
        return "columns are ordered by activation (g_idx)"
    group = case.in_features if case.per_row else case.group_size
    if not case.per_row and group % 32:
        return f"groups of {group} are no multiple of 32"
    return unavailable_reason()


def _native(activation: str | None) -> Callable[[PackedLinear], Run]:
    def prepare(layer: PackedLinear) -> Run:
        from .linear import NativeLinear

        state = layer.quant_state()
        bits, zeros = (4 if state.bits <= 4 else 8), state.zeros
        if bits != state.bits and zeros is None:  # narrower codes travel in the next larger format
            zeros = torch.full(state.scales.shape, 2 ** (state.bits - 1), dtype=torch.uint8)
        inputs = activation or ("bfloat16" if state.scales.dtype == torch.bfloat16 else "float32")
        packed = NativeLinear.from_codes(
            state.codes, state.scales, zeros, bits=bits, bias=layer.bias, activation=inputs
        )
        return lambda x: packed(x).to(x.dtype)

    return prepare


# -- torch's weight-only products


def _no_int8pack(case: LinearCase, rows: int) -> str | None:
    if case.bits != 8 or not case.per_row or not case.symmetric or case.g_idx:
        return "takes 8 bits, symmetric, one scale a row"
    return None


def _signed(layer: PackedLinear) -> torch.Tensor:
    """Codes of a symmetric layer as int8 [N, K] around 0."""
    state = layer.quant_state()
    return (state.codes.to(torch.int16) - 2 ** (state.bits - 1)).to(torch.int8).contiguous()


def _int8pack(layer: PackedLinear) -> Run:
    codes, scales = _signed(layer), layer.weight_scale.detach().flatten()
    return lambda x: _biased(torch._weight_int8pack_mm(x, codes, scales), layer.bias)


def _no_int4pack(case: LinearCase, rows: int) -> str | None:
    if case.bits != 4 or case.group_size not in INT4_GROUPS or case.g_idx:
        return f"takes 4 bits in groups of {', '.join(map(str, INT4_GROUPS))}"
    if case.out_features % 16:
        return f"{case.out_features} outputs are no multiple of 16"
    if case.device == "cuda":
        if case.dtype != torch.bfloat16:
            return "takes bfloat16 on CUDA"
        if case.in_features % 128:
            return f"{case.in_features} inputs are no multiple of 128"
    return None


def _int4pack(layer: PackedLinear) -> Run:
    state, group = layer.quant_state(), layer.scheme.group_size
    scales = state.scales
    zeros = torch.zeros_like(scales) if state.zeros is None else (8.0 - state.zeros.float()) * scales.float()
    # a weight is (code - 8) * scale + zero: (code - z) * scale = (code - 8) * scale + (8 - z) * scale
    table = torch.stack([scales, zeros.to(scales.dtype)], dim=-1).transpose(0, 1).contiguous()
    if scales.is_cuda:
        packed = torch._convert_weight_to_int4pack((state.codes[:, ::2] << 4 | state.codes[:, 1::2]).contiguous(), 8)
        return lambda x: _biased(torch._weight_int4pack_mm(x, packed, group, table), layer.bias)
    packed = torch._convert_weight_to_int4pack_for_cpu(state.codes.int(), 2)
    return lambda x: _biased(torch._weight_int4pack_mm_for_cpu(x, packed, group, table), layer.bias)


def _biased(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return y if bias is None else y + bias


# -- Triton


def _no_triton(case: LinearCase, rows: int) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if case.device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return "needs CUDA (or Triton's interpreter)"
    if case.bits != 4 or case.g_idx or case.in_features % 8 or (not case.per_row and case.group_size % 8):
        return "takes 4 bits in groups of a multiple of 8"
    return f"takes at most {_triton_rows()} rows" if rows > _triton_rows() else None


def _triton_rows() -> int:
    from .triton_linear import MAX_ROWS

    return MAX_ROWS


def _triton(layer: PackedLinear) -> Run:
    from .triton_linear import w4_rows

    zeros, packed = layer.quant_state().zeros, layer.weight_packed.detach()
    scales = layer.weight_scale.detach().contiguous()
    return lambda x: w4_rows(x.contiguous(), packed, scales, zeros, layer.bias)


# -- int8 activations, one scale a row on both sides


def _no_int_mm(case: LinearCase, rows: int) -> str | None:
    if not case.per_row or not case.symmetric or case.g_idx:
        return "takes symmetric weights with one scale a row"
    if case.device == "cuda":
        if rows < INT_MM_ROWS_CUDA:
            return f"takes at least {INT_MM_ROWS_CUDA} rows on CUDA"
        if case.in_features % 8 or case.out_features % 8:
            return "takes sizes that are multiples of 8 on CUDA"
    return None


def _int_mm(layer: PackedLinear) -> Run:
    codes, scales = _signed(layer).t(), layer.weight_scale.detach().float().flatten()

    def run(x: torch.Tensor) -> torch.Tensor:
        step = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-30) / 127
        rounded = (x.float() / step).round_().to(torch.int8)
        return _biased((torch._int_mm(rounded, codes).float() * (step * scales)).to(x.dtype), layer.bias)

    return run


CANDIDATES = {
    candidate.name: candidate
    for candidate in (
        Candidate("dequantize", lambda case, rows: None, _dequantize, copies=False),
        Candidate("native", _no_native, _native(None)),
        Candidate("int8pack", _no_int8pack, _int8pack),
        Candidate("int4pack", _no_int4pack, _int4pack),
        Candidate("triton", _no_triton, _triton, copies=False),
        Candidate("native-int8", _no_native, _native("int8"), quantizes=True),
        Candidate("int-mm", _no_int_mm, _int_mm, quantizes=True),
    )
}
