"""Packed linear layers that run the kernel chosen for their number of rows (linear_choice.py)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from .linear_candidates import CANDIDATES, LinearCase, Run
from .linear_choice import Choice, bucket, choose, disagreement
from .packed import PackedLinear


class LinearKernel:
    """One layer's kernels by bucket of rows; called with x [..., K], returns [..., N]."""

    def __init__(self, layer: PackedLinear, table: dict[int, str], runs: dict[str, Run]) -> None:
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.table = {rows: runs[name] for rows, name in table.items()}
        self.names = dict(table)
        self.handle = id(self)
        _kernels[self.handle] = self

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():  # rows are no constant of the graph: the choice is made inside an operator
            return packed_linear(x, self.handle, self.out_features)
        return self.run(x)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, self.in_features)
        y = self.table[bucket(flat.shape[0])](flat)
        return y.reshape(*x.shape[:-1], self.out_features)


_kernels: WeakValueDictionary[int, LinearKernel] = WeakValueDictionary()


@torch.library.custom_op("llmopt::packed_linear", mutates_args=())
def packed_linear(x: torch.Tensor, handle: int, out_features: int) -> torch.Tensor:
    """The kernel `handle` of this process, as one operator of a compiled graph."""
    return _kernels[handle].run(x)


@packed_linear.register_fake
def _(x: torch.Tensor, handle: int, out_features: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


@dataclass
class Installed:
    """Layers that got a kernel. choices: by case. notes: what was decided."""

    layers: list[PackedLinear] = field(default_factory=list)
    choices: dict[LinearCase, Choice] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def remove(self) -> None:
        """Give the layers their plain arithmetic back."""
        for layer in self.layers:
            layer.kernel = None
        self.layers = []


@torch.no_grad()
def install(model: nn.Module, allow_quantized: bool = False) -> Installed:
    """Let every PackedLinear of the model run the kernels chosen for it; undo with `Installed.remove`.

    Each layer's own kernels are held against its plain arithmetic once more, on its real weights; where one differs the
    layer keeps the plain arithmetic and a note names it. allow_quantized: activations may be quantized to int8.
    """
    done = Installed()
    used: Counter[str] = Counter()
    for name, layer in model.named_modules():
        if type(layer) is not PackedLinear:
            continue
        case = LinearCase.of(layer)
        if case not in done.choices:
            done.choices[case] = choose(case)
        table = done.choices[case].table(allow_quantized)
        runs = {each: CANDIDATES[each].prepare(layer) for each in set(table.values())}
        faults = {n: disagreement(case, n, run, layer, 3) for n, run in runs.items() if n != "dequantize"}
        fault = next((f"{n} {why}" for n, why in faults.items() if why), None)
        if fault:
            done.notes.append(f"linears: {name} runs dequantized; on its weights {fault}")
            continue
        layer.kernel = LinearKernel(layer, table, runs)
        done.layers.append(layer)
        used[by_rows(table)] += 1
    for shown, count in used.most_common():
        done.notes.append(f"linears: {count} × {shown}")
    if not done.choices:
        done.notes.append("linears: the model has no packed layers, so there is nothing to choose")
    return done


def by_rows(table: dict[int, str]) -> str:
    """`native up to 64 rows, dequantize above`."""
    parts: list[tuple[str, int]] = []
    for rows, name in sorted(table.items()):
        if parts and parts[-1][0] == name:
            parts[-1] = (name, rows)
        else:
            parts.append((name, rows))
    if len(parts) == 1:
        return parts[0][0]
    shown = [f"{name} up to {rows} rows" for name, rows in parts[:-1]]
    return ", ".join([*shown, f"{parts[-1][0]} above"])


def cases_of(model: Any) -> dict[LinearCase, int]:
    """The cases of a model's packed layers (it may be on the meta device) and how many layers each has."""
    return dict(Counter(LinearCase.of(m) for m in model.modules() if type(m) is PackedLinear))
