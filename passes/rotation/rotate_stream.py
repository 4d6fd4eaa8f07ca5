"""Rotations of a residual stream (R1) and of values (R2), as edits of the weights that `Stream` lists."""

from __future__ import annotations

import torch
from torch import nn

from .basis import Rotation
from .edits import Edits
from .fold import fold_norm
from .stream import Stream


def rotate_residual(
    stream: Stream, model: nn.Module, edits: Edits, generator: torch.Generator, keep_final: bool = False
) -> int:
    """Rotate everything that reads or writes the stream; returns how many norms were folded.

    keep_final: leave the final norm as it is, where it weighs all channels alike and the head is tied to the embeddings
    (their one matrix is rotated once).
    """
    make = Rotation.mean_preserving if stream.centered else Rotation.randomized
    rotation = make(stream.hidden, generator)
    folded = [reads for reads in stream.reads if not (keep_final and reads is stream.final)]
    for reads in folded:
        fold_norm(reads, model, edits, rotation)
    for name in stream.embeddings:
        edits.rotate_inputs(name, rotation)
    for reads in folded:
        for name in reads.weights:
            edits.rotate_inputs(name, rotation)
    for name in stream.writes:
        edits.rotate_outputs(name, rotation)
        bias = f"{name.removesuffix('.weight')}.bias"
        if name.endswith(".weight") and _has_parameter(model, bias):
            edits.rotate_inputs(bias, rotation)
    return len(folded)


def rotate_values(stream: Stream, model: nn.Module, edits: Edits, generator: torch.Generator) -> None:
    """Rotate each attention's values, all heads of a layer by the same matrix, and the columns that take them back."""
    for values in stream.values:
        rotation = Rotation.randomized(values.head_dim, generator)
        edits.rotate_head_outputs(values.value, rotation, values.first, values.kv_heads)
        bias = f"{values.value.removesuffix('.weight')}.bias"
        if _has_parameter(model, bias):
            edits.rotate_head_bias(bias, rotation, values.first, values.kv_heads)
        edits.rotate_head_inputs(values.output, rotation, values.heads)


def _has_parameter(model: nn.Module, name: str) -> bool:
    module_name, _, own = name.rpartition(".")
    return getattr(model.get_submodule(module_name), own, None) is not None
