"""The target of a search: `min|max METRIC [where METRIC op NUMBER (and METRIC op NUMBER)*]`, read without `eval`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import UsageError, did_you_mean
from ..recipe import Gates
from .metrics import METRICS, Metric

MOST_CHARACTERS, MOST_CONDITIONS = 1000, 20
TOKEN = re.compile(
    r"\s*(?:(?P<word>[A-Za-z_][A-Za-z0-9_]*)|(?P<op><=|>=|<|>)|(?P<number>\d[\d.]*(?:[eE][+-]?\d+)?\S*))"
)
NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:[eE][+-]?\d{1,3})?)(.*)", re.ASCII)
BYTES = {"": 1, "b": 1, **{f"{p}b": 1000**n for n, p in enumerate("kmgt", 1)}}
BYTES |= {f"{p}ib": 1024**n for n, p in enumerate("kmgt", 1)}
EXAMPLE = 'Write for example "min size where mean_kl < 0.03 and decode_speedup > 1.5"'
WHERE = "--target"


@dataclass(frozen=True)
class Condition:
    """`metric op limit`, the limit in the metric's own unit (bytes, nats, shares as fractions)."""

    metric: Metric
    op: str
    limit: float

    def holds(self, value: float) -> bool:
        return {"<": value < self.limit, "<=": value <= self.limit, ">": value > self.limit, ">=": value >= self.limit}[
            self.op
        ]

    @property
    def upper(self) -> bool:
        """Whether the limit is from above."""
        return self.op.startswith("<")

    def violation(self, value: float | None) -> float:
        """How far a figure is beyond the limit, as a share of the limit: at most 0 where it holds; 1 where unknown."""
        if value is None:
            return 1.0
        if self.holds(value):
            return 0.0
        beyond = value - self.limit if self.upper else self.limit - value
        return max(beyond / (abs(self.limit) or 1.0), 1e-9)

    def beyond(self, value: float, margin: float) -> bool:
        """Whether a rough figure is so far beyond the limit that the true one cannot hold it.

        margin: the share by which a rough figure may be off; for one such as top-1 agreement, of what it lacks to 1.
        """
        if self.holds(value):
            return False
        if self.metric.unit == "share":
            least, most = sorted((1 - value, 1 - self.limit))
        else:
            least, most = sorted((value, self.limit))
        return most > least * (1 + margin)

    def __str__(self) -> str:
        return f"{self.metric.name} {self.op} {self.metric.show(self.limit)}"


@dataclass(frozen=True)
class Target:
    """What is searched for: the least (or, with `maximize`, the greatest) `metric` of the trials that hold `limits`."""

    metric: Metric
    maximize: bool
    limits: tuple[Condition, ...]

    @property
    def speed(self) -> bool:
        """Whether speed has to be measured."""
        return any(metric.speed for metric in self.metrics)

    @property
    def metrics(self) -> list[Metric]:
        """The metrics that it names, the one that decides first, each once."""
        return list(dict.fromkeys([self.metric, *(limit.metric for limit in self.limits)]))

    def feasible(self, figures: Mapping[str, float]) -> bool:
        """Whether the figures hold every limit and have the metric that decides; what was not measured holds none."""
        known = all(metric.name in figures for metric in self.metrics)
        return known and all(limit.holds(figures[limit.metric.name]) for limit in self.limits)

    def misses(self, figures: Mapping[str, float]) -> list[Condition]:
        """The limits that do not hold; one whose figure is unknown is not among them."""
        known = [limit for limit in self.limits if limit.metric.name in figures]
        return [limit for limit in known if not limit.holds(figures[limit.metric.name])]

    def better(self, one: float, other: float) -> bool:
        return one > other if self.maximize else one < other

    def violation(self, figures: Mapping[str, float]) -> float:
        """How far the figures are beyond all limits together; see `Condition.violation`."""
        return sum(limit.violation(figures.get(limit.metric.name)) for limit in self.limits)

    def as_good_as(self, value: float) -> Condition:
        """The limit that a figure of the deciding metric sets to those that are to be no worse."""
        return Condition(self.metric, ">=" if self.maximize else "<=", value)

    def with_gates(self, gates: Gates) -> Target:
        """The target with a recipe's gates as further limits, so that the best recipe passes its own gates."""
        added = [
            Condition(METRICS[name.partition("_")[2]], "<=" if name.startswith("max_") else ">=", limit)
            for name, limit in gates
            if limit is not None
        ]
        return Target(self.metric, self.maximize, tuple(dict.fromkeys([*self.limits, *added])))

    def __str__(self) -> str:
        limits = " and ".join(map(str, self.limits))
        return f"{'max' if self.maximize else 'min'} {self.metric.name}{f' where {limits}' if limits else ''}"


def parse_target(text: str) -> Target:
    """Raises UsageError that names the place and the nearest valid word."""
    if len(text) > MOST_CHARACTERS:
        raise UsageError(f"{len(text)} characters are too long for a target", WHERE, EXAMPLE)
    tokens = _Tokens(text)
    direction = tokens.word("`min` or `max`")
    if direction not in ("min", "max"):
        raise UsageError(f"starts with {_shown(direction)}, not with `min` or `max`", WHERE, EXAMPLE)
    metric, limits = tokens.metric(), []
    joint = "where"
    while not tokens.ended():
        if tokens.word(f"`{joint}`") != joint:
            raise UsageError(f"expected `{joint}` before {_shown(tokens.last)}", WHERE, EXAMPLE)
        limits.append(tokens.condition())
        joint = "and"
    if len(limits) > MOST_CONDITIONS:
        raise UsageError(f"{len(limits)} limits are too many (at most {MOST_CONDITIONS})", WHERE)
    _possible(limits)
    return Target(metric, direction == "max", tuple(dict.fromkeys(limits)))


class _Tokens:
    """The words, operators and numbers of a target, one after another."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.last = text, 0, ""

    def ended(self) -> bool:
        return not self.text[self.at :].strip()

    def next(self, kind: str, expected: str) -> str:
        match = TOKEN.match(self.text, self.at)
        if match is None or match[kind] is None:
            rest = self.text[self.at :].strip()
            found = f"found {_shown(rest)}" if rest else "it ends"
            raise UsageError(f"expected {expected} at character {self.at + 1}, {found}", WHERE, EXAMPLE)
        self.at, self.last = match.end(), match[kind]
        return self.last

    def word(self, expected: str) -> str:
        return self.next("word", expected)

    def metric(self) -> Metric:
        name = self.word("a metric")
        if name not in METRICS:
            raise UsageError(f"unknown metric {_shown(name)}", WHERE, did_you_mean(name[:60], METRICS))
        return METRICS[name]

    def condition(self) -> Condition:
        metric = self.metric()
        op = self.next("op", f"`<`, `<=`, `>` or `>=` after {metric.name}")
        return Condition(metric, op, _number(self.next("number", "a number"), metric))


def _number(text: str, metric: Metric) -> float:
    match = NUMBER.fullmatch(text)
    if match is None:
        raise UsageError(f"{_shown(text)} is not a number", WHERE, EXAMPLE)
    value, unit = float(match[1]), match[2].lower()
    if metric.unit == "bytes" and unit in BYTES:
        value *= BYTES[unit]
    elif metric.unit in ("share", "rise") and unit == "%":
        value /= 100
    elif metric.unit == "rise" and not unit:
        raise UsageError(f"{metric.name} is in percent, and {_shown(text)} has no % sign", WHERE, f"Write {text}%")
    elif (
        unit and not (metric.unit == "ratio" and unit in ("x", "×")) and not (metric.unit == "seconds" and unit == "s")
    ):
        units = {"bytes": "kB, MB, GB, KiB, MiB or GiB", "share": "%", "rise": "%", "ratio": "x", "seconds": "s"}
        hint = f"Its units: {units[metric.unit]}" if metric.unit in units else "It has no unit"
        raise UsageError(f"{metric.name} is not measured in {_shown(match[2])}", WHERE, hint)
    if not math.isfinite(value):
        raise UsageError(f"{_shown(text)} is too large", WHERE)
    if metric.unit == "share" and value > 1:
        raise UsageError(f"{metric.name} is 1 (100%) at most, not {_shown(text)}", WHERE, "Write 0.9 or 90%")
    return value


def _possible(limits: Sequence[Condition]) -> None:
    """Raise UsageError where two limits of one metric exclude each other."""
    for low in (limit for limit in limits if not limit.upper):
        for high in (limit for limit in limits if limit.upper and limit.metric is low.metric):
            both = low.op == ">=" and high.op == "<="
            if low.limit > high.limit or (low.limit == high.limit and not both):
                raise UsageError(f"nothing can satisfy both {low} and {high}", WHERE)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}…")
