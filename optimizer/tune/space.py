"""A search space: a recipe in which values may be choices. Drawing every choice gives a recipe.

Three forms stand where a value could: `{choice: [a, b]}`, `{range: [low, high]}` (numbers) and `{int: [low, high]}`;
the last two take `step` or `log: true`. Each takes `when: {option: value}`: the option is there only where its sibling
was drawn so. A whole entry of `passes` may be a choice of entries, and `optional: true` beside its name lets it be
left out. Values of a choice may hold choices themselves; these are drawn only where they are chosen.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UsageError, did_you_mean
from ..recipe import Recipe
from ..yaml_source import Location, YamlSource, parse_yaml, read_yaml

FORMS = ("choice", "range", "int")
KEYS = {"choice": {"choice", "when"}, "range": {"range", "step", "log", "when"}, "int": {"int", "step", "log", "when"}}
SEARCHED = ("passes", "export", "calibration")
"""Parts of a recipe that may hold choices; were the others to change, the trials' figures would not compare."""


@dataclass(frozen=True)
class Domain:
    """What may be drawn at a place. `labels` name the values of a choice; low, high, step, log: of a number."""

    name: str
    kind: str
    location: Location
    labels: tuple[str, ...] = ()
    low: float = 0
    high: float = 0
    step: float | None = None
    log: bool = False

    def corners(self) -> list[Any]:
        """Values that stand for all: every one of a choice, both ends of a number."""
        return list(self.labels) if self.kind == "choice" else list(dict.fromkeys([self.low, self.last]))

    @property
    def last(self) -> float:
        """The greatest value that the steps reach."""
        if self.step is None:
            return self.high
        return self.at(math.floor((self.high - self.low) / self.step + 1e-9))

    def at(self, place: int) -> float:
        assert self.step is not None
        value = self.low + place * self.step
        return int(value) if self.kind == "int" else round(value, 12)

    def values(self) -> list[Any] | None:
        """All values, None where they are too many to list."""
        if self.kind == "choice":
            return list(self.labels)
        if self.step is None or (count := math.floor((self.high - self.low) / self.step + 1e-9) + 1) > 1000:
            return None
        return [self.at(place) for place in range(count)]

    @property
    def short(self) -> str:
        """`quantize.bits` of `passes.0.choice.1.quantize.bits`."""
        names = [str(part) for part in self.location if isinstance(part, str) and part not in ("choice", *SEARCHED)]
        return ".".join(names) or self.name


Pick = Callable[[Domain], Any]


@dataclass
class Draw:
    """A recipe drawn from a space, and the value picked at each place that was reached, by the place's name."""

    source: YamlSource
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return json.dumps(self.values, sort_keys=True)


class Space:
    """A space that was read and whose choices are well-formed. Raises UsageError with file, line and key."""

    def __init__(self, source: YamlSource) -> None:
        self.source = source
        if not isinstance(source.data, dict):
            raise UsageError("a space is a recipe: a mapping of keys", source.where(()), "Start with `passes:`")
        self.domains: dict[str, Domain] = {}
        for key, value in source.data.items():
            if key not in Recipe.model_fields:
                hint = did_you_mean(str(key), Recipe.model_fields)
                raise UsageError(f"unknown key {key!r}", source.where((key,)), hint)
            self._find(value, (key,))
        if not self.domains:
            hint = "Write for example `bits: {choice: [3, 4, 8]}`"
            raise UsageError("has no choice, so there is nothing to search", source.name, hint)
        names = [domain.short for domain in self.domains.values()]
        self.titles = {
            name: domain.short if names.count(domain.short) == 1 else name for name, domain in self.domains.items()
        }

    @classmethod
    def load(cls, space: str | Path | dict[str, Any]) -> Space:
        """Read a YAML file, or take a dict of the same form."""
        if isinstance(space, dict):
            import yaml

            return cls(parse_yaml(yaml.safe_dump({"name": "tuned", **space}, sort_keys=False), "<python>"))
        if not Path(space).is_file():
            raise UsageError("no such file", str(space), "Name a YAML file with the search space")
        return cls(read_yaml(Path(space)))

    def draw(self, pick: Pick) -> Draw:
        """A recipe, each choice made by `pick`. Errors of that recipe point at the space's own lines."""
        draw = Draw(YamlSource(self.source.name, {}))
        draw.source.data = self._drawn(self.source.data, (), (), draw, pick)
        return draw

    def titled(self, values: dict[str, Any]) -> str:
        """`quantize.bits 4, quantize.group_size 32`."""
        return ", ".join(f"{self.titles[name]} {value}" for name, value in values.items())

    def _add(self, domain: Domain) -> None:
        part = domain.location[0]
        if part not in SEARCHED:
            hint = f"Choices may stand below {', '.join(f'`{key}`' for key in SEARCHED)}"
            raise UsageError(
                f"`{part}` is the same for all trials, or they would not compare", self._where(domain.location), hint
            )
        self.domains[domain.name] = domain

    def _where(self, location: Location) -> str:
        return self.source.where(location)

    def _find(self, value: Any, at: Location) -> None:
        """Collect the domains in a value, and raise UsageError where one is malformed."""
        if isinstance(value, list):
            for place, item in enumerate(value):
                entry = len(at) == 1 and at[0] == "passes"
                if entry and isinstance(item, dict) and "optional" in item:
                    self._optional(item, (*at, place))
                    item = {key: inner for key, inner in item.items() if key != "optional"}
                self._find(item, (*at, place))
        elif isinstance(value, dict):
            if form := self._form(value, at):
                self._add(self._domain(value, form, at))
                for place, item in enumerate(value["choice"] if form == "choice" else ()):
                    self._find(item, (*at, "choice", place))
            else:
                for key, item in value.items():
                    self._find(item, (*at, key))
                self._conditions(value, at)

    def _optional(self, item: dict[Any, Any], at: Location) -> None:
        if not isinstance(item["optional"], bool):
            raise UsageError("`optional` is true or false", self._where((*at, "optional")))
        if item["optional"]:
            self._add(Domain(_name((*at, "optional")), "choice", (*at, self._entry_name(item)), ("with", "without")))

    @staticmethod
    def _entry_name(item: dict[Any, Any]) -> str:
        return next((str(key) for key in item if key != "optional"), "optional")

    def _form(self, value: dict[Any, Any], at: Location) -> str | None:
        found = [form for form in FORMS if form in value]
        if not found:
            return None
        form = found[0]
        unknown = [key for key in value if key not in KEYS[form]]
        if unknown:
            hint = did_you_mean(str(unknown[0]), KEYS[form])
            raise UsageError(f"unknown key {unknown[0]!r} beside `{form}`", self._where((*at, unknown[0])), hint)
        return form

    def _domain(self, value: dict[str, Any], form: str, at: Location) -> Domain:
        where = self._where((*at, form))
        if form == "choice":
            items = value["choice"]
            if not isinstance(items, list) or not items:
                raise UsageError("`choice` needs a list of values", where, "Write `{choice: [3, 4, 8]}`")
            texts = [json.dumps(item, sort_keys=True, default=str) for item in items]
            twice = next((text for text in texts if texts.count(text) > 1), None)
            if twice is not None:
                raise UsageError(f"{twice[:60]} stands twice in the choice", where)
            return Domain(_name(at), form, at, tuple(_labels(items)))
        return self._number(value, form, at, where)

    def _number(self, value: dict[str, Any], form: str, at: Location, where: str) -> Domain:
        kind: Any = int if form == "int" else (int, float)
        bounds, step, log = value[form], value.get("step"), value.get("log", False)
        good = isinstance(bounds, list) and len(bounds) == 2 and all(_is(bound, kind) for bound in bounds)
        if not good or not bounds[0] < bounds[1]:
            noun = "whole numbers" if form == "int" else "numbers"
            raise UsageError(f"`{form}` needs two {noun}, the lower one first", where, f"Write `{{{form}: [1, 8]}}`")
        if not isinstance(log, bool) or (log and (step is not None or bounds[0] <= 0)):
            what = "`log` is true or false, without a `step` and for bounds above 0"
            raise UsageError(what, self._where((*at, "log")))
        if step is not None and not (_is(step, kind) and 0 < step <= bounds[1] - bounds[0]):
            raise UsageError("`step` is a number above 0 that fits between the bounds", self._where((*at, "step")))
        if step is None and form == "int" and not log:
            step = 1
        return Domain(_name(at), form, at, (), bounds[0], bounds[1], step, log)

    def _conditions(self, mapping: dict[Any, Any], at: Location) -> None:
        """Check the `when` of a mapping's options: that siblings exist and do not wait for each other."""
        waits = {}
        for key, value in mapping.items():
            if not (isinstance(value, dict) and any(form in value for form in FORMS) and "when" in value):
                continue
            when, where = value["when"], self._where((*at, key, "when"))
            if not isinstance(when, dict) or not when:
                raise UsageError("`when` is a mapping of a sibling's name to its value", where, "Write `when: {a: b}`")
            for name in when:
                if name not in mapping or name == key:
                    others = [str(other) for other in mapping if other != key]
                    raise UsageError(f"there is no option {name!r} beside it", where, did_you_mean(str(name), others))
            waits[key] = set(when)
        for start in waits:
            seen, front = set(), {start}
            while front:
                seen |= front
                front = set().union(*(waits.get(key, set()) for key in front))
                if start in front:
                    raise UsageError("the conditions wait for each other", self._where((*at, start, "when")))
                front -= seen

    def _drawn(self, value: Any, at: Location, to: Location, draw: Draw, pick: Pick) -> Any:
        """The value at `at` of the space with every choice made, as it stands at `to` in the recipe."""
        draw.source.lines[to] = self.source.lines.get(at) or draw.source.lines.get(to[:-1], 1)
        if isinstance(value, list):
            return self._drawn_list(value, at, to, draw, pick)
        if not isinstance(value, dict):
            return value
        domain = self.domains.get(_name(at))
        if domain is not None and any(form in value for form in FORMS):
            picked = draw.values[domain.name] = pick(domain)
            if domain.kind != "choice":
                return picked
            place = domain.labels.index(picked)
            return self._drawn(value["choice"][place], (*at, "choice", place), to, draw, pick)
        out: dict[Any, Any] = {}
        waiting = list(value)
        while waiting:
            for key in waiting:
                when = (
                    value[key].get("when")
                    if isinstance(value[key], dict) and _name((*at, key)) in self.domains
                    else None
                )
                if when and any(name in waiting for name in when):
                    continue
                if not when or all(name in out and _matches(out[name], asked) for name, asked in when.items()):
                    out[key] = self._drawn(value[key], (*at, key), (*to, key), draw, pick)
                waiting.remove(key)
                break
        return {key: out[key] for key in value if key in out}

    def _drawn_list(self, value: list[Any], at: Location, to: Location, draw: Draw, pick: Pick) -> list[Any]:
        out: list[Any] = []
        for place, item in enumerate(value):
            inner = (*at, place)
            if at == ("passes",) and isinstance(item, dict) and "optional" in item:
                domain = self.domains.get(_name((*inner, "optional")))
                if domain is not None:
                    draw.values[domain.name] = pick(domain)
                    if draw.values[domain.name] == "without":
                        continue
                item = {key: each for key, each in item.items() if key != "optional"}
            out.append(self._drawn(item, inner, (*to, len(out)), draw, pick))
        return out


def _name(at: Location) -> str:
    return ".".join(str(part) for part in at)


def _is(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)


def _matches(value: Any, asked: Any) -> bool:
    """Whether a drawn value is the one asked for, or one of a list."""
    wanted = asked if isinstance(asked, list) else [asked]
    return any(type(value) is type(each) and value == each for each in wanted)


def _labels(items: list[Any]) -> list[str]:
    """A name for each value: itself, the pass that an entry names, or its JSON; numbered where that is not enough."""
    names = []
    for item in items:
        name = str(next(iter(item))) if isinstance(item, dict) and len(item) == 1 else None
        if name is None:
            name = item if isinstance(item, str) else json.dumps(item, default=str)
        names.append(name if len(name) <= 40 else f"{name[:39]}…")
    return [name if names.count(name) == 1 else f"{name} #{place + 1}" for place, name in enumerate(names)]
