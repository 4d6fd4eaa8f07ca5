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

    modules = dict(skeleton.named_modules())
    packed = {name: modules[name] for name in names if name in modules}
    taken = {name: layer._parameters.pop("weight") for name, layer in packed.items() if "weight" in layer._parameters}
    tried: set[Any] = set()

    def visit(module: nn.Module, name: str, initialize: Callable[[nn.Module], None]) -> str | None:
        initialize = getattr(module, "_init_weights", initialize)
        for leaf, child in module.named_children():
            found = visit(child, f"{name}.{leaf}" if name else leaf, initialize)
            if found is not None:
                return found
        prefix = f"{name}." if name else ""
        own = tuple(leaf for leaf, _ in module.named_modules() if f"{prefix}{leaf}".rstrip(".") in taken)
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

    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return visit(skeleton, "", lambda module: None)
    finally:
        for name, weight in taken.items():
            packed[name]._parameters["weight"] = weight
