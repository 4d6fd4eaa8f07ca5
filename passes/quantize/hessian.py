"""Hessians of layer inputs: `H = mean(x x^T)` accumulated in float32, shared by layers that see the same input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...optimizer.errors import RunError
from ...runtime.kernels.calibration import add_outer_products
from .factor import mirror_lower, panels

ADDED = 1 << 22
"""Input values that are converted to float32 at once."""


class Hessian:
    """Sum of `x x^T` over all input rows, float32 [K, K], and their number.

    Where the original model's inputs y are given too, also the sum of `y x^T`.
    """

    def __init__(self, columns: int, device: torch.device) -> None:
        self.sum = torch.zeros(columns, columns, device=device)
        self.cross_sum: torch.Tensor | None = None
        self.rows = 0

    def add(self, inputs: torch.Tensor, original: torch.Tensor | None = None) -> None:
        """Add inputs `[..., K]` of any floating dtype; products and sums are float32.

        original: the same layer's inputs in the unquantized model, same shape.
        """
        rows = inputs.reshape(-1, inputs.shape[-1])
        self.rows += len(rows)
        if original is not None:
            self._add_cross(original.reshape(rows.shape), rows)
        if add_outer_products(self.sum, rows):
            return
        for part in rows.split(max(1, ADDED // rows.shape[1])):
            values = part.float()
            for start, stop in panels(rows.shape[1]):
                self.sum[start:, start:stop].addmm_(values[:, start:].t(), values[:, start:stop])

    def _add_cross(self, original: torch.Tensor, rows: torch.Tensor) -> None:
        if self.cross_sum is None:
            self.cross_sum = torch.zeros_like(self.sum)
        self.cross_sum.addmm_(original.float().t(), rows.float())

    def copy(self) -> Hessian:
        other = Hessian.__new__(Hessian)
        other.sum, other.rows = self.sum.clone(), self.rows
        other.cross_sum = None if self.cross_sum is None else self.cross_sum.clone()
        return other

    def mean(self) -> torch.Tensor:
        """The full symmetric matrix, divided by the number of rows; float32 [K, K]."""
        return mirror_lower(self.sum.clone()).div_(max(1, self.rows))

    def take_mean(self) -> torch.Tensor:
        """The same in the memory of the sum, which is gone afterwards."""
        total, self.sum = self.sum, torch.empty(0, device=self.sum.device)
        return mirror_lower(total).div_(max(1, self.rows))

    def cross(self) -> torch.Tensor | None:
        """`mean(y x^T)`, float32 [K, K]; None where no original inputs were given."""
        return None if self.cross_sum is None else self.cross_sum / max(1, self.rows)

    def take_cross(self) -> torch.Tensor | None:
        """The same in the memory of the sum, which is gone afterwards."""
        total, self.cross_sum = self.cross_sum, None
        return None if total is None else total.div_(max(1, self.rows))


@dataclass
class InputGroup:
    """Layers whose inputs were the same tensor in every call, and the Hessian of those inputs."""

    names: list[str]
    hessian: Hessian
    first_call: int


@dataclass
class HessianCollector:
    """Hooks that gather the Hessians of named layers while a block runs.

    Layers that were given the very same tensor share one matrix (query, key and value projections, for example); a
    group splits where its members' inputs part. Call `flush` after each forward. `originals` are the same layers of an
    unquantized copy of the block, to be run on the original hidden state before each flush; may be empty. A flush
    raises RunError where a layer and its original were given inputs of different shapes.
    """

    layers: Mapping[str, nn.Module]
    originals: Mapping[str, nn.Module] = field(default_factory=dict)
    groups: list[InputGroup] = field(default_factory=list)
    _pending: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    _original: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    @contextmanager
    def hooks(self) -> Iterator[HessianCollector]:
        """Attach the hooks for the duration."""
        watched = [(self.layers, self._pending), (self.originals, self._original)]
        handles = [
            layer.register_forward_pre_hook(self._hook(store, name))
            for layers, store in watched
            for name, layer in layers.items()
        ]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, store: dict[str, list[torch.Tensor]], name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            store.setdefault(name, []).append(args[0])

        return hook

    def flush(self) -> None:
        """Add the inputs recorded since the last flush to their Hessians."""
        if not self.groups:
            self._form_groups()
        for group in list(self.groups):
            parts: dict[tuple[int, ...], list[str]] = {}
            for name in group.names:
                parts.setdefault(tuple(id(x) for x in self._pending.get(name, [])), []).append(name)
            for other in list(parts.values())[1:]:
                self.groups.append(InputGroup(other, group.hessian.copy(), group.first_call))
                self._add(self.groups[-1])
            group.names = next(iter(parts.values()))
            self._add(group)
        self._pending.clear()
        self._original.clear()

    def _form_groups(self) -> None:
        groups: dict[tuple[int, ...], InputGroup] = {}
        called = list(self._pending)
        for name in called + [name for name in self.layers if name not in self._pending]:
            key = tuple(id(x) for x in self._pending.get(name, [])) or (-1 - len(groups),)
            if key not in groups:
                layer: Any = self.layers[name]  # nn.Linear, or a module that stands in for one
                hessian = Hessian(layer.in_features, layer.weight.device)
                groups[key] = InputGroup([], hessian, len(groups))
            groups[key].names.append(name)
        self.groups = list(groups.values())

    def _add(self, group: InputGroup) -> None:
        name = group.names[0]
        given, originals = self._pending.get(name, []), self._original.get(name, [])
        if self.originals and [x.shape for x in given] != [x.shape for x in originals]:
            raise RunError(
                "the unquantized model gives it other tokens, so that `match_original` cannot compare the inputs",
                where=", ".join(group.names),
                what_to_do="Leave `match_original` out, or give this module a method without calibration.",
            )
        for i, inputs in enumerate(given):
            group.hessian.add(inputs, originals[i] if originals else None)
