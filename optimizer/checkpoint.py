"""A pass's progress on disk: the results of its finished steps, and what it needs to go on after them.

A folder with a journal (`journal.json`), one safetensors file a step, and one folder `live-N` with what was in memory
after step N. The journal is replaced after the files that it names are whole, so that a run that is killed at any
moment finds the last step that it finished. Checksums tell a file that a crash of the machine left torn.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..runtime.tensor_files import Spec, write_tensors
from .files import write_atomic

if TYPE_CHECKING:
    import torch

JOURNAL = "journal.json"
CHUNK = 1 << 20


class Checkpoint:
    """Steps of one pass. `identity` (JSON) is what a result depends on: progress made under another one is dropped."""

    def __init__(self, folder: Path, identity: Mapping[str, Any] | None = None) -> None:
        self.folder, self.identity = folder, dict(identity or {})
        self._steps: list[dict[str, Any]] = []
        self.prepared: Any = None
        """What `prepare` was given, by this run or an earlier one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._open()

    @property
    def done(self) -> int:
        """Number of finished steps."""
        return len(self._steps)

    @property
    def files(self) -> list[Path]:
        """The tensors of the finished steps, in order; a later file's tensors stand before an earlier one's."""
        return [self.folder / step["file"] for step in self._steps]

    def data(self, step: int) -> Any:
        """What `commit` was given for a finished step (0-based)."""
        return self._steps[step]["data"]

    @property
    def live(self) -> Path | None:
        """The folder that was written with the last finished step; None where there was none."""
        name = self._steps[-1]["live"] if self._steps else None
        return self.folder / name if name else None

    def next_live(self) -> Path:
        """An empty folder for what is in memory after the step that runs now, to be given to `commit`."""
        return self.scratch(f"live-{self.done:05d}")

    def scratch(self, name: str) -> Path:
        """An empty folder that lasts until `finish`."""
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def commit(self, tensors: Mapping[str, torch.Tensor], data: Any, live: Path | None = None) -> Path:
        """Record the next step as finished: its tensors, JSON data, and the folder from `next_live`, if it was filled.

        Returns the file that holds the tensors.
        """
        path = self.folder / f"step-{self.done:05d}.safetensors"
        write_tensors(path, {name: Spec.of(tensor) for name, tensor in tensors.items()}, lambda name: tensors[name])
        before = self.live
        sums = {str(file.relative_to(self.folder)): checksum(file) for file in [path, *_files(live)]}
        step = {"file": path.name, "data": data, "live": live.name if live else None, "checksums": sums}
        self._write([*self._steps, step], self.prepared)
        if before is not None and before != live:
            shutil.rmtree(before, ignore_errors=True)
        return path

    def prepare(self, data: Any) -> None:
        """Record JSON data that the steps to come depend on, such as the result of a search."""
        self._write(self._steps, data)

    def finish(self) -> None:
        """Drop what is only needed to go on; the steps' tensors stay."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
        (self.folder / JOURNAL).unlink(missing_ok=True)

    def _write(self, steps: list[dict[str, Any]], prepared: Any) -> None:
        journal = {"identity": self.identity, "prepared": prepared, "steps": steps}
        write_atomic(self.folder / JOURNAL, json.dumps(journal))
        self._steps, self.prepared = steps, prepared

    def _open(self) -> None:
        """Read the journal, keep the steps up to which everything is whole, and remove what it does not name."""
        try:
            journal = json.loads((self.folder / JOURNAL).read_text(encoding="utf-8"))
            steps = journal["steps"] if journal["identity"] == self.identity else []
            self._steps = steps if all(self._whole(step, last=step is steps[-1]) for step in steps) else []
            self.prepared = journal.get("prepared") if journal["identity"] == self.identity else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self._steps = []
        known = {JOURNAL} if self._steps or self.prepared is not None else set()
        known |= {step["file"] for step in self._steps}
        known |= {self.live.name} if self.live else set()
        for path in self.folder.iterdir():
            if path.name not in known:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def _whole(self, step: dict[str, Any], last: bool) -> bool:
        """Whether the step's files are what was written; the live folder counts for the last step only."""
        for name, known in step["checksums"].items():
            path = self.folder / name
            if (last or "/" not in name) and (not path.is_file() or checksum(path) != known):
                return False
        return True


def checksum(path: Path) -> int:
    """CRC-32 of a file's contents."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            value = zlib.crc32(chunk, value)
    return value


def _files(folder: Path | None) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file()) if folder else []
