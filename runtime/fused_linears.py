"""One product for linear layers that get the same input: queries, keys and values; gate and up.

The stored model keeps its layers, so that every runtime opens it; here their weights become views of one matrix, and
the first layer to be called computes for all. A layer that is called with another input computes by itself, so that the
result never depends on the order of calls. The native decoder does not need this: it packs such layers together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..optimizer.runtime_spec import FuseSpec

if TYPE_CHECKING:
    from .open import OpenedModel

MEMBERS = {"qkv": ("q_proj", "k_proj", "v_proj"), "gate_up": ("gate_proj", "up_proj")}


class SharedProduct:
    """The weights of several layers in one matrix `[sum of rows, in]`, and the outputs of the last input."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.rows = [layer.out_features for layer in layers]
        self.weight = torch.cat([layer.weight.detach() for layer in layers])
        biases = [layer.bias for layer in layers]
        self.bias = None if biases[0] is None else torch.cat([bias.detach() for bias in biases])
        self._input: torch.Tensor | None = None
        self._outputs: list[torch.Tensor] = []

    def output(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Output of layer `index` for inputs `[…, in]`; layer 0 computes all, the last one lets go of the rest."""
        if index == 0:
            self._outputs = list(nn.functional.linear(x, self.weight, self.bias).split(self.rows, dim=-1))
            self._input = x
            return self._outputs[0]
        if self._input is not x:
            start = sum(self.rows[:index])
            part = slice(start, start + self.rows[index])
            return nn.functional.linear(x, self.weight[part], None if self.bias is None else self.bias[part])
        found = self._outputs[index]
        if index == len(self.rows) - 1:
            self._input, self._outputs = None, []
        return found


class FusedPart(nn.Linear):
    """A linear layer whose weight and bias are views of a `SharedProduct`, which computes it."""

    def __init__(self, shared: SharedProduct, index: int) -> None:
        nn.Module.__init__(self)
        start = sum(shared.rows[:index])
        part = slice(start, start + shared.rows[index])
        self.in_features, self.out_features = shared.weight.shape[1], shared.rows[index]
        self.weight = nn.Parameter(shared.weight[part], requires_grad=False)
        self.bias = None if shared.bias is None else nn.Parameter(shared.bias[part], requires_grad=False)
        self._shared, self._index = shared, index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._shared.output(self._index, x)


def fuse_linears(module: nn.Module, spec: FuseSpec) -> dict[str, int]:
    """Fuse what the spec asks for, in place; returns how many groups of each kind were fused.

    Only plain linear layers in memory are fused, all of a group alike in dtype, device and bias.
    """
    done = {kind: 0 for kind in MEMBERS if getattr(spec, kind)}
    for parent in list(module.modules()):
        for kind in done:
            layers = [getattr(parent, name, None) for name in MEMBERS[kind]]
            if not all(type(layer) is nn.Linear and not layer.weight.is_meta for layer in layers):
                continue
            linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
            kinds = {(x.weight.dtype, x.weight.device, x.in_features, x.bias is None) for x in linears}
            if len(kinds) != 1:
                continue
            shared = SharedProduct(linears)
            for index, name in enumerate(MEMBERS[kind]):
                setattr(parent, name, FusedPart(shared, index).train(linears[index].training))
            done[kind] += 1
    return done


def apply_fusion(opened: OpenedModel) -> None:
    """Fuse an opened model as its RuntimeSpec asks, and note what came of it; for engines that call its modules."""
    for kind, count in fuse_linears(opened.module, opened.runtime.fuse).items():
        names = " and ".join(MEMBERS[kind])
        if count:
            opened.note(f"fuse: {names} of {count} modules share one product")
        else:
            opened.note(f"fuse: no {names} are plain linear layers side by side, so nothing was fused", "fallback")


def apply_around(opened: Any, make: Callable[[], Any]) -> Any:
    """The runner that `make` makes, with the fusion that the RuntimeSpec asks for: on CUDA before, because graphs are
    captured while it is made; on the CPU afterwards, where the runner calls the modules at all.
    """
    spec = opened.runtime.fuse
    if not (spec.qkv or spec.gate_up):
        return make()
    before = opened.device.type != "cpu"
    if before:
        apply_fusion(opened)
    runner = make()
    if getattr(runner, "decoder", None) is not None:
        opened.note("fuse: the native decoder multiplies layers with the same input together in any case")
    elif not before:
        apply_fusion(opened)
    return runner
