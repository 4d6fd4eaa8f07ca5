"""Whether plain transformers can open a folder whose layers hold packed weights and no `weight`."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from .initialization import initializers

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from .initialization import Initialize


def asks_for_weight(skeleton: PreTrainedModel, names: Collection[str]) -> str | None:
    """The class whose initialization of weights asks for the `weight` of one of these layers; None where none does.

    transformers initializes every module of a model that it has opened, what was loaded excepted tensor by tensor, and
    some architectures reach for `weight` there by its name: with packed layers they stop at an AttributeError.
    skeleton: a transformers model on the meta device, whole again afterwards. names: of its layers to be packed; those
    that it does not have are passed over.
    """
    import torch

    modules = dict(skeleton.named_modules())
    packed = {name: modules[name] for name in names if name in modules}
    whole = {name: layer._parameters for name, layer in packed.items()}
    for layer in packed.values():
        layer.__dict__["_parameters"] = {leaf: p for leaf, p in layer._parameters.items() if leaf != "weight"}
    tried: set[tuple[type, tuple[str, ...]]] = set()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for name, module, initialize in initializers(skeleton):
                leaves = (leaf for leaf, _ in module.named_modules())
                own = tuple(leaf for leaf in leaves if ".".join(filter(None, (name, leaf))) in packed)
                if own and (type(module), own) not in tried and _lacks_weight(module, initialize):
                    return type(module).__name__
                tried.add((type(module), own))
    finally:
        for name, layer in packed.items():
            layer.__dict__["_parameters"] = whole[name]
    return None


def _lacks_weight(module: nn.Module, initialize: Initialize) -> bool:
    """Whether initializing the module stops at a `weight` that is not there."""
    try:
        initialize(module)
    except AttributeError as error:
        return "'weight'" in str(error)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return False  # what cannot be done without values says nothing
    return False
