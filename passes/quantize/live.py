"""The hidden states of the calibration batches between two blocks: kept in memory, in files, or both.

Files serve two purposes: a run that was killed goes on from them, and where memory is short they are the only copy,
read again one batch at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...runtime.tensor_files import Spec, locate, read_stored, write_tensors

if TYPE_CHECKING:
    import torch

    from ...runtime.decoder_blocks import CapturedBatch

FIELDS = ("hidden", "original")


class LiveStates:
    """Writes the batches' states after a block into the folder that `begin` is given.

    offload: whether the files become the only copy. scratch: an empty folder for what lasts no longer than a block,
    where that is to lie in files, too.
    """

    def __init__(self, offload: bool = False) -> None:
        self.offload = offload
        self.scratch: Path | None = None
        self._folder: Path | None = None

    def begin(self, folder: Path | None) -> None:
        """Take `folder` (empty) for the states after the block that runs now; None keeps them in memory only."""
        self._folder = folder

    def keep(self, number: int, batch: CapturedBatch) -> None:
        """Write the states of batch `number`, which are those after the block."""
        if self._folder is None:
            return
        path = self._folder / f"{number:05d}.safetensors"
        states = {field: state for field in FIELDS if (state := getattr(batch, field)) is not None}
        write_tensors(path, {name: Spec.of(state) for name, state in states.items()}, lambda name: states[name])
        if self.offload:
            self._point(path, batch)

    def resume(self, folder: Path, captured: list[CapturedBatch]) -> None:
        """Give the batches the states that `keep` wrote into `folder`."""
        for number, batch in enumerate(captured):
            self._point(folder / f"{number:05d}.safetensors", batch)
            if not self.offload:
                batch.hidden, batch.original = batch.hidden, batch.original

    def _point(self, path: Path, batch: CapturedBatch) -> None:
        for name, place in locate([path]).items():
            batch.leave_in_file(name, place)


class Stash:
    """Tensors by name, in memory, or in files of `folder` where one is given."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._kept: dict[str, torch.Tensor | Path] = {}
        self._devices: dict[str, torch.device] = {}

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a tensor under a name, in the place of what was kept there."""
        self._devices[name] = tensor.device
        if self._folder is None:
            self._kept[name] = tensor
            return
        path = self._folder / f"{name}.safetensors"
        write_tensors(path, {"state": Spec.of(tensor)}, lambda _: tensor)
        self._kept[name] = path

    def get(self, name: str) -> torch.Tensor:
        """The tensor of that name, where it was."""
        kept = self._kept[name]
        return read_stored(locate([kept])["state"]).to(self._devices[name]) if isinstance(kept, Path) else kept

    def take(self, name: str) -> torch.Tensor:
        """The same, no longer kept."""
        tensor, kept = self.get(name), self._kept.pop(name)
        if isinstance(kept, Path):
            kept.unlink()
        return tensor

    def clear(self) -> None:
        """Keep nothing more."""
        for name in list(self._kept):
            self.take(name)
