"""The cyclic garbage collector, held still while many objects are made that all stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Within it no collection starts by itself; afterwards the collector is as it was.

    Importing torch and transformers makes a million objects that live on; a collection every few hundred of them takes
    a fifth of the start. Loads at the same time in other threads only shorten each other's pause.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
