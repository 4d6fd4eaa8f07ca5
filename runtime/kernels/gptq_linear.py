"""GPTQLinear: a linear layer that keeps its weight as a GPTQ checkpoint stores it.

Its state dict is the module's part of the checkpoint, as AutoGPTQ introduced it and GPTQModel writes it:

    qweight  int32 [ceil(K * bits / 32), N]   codes of 2, 3, 4 or 8 bits, packed along the K input columns
    qzeros   int32 [G, ceil(N * bits / 32)]   zero points, packed along the N outputs
    scales   float16 [G, N]                   G = ceil(K / group_size), or 1 per output channel
    g_idx    int32 [K]                        group of each column: k // group_size, or any other with `desc_act`
    bias     model dtype [N]                  where the layer has one

Along the packed axis element i takes bits `i * bits` to `(i + 1) * bits - 1` of one bit string over little-endian
words, which is the layout of bitpack.py; with 3 bits that is 32 codes in 3 words. A weight is `(code - zero) * scale`.
The checkpoint format `gptq` stores `zero - 1`, `gptq_v2` the zero point itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from .bitpack import pack_rows, packed_words, unpack_rows
from .packed import PackedLinear, QuantScheme, QuantState, WeightHolder, dequantize_codes

BITS = (2, 3, 4, 8)
LEAVES = ("qweight", "qzeros", "scales", "g_idx")


@dataclass(frozen=True)
class GPTQScheme(QuantScheme):
    """The grid of a weight in a GPTQ checkpoint. g_idx: the file has one, whatever it says."""

    minus_one: bool = True
    """Zero points are stored minus one: the checkpoint format `gptq`, not `gptq_v2`."""

    @property
    def format(self) -> str:
        return "gptq"

    def num_groups(self, in_features: int) -> int:
        """Scales per output row; the last group may be short. Raises ValueError for a group size below one."""
        if self.group_size == -1:
            return 1
        if self.group_size < 1:
            raise ValueError(f"a group size of {self.group_size}")
        return -(-in_features // self.group_size)

    def columns_per_group(self, in_features: int) -> int:
        return in_features if self.group_size == -1 else self.group_size

    def nbytes(self, out_features: int, in_features: int, dtype_bytes: int) -> int:
        groups = self.num_groups(in_features)
        words = packed_words(in_features, self.bits) * out_features + groups * packed_words(out_features, self.bits)
        return words * 4 + groups * out_features * 2 + (in_features * 4 if self.g_idx else 0)


class GPTQLinear(WeightHolder):
    """`y = x W^T + b` with W as a GPTQ checkpoint has it. Make one with `empty` and load a state dict into it."""

    scheme: GPTQScheme
    qweight: nn.Parameter
    qzeros: nn.Parameter
    scales: nn.Parameter
    g_idx: nn.Parameter

    def allocate(self, new: Callable[..., nn.Parameter], dtype: torch.dtype) -> None:
        bits, groups = self.scheme.bits, self.scheme.num_groups(self.in_features)
        self.dtype = dtype
        self.qweight = new(packed_words(self.in_features, bits), self.out_features, dtype=torch.int32)
        self.qzeros = new(groups, packed_words(self.out_features, bits), dtype=torch.int32)
        self.scales = new(groups, self.out_features, dtype=torch.float16)
        if self.scheme.g_idx:
            self.g_idx = new(self.in_features, dtype=torch.int32)

    @property
    def weight(self) -> torch.Tensor:
        """The dequantized weight [N, K] in the model's dtype, computed anew at each access."""
        return self.dequantize(self.dtype)

    def columns_in_order(self) -> torch.Tensor:
        """Group of each column where groups follow one another, int32 [K]."""
        size = self.scheme.columns_per_group(self.in_features)
        return torch.arange(self.in_features, dtype=torch.int32, device=self.qweight.device) // size

    def check(self) -> None:
        """Raise ValueError where g_idx names a group that there is not."""
        if self.scheme.g_idx:
            low, high = (int(value) for value in self.g_idx.aminmax())
            if low < 0 or high >= self.scales.shape[0]:
                raise ValueError(f"g_idx has group {low if low < 0 else high}, there are {self.scales.shape[0]}")

    def quant_state(self) -> QuantState:
        """Codes, scales and zero points, unpacked, for kernels that lay them out anew.

        Zero points that are all in the middle become None, and so does a g_idx of groups that follow one another.
        Raises ValueError as `check` does.
        """
        self.check()
        zeros, plain = self.zero_points(), self.columns_in_order()
        g_idx = self.g_idx.detach() if self.scheme.g_idx else plain
        size = self.scheme.columns_per_group(self.in_features)
        ordered = torch.equal(g_idx.int(), plain) and self.in_features % size == 0
        return QuantState(
            codes=self.codes(),
            scales=self.scales.detach().t().contiguous(),
            zeros=None if bool((zeros == 2 ** (self.scheme.bits - 1)).all()) else zeros,
            bits=self.scheme.bits,
            group_size=size,
            g_idx=None if ordered else g_idx,
        )

    def codes(self) -> torch.Tensor:
        """uint8 [N, K]."""
        return unpack_rows(_row_major(self.qweight.detach().t()), self.scheme.bits, self.in_features)

    def zero_points(self) -> torch.Tensor:
        """uint8 [N, G]."""
        words = self.qzeros.detach()
        if self.scheme.minus_one:
            words = plus_one(words, self.scheme.bits)
        return unpack_rows(_row_major(words), self.scheme.bits, self.out_features).t().contiguous()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight [N, K]: `(code - zero) * scale`, which float32 holds exactly, rounded once to `dtype`."""
        scales, zeros = self.scales.detach().t().contiguous().float(), self.zero_points()
        index = self.g_idx if self.scheme.g_idx else self.columns_in_order()
        return dequantize_codes(self.codes(), scales, zeros, self.scheme.bits, index).to(dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input, self.dequantize(input.dtype), self.bias)

    def describe(self) -> str:
        scheme = self.scheme
        group = "channel" if scheme.group_size == -1 else scheme.group_size
        return f"bits={scheme.bits}, group_size={group}, gptq{'' if scheme.minus_one else '_v2'}"


def _row_major(words: torch.Tensor) -> torch.Tensor:
    """Contiguous, with the strides of that also where a side is 1, so that words can be viewed as bytes."""
    return words.contiguous().reshape(-1).view(words.shape)


def plus_one(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Packed zero points of the format `gptq`, int32 [G, words], each raised by one.

    Writers subtract one from all fields of a word at once, so that a zero point 0 borrows from the field above; adding
    to the whole word gives back what it was. Three bits, whose fields cross words, are raised one by one.
    """
    if 32 % bits == 0:
        return words + sum(1 << shift for shift in range(0, 32, bits))
    count = words.shape[1] * 32 // bits
    return pack_rows((unpack_rows(_row_major(words), bits, count) + 1) & (2**bits - 1), bits)[:, : words.shape[1]]


def constant_zeros(value: int, bits: int, groups: int, out_features: int) -> torch.Tensor:
    """`qzeros`, int32 [groups, words], of `value` in every field."""
    row = pack_rows(torch.full((1, out_features), value, dtype=torch.uint8), bits)
    return row.expand(groups, -1).contiguous()


def half_scales(scales: torch.Tensor, idle: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Scales [N, G] as float16 [G, N] that give the same weights.

    idle: bool [N, G], whether all codes of a group are its zero point, so that any scale gives its weights, zeros;
    asked for where float16 does not hold a scale. Raises ValueError, with that scale, where a group needs it.
    """
    half = scales.to(torch.float16)
    inexact = half.to(scales.dtype) != scales
    if bool(inexact.any()):
        needed = inexact & ~idle()
        if bool(needed.any()):
            raise ValueError(f"float16 does not hold the scale {float(scales[needed][0]):.9g}")
        half = torch.where(inexact, torch.finfo(torch.float16).tiny, half)
    return half.t().contiguous()


def idle_groups(layer: PackedLinear) -> torch.Tensor:
    """Whether all codes of a group are its zero point, bool [N, G]."""
    state = layer.quant_state()
    (rows, columns), groups = state.codes.shape, state.scales.shape[1]
    index = state.g_idx
    index = torch.arange(columns) // state.group_size if index is None else index.long()
    middle = torch.full((rows, groups), 2 ** (state.bits - 1), dtype=torch.uint8)
    zeros = middle if state.zeros is None else state.zeros
    used = (state.codes != zeros[:, index]).to(torch.int32)
    return torch.zeros(rows, groups, dtype=torch.int32).index_add_(1, index, used) == 0
