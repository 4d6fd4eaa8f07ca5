"""Memory over a run: physical memory of this process and of those it starts, sampled by a thread, stage by stage."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from .manifest import StageTime, Timeline

INTERVAL = 0.25
"""Seconds between samples at first."""
MOST_SAMPLES = 300
"""When there are this many, each second one is dropped and the interval doubled."""
MOST_STAGES = 200
CHILDREN_EVERY = 2.0
"""Seconds between looks for processes that were started: that walks over all processes of the machine."""


class MemoryTimeline:
    """Samples while it is entered; `stage` marks what runs; `result` is what the manifest keeps.

    A sample takes some ten microseconds. Device memory is what torch has allocated on CUDA, where it is in use.
    """

    def __init__(self, interval: float = INTERVAL, most_samples: int = MOST_SAMPLES) -> None:
        import psutil

        self.interval, self.most_samples = interval, most_samples
        self._process = psutil.Process()
        self._children: list[Any] = []
        self._looked = float("-inf")
        self._start = time.perf_counter()
        self._stages: list[StageTime] = []
        self._samples: list[tuple[float, int, int, int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llmopt-memory", daemon=True)

    def __enter__(self) -> MemoryTimeline:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """What runs inside is a stage of that name."""
        start = self._now()
        try:
            yield
        finally:
            if len(self._stages) < MOST_STAGES:
                self._stages.append(StageTime(name=name, start=round(start, 3), end=round(self._now(), 3)))

    def result(self) -> Timeline:
        """The samples and stages so far."""
        samples = list(self._samples)
        return Timeline(
            interval=self.interval,
            times=[sample[0] for sample in samples],
            rss=[sample[1] for sample in samples],
            children=[sample[2] for sample in samples],
            device=[sample[3] for sample in samples],
            stages=sorted(self._stages, key=lambda stage: stage.start),
        )

    def _run(self) -> None:
        while True:
            self._sample()
            if self._stop.wait(self.interval):
                return

    def _sample(self) -> None:
        now = self._now()
        self._samples.append((round(now, 3), self._process.memory_info().rss, self._started(now), _device_bytes()))
        if len(self._samples) >= self.most_samples:
            self._samples = self._samples[::2]
            self.interval *= 2

    def _started(self, now: float) -> int:
        """Bytes of the processes that this one started; 0 where there are none."""
        import psutil

        if now - self._looked >= CHILDREN_EVERY:
            self._looked = now
            with suppress(psutil.Error):
                self._children = self._process.children(recursive=True)
        total = 0
        for child in self._children:
            with suppress(psutil.Error):
                total += child.memory_info().rss
        return total

    def _now(self) -> float:
        return time.perf_counter() - self._start


def _device_bytes() -> int:
    """Bytes that torch has allocated on all CUDA devices; 0 where torch is not loaded or CUDA not in use."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)  # absent while torch is being imported
    if cuda is None or not getattr(cuda, "is_initialized", bool)():
        return 0
    return sum(cuda.memory_allocated(device) for device in range(cuda.device_count()))
