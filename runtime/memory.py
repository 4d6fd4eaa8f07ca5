"""Bytes that a model's weights hold in memory, bytes that are left, and sizes as people write them."""

from __future__ import annotations

import re
import sys
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


def give_back() -> None:
    """Let the C library return freed memory to the system (glibc keeps what small tensors held); elsewhere nothing."""
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def peak_memory() -> int:
    """Most bytes of physical memory that this process has had so far (on Windows: what it has now).

    On Linux by VmHWM: the peak in `getrusage` also covers what the process was forked from.
    """
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    try:
        import resource
    except ImportError:
        return resident_memory()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def parse_size(text: str) -> int:
    """`20GB`, `512 MiB` or a number of bytes → bytes. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.I)
    if not match:
        raise ValueError(f"{text!r} is not a size: write for example 20GB")
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " "))
