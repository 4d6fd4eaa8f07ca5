"""Exact changes of weights: computed in float64, rounded once to the dtype that the parameter is stored in.

An edit takes a weight float64 `[out, in]` and returns the new one. The edits of one parameter are collected first and
applied together, so that folding a norm and rotating both sides cost one rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from .basis import Rotation

CHUNK = 1 << 23
"""Elements that are held in float64 at a time, where the edits allow it to work by rows."""


@dataclass(frozen=True)
class Edit:
    """`change` maps a float64 matrix to one of the same shape; `by_rows`: each row only depends on itself."""

    change: Callable[[torch.Tensor], torch.Tensor]
    by_rows: bool


@dataclass
class Edits:
    """The edits of a model's parameters, by name, in the order in which they are applied."""

    by_name: dict[str, list[Edit]] = field(default_factory=dict)

    def add(self, name: str, change: Callable[[torch.Tensor], torch.Tensor], by_rows: bool) -> None:
        self.by_name.setdefault(name, []).append(Edit(change, by_rows))

    def scale_inputs(self, name: str, scale: torch.Tensor) -> None:
        """W diag(scale): what a norm's weight does before W. scale: float64 [in]."""
        self.add(name, lambda w: w * scale, True)

    def rotate_inputs(self, name: str, rotation: Rotation) -> None:
        """W Q: the weight for inputs that come rotated by Q. Of embeddings: rows rotated by Q."""
        self.add(name, rotation.apply, True)

    def rotate_outputs(self, name: str, rotation: Rotation) -> None:
        """Q^T W: outputs rotated by Q."""
        self.add(name, rotation.apply_outputs, False)

    def rotate_head_outputs(self, name: str, rotation: Rotation, first: int, count: int) -> None:
        """Rows `first` … of `count` heads: each head's outputs rotated by Q."""

        def change(w: torch.Tensor) -> torch.Tensor:
            rows = w[first : first + count * rotation.size]
            heads = rows.view(count, rotation.size, -1).transpose(1, 2)
            out = w.clone()
            out[first : first + len(rows)] = rotation.apply(heads).transpose(1, 2).reshape(rows.shape)
            return out

        self.add(name, change, False)

    def rotate_head_bias(self, name: str, rotation: Rotation, first: int, count: int) -> None:
        """The same for the bias, which comes as a row `[1, out]`."""

        def change(row: torch.Tensor) -> torch.Tensor:
            out = row.clone()
            part = slice(first, first + count * rotation.size)
            out[:, part] = rotation.apply(row[:, part].view(1, count, rotation.size)).view(1, -1)
            return out

        self.add(name, change, True)

    def rotate_head_inputs(self, name: str, rotation: Rotation, count: int) -> None:
        """Columns of `count` heads: for inputs whose heads come rotated by Q each."""
        self.add(name, lambda w: rotation.apply(w.view(len(w), count, rotation.size)).reshape(w.shape), True)

    def apply(self, model: nn.Module) -> None:
        """Make all changes. Parameters of one dimension are taken as one row, those of three as stacked matrices."""
        with torch.no_grad():
            for name, edits in self.by_name.items():
                parameter = model.get_parameter(name)
                parameter.data = edited(parameter.data, edits)


def edited(tensor: torch.Tensor, edits: list[Edit]) -> torch.Tensor:
    """The tensor after `edits`, in its own dtype and on its own device."""
    out = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    matrices = tensor.unsqueeze(0) if tensor.ndim == 1 else tensor
    matrices = matrices.unsqueeze(0) if matrices.ndim == 2 else matrices
    by_rows = all(edit.by_rows for edit in edits)
    for source, target in zip(matrices, out.view(matrices.shape)):
        rows = max(1, CHUNK // source.shape[1]) if by_rows else len(source)
        for start in range(0, len(source), rows):
            part = source[start : start + rows].double().cpu()
            for edit in edits:
                part = edit.change(part)
            target[start : start + rows] = part.to(out.dtype)
    return out
