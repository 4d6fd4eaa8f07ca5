"""Draws a report of data of a known kind and writes it."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from ...optimizer.errors import MissingDependency, RunError, UsageError
from .page import Page, render
from .svg import available

KINDS = {
    "artifact": "artifact",
    "evaluation": "evaluated",
    "bench": "benched",
    "diff": "difference",
    "difference": "difference",
    "comparison": "comparison",
    "search": "searched",
}
"""Kind of data → the module of this package whose `page(data)` lays it out."""


def draw_report(kind: str, data: dict[str, Any]) -> str:
    """The HTML of a report, see `write_report`."""
    if not available():
        raise MissingDependency("vl-convert-python", "report", "a report")
    return render(_builder(kind)(data))


def write_report(kind: str, data: dict[str, Any], path: str | Path) -> Path:
    """Write a report: one HTML file that loads nothing. An existing file is replaced, or stays whole.

    kind: "artifact" (a manifest, the content of llmopt.json), "evaluation" (what `llmopt eval --json` prints), "bench",
    "diff" (a JSON object of figures and lists of records; see records.py), "comparison" (see comparison.py) or "search"
    (what `llmopt tune --json` prints).
    Raises UsageError for an unknown kind, MissingDependency without the extra `report`, RunError where the file cannot
    be written.
    """
    place = Path(path)
    if place.is_dir():
        raise UsageError("is a folder; a report is a file", str(path), "Name a file such as report.html")
    text = draw_report(kind, data)
    temporary = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, place)
    except OSError as error:
        raise RunError(f"the report cannot be written ({error.strerror})", str(path)) from None
    finally:
        temporary.unlink(missing_ok=True)
    return place


def _builder(kind: str) -> Callable[[dict[str, Any]], Page]:
    if kind not in KINDS:
        raise UsageError(f"there is no report of kind {kind!r}", "report", f"Kinds: {', '.join(KINDS)}")
    return import_module(f".{KINDS[kind]}", __package__).page
