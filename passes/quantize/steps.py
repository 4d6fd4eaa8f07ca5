"""What finished blocks leave behind on disk (changed tensors, report lines), and a model brought up to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...optimizer.errors import RunError
from ...runtime.packed_load import assign, owner_of
from ...runtime.tensor_files import locate, read_stored

if TYPE_CHECKING:
    from ...optimizer.checkpoint import Checkpoint
    from ...optimizer.model import LoadedModel

Lines = list[dict[str, Any]]


class FinishedSteps:
    """Commits the steps of a run to a checkpoint. A lazy model's results have to go to one; another's may.

    restore: repeats on the module tree what the quantization of the layers in these report lines did.
    """

    def __init__(self, model: LoadedModel, checkpoint: Checkpoint | None, restore: Callable[[Lines], None]) -> None:
        if checkpoint is None and model.weights is not None:
            raise RunError("the results of a lazy model need a folder", what_to_do="Give the context a checkpoint.")
        self.model, self.checkpoint, self.restore = model, checkpoint, restore

    @property
    def done(self) -> int:
        """Steps that an earlier run finished, or this one so far; 0 where nothing is kept."""
        return self.checkpoint.done if self.checkpoint is not None else 0

    def resume(self) -> Lines:
        """Bring the model to the state after the finished steps; returns their report lines."""
        if self.checkpoint is None or not self.checkpoint.done:
            return []
        lines = [line for step in range(self.checkpoint.done) for line in self.checkpoint.data(step)]
        self.restore(lines)
        if self.model.weights is not None:
            self.model.weights.overlay(self.checkpoint.files)
            self.model.weights.forget()
            return lines
        for name, place in locate(self.checkpoint.files).items():
            device = _device(owner_of(self.model.module, name)[0])
            if not assign(self.model.module, name, read_stored(place).to(device), place.file):
                raise RunError(f"{name} is not a tensor of the model", str(place.file))
        return lines

    def save(self, names: list[str], lines: Lines, live: Path | None = None) -> None:
        """Commit a step that changed the modules of these names, all of which are in memory."""
        if self.checkpoint is None:
            return
        tensors = {
            name: tensor
            for module in names
            for name, tensor in self.model.module.get_submodule(module).state_dict(prefix=f"{module}.").items()
            if self._changed(name, tensor)
        }
        path = self.checkpoint.commit(tensors, lines, live)
        if self.model.weights is not None:
            self.model.weights.overlay([path])
            self.model.weights.forget()

    def _changed(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor is another than the one that lies in the lazy model's files."""
        weights = self.model.weights
        if weights is None or weights.aliases.get(name, name) not in weights.stored:
            return True
        place = weights.place(name)
        if place.shape != tuple(tensor.shape):
            return True
        stored = weights.read(name)
        return stored.dtype != tensor.dtype or not torch.equal(stored, tensor.cpu())


def _device(module: torch.nn.Module) -> torch.device:
    """Where a module's tensors are; the CPU where it has none."""
    return next((tensor.device for tensor in module.parameters()), torch.device("cpu"))
