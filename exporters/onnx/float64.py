"""Runs a float32 torch model in float64, without a float64 copy of it.

Rounding in float32 moves the logits of a decoder by about 1e-4, in torch as in a graph. A reference in float64 holds
each of the two apart from the exact values of the same weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel

ELEMENTS = 2**22
"""Elements of a weight that are in float64 at a time (32 MiB), at least a row."""


class Float64(TorchFunctionMode):
    """While it is on, every torch function takes float32 tensors as their values in float64, and makes float64 where
    float32 is asked for (norms, softmax and rotary embeddings ask for it by name). Nothing is changed in place: a
    function that writes into a float32 tensor writes into a copy."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__repr__", "is_floating_point", "size", "dim", "numel"):
            return func(*args, **(kwargs or {}))
        if func is nn.functional.linear:
            return _linear(*args, **(kwargs or {}))
        if func is nn.functional.embedding:
            return func(*args, **(kwargs or {})).double()
        if func is torch.Tensor.float:
            return args[0].double()
        return func(*_widen(args), **{key: _widen(value) for key, value in (kwargs or {}).items()})


def _widen(value: Any) -> Any:
    """`value` with float64 in the place of float32, inside lists and tuples too."""
    if isinstance(value, torch.Tensor):
        return value.double() if value.dtype == torch.float32 else value
    if value is torch.float32:
        return torch.float64
    if type(value) in (list, tuple):
        return type(value)(_widen(each) for each in value)
    return value


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x weight^T + bias` in float64, some rows of the weight at a time."""
    x, step = x.double(), max(1, ELEMENTS // weight.shape[1])
    out = torch.cat([x @ rows.double().t() for rows in weight.split(step)], -1)
    return out if bias is None else out + bias.double()


def float64_logits(module: PreTrainedModel, text: list[int], positions: np.ndarray) -> np.ndarray:
    """Logits float64 [positions, vocab] of a text, computed at once without a cache."""
    kept = torch.from_numpy(positions)
    takes = "logits_to_keep" in inspect.signature(module.forward).parameters
    with torch.inference_mode(), Float64():
        ids = torch.tensor([text])
        if takes:
            return module(input_ids=ids, use_cache=False, logits_to_keep=kept).logits[0].numpy()
        return module(input_ids=ids, use_cache=False).logits[0, kept].numpy()
