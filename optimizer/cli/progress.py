"""Renders a run's events: progress bars with ETA on a terminal, plain lines when piped, JSON lines for scripts."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..events import Event, Listener, json_lines, silent

if TYPE_CHECKING:
    from rich.progress import TaskID

TITLES = {
    "load": "loading the source",
    "calibration": "writing calibration text",
    "reference": "measuring the source",
    "huggingface": "writing the artifact",
    "onnx": "writing the graph and proving it in a fresh process",
    "look": "measuring it on a few windows",
    "prove": "reopening it in a fresh process and measuring it",
    "report": "drawing the report",
    "attribution": "finding the layers that hurt",
    "open": "opening the models",
    "text": "scoring the text",
    "generate": "continuing the prompts",
    "tasks": "running the tasks",
    "layers": "comparing the layers",
}


@contextmanager
def listener(log: str) -> Iterator[Listener]:
    """A listener for `log`: "rich" (bars on a terminal), "plain", "json" or "none"; all write to standard error."""
    if log == "json":
        yield json_lines()
    elif log == "none":
        yield silent
    elif log == "rich" and sys.stderr.isatty():
        with RichListener() as rich:
            yield rich
    else:
        yield PlainListener()


def duration(seconds: float) -> str:
    """`8.4 s`, `2 min 05 s`, `1 h 12 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def seconds_left(event: Event, started: float, now: float) -> float | None:
    """What a progress event says itself (`data["left"]`, in seconds; None where it cannot know yet), or by the pace of
    its steps since `started`.

    Listeners begin to count anew after an event that says it itself: its steps are not those that follow.
    """
    assert event.step and event.total
    if "left" in event.data:
        said = event.data["left"]
        return None if said is None else float(said)
    return (now - started) / event.step * (event.total - event.step)


def told(left: float | None, form: str) -> str:
    """Seconds in words, put into `form`; empty where they are not known."""
    return "" if left is None else form.format(duration(left))


class PlainListener:
    """One line a stage and a note, and a line of progress every few seconds."""

    interval = 5.0

    def __init__(self) -> None:
        self.started = self.shown = time.monotonic()

    def __call__(self, event: Event) -> None:
        now = time.monotonic()
        title = TITLES.get(event.stage, event.stage)
        if event.kind == "stage_started":
            self.started = self.shown = now
            self._print(f"{title} …")
        elif event.kind == "stage_finished":
            took = duration(event.data["seconds"]) if "seconds" in event.data else event.message
            self._print(f"{title}: done ({took})")
        elif event.kind == "note":
            self._print(f"{title}: {event.data.get('note', 'note')}: {event.message}")
        elif event.kind == "progress" and event.step and event.total:
            self._progress(event, title, now)

    def _progress(self, event: Event, title: str, now: float) -> None:
        if now - self.shown >= self.interval:
            self.shown = now
            left = told(seconds_left(event, self.started, now), ", {} left")
            self._print(f"  {title} {event.step}/{event.total}{left}. {event.message}".rstrip())
        if "left" in event.data:
            self.started = now

    def _print(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class RichListener:
    """A bar for the stage that runs, with the time left after its first step; finished stages become lines."""

    def __enter__(self) -> RichListener:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self.console = Console(stderr=True)
        columns = [
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
        ]
        self.progress = Progress(*columns, console=self.console, transient=True)
        self.progress.start()
        self.task: TaskID | None = None
        self.started = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def __call__(self, event: Event) -> None:
        title = TITLES.get(event.stage, event.stage)
        if event.kind == "stage_started":
            self.started = time.monotonic()
            self.task = self.progress.add_task(title, total=None, left="")
        elif event.kind == "progress" and self.task is not None and event.step and event.total:
            left = told(seconds_left(event, self.started, time.monotonic()), "{} left  ")
            if "left" in event.data:
                self.started = time.monotonic()
            self.progress.update(self.task, completed=event.step, total=event.total, left=left + event.message)
        elif event.kind == "stage_finished":
            if self.task is not None:
                self.progress.remove_task(self.task)
                self.task = None
            took = duration(event.data["seconds"]) if "seconds" in event.data else event.message
            self.console.print(f"[green]✓[/] {title} [dim]{took}[/]")
        elif event.kind == "note":
            style = "yellow" if event.data.get("note") == "fallback" else "dim"
            self.console.print(f"[{style}]  {title}: {event.data.get('note', 'note')}: {event.message}[/]")
