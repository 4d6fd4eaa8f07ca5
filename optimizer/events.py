"""Events of a run: the command line renders them as progress, a script reads them as JSON lines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any, Literal

EventKind = Literal["run_started", "stage_started", "progress", "note", "stage_finished", "run_finished", "run_failed"]


@dataclass(frozen=True)
class Event:
    """One thing that happened. `stage` is a pass, exporter or step name; `data` is JSON-serializable."""

    kind: EventKind
    stage: str = ""
    message: str = ""
    step: int | None = None
    total: int | None = None
    data: dict[str, Any] = field(default_factory=dict)
    time: float = field(default_factory=time.time)

    def as_dict(self) -> dict[str, Any]:
        """The event without its empty fields."""
        return {k: v for k, v in self.__dict__.items() if v not in (None, "", {})}


Listener = Callable[[Event], None]


def json_lines(stream: IO[str] | None = None) -> Listener:
    """A listener that writes each event as one line of JSON (standard error by default)."""

    def write(event: Event) -> None:
        out = stream or sys.stderr
        print(json.dumps(event.as_dict(), default=str), file=out, flush=True)

    return write


def silent(event: Event) -> None:
    """A listener that ignores everything."""
