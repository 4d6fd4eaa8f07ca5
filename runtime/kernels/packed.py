"""PackedLinear: a linear layer that keeps its weight as packed integer codes, exactly as the checkpoint stores it.

Its state dict is the module's part of a compressed-tensors `pack-quantized` checkpoint:

    weight_packed      int32 [N, ceil(K * bits / 32)]   unsigned codes, see bitpack.py
    weight_scale       model dtype [N, G]               G = K / group_size, or 1 per output channel
    weight_zero_point  int32 [ceil(N * bits / 32), G]   asymmetric schemes only; unsigned codes packed along N
    weight_g_idx       int32 [K]                        group of each column; only where they lie apart
    weight_shape       int64 [2]                        (N, K)
    bias               model dtype [N]                  where the layer has one

A weight is `(code - zero) * scale`, both steps rounded to the scale's dtype; without zero points `zero` is
`2**(bits - 1)`. This is the arithmetic of compressed-tensors' decompression, so that a layer computes what plain
transformers computes from the same folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, TypeVar

import torch
from torch import nn

from .bitpack import pack_rows, packed_words, unpack_rows


@dataclass(frozen=True)
class QuantScheme:
    """The grid of one weight: `bits` per code, `group_size` input columns per scale (-1: one group per output)."""

    bits: int
    group_size: int = -1
    symmetric: bool = True
    g_idx: bool = False
    """Columns carry their group's number (activation order without static groups)."""
    spans_rows: ClassVar[bool] = False
    """Groups run on over the ends of rows, so that their size need not divide a row."""

    @property
    def format(self) -> str:
        """compressed-tensors' name of the format that stores it."""
        return "pack-quantized"

    def num_groups(self, in_features: int) -> int:
        """Scales per output row. Raises ValueError where the group size does not divide `in_features`."""
        if self.group_size == -1:
            return 1
        if self.group_size < 1 or in_features % self.group_size:
            raise ValueError(f"group size {self.group_size} does not divide {in_features} input features")
        return in_features // self.group_size

    def columns_per_group(self, in_features: int) -> int:
        return in_features // self.num_groups(in_features)

    def nbytes(self, out_features: int, in_features: int, dtype_bytes: int) -> int:
        """Bytes of a `[out_features, in_features]` weight's tensors in this scheme, without the bias."""
        groups = self.num_groups(in_features)
        size = out_features * packed_words(in_features, self.bits) * 4 + out_features * groups * dtype_bytes + 16
        if not self.symmetric:
            size += packed_words(out_features, self.bits) * groups * 4
        return size + in_features * 4 if self.g_idx else size


@dataclass(frozen=True)
class QuantState:
    """A layer's unpacked contents, for kernels that lay weights out anew.

    codes: uint8 [N, K]; scales: the stored dtype [N, G]; zeros: uint8 [N, G], or None for `2**(bits - 1)` everywhere;
    g_idx: int32 [K], or None where column k belongs to group `k // group_size`. group_size is never -1 here.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    group_size: int
    g_idx: torch.Tensor | None = None


def dequantize_codes(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int, g_idx: torch.Tensor | None = None
) -> torch.Tensor:
    """`(code - zero) * scale` in the dtype of `scales`: codes uint8 [N, K], scales [N, G], zeros uint8 [N, G] or None.

    Integers up to 255 are exact in every floating dtype used, so that only the product is rounded.
    """
    dtype, (rows, columns) = scales.dtype, codes.shape
    if g_idx is not None:
        index = g_idx.long()
        offset = 2 ** (bits - 1) if zeros is None else zeros[:, index].to(dtype)
        return (codes.to(dtype) - offset) * scales[:, index]
    values = codes.to(dtype).view(rows, scales.shape[1], -1)
    values -= 2 ** (bits - 1) if zeros is None else zeros.to(dtype).unsqueeze(-1)
    values *= scales.unsqueeze(-1)
    return values.view(rows, columns)


Holder = TypeVar("Holder", bound="WeightHolder")


def fixed(tensor: torch.Tensor) -> nn.Parameter:
    """`tensor`, contiguous, as a parameter that is not trained."""
    return nn.Parameter(tensor.contiguous(), requires_grad=False)


def unset(device: torch.device | str, *shape: int, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialized parameter that is not trained."""
    return fixed(torch.empty(shape, dtype=dtype, device=device))


class WeightHolder(nn.Module):
    """What linear layers share that hold their weight in a form of their own, whatever the form."""

    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, scheme: QuantScheme) -> None:
        super().__init__()
        self.in_features, self.out_features, self.scheme = in_features, out_features, scheme

    @classmethod
    def empty(
        cls: type[Holder],
        in_features: int,
        out_features: int,
        scheme: QuantScheme,
        bias: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "meta",
    ) -> Holder:
        """A layer with uninitialized tensors of the right shapes, to load a state dict into.

        dtype: of the bias, and of the scales where the scheme leaves that open. Raises ValueError where the scheme's
        groups do not divide the weight.
        """
        layer = cls(in_features, out_features, scheme)
        new = partial(unset, device)
        layer.allocate(new, dtype)
        layer.bias = new(out_features, dtype=dtype) if bias else None
        return layer

    def allocate(self, new: Callable[..., nn.Parameter], dtype: torch.dtype) -> None:
        """Make all tensors but the bias by `new(*shape, dtype=...)`; `dtype` as in `empty`."""
        raise NotImplementedError

    def keep_bias(self, linear: nn.Linear) -> None:
        """Take over the bias of the layer that this one stands for."""
        self.bias = None if linear.bias is None else fixed(linear.bias.detach())

    @property
    def packed_nbytes(self) -> int:
        """Bytes held for the weight, without the bias."""
        return sum(p.nbytes for name, p in self.named_parameters(recurse=False) if name != "bias")

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"{self.describe()}"
        )

    def describe(self) -> str:
        """The scheme, for `print(model)`."""
        raise NotImplementedError


class PackedLinear(WeightHolder):
    """`y = x W^T + b` with W kept packed. Make one with `from_linear`, or with `empty` to load a state dict into."""

    weight_packed: nn.Parameter
    weight_scale: nn.Parameter
    weight_zero_point: nn.Parameter
    weight_g_idx: nn.Parameter
    kernel: Callable[[torch.Tensor], torch.Tensor] | None = None
    """What computes the layer in the place of the plain arithmetic, see `linear_dispatch.install`."""

    def allocate(self, new: Callable[..., nn.Parameter], dtype: torch.dtype) -> None:
        scheme, bits = self.scheme, self.scheme.bits
        groups = scheme.num_groups(self.in_features)
        self.weight_packed = new(self.out_features, packed_words(self.in_features, bits), dtype=torch.int32)
        self.weight_scale = new(self.out_features, groups, dtype=dtype)
        if not scheme.symmetric:
            self.weight_zero_point = new(packed_words(self.out_features, bits), groups, dtype=torch.int32)
        if scheme.g_idx:
            self.weight_g_idx = new(self.in_features, dtype=torch.int32)
        self.weight_shape = new(2, dtype=torch.int64)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        scheme: QuantScheme,
        g_idx: torch.Tensor | None = None,
    ) -> PackedLinear:
        """Pack codes (uint8 [N, K]), scales (floating [N, G]), zeros (uint8 [N, G]; None if symmetric) and, where the
        scheme has them, the groups of columns (int32 [K]).

        The linear gives its shape and its bias. Raises ValueError where shapes, symmetry or g_idx do not fit the
        scheme.
        """
        rows, columns = linear.out_features, linear.in_features
        groups = scheme.num_groups(columns)
        if tuple(codes.shape) != (rows, columns) or tuple(scales.shape) != (rows, groups):
            raise ValueError(
                f"codes {tuple(codes.shape)} and scales {tuple(scales.shape)} do not fit [{rows}, {columns}] "
                f"in {groups} groups"
            )
        if scheme.symmetric != (zeros is None):
            raise ValueError("zero points are for asymmetric schemes, and only for those")
        if scheme.g_idx != (g_idx is not None):
            raise ValueError("groups of columns are for schemes with g_idx, and only for those")
        layer = cls(columns, rows, scheme)
        layer.weight_packed = fixed(pack_rows(codes, scheme.bits))
        layer.weight_scale = fixed(scales)
        if zeros is not None:
            layer.weight_zero_point = fixed(pack_rows(zeros.t().contiguous(), scheme.bits).t())
        if g_idx is not None:
            layer.weight_g_idx = fixed(g_idx.to(torch.int32))
        layer.weight_shape = fixed(torch.tensor([rows, columns], dtype=torch.int64, device=codes.device))
        layer.keep_bias(linear)
        return layer

    @property
    def weight(self) -> torch.Tensor:
        """The dequantized weight [N, K], computed anew at each access."""
        return self.dequantize()

    def quant_state(self) -> QuantState:
        """Codes, scales and zero points, unpacked, for kernels that lay them out anew."""
        zeros, bits = None, self.scheme.bits
        if not self.scheme.symmetric:
            zeros = unpack_rows(self.weight_zero_point.t(), bits, self.out_features).t().contiguous()
        return QuantState(
            codes=unpack_rows(self.weight_packed, bits, self.in_features),
            scales=self.weight_scale.detach(),
            zeros=zeros,
            bits=bits,
            group_size=self.scheme.columns_per_group(self.in_features),
            g_idx=self.weight_g_idx if self.scheme.g_idx else None,
        )

    def dequantize(self) -> torch.Tensor:
        """The weight [N, K] in the scale's dtype, as compressed-tensors' decompression computes it."""
        state = self.quant_state()
        return dequantize_codes(state.codes, state.scales, state.zeros, state.bits, state.g_idx)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.kernel is not None:
            return self.kernel(input)
        return nn.functional.linear(input, self.dequantize(), self.bias)

    def describe(self) -> str:
        scheme = self.scheme
        group = "channel" if scheme.group_size == -1 else scheme.group_size
        return f"bits={scheme.bits}, group_size={group}, {'symmetric' if scheme.symmetric else 'asymmetric'}"
