"""How weight files call the tensors of a model, where transformers gives some other names as it loads them.

mixtral's files have `block_sparse_moe.experts.0.w1`, the module is `mlp.experts`. What transformers merges or splits on
the way (`WeightConverter`) is no matter of names: `converted` finds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .weight_files import read_header, weight_files

if TYPE_CHECKING:
    from torch import nn


class CheckpointNames:
    """The two names of each tensor, by transformers' own rules for the architecture.

    stored: names in the weight files; rules that change none of them are not in effect. As in transformers, a name that
    the model has, and that the rules would make one that it lacks, stays as it is.
    """

    def __init__(self, module: nn.Module, stored: Iterable[str]) -> None:
        self.stored = list(stored)
        names, self._forward = self.stored, []
        for rule in _rules(module, renamings=True):
            renamed = [rule.rename_source_key(name)[0] for name in names]
            if renamed != names:
                self._forward.append(rule)
                names = renamed
        self._backward: list[Any] = [rule.reverse_transform() for rule in reversed(self._forward)]
        self._owners = {name for name, _ in module.named_modules()} if self._forward else set()
        self._known = {self.in_module(name): name for name in self.stored} if self._forward else {}
        self._parents = {_owner(own): _owner(name) for own, name in self._known.items() if _leaf(own) == _leaf(name)}

    @classmethod
    def of_folder(cls, module: nn.Module, folder: Path) -> CheckpointNames:
        """Those of the weight files in a folder."""
        return cls(module, [name for file in weight_files(folder) for name in read_header(file)])

    def in_module(self, name: str) -> str:
        """The name in the model's state dict of what the files call `name`."""
        own = name
        for rule in self._forward:
            own = rule.rename_source_key(own)[0]
        return name if own != name and not self._has(own) and self._has(name) else own

    def in_files(self, name: str) -> str:
        """The name in weight files of what the model's state dict calls `name`: that of the source, or, of a tensor
        that the source does not have, beside those of the same module."""
        if name in self._known:
            return self._known[name]
        if _owner(name) in self._parents:
            parent = self._parents[_owner(name)]
            return f"{parent}.{_leaf(name)}" if parent else _leaf(name)
        for rule in self._backward:
            name = rule.rename_source_key(name)[0]
        return name

    def _has(self, name: str) -> bool:
        """Whether the model has the module that would hold the tensor, whatever its form there."""
        return _owner(name) in self._owners


def converted(module: nn.Module, names: Iterable[str]) -> str | None:
    """The first of the tensors, by the names that modules have for them, that transformers merges, splits or permutes
    as it loads them, but for experts that it stacks; None where there is none."""
    rules = [rule for rule in _rules(module, renamings=False) if not any("experts" in t for t in rule.target_patterns)]
    return next((name for name in names for rule in rules if rule.rename_source_key(name)[1] is not None), None)


def _rules(module: nn.Module, renamings: bool) -> Iterator[Any]:
    """transformers' rules for names alone, in the order in which it applies them; or all others."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    rules: Any = get_model_conversion_mapping(module)  # type: ignore[arg-type]
    return (rule for rule in rules if isinstance(rule, WeightRenaming) == renamings)


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
