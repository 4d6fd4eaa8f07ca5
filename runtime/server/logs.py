"""The server's log: one line an event, JSON or text, on standard error. Never the text of requests, unless asked."""

from __future__ import annotations

import contextlib
import json
import sys
from datetime import datetime, timezone
from typing import IO, Any, Literal


class Log:
    """Writes events. Fields that are None are left out; a value with line breaks cannot forge a second line."""

    def __init__(self, form: Literal["json", "text"] = "text", stream: IO[str] | None = None) -> None:
        self._form, self._stream = form, stream

    def event(self, name: str, **fields: Any) -> None:
        when = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        known = {key: value for key, value in fields.items() if value is not None}
        if self._form == "json":
            line = json.dumps({"time": when, "event": name, **known}, default=str)
        else:
            line = " ".join([when, name, *(f"{key}={_plain(value)}" for key, value in known.items())])
        with contextlib.suppress(OSError, ValueError):  # a log that is gone must not take the server with it
            print(line, file=self._stream or sys.stderr, flush=True)


def _plain(value: Any) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text and text else json.dumps(text)
