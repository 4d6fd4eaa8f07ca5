"""Passes: each rewrites weights, the runtime specification, or both."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_CLASSES = {
    "Activation": "activation",
    "Draft": "draft",
    "FlashAttention": "attention",
    "Fuse": "fuse",
    "KVCache": "kv_cache",
    "Quantize": "quantize",
    "Rotate": "rotate",
}

__all__ = sorted(_CLASSES)

if TYPE_CHECKING:
    from .activation import Activation
    from .attention import FlashAttention
    from .draft import Draft
    from .fuse import Fuse
    from .kv_cache import KVCache
    from .quantize import Quantize
    from .rotate import Rotate


def __getattr__(name: str) -> Any:
    if name in _CLASSES:
        return getattr(import_module(f".{_CLASSES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
