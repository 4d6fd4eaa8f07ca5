"""How transformers initializes what a folder's files lack: every module, by the `_init_weights` of its own model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

Initialize = Callable[["nn.Module"], None]


def initializers(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, Initialize]]:
    """Name, module and what initializes it, children before their parents; a model within the model brings its own."""
    from transformers import PreTrainedModel

    def visit(name: str, module: nn.Module, initialize: Initialize) -> Iterator[tuple[str, nn.Module, Initialize]]:
        if isinstance(module, PreTrainedModel):
            initialize = module._init_weights
        for leaf, child in module.named_children():
            yield from visit(f"{name}.{leaf}" if name else leaf, child, initialize)
        yield name, module, initialize

    return visit("", model, model._init_weights)
