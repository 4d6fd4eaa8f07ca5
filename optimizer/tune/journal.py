"""The journal of a search: one JSON line that says which search it is, then one a finished trial.

Lines are flushed as they are written, so that a search that was killed goes on after its last finished trial. A last
line that was cut is dropped.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import RunError, UsageError

VERSION = 1
NAME = "trials.jsonl"
State = Literal["complete", "pruned", "refused", "failed"]
STATES = ("complete", "pruned", "refused", "failed")


@dataclass(frozen=True)
class Trial:
    """A finished trial.

    state: `complete` was made and measured; `pruned` was given up early; `refused` is no valid recipe for this model;
    `failed` broke off. reason: why it is not complete. ran: whether its passes were begun. figures: of the artifact,
    by name (`metrics.METRICS`), and source: of what it was made from. proxy: what the cheap checks found, by the same
    names. seconds: wall time; elapsed: of the whole search up to its end. foreign_cpu: share of the machine that others
    used while speed was measured.
    """

    number: int
    values: dict[str, Any]
    state: State
    reason: str = ""
    ran: bool = False
    figures: dict[str, float] = field(default_factory=dict)
    source: dict[str, float] = field(default_factory=dict)
    proxy: dict[str, float] = field(default_factory=dict)
    foreign_cpu: float | None = None
    seconds: float = 0.0
    elapsed: float = 0.0

    @property
    def key(self) -> str:
        """The same as that of its draw (`space.Draw.key`)."""
        return json.dumps(self.values, sort_keys=True)

    @property
    def known(self) -> dict[str, float]:
        """The figures, or as much as the cheap checks say of them."""
        return self.figures or self.proxy


class Journal:
    """The file and what it held when it was opened. `notes` say what was mended.

    identity: what makes two searches the same, by name. Raises UsageError where the file is another search's, RunError
    where it is damaged.
    """

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path = path
        self.trials: list[Trial] = []
        self.notes: list[str] = []
        if path.exists():
            self._read(identity)
        if not path.exists():
            self._write({"search": VERSION, "identity": identity})

    def append(self, trial: Trial) -> None:
        self.trials.append(trial)
        self._write(asdict(trial))

    def _write(self, record: dict[str, Any]) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(f"the trial cannot be written down ({error.strerror})", str(self.path)) from None

    def _read(self, identity: dict[str, Any]) -> None:
        lines = self._whole_lines()
        if not lines:
            self.path.unlink()
            return
        _require_same(_object(lines[0], f"{self.path}:1"), identity, self.path)
        for number, line in enumerate(lines[1:], 2):
            where = f"{self.path}:{number}"
            try:
                trial = Trial(**_object(line, where))
            except TypeError:
                raise RunError("is no trial", where, "Begin anew with --force") from None
            if trial.state not in STATES or trial.number != len(self.trials):
                raise RunError("is not the trial that should stand here", where, "Begin anew with --force")
            self.trials.append(trial)

    def _whole_lines(self) -> list[bytes]:
        """The lines; where the last one was cut, the file is cut before it."""
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            self.notes.append(f"{self.path}: the last line was cut when the search was stopped, and is dropped")
            with self.path.open("r+b") as file:
                file.truncate(len(whole))
        return whole.splitlines()


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise RunError("is not a line of a search's journal", where, "Begin anew with --force")
    return found


def _require_same(head: dict[str, Any], identity: dict[str, Any], path: Path) -> None:
    if head.get("search") != VERSION or not isinstance(head.get("identity"), dict):
        raise UsageError("is not the journal of a search", str(path), "Choose another --out")
    before = head["identity"]
    for name, value in identity.items():
        if before.get(name) != value:
            hint = "Choose another --out, or begin anew with --force"
            raise UsageError(f"this search was begun with another {name}", str(path), hint)
