"""Time that a search may take, and what of it is left."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence

from ..errors import UsageError

UNITS = {"s": 1, "m": 60, "h": 3600}
OVERRUN = 0.05
"""Share of the budget by which the last trial may overrun it, by the time that trials took."""


def parse_budget(text: str) -> float:
    """`90s`, `30m`, `1.5h`, `1h30m` → seconds. Raises UsageError."""
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([smh])", text.strip().lower(), re.ASCII)
    whole = "".join(f"{number}{unit}" for number, unit in parts)
    seconds = sum(float(number) * UNITS[unit] for number, unit in parts)
    if not parts or whole != re.sub(r"\s+", "", text.lower()) or not 0 < seconds <= 1e8:
        raise UsageError(f"{text[:40]!r} is not a time", "--budget", "Write for example 90s, 30m or 1h30m")
    return seconds


class Budget:
    """Seconds of wall time; `spent` before this process counts, too."""

    def __init__(self, seconds: float, spent: float, clock: Callable[[], float]) -> None:
        self.seconds, self.before, self.clock = seconds, spent, clock
        self.start = clock()

    @property
    def spent(self) -> float:
        return self.before + self.clock() - self.start

    @property
    def left(self) -> float:
        return max(0.0, self.seconds - self.spent)

    def expected(self, took: Sequence[float]) -> float:
        """What the next trial takes: the median of those before it."""
        return statistics.median(took) if took else 0.0

    def allows(self, took: Sequence[float]) -> bool:
        """Whether one more trial may start. The first may wherever any time is left."""
        return self.left > 0 and self.spent + self.expected(took) <= self.seconds * (1 + OVERRUN)
