"""Quantized keys and values: what the codes of `int8`, `fp8_e4m3` and `int4` mean, and how they are made.

Each vector of one token and KV head has codes of its own and one bfloat16 scale:

    scale = bfloat16(max |x| / limit), code = quantizer(x / scale), x ≈ scale · value(code)

| format | bits | limit | value of a code | before it is quantized |
|---|---|---|---|---|
| int8 | 8 | 127 | the integer, -127 … 127 | |
| fp8_e4m3 | 8 | 448 | float8 e4m3 (OCP FP8, arXiv:2209.05433) | |
| int4 | 4 | 7.5 | n - 7.5 for n = 0 … 15 | rotated: `rotate` |

A vector that is not finite gets the scale NaN. Division, rounding (to nearest, ties to even; int4: floor) and the order
of the rotation's sums are part of the definition, so that every writer makes the same bits: these functions on any
device, and `runtime/kernels/attention_codes.cpp`. How codes and scales lie in memory is a backend's own business; the
torch backends keep them as `split` says.

`rotate` spreads a few large channels over all (QuaRot, arXiv:2404.00456). Products of two rotated vectors are `block`
times those of the vectors, so a rotated query attends rotated keys, and the sum over rotated values is rotated back.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from ...optimizer.errors import RunError, UsageError, did_you_mean

if TYPE_CHECKING:
    import torch


class UnsupportedFormat(RunError):
    """This model's keys and values cannot be kept in the format that was asked for."""


SCALE_BYTES = 2
"""Of one vector's scale."""


@dataclass(frozen=True)
class KVFormat:
    """One format of the table above. storage: the torch dtype that tells caches of this format from others."""

    name: str
    bits: int
    limit: float
    storage: str
    rotates: bool = False

    def vector_bytes(self, dim: int) -> int:
        """Bytes of one vector of `dim` elements, the scale included."""
        return -(-dim * self.bits // 8) + SCALE_BYTES

    def dim_of(self, vector_bytes: int) -> int:
        """The inverse of `vector_bytes`."""
        return (vector_bytes - SCALE_BYTES) * 8 // self.bits

    def fault(self, dim: int) -> str:
        """Why vectors of `dim` elements cannot be kept; empty where they can."""
        return f"{self.name} packs two elements a byte, and {dim} is odd" if self.bits == 4 and dim % 2 else ""

    @property
    def dtype(self) -> torch.dtype:
        """`storage` as torch has it."""
        import torch

        return getattr(torch, self.storage)


FORMATS = {
    f.name: f
    for f in (
        KVFormat("int8", 8, 127.0, "int8"),
        KVFormat("fp8_e4m3", 8, 448.0, "float8_e4m3fn"),
        KVFormat("int4", 4, 7.5, "uint8", rotates=True),
    )
}
PLAIN = ("float32", "bfloat16", "float16")
"""Other names that `kv_dtype` may have, beside `auto`."""


def format_of(dtype: torch.dtype) -> KVFormat | None:
    """The format of caches with this dtype; None where their elements are plain floats."""
    return _by_storage().get(str(dtype).removeprefix("torch."))


@lru_cache(maxsize=1)
def _by_storage() -> dict[str, KVFormat]:
    return {f.storage: f for f in FORMATS.values()}


def cache_dtype(wanted: torch.dtype | str | None, own: torch.dtype) -> torch.dtype:
    """The dtype of a cache's tensors. wanted: None or `auto` (the model's `own`), a format's name, or a plain dtype.

    Raises UsageError for any other name.
    """
    import torch

    if wanted is None or wanted == "auto":
        return own
    if isinstance(wanted, torch.dtype):
        return wanted
    if wanted in FORMATS:
        return FORMATS[wanted].dtype
    if wanted in PLAIN:
        return getattr(torch, wanted)
    names = ["auto", *FORMATS, *PLAIN]
    raise UsageError(f"unknown kv_dtype {wanted!r}", "kv_dtype", did_you_mean(str(wanted), names))


def cache_dtype_name(dtype: torch.dtype) -> str:
    """What a cache of this dtype is called: a format's name, or the plain dtype's."""
    found = format_of(dtype)
    return found.name if found else str(dtype).removeprefix("torch.")


def rotate(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """x [..., D] times a Hadamard matrix of 1 and -1 in blocks, float32 (float64 of float64); and the block, the
    largest power of two that divides D. `rotate(rotate(x)[0])[0] / block` is x."""
    import torch

    dim = x.shape[-1]
    block, half = dim & -dim, 1
    x = x if x.dtype == torch.float64 else x.float()
    while half < block:
        low, high = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        half *= 2
    return x, block


def quantize(x: torch.Tensor, fmt: KVFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [..., D · bits / 8] and scales bfloat16 [...] of vectors [..., D].

    8 bits: the code's byte, int8 in two's complement. 4 bits: byte i holds dimensions i (low bits) and i + D/2.
    """
    import torch

    x = rotate(x)[0] if fmt.rotates else x.float()
    largest = x.abs().amax(-1)
    scale = torch.where(largest.isfinite(), (largest / fmt.limit), torch.nan).to(torch.bfloat16)
    step = scale.float()[..., None]
    ratio = (x / torch.where(step == 0, 1.0, step)).nan_to_num(0.0, 0.0, 0.0)
    if fmt.name == "int8":
        return ratio.round().clamp(-127, 127).to(torch.int8).view(torch.uint8), scale
    if fmt.name == "fp8_e4m3":
        return ratio.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8), scale
    codes = (ratio.floor() + 8).clamp(0, 15).to(torch.uint8)
    low, high = codes.chunk(2, dim=-1)
    return low | high << 4, scale


def dequantize(codes: torch.Tensor, scales: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    """Vectors float32 [..., D] from what `quantize` made; still rotated where the format rotates."""
    import torch

    if fmt.name == "int8":
        values = codes.view(torch.int8).float()
    elif fmt.name == "fp8_e4m3":
        values = codes.view(torch.float8_e4m3fn).float()
    else:
        values = torch.cat((codes & 15, codes >> 4), dim=-1).float() - 7.5
    return values * scales.float()[..., None]


def turn_back(x: torch.Tensor, fmt: KVFormat | None) -> torch.Tensor:
    """x [..., D] of rotated vectors as it would be without: what a query must be to attend rotated keys, and what the
    sum over rotated values stands for. Same dtype; x itself where the format does not rotate."""
    if fmt is None or not fmt.rotates:
        return x
    turned, block = rotate(x)
    return (turned / block).to(x.dtype)


def split(cache: torch.Tensor, fmt: KVFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a quantized cache [N, B, H, vector_bytes], N blocks of B tokens: codes uint8 [N, B, H, C] and scales
    bfloat16 [N, B, H].

    In each block all codes come first, then all scales, so that codes stay aligned.
    """
    import torch

    blocks, size, heads, bytes_each = cache.shape
    flat = cache.view(torch.uint8).view(blocks, -1)
    width = bytes_each - SCALE_BYTES
    cut = size * heads * width
    codes = flat[:, :cut].unflatten(1, (size, heads, width))
    return codes, flat[:, cut:].view(torch.bfloat16).unflatten(1, (size, heads))


def write(x: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, fmt: KVFormat) -> None:
    """Vectors [T, H, D] into the slots (int64 [T]) of a quantized cache [N, B, H, vector_bytes]."""
    codes, scales = quantize(x, fmt)
    code_cache, scale_cache = split(cache, fmt)
    block, offset = slots // cache.shape[1], slots % cache.shape[1]
    code_cache[block, offset] = codes
    scale_cache[block, offset] = scales


def read(cache: torch.Tensor, blocks: torch.Tensor, fmt: KVFormat | None, dtype: torch.dtype) -> torch.Tensor:
    """Blocks [...] of a cache [N, B, H, …] as vectors [..., B, H, D]: as they are, or dequantized to `dtype` and still
    rotated."""
    if fmt is None:
        return cache[blocks]
    codes, scales = split(cache, fmt)
    return dequantize(codes[blocks], scales[blocks], fmt).to(dtype)
