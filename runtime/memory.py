"""Bytes that a model's weights hold in memory, and bytes that are left."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn


def weight_bytes(module: nn.Module) -> int:
    """Bytes of all tensors that the modules hold: parameters, buffers and plain tensor attributes (prepacked weights).

    Each storage counts once, so tied weights and views count once. Opaque tensors (oneDNN's) count their elements.
    """
    seen: dict[object, int] = {}
    for child in module.modules():
        for tensor in _own_tensors(child):
            if tensor.is_meta:
                continue
            try:
                storage = tensor.untyped_storage()
                seen[(tensor.device, storage.data_ptr())] = storage.nbytes()
            except (RuntimeError, NotImplementedError):
                seen[id(tensor)] = tensor.numel() * tensor.element_size()
    return sum(seen.values())


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    import torch

    tables = (module._parameters.values(), module._buffers.values(), module.__dict__.values())
    found = []
    for table in tables:
        for value in table:
            values = value if isinstance(value, (tuple, list)) else (value,)
            found += [v for v in values if isinstance(v, torch.Tensor)]
    return found


def available_memory() -> int:
    """Bytes of physical memory that this process can still have: what the machine, or its control group, has free."""
    import psutil

    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):
        limit = int((group / "memory.max").read_text())
        free = min(free, limit - int((group / "memory.current").read_text()))
    return max(0, free)


def resident_memory() -> int:
    """Bytes of physical memory that this process has now."""
    import psutil

    return int(psutil.Process().memory_info().rss)
