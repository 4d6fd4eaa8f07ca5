"""Quantized keys and values: what the codes of `int8`, `fp8_e4m3` and `int4` mean, and how they are made.

Each vector of one token and KV head has codes of its own and one bfloat16 scale:

    scale = bfloat16(max |x| / limit), code = quantizer(x / scale), x ≈ scale · value(code)

| format | bits | limit | value of a code | before it is quantized |
|---|---|---|---|---|
| int8 | 8 | 127 | the integer, -127 … 127 | |
| fp8_e4m3 | 8 | 448 | float8 e4m3 (OCP FP8, arXiv:2209.05433) | |
| int4, values | 4 | 7.5 | n - 7.5 for n = 0 … 15 | rotated: `rotate` |

`rotate` spreads a few large channels over all (QuaRot, arXiv:2404.00456); the sum over rotated values is rotated back.

Keys in `int4` are quantized by channel in blocks of tokens, the pool's blocks (KIVI, arXiv:2402.02750): a channel of a
KV head has over the tokens of a block one bfloat16 scale and one whole number, the code of zero. With lo and hi the
least and the largest of the channel's bfloat16 values in the block:

    scale = bfloat16(max((hi - lo) / 15, max(|lo|, |hi|) / 127)), zero = round(-lo / scale), in -127 … 127
    code = round(x / scale) + zero, in 0 … 15, x ≈ scale · (code - zero)

That needs every token of the block. So a query at position p reads the keys of the blocks before its own as codes, and
those of its own block, p // B * B … p, as they are, in bfloat16: what it reads depends on its position alone, not on
how its text was cut into steps. The exact keys of a request's last block, its tail, lie in the codes' places of the
next two blocks of its table (`tail_blocks`), a quarter of the tokens each: the keys' of the first, the values' of the
first, the keys' of the second, the values' of the second. There is one tail: a row that begins inside a block must end
in it, and the drafts of a row lie in one block (`crosses`).

What is not finite makes the scale NaN. Division, rounding (to nearest, ties to even; values in int4: floor) and the
order of the rotation's sums are part of the definition, so that every writer makes the same bits: these functions on
any device, and `runtime/kernels/attention_codes.cpp`. How codes and scales lie in memory is a backend's own business;
the torch backends keep them as `split` and `split_keys` say.
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
CHANNEL_BYTES = 3
"""Of a channel's scale and zero."""


@dataclass(frozen=True)
class KVFormat:
    """One format of the table above. storage: the torch dtype that tells caches of this format from others."""

    name: str
    bits: int
    limit: float
    storage: str
    rotates: bool = False
    """Values, before they are quantized."""
    by_channel: bool = False
    """Keys, over the tokens of a block."""

    @property
    def tail_blocks(self) -> int:
        """Blocks that a request's table has beyond those of its tokens: the place of its last block's exact keys."""
        return 2 if self.by_channel else 0

    def key_bytes(self, block_size: int, dim: int) -> int:
        """Bytes of a block's keys of one head, scales included."""
        if self.by_channel:
            return block_size * dim * self.bits // 8 + CHANNEL_BYTES * dim
        return block_size * self.vector_bytes(dim)

    def token_bytes(self, dim: int, block_size: int = 32) -> int:
        """Bytes of one head's key and value, rounded up; keys by channel have their share of the block's scales."""
        return -(-self.key_bytes(block_size, dim) // block_size) + self.vector_bytes(dim)

    def vector_bytes(self, dim: int) -> int:
        """Bytes of one vector of `dim` elements, the scale included."""
        return -(-dim * self.bits // 8) + SCALE_BYTES

    def dim_of(self, vector_bytes: int) -> int:
        """The inverse of `vector_bytes`."""
        return (vector_bytes - SCALE_BYTES) * 8 // self.bits

    def fault(self, key_dim: int, value_dim: int) -> str:
        """Why keys and values of so many elements cannot be kept; empty where they can."""
        odd = next((d for d in (key_dim, value_dim) if d % 2), 0) if self.bits == 4 else 0
        if odd:
            return f"{self.name} packs two elements a byte, and {odd} is odd"
        if self.by_channel and key_dim != value_dim:
            return f"{self.name} keeps exact keys where values may lie, and {key_dim} elements are not {value_dim}"
        return ""

    def block_fault(self, block_size: int) -> str:
        """Why blocks of so many tokens cannot be; empty where they can."""
        return f"{self.name} needs blocks of a multiple of 4 tokens" if self.by_channel and block_size % 4 else ""

    def crosses(self, start: int, end: int, num_drafts: int, block_size: int) -> bool:
        """Whether a row of the tokens start … end - 1, the last of them drafts, would need two tails (see above)."""
        inside = self.by_channel and start % block_size > 0 and end > (start // block_size + 1) * block_size
        first = end - num_drafts
        return inside or (self.by_channel and num_drafts > 0 and end > (first // block_size + 1) * block_size)

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
        KVFormat("int4", 4, 7.5, "uint8", rotates=True, by_channel=True),
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
    """What a sum over rotated values [..., D] stands for. Same dtype; x itself where the format does not rotate."""
    if fmt is None or not fmt.rotates:
        return x
    turned, block = rotate(x)
    return (turned / block).to(x.dtype)


def quantize_keys(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys [..., B, D] of a block by channel: codes uint8 [..., B, D / 2] (packed as by `quantize`), scales bfloat16
    and zeros int8 [..., D]."""
    import torch

    x = x.to(torch.bfloat16).float()
    low, high = x.amin(-2), x.amax(-2)
    spread = high - low
    scale = torch.maximum(spread / 15, torch.maximum(low.abs(), high.abs()) / 127).to(torch.bfloat16)
    scale = torch.where(spread.isfinite(), scale, torch.nan)
    step = scale.float()
    step = torch.where(step == 0, 1.0, step)
    zero = (-low / step).nan_to_num(0.0, 0.0, 0.0).round().clamp(-127, 127)
    ratio = (x / step.unsqueeze(-2)).nan_to_num(0.0, 0.0, 0.0)
    codes = (ratio.round() + zero.unsqueeze(-2)).clamp(0, 15).to(torch.uint8)
    low_half, high_half = codes.chunk(2, dim=-1)
    return low_half | high_half << 4, scale, zero.to(torch.int8)


def dequantize_keys(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Keys float32 [..., B, D] from what `quantize_keys` made."""
    import torch

    values = torch.cat((codes & 15, codes >> 4), dim=-1).float()
    return (values - zeros.float().unsqueeze(-2)) * scales.float().unsqueeze(-2)


def split_keys(cache: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of keys by channel, cache [N, H, key_bytes]: codes uint8 [N, B, H, D / 2], scales bfloat16 [N, H, D], zeros
    int8 [N, H, D]. In each block all codes come first, then all scales, then all zeros."""
    import torch

    blocks, heads, bytes_each = cache.shape
    dim = 2 * bytes_each // (block_size + 2 * CHANNEL_BYTES)
    flat = cache.view(torch.uint8).view(blocks, -1)
    cut, end = block_size * heads * dim // 2, block_size * heads * dim // 2 + heads * dim * SCALE_BYTES
    return (
        flat[:, :cut].unflatten(1, (block_size, heads, dim // 2)),
        flat[:, cut:end].view(torch.bfloat16).unflatten(1, (heads, dim)),
        flat[:, end:].view(torch.int8).unflatten(1, (heads, dim)),
    )


def tail_quarters(key_cache: torch.Tensor, value_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes' places as bfloat16 [N, B / 4, H, D], of keys and of values: each a quarter of a tail."""
    import torch

    blocks, size, heads, width = value_cache.shape
    dim = 2 * (width - SCALE_BYTES)
    cut = size * heads * dim // 2

    def view(cache: torch.Tensor) -> torch.Tensor:
        flat = cache.view(torch.uint8).view(blocks, -1)[:, :cut]
        return flat.view(torch.bfloat16).unflatten(1, (size // 4, heads, dim))

    return view(key_cache), view(value_cache)


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


def read_keys(
    cache: torch.Tensor, blocks: torch.Tensor, block_size: int, fmt: KVFormat | None, dtype: torch.dtype
) -> torch.Tensor:
    """`read` for keys, which may be by channel. None of them is rotated."""
    if fmt is None or not fmt.by_channel:
        return read(cache, blocks, fmt, dtype)
    codes, scales, zeros = (part[blocks] for part in split_keys(cache, block_size))
    return dequantize_keys(codes.transpose(-2, -3), scales, zeros).to(dtype).transpose(-2, -3)
