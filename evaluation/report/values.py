"""Values as a report writes them. Everything that is absent or not a number is said to be so, never drawn as 0."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

ABSENT = "–"


def number(value: Any) -> float | None:
    """The value where it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


def size(value: Any) -> str:
    """Bytes as KiB, MiB or GiB."""
    count = number(value)
    if count is None:
        return ABSENT
    for unit, bound in (("bytes", 2**10), ("KiB", 2**20), ("MiB", 2**30)):
        if abs(count) < bound:
            return f"{count / (bound / 2**10):,.{0 if unit == 'bytes' else 1}f} {unit}"
    return f"{count / 2**30:,.2f} GiB"


def short(value: Any, digits: int = 4) -> str:
    """A number with `digits` significant digits; other values as they are."""
    found = number(value)
    if found is None:
        return ABSENT if value is None or isinstance(value, float) else str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if found and (abs(found) < 1e-3 or abs(found) >= 1e7):
        return f"{found:.{digits - 1}e}"
    places = max(0, digits - 1 - (math.floor(math.log10(abs(found))) if found else 0))
    text = f"{found:,.{places}f}"
    return text.rstrip("0").rstrip(".") if places else text


def percent(value: Any, digits: int = 1, signed: bool = False) -> str:
    found = number(value)
    return ABSENT if found is None else f"{found:{'+' if signed else ''}.{digits}%}"


def times(value: Any) -> str:
    """A ratio: `1.83×`."""
    found = number(value)
    return ABSENT if found is None else f"{found:.2f}×"


def ratio(after: Any, before: Any) -> float | None:
    """after / before; None where either is absent or the latter 0."""
    top, bottom = number(after), number(before)
    return None if top is None or not bottom else top / bottom


def seconds(value: Any) -> str:
    found = number(value)
    if found is None:
        return ABSENT
    if found < 60:
        return f"{found:.1f} s"
    minutes, rest = divmod(round(found), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


BY_UNIT: dict[str, Callable[[Any], str]] = {
    "bytes": size,
    "nats": short,
    "share": lambda value: percent(value, 2),
    "rise": lambda value: percent(value, 2, signed=True),
    "ratio": times,
    "plain": short,
    "seconds": lambda value: f"{short(value)} s",
}
"""How a figure of each unit is written."""
