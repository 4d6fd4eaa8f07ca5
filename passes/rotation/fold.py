"""Folding norm weights into the linear layers that read the norm: the norm is left with weight 1."""

from __future__ import annotations

import torch
from torch import nn

from ...optimizer.errors import RunError
from .basis import Rotation
from .edits import Edits
from .stream import Reads, Stream


def is_uniform(reads: Reads, model: nn.Module) -> bool:
    """Whether the norm multiplies all channels by one number and adds nothing: it then commutes with rotations."""
    bias = _bias(reads, model)
    return is_uniform_vector(_gain(reads, model)) and (bias is None or not bool(bias.any()))


def is_uniform_vector(gain: torch.Tensor) -> bool:
    return bool((gain == gain[0]).all())


def fold_norm(reads: Reads, model: nn.Module, edits: Edits, rotation: Rotation | None = None) -> None:
    """Let W(gain * z + bias) be computed by W' = W diag(gain) on z alone, and set the norm's own parameters.

    A bias moves into the layers' own biases where all of them have one. Otherwise it stays in the norm, as bias / gain
    in the new basis. rotation: the basis that z will come in; W' itself is rotated by the caller, after this fold.
    Raises RunError where a bias has to stay and a gain of zero stands in its way.
    """
    gain, bias = _gain(reads, model), _bias(reads, model)
    for name in reads.weights:
        edits.scale_inputs(name, gain)
    left = torch.zeros_like(gain)
    if bias is not None and bool(bias.any()):
        biases = [_own_bias(name, model) for name in reads.weights]
        if all(name is not None for name in biases):
            for weight, own in zip(reads.weights, biases):
                assert own is not None
                shift = model.get_parameter(weight).detach().double().cpu() @ bias
                edits.add(own, lambda row, shift=shift: row + shift, True)  # type: ignore[misc]
        else:
            if bool(((gain == 0) & (bias != 0)).any()):
                raise RunError("a weight is zero where the bias is not, so it cannot be folded", where=reads.norm)
            left = torch.where(bias == 0, 0.0, bias / torch.where(gain == 0, 1.0, gain))
            left = left if rotation is None else rotation.apply(left)
    if reads.form.has_weight:
        edits.add(f"{reads.norm}.weight", lambda row: torch.full_like(row, 1.0 - reads.form.offset), True)
    if reads.form.has_bias:
        edits.add(f"{reads.norm}.bias", lambda row: left.expand_as(row), True)


def foldable(stream: Stream, model: nn.Module) -> list[Reads]:
    """The norms that can be folded: all, but the final one where the head is tied to the embeddings."""
    return [reads for reads in stream.reads if not (stream.tied and reads is stream.final)]


def _gain(reads: Reads, model: nn.Module) -> torch.Tensor:
    if not reads.form.has_weight:
        size = model.get_parameter(reads.weights[0]).shape[-1]
        return torch.ones(size, dtype=torch.float64)
    return model.get_parameter(f"{reads.norm}.weight").detach().double().cpu() + reads.form.offset


def _bias(reads: Reads, model: nn.Module) -> torch.Tensor | None:
    if not reads.form.has_bias:
        return None
    return model.get_parameter(f"{reads.norm}.bias").detach().double().cpu()


def _own_bias(weight: str, model: nn.Module) -> str | None:
    """Name of the bias beside a linear layer's weight, where it has one."""
    module_name, _, own = weight.rpartition(".")
    module = model.get_submodule(module_name)
    return f"{module_name}.bias" if own == "weight" and getattr(module, "bias", None) is not None else None
