"""A model's layers one at a time: what each stores and in which format, its weight as numbers, and how far two lie
apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..runtime.tensor_files import Stored

CHUNK = 1 << 22
"""Elements that are compared at a time."""


@dataclass
class ErrorSum:
    """‖b − a‖² and ‖a‖², added up in float64, and the largest difference."""

    difference: float = 0.0
    norm: float = 0.0
    largest: float = 0.0

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Two tensors of one shape and any floating dtype; compared in float32."""
        left, right = a.reshape(-1), b.to(a.device).reshape(-1)
        for start in range(0, left.numel(), CHUNK):
            one, other = left[start : start + CHUNK].float(), right[start : start + CHUNK].float()
            apart = other - one
            self.difference += apart.double().square().sum().item()
            self.norm += one.double().square().sum().item()
            self.largest = max(self.largest, apart.abs().max().item())

    def join(self, other: ErrorSum) -> None:
        self.difference += other.difference
        self.norm += other.norm
        self.largest = max(self.largest, other.largest)

    @property
    def relative(self) -> float | None:
        """‖b − a‖ / ‖a‖ (Frobenius); None where only a is 0."""
        if self.difference == 0:
            return 0.0
        return math.sqrt(self.difference / self.norm) if self.norm else None


def holders(module: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """Name → module of those at and below `module` that hold parameters of their own."""
    found = {}
    for name, child in module.named_modules(prefix=prefix):
        if any(p is not None for p in child._parameters.values()):
            found[name] = child
    return found


def dense_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's own parameters by name; a packed layer's is its dequantized `weight` (and its bias)."""
    from ..runtime.kernels.packed import WeightHolder

    if isinstance(module, WeightHolder):
        bias = {} if module.bias is None else {"bias": module.bias.detach()}
        return {"weight": module.dequantize(), **bias}  # type: ignore[operator]
    return {name: p.detach() for name, p in module._parameters.items() if p is not None and p.is_floating_point()}


def weight_error(a: nn.Module, b: nn.Module) -> ErrorSum | None:
    """Between the parameters of two modules; None where their names or shapes differ."""
    one, other = dense_tensors(a), dense_tensors(b)
    if {k: t.shape for k, t in one.items()} != {k: t.shape for k, t in other.items()}:
        return None
    error = ErrorSum()
    for name, tensor in one.items():
        error.add(tensor, other[name])
    return error


def describe(module: nn.Module, name: str, stored: Mapping[str, Stored]) -> dict[str, Any]:
    """How a module is stored: `format`, `bits`, `group_size`, `symmetric` of quantized ones, `dtype` of others, and
    `bytes` in the files (0 where another module's tensor stands for it)."""
    from ..runtime.kernels.packed import WeightHolder

    own = {key: place for key, place in stored.items() if key.rpartition(".")[0] == name or _below(key, name, module)}
    size = sum(place.nbytes for place in own.values())
    if isinstance(module, WeightHolder):
        scheme = module.scheme
        return {
            "format": scheme.format,
            "bits": scheme.bits,
            "group_size": scheme.group_size,
            "symmetric": scheme.symmetric,
            "bytes": size,
        }
    dtypes = sorted({place.dtype for place in own.values()})
    if not dtypes:
        dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in module.parameters(recurse=False)})
    return {"format": "dense", "dtype": "/".join(dtypes), "bytes": size}


def label(stored: Mapping[str, Any]) -> str:
    """`pack-quantized W4 g64`, `BF16`: what `describe` says, for a table."""
    if stored["format"] == "dense":
        return str(stored["dtype"])
    group = "" if stored["group_size"] in (-1, 0) else f" g{stored['group_size']}"
    return f"{stored['format']} W{stored['bits']}{group}{'' if stored['symmetric'] else ' asym'}"


@contextmanager
def recorded(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, torch.Tensor]]:
    """While it lasts, the last output of each module is kept under its name, where that is one tensor."""
    import torch

    outputs: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor):
                outputs[name] = output

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in modules.items()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _below(key: str, name: str, module: nn.Module) -> bool:
    """Whether a stored tensor belongs to a module whose tensors have points in their names (bitsandbytes' states)."""
    if not key.startswith(f"{name}."):
        return False
    return not any(key.startswith(f"{name}.{child}.") for child in module._modules)
