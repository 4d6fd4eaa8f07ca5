"""How weight files call the tensors of a model, where transformers gives some other names as it loads them.

mixtral's files have `block_sparse_moe.experts.0.w1`, the module is `mlp.experts`. What transformers merges or splits on
the way (`WeightConverter`) is no matter of names and is left out here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


class CheckpointNames:
    """The two names of each tensor, by transformers' own rules for the architecture.

    stored: names in the weight files; rules that change none of them are not in effect.
    """

    def __init__(self, module: nn.Module, stored: Iterable[str]) -> None:
        names = self.stored = list(stored)
        self._forward: list[Any] = []
        for rule in _renamings(module):
            renamed = [rule.rename_source_key(name)[0] for name in names]
            if renamed != names:
                self._forward.append(rule)
                names = renamed
        self._backward = [rule.reverse_transform() for rule in reversed(self._forward)]

    def in_module(self, name: str) -> str:
        """The name in the model's state dict of what the files call `name`."""
        for rule in self._forward:
            name = rule.rename_source_key(name)[0]
        return name

    def in_files(self, name: str) -> str:
        """The name in weight files of what the model's state dict calls `name`."""
        for rule in self._backward:
            name = rule.rename_source_key(name)[0]
        return name


def _renamings(module: nn.Module) -> list[Any]:
    """transformers' rules for names alone, in the order in which it applies them."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    rules: Any = get_model_conversion_mapping(module)  # type: ignore[arg-type]
    return [rule for rule in rules if isinstance(rule, WeightRenaming)]
