"""Integer codes and scales as llama.cpp's blocks of 32 values, without rounding anything but a scale to float16.

Layouts (ggml-common.h): a block begins with its scale `d` in float16; then

    Q4_0   16 bytes, byte j holds code j in its low and code j + 16 in its high half; value d * (code - 8)
    Q4_1   the minimum `m` in float16, then 16 bytes as above;                       value d * code + m
    Q5_0   4 bytes with each code's fifth bit, then 16 bytes with its other four;    value d * (code - 16)
    Q5_1   `m`, then as Q5_0;                                                        value d * code + m
    Q8_0   32 signed bytes;                                                          value d * code
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...optimizer.errors import RunError

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK = 32
OFFSETS = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 0}
"""Code that stands for zero in the types without a minimum."""
FLOAT16_MAX = 65504.0


@dataclass(frozen=True)
class Codes:
    """A quantized weight: value = (codes - zeros) * scales, exact in float64.

    codes: int16 [N, K]; scales: float32 [N, G]; zeros: int16 [N, G]. K is G times the group size.
    """

    codes: NDArray[Any]
    scales: NDArray[Any]
    zeros: NDArray[Any]
    bits: int
    symmetric: bool
    scattered: bool = False
    """Groups are no equal runs of columns: activation order without static groups, or a last group that is shorter."""

    @property
    def group_size(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    def dequantize(self) -> NDArray[Any]:
        """float32 [N, K]; exact, because a code has at most 9 bits and a scale at most 11 of mantissa, or rounded
        once where scales are float32."""
        size = self.group_size
        centred = self.codes.astype(np.float32) - np.repeat(self.zeros, size, axis=1).astype(np.float32)
        return centred * np.repeat(self.scales, size, axis=1)

    def rows(self, order: NDArray[Any]) -> Codes:
        """The same weight with its rows in another order."""
        return replace(self, codes=self.codes[order], scales=self.scales[order], zeros=self.zeros[order])


def choose(weight: Codes) -> tuple[str, str]:
    """The type that holds the weight value for value, and ""; or "" and why there is none."""
    if weight.scattered:
        why = "activation order without static groups, or a short last one"
        return "", f"its groups are no equal runs of columns ({why})"
    if weight.group_size % BLOCK:
        return "", f"its group size {weight.group_size} is no multiple of {BLOCK}"
    if weight.symmetric and weight.bits <= 5:
        return ("Q4_0" if weight.bits <= 4 else "Q5_0"), ""
    if not weight.symmetric and weight.bits <= 5:
        return ("Q4_1" if weight.bits <= 4 else "Q5_1"), ""
    centred = weight.codes - np.repeat(weight.zeros, weight.group_size, axis=1)
    if centred.min() < -128 or centred.max() > 127:
        return "", "its codes about their zero points leave the range of a signed byte"
    return "Q8_0", ""


def encode(weight: Codes, kind: str, where: str = "") -> NDArray[Any]:
    """Bytes uint8 [N, bytes a row] of a weight in a type that `choose` gave for it.

    Raises RunError where a scale or minimum is beyond float16.
    """
    rows, columns = weight.codes.shape
    repeat = weight.group_size // BLOCK
    scales = np.repeat(weight.scales, repeat, axis=1)
    parts = [half(scales, where)]
    if kind in OFFSETS:
        zeros = np.repeat(weight.zeros, weight.group_size, axis=1)
        codes = weight.codes - zeros + OFFSETS[kind]
    else:
        codes = weight.codes
        parts.append(half(-weight.zeros.astype(np.float32) * weight.scales, where).repeat(repeat, axis=1))
    blocks = codes.reshape(rows, columns // BLOCK, BLOCK)
    if kind == "Q8_0":
        parts.append(blocks.astype(np.int8).view(np.uint8))
    else:
        parts += _nibbles(blocks.astype(np.uint8), fifth=kind.startswith("Q5"))
    return np.concatenate(parts, axis=2).reshape(rows, -1)


def half(values: NDArray[Any], where: str = "") -> NDArray[Any]:
    """float32 [N, B] as little-endian float16 bytes uint8 [N, B, 2]. Raises RunError where one is beyond it."""
    if values.size and not np.abs(values).max() <= FLOAT16_MAX:
        raise RunError("a scale is beyond float16", where, "Export this model in a floating-point type")
    return values.astype("<f2")[..., None].view(np.uint8)


def scale_error(weight: Codes, kind: str) -> float:
    """Largest relative difference that float16 makes to a scale or minimum; 0 where all are held exactly."""
    values = [weight.scales]
    if kind not in OFFSETS:
        values.append(-weight.zeros.astype(np.float32) * weight.scales)
    worst = 0.0
    for value in values:
        difference = _rounding(value)
        magnitude = np.abs(value)
        worst = max(worst, float((difference / np.where(magnitude == 0, 1, magnitude)).max(initial=0.0)))
    return worst


def value_error(weight: Codes, kind: str) -> float:
    """How far a value can be from the weight's, for float16's rounding of scales and minima; 0 where it cannot."""
    worst = _rounding(weight.scales) * 2**weight.bits
    if kind not in OFFSETS:
        minima = -weight.zeros.astype(np.float32) * weight.scales
        # float32 rounds the sum of product and minimum once more
        worst = worst + _rounding(minima) + np.abs(weight.scales) * 2.0 ** (weight.bits - 22)
    return float(worst.max(initial=0.0))


def _rounding(values: NDArray[Any]) -> NDArray[Any]:
    return np.abs(values.astype(np.float16).astype(np.float32) - values)


def _nibbles(codes: NDArray[Any], fifth: bool) -> list[NDArray[Any]]:
    """Four-bit halves [N, B, 16], preceded by the fifth bits [N, B, 4] where asked; codes uint8 [N, B, 32]."""
    low, high = codes[..., :16], codes[..., 16:]
    packed = (low & 15) | ((high & 15) << 4)
    if not fifth:
        return [packed]
    return [np.packbits(codes >> 4, axis=-1, bitorder="little"), packed]
