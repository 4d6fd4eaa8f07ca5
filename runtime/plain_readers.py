"""Whether plain transformers can open a folder whose layers hold packed weights and no `weight`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def asks_for_weight(skeleton: nn.Module, names: Collection[str]) -> str | None:
    """The class whose initialization of weights asks for the `weight` of one of these layers; None where none does.

    transformers initializes every module of a model that it has opened, what was loaded excepted tensor by tensor, and
    some architectures reach for `weight` there by its name: with packed layers they stop at an AttributeError.
    skeleton: a transformers model on the meta device, whole again afterwards. names: of its layers to be packed; those
    that it does not have are passed over.
    """
    import torch
    from transformers import PreTrainedModel

    modules = dict(skeleton.named_modules())
    packed = {name: modules[name] for name in names if name in modules}
    whole = {name: layer._parameters for name, layer in packed.items()}
    tried: set[Any] = set()

    def visit(module: nn.Module, name: str, initialize: Callable[[nn.Module], None]) -> str | None:
        if isinstance(module, PreTrainedModel):
            initialize = module._init_weights
        for leaf, child in module.named_children():
            found = visit(child, f"{name}.{leaf}" if name else leaf, initialize)
            if found is not None:
                return found
        prefix = f"{name}." if name else ""
        own = tuple(leaf for leaf, _ in module.named_modules() if f"{prefix}{leaf}".rstrip(".") in packed)
        if not own or (type(module), own) in tried:
            return None
        tried.add((type(module), own))
        try:
            initialize(module)
        except AttributeError as error:
            return type(module).__name__ if "'weight'" in str(error) else None
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            return None  # what cannot be done without values says nothing
        return None

    for layer in packed.values():
        layer.__dict__["_parameters"] = {leaf: p for leaf, p in layer._parameters.items() if leaf != "weight"}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return visit(skeleton, "", lambda module: None)
    finally:
        for name, layer in packed.items():
            layer.__dict__["_parameters"] = whole[name]
