"""The head of a lazy model, multiplied a part at a time as it is read from its file.

A head of 262,144 tokens is larger than all else that has to be in memory to know a window's logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from . import tensor_files

if TYPE_CHECKING:
    from torch import nn

    from ..optimizer.model import LoadedModel

LEAST_PARTS = 4
"""A head of fewer parts is filled: reading it anew for every window would save little."""


@contextmanager
def head_by_parts(model: LoadedModel, *names: str) -> Iterator[list[str]]:
    """While it lasts, the head of a lazy model, where it is named, empty, large and a plain linear layer, computes with
    what it reads of its file, some PART bytes at a time. Yields the names of the modules that have to be filled as
    before: all others. A part's products may differ from the whole matrix's in their last bits.
    """
    found = _head(model, names)
    if found is None:
        yield list(names)
        return
    name, head = found

    def forward(states: Any) -> Any:
        return _product(model, name, head, states)

    before = head.__dict__.get("forward")
    head.forward = forward  # type: ignore[method-assign,assignment]
    try:
        yield [other for other in names if other != name]
    finally:
        del head.forward
        if before is not None:
            head.forward = before  # type: ignore[method-assign]


def _head(model: LoadedModel, names: tuple[str, ...]) -> tuple[str, nn.Linear] | None:
    from torch import nn

    module: Any = model.module
    head, weights = module.get_output_embeddings(), model.weights
    name = next((name for name in names if module.get_submodule(name) is head), None)
    if name is None or weights is None or type(head) is not nn.Linear or not head.weight.is_meta:
        return None
    return (name, head) if weights.place(f"{name}.weight").nbytes >= LEAST_PARTS * tensor_files.PART else None


def _product(model: LoadedModel, name: str, head: nn.Linear, states: Any) -> Any:
    """`head(states)`: [..., K] to [..., N], in the dtype of the states."""
    import torch
    import torch.nn.functional as F

    weights = model.weights
    assert weights is not None
    bias = None if head.bias is None else weights.read(f"{name}.bias")
    out = states.new_empty(*states.shape[:-1], head.out_features)
    start = 0
    for part in weights.parts(f"{name}.weight"):
        stop = start + len(part)
        out[..., start:stop] = F.linear(states, part.to(states.device), None if bias is None else bias[start:stop])
        start = stop
    assert start == head.out_features and isinstance(out, torch.Tensor)
    return out
