"""Which attention backend a model runs on, chosen at load, stated and recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ...optimizer.errors import RunError
from ..kernels.kv_format import UnsupportedFormat, cache_dtype_name, format_of
from .exact_keys import by_channel
from .layer import AttentionLayer
from .op import BACKENDS

if TYPE_CHECKING:
    import torch

ALIASES = {"sdpa": "torch", "eager": "torch"}
"""Names that a recipe may use (`attention.backend`), and the paged backend that computes the same."""


@dataclass(frozen=True)
class AttentionChoice:
    """name: the backend. reason: why. refused: (backend, why not) of every one that was preferred and fell back."""

    name: str
    reason: str
    block_size: int
    refused: tuple[tuple[str, str], ...] = field(default=())

    def __str__(self) -> str:
        text = f"attention backend {self.name}: {self.reason}"
        return text + "".join(f"; {name} refused: {why}" for name, why in self.refused)


def _shape_fault(layers: Sequence[AttentionLayer], dtype: torch.dtype, block_size: int | None, page: int) -> str:
    import torch

    if dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 or bfloat16, not {cache_dtype_name(dtype)}"
    for layer in layers:
        if layer.kind != "paged":
            return "latent attention runs in gather mode"
        if layer.key_dim != layer.value_dim or layer.key_dim > 256 or layer.key_dim % 8:
            return f"head dims {layer.key_dim}/{layer.value_dim} are not one multiple of 8 up to 256"
        if layer.chunk or layer.sink_tokens:
            return "chunked attention and kept first tokens have no argument there"
    if block_size is not None and block_size % page:
        return f"block_size {block_size} is not a multiple of {page}"
    return ""


def _format_fault(layers: Sequence[AttentionLayer], dtype: torch.dtype, block_size: int | None) -> str:
    """Why no backend can quantize these layers' keys and values; empty where they can, or have nothing to quantize."""
    fmt = format_of(dtype)
    if fmt is None:
        return ""
    if any(layer.kind != "paged" for layer in layers):
        return f"latent attention has no {fmt.name} cache"
    why = fmt.block_fault(block_size or DEFAULT_BLOCK)
    return why or next((why for x in layers if (why := fmt.fault(*x.cache_shape[1:]))), "")


def refusal(
    name: str, layers: Sequence[AttentionLayer], dtype: torch.dtype, device: torch.device, block_size: int | None
) -> str:
    """Why a backend cannot run these layers here; empty where it can."""
    import torch

    why = _format_fault(layers, dtype, block_size)
    if why or name in ("reference", "torch"):
        return why
    if name == "compiled":
        if device.type != "cpu":
            return "it runs on the CPU"
        from .compiled import refusal as compiled_refusal

        return compiled_refusal(layers, dtype, block_size)
    if name == "triton":
        if find_spec("triton") is None:
            return "triton is not installed"
        from .triton_paged import interpreted

        if device.type != "cuda" and not interpreted():
            return "it needs a CUDA device (or TRITON_INTERPRET=1, for tests)"
        if any(layer.kind != "paged" for layer in layers):
            return "latent attention runs in gather mode"
        if by_channel(dtype):
            return "its kernels read no keys by channel (int4); torch's operators do"
        return ""
    if device.type != "cuda":
        return "it needs a CUDA device"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs compute capability 8.0"
    if name == "flash_attn":
        if find_spec("flash_attn") is None:
            return "flash-attn is not installed"
        if any(layer.has_sinks for layer in layers):
            return "it has no attention sinks"
        return _shape_fault(layers, dtype, block_size, 256)
    if find_spec("torch.nn.attention.varlen") is None:
        return "this torch has no torch.nn.attention.varlen"
    from .varlen import takes_block_table

    if not takes_block_table():
        return "this torch's varlen_attn takes no block table"
    if any(layer.softcap for layer in layers):
        return "it has no soft-capping"
    return _shape_fault(layers, dtype, block_size, 256)


DEFAULT_BLOCK = 32
"""Of keys by channel: shorter blocks have more scales than the memory is worth, longer ones wider ranges."""
BLOCK_SIZES = {"reference": 16, "torch": 16, "compiled": 32, "triton": 16, "varlen": 256, "flash_attn": 256}


def _block_size(name: str, dtype: torch.dtype) -> int:
    return DEFAULT_BLOCK if by_channel(dtype) else BLOCK_SIZES[name]


def choose(
    wanted: str,
    layers: Sequence[AttentionLayer],
    dtype: torch.dtype,
    device: torch.device,
    block_size: int | None = None,
) -> AttentionChoice:
    """The backend for these layers. wanted: `auto` or a backend's name.

    Raises RunError for a backend asked for by name that cannot run here: only `auto` falls back.
    """
    wanted = ALIASES.get(wanted, wanted)
    if wanted != "auto":
        if wanted not in BACKENDS:
            raise RunError(
                f"unknown attention backend {wanted!r}", what_to_do=f"Use auto or one of: {', '.join(BACKENDS)}"
            )
        why = refusal(wanted, layers, dtype, device, block_size)
        if why:
            raise RunError(f"attention backend {wanted!r} cannot run here: {why}", what_to_do="Use attention='auto'")
        return AttentionChoice(wanted, "asked for", block_size or _block_size(wanted, dtype))
    order = ("varlen", "flash_attn", "triton", "torch") if device.type == "cuda" else ("compiled", "torch")
    refused: list[tuple[str, str]] = []
    for name in order:
        why = refusal(name, layers, dtype, device, block_size)
        if not why:
            first = "first choice" if not refused else "fallback"
            size = block_size or _block_size(name, dtype)
            return AttentionChoice(name, f"{first} on {device.type}", size, tuple(refused))
        refused.append((name, why))
    why = _format_fault(layers, dtype, block_size)
    if why:
        raise UnsupportedFormat(
            f"this model's keys and values cannot be kept as asked: {why}", "kv_dtype", "Use kv_dtype='auto'"
        )
    raise RunError("no attention backend runs here", what_to_do="Report this: the torch backend always should")
