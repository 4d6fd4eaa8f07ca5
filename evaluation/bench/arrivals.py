"""When requests are sent: vLLM's arrival process."""

from __future__ import annotations

import math
import random

from ...optimizer.errors import UsageError


def arrival_times(count: int, rate: float = math.inf, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Seconds after the start at which each of `count` requests is due, ascending; the same for the same seed.

    rate: requests a second; infinite: all at once. Gaps are Gamma deviates with shape `burstiness`, the same mean and
    hence a coefficient of variation of burstiness ** -0.5: 1 is a Poisson process, less comes in bursts, more is more
    even, infinite is a metronome. All are rescaled so that the last is due at count / rate, whatever the seed.
    Raises UsageError for a rate or burstiness that is not positive.
    """
    for name, value in (("request rate", rate), ("burstiness", burstiness)):
        if not value > 0:
            raise UsageError(f"the {name} is {value:g}", "arrivals", "Use a positive number.")
    if math.isinf(rate) or not count:
        return [0.0] * count
    generator = random.Random(seed)
    even = math.isinf(burstiness)
    gaps = [1.0 if even else generator.gammavariate(burstiness, 1 / burstiness) for _ in range(count)]
    total = math.fsum(gaps)
    if not total > 0:  # a burstiness so small that every deviate underflows
        raise UsageError(f"a burstiness of {burstiness:g} leaves no time between requests", "arrivals")
    times, now = [], 0.0
    for gap in gaps:
        now += gap
        times.append(now * (count / rate) / total)
    return times
