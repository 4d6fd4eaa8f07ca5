"""A linear layer over weights prepacked for the native kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import nn

from .native import ACTIVATION_FORMATS, SCALE_FORMATS, WEIGHT_FORMATS, contiguous, library

MAX_GROUP = 65536  # 255 * 127 * 65536 < 2^31: exact 32-bit sums


class NativeLinear:
    """y = x Wᵀ + b with weights in `float32`, `bfloat16`, `int8` or `int4`, and activations that enter the products as
    `float32`, `bfloat16` or `int8`. The arithmetic is stated in linear.h.

    Float weights take activations of their own type. Integer weights take any: `int8` quantizes each token and group
    symmetrically at run time (scale max|x| / 127, round to nearest even), the others use the activations as they are.
    dequantize, with integer weights and bfloat16 activations: each weight is rounded to bfloat16 before its product, as
    transformers does when it decompresses a layer; otherwise scales multiply the sums of their groups.
    """

    def __init__(
        self,
        weight: str,
        activation: str,
        out_features: int,
        in_features: int,
        group_size: int,
        symmetric: bool,
        scale_dtype: torch.dtype = torch.float32,
        dequantize: bool = False,
    ):
        if weight not in WEIGHT_FORMATS or activation not in ACTIVATION_FORMATS:
            raise ValueError(f"unknown weight or activation format: {weight!r}, {activation!r}")
        if weight in ("float32", "bfloat16") and activation != weight:
            raise ValueError(f"{weight} weights take {weight} activations, not {activation}")
        if out_features < 1 or in_features < 1:
            raise ValueError(f"a linear layer of {out_features} x {in_features} weights")
        if group_size and (group_size % 32 or in_features % group_size):
            raise ValueError(f"group_size {group_size} is not a multiple of 32 that divides {in_features} columns")
        if (group_size or in_features) > MAX_GROUP:
            raise ValueError(f"groups of more than {MAX_GROUP} columns overflow 32-bit sums")
        self.weight_format, self.activation_format = weight, activation
        self.out_features, self.in_features = out_features, in_features
        self.group_size = group_size or in_features
        self.handle: int | None = library().llmopt_linear_create(
            WEIGHT_FORMATS[weight],
            ACTIVATION_FORMATS[activation],
            out_features,
            in_features,
            group_size,
            int(symmetric),
            SCALE_FORMATS[scale_dtype],
            int(dequantize),
        )
        if not self.handle:
            raise MemoryError(f"no memory for a linear layer of {out_features} x {in_features} {weight} weights")

    @classmethod
    def from_weight(
        cls, weight: torch.Tensor, bias: torch.Tensor | None = None, *, dtype: str | None = None
    ) -> NativeLinear:
        """From `weight` [out, in], float32 or bfloat16 (other float types go through float32). dtype: `float32` or
        `bfloat16`; None keeps the weight's own."""
        if weight.dim() != 2 or not weight.is_floating_point():
            raise ValueError(f"expected a float matrix, got {tuple(weight.shape)} {weight.dtype}")
        kept = "bfloat16" if weight.dtype == torch.bfloat16 else "float32"
        layer = cls(dtype or kept, dtype or kept, weight.shape[0], weight.shape[1], 0, True)
        values = contiguous(weight, torch.bfloat16 if kept == "bfloat16" else torch.float32)
        library().llmopt_linear_pack_values(
            layer.handle, 0, weight.shape[0], values.data_ptr(), int(kept == "bfloat16")
        )
        layer._set_bias(bias)
        return layer

    @classmethod
    def from_codes(
        cls,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        *,
        bits: int,
        bias: torch.Tensor | None = None,
        activation: str = "int8",
        dequantize: bool = False,
    ) -> NativeLinear:
        """From codes uint8 [out, in] below 2**bits, scales float [out, groups] and zero points uint8 [out, groups], or
        None for the constant 2**(bits-1): weight = (code - zero) * scale. bits: 4 or 8. Columns are split evenly over
        the groups; with more than one, a group is a multiple of 32 columns. Raises ValueError for anything else."""
        if bits not in (4, 8):
            raise ValueError(f"bits must be 4 or 8, not {bits}")
        if codes.dim() != 2 or codes.dtype != torch.uint8:
            raise ValueError(f"codes must be a uint8 matrix, got {tuple(codes.shape)} {codes.dtype}")
        rows, columns = codes.shape
        if scales.dim() != 2 or scales.shape[0] != rows or scales.shape[1] < 1 or columns % scales.shape[1]:
            raise ValueError(f"scales {tuple(scales.shape)} do not fit codes {tuple(codes.shape)}")
        if zeros is not None and zeros.shape != scales.shape:
            raise ValueError(f"zeros {tuple(zeros.shape)} do not fit scales {tuple(scales.shape)}")
        if bits == 4 and int(codes.max()) > 15:
            raise ValueError("4-bit codes must be below 16")
        codes, zeros = _centred(codes, zeros, bits)
        groups = scales.shape[1]
        kept = _narrowest(scales.detach())
        layer = cls(
            f"int{bits}", activation, rows, columns, 0 if groups == 1 else columns // groups, zeros is None, kept.dtype,
            dequantize,
        )  # fmt: skip
        packed = contiguous(codes, torch.uint8), contiguous(kept, kept.dtype)
        shifts = None if zeros is None else contiguous(zeros, torch.uint8)
        library().llmopt_linear_pack_codes(
            layer.handle,
            0,
            rows,
            packed[0].data_ptr(),
            packed[1].data_ptr(),
            None if shifts is None else shifts.data_ptr(),
        )
        layer._set_bias(bias)
        return layer

    def _set_bias(self, bias: torch.Tensor | None) -> None:
        if bias is not None:
            if bias.shape != (self.out_features,):
                raise ValueError(f"bias {tuple(bias.shape)} does not fit {self.out_features} outputs")
            values = contiguous(bias, torch.float32)  # has to outlive the call
            library().llmopt_linear_set_bias(self.handle, values.data_ptr())

    def reorder_inputs(self, order: torch.Tensor) -> NativeLinear:
        """Let column i of the packed weight multiply input `order[i]`, a permutation int64 or int32 [in]; returns the
        layer. Raises ValueError where it is none."""
        if not torch.equal(order.long().sort().values, torch.arange(self.in_features)):
            raise ValueError(f"the order is no permutation of {self.in_features} columns")
        values = contiguous(order, torch.int32)
        library().llmopt_linear_set_order(self.handle, values.data_ptr())
        return self

    def sum_as_torch(self) -> NativeLinear:
        """Cut the sums over columns as torch's own bfloat16 products do on this machine; returns the layer."""
        together, alone = torch_chunks(self.in_features)
        library().llmopt_linear_set_chunks(self.handle, together, alone)
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights, scales, zero points and bias."""
        return library().llmopt_linear_bytes(self.handle)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] of any float type -> float32 [..., out]."""
        if x.shape[-1] != self.in_features:
            raise ValueError(f"input {tuple(x.shape)} does not end in {self.in_features} features")
        rows = contiguous(x, torch.float32).reshape(-1, self.in_features)
        y = torch.empty(rows.shape[0], self.out_features)
        if library().llmopt_linear_forward(
            self.handle, rows.shape[0], rows.data_ptr(), self.in_features, y.data_ptr(), self.out_features
        ):
            raise MemoryError("no memory for a native linear layer's activations")
        return y.reshape(*x.shape[:-1], self.out_features)

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        handle, self.handle = getattr(self, "handle", None), None
        if handle and not ending():  # modules are taken apart then, and the memory goes with the process
            library().llmopt_linear_free(handle)


CHUNKS = (0, 256, 384, 512, 768, 1024, 2048, 4096)


@lru_cache(maxsize=64)
def torch_chunks(in_features: int) -> tuple[int, int]:
    """Columns that torch's bfloat16 matrix product sums in one go, for several rows and for one; 0: all of them.

    Found by trial: over weights whose products cancel, the result is nothing but the rounding of the float32 sums,
    which differs with their order. Where no candidate gives torch's bits (another instruction set), both are 0.
    """
    columns, rows = in_features, 16
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, columns, generator=generator).bfloat16()
    weight = torch.randn(256, columns, generator=generator).bfloat16()
    half = columns // 2
    x[:, columns - half :] = x[:, :half].flip(1)
    weight[:, columns - half :] = -weight[:, :half].flip(1)
    layer = NativeLinear.from_weight(weight)
    found = []
    for inputs in (x, x[:1]):
        wanted = nn.functional.linear(inputs, weight)
        for chunk in CHUNKS:
            if chunk < columns:
                library().llmopt_linear_set_chunks(layer.handle, chunk, chunk)
                if torch.equal(layer(inputs).bfloat16(), wanted):
                    found.append(chunk)
                    break
    if len(found) < 2 or (all(found) and max(found) % min(found)):
        return 0, 0
    return found[0], found[1]


def _centred(codes: torch.Tensor, zeros: torch.Tensor | None, bits: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same differences `code - zero`: a zero point that all groups share becomes the format's constant (None) where
    the codes then still fit it; other codes of at most five bits move to the middle of the 8-bit range, which is where
    the kernels know them as narrow."""
    if zeros is None or not zeros.numel():
        return codes, zeros
    low, high = (int(v) for v in zeros.aminmax())
    first, last = (int(v) for v in codes.aminmax())
    shift = 2 ** (bits - 1) - low
    if low == high and first + shift >= 0 and last + shift < 2**bits:
        return (codes + shift % 256 if shift else codes), None  # bytes wrap
    if bits == 8 and last < 32 and high < 144:
        return codes + 112, zeros.to(torch.uint8) + 112
    return codes, zeros


def _narrowest(scales: torch.Tensor) -> torch.Tensor:
    """The scales in bfloat16 or float16 where that holds every one exactly, else in float32."""
    exact = scales.float()
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(exact.to(dtype).float(), exact):
            return exact.to(dtype)
    return exact


def order_of_groups(g_idx: torch.Tensor, group_size: int) -> torch.Tensor:
    """The columns, group by group, int64 [K], of a layer whose column k is in group `g_idx[k]`. Raises ValueError where
    the groups do not have `group_size` columns each."""
    order = torch.argsort(g_idx, stable=True)
    if not torch.equal(g_idx[order].long(), torch.arange(len(g_idx)) // group_size) or len(g_idx) % group_size:
        raise ValueError(f"its groups are not of {group_size} columns each")
    return order


def quantize_rows(weight: torch.Tensor, *, bits: int, group_size: int = 0) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Symmetric round-to-nearest quantization of `weight` [out, in] at load: codes uint8 [out, in], scales float
    [out, groups], and None for the constant zero point 2**(bits-1). group_size 0: one scale a row.

    The scale is max|w| / (2**(bits-1) - 1) for 8 bits; for 4 bits the signed extreme maps to -8, so that all sixteen
    codes are used. Scales of groups are rounded to bfloat16 before the codes are chosen, which halves their memory.
    """
    rows, columns = weight.shape
    size = group_size or columns
    if columns % size:
        raise ValueError(f"group_size {size} does not divide {columns} columns")
    values = weight.detach().float().reshape(rows, columns // size, size)
    zero = 2 ** (bits - 1)
    if bits == 8:
        scales = values.abs().amax(-1) / (zero - 1)
    else:
        extreme = values.gather(-1, values.abs().argmax(-1, keepdim=True)).squeeze(-1)
        scales = extreme / -zero
    if group_size:
        scales = scales.bfloat16().float()
    safe = torch.where(scales == 0, torch.ones_like(scales), scales)
    codes = (values / safe.unsqueeze(-1)).round_().add_(zero).clamp_(0, 2 * zero - 1).to(torch.uint8)
    return codes.reshape(rows, columns), scales, None
