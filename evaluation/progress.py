"""Events of a measurement."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from ..optimizer.events import Event, Listener


@contextmanager
def stage(listener: Listener, name: str) -> Iterator[None]:
    """Tell the listener that a stage begins, and at its end how many seconds it took."""
    start = time.perf_counter()
    listener(Event("stage_started", name))
    yield
    listener(Event("stage_finished", name, data={"seconds": round(time.perf_counter() - start, 3)}))
