"""The recipe of a draw as a file that `llmopt optimize` runs unchanged, and which of several trials is the best."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from ..recipe import Gates, LoadedRecipe
from ..yaml_source import YamlSource
from .journal import Trial
from .space import Draw
from .target import Target

GATES = {
    "perplexity_increase": "max_perplexity_increase",
    "mean_kl": "max_mean_kl",
    "top1_agreement": "min_top1_agreement",
    "compression": "min_compression",
    "decode_speedup": "min_decode_speedup",
}
"""Metric → the gate that limits it."""


def best_of(target: Target, trials: Sequence[Trial]) -> Trial | None:
    """The trial that meets the target best; among equal ones the one of least KL, then the first."""
    sign = -1 if target.maximize else 1

    def rank(trial: Trial) -> tuple[float, float, int]:
        figures = trial.figures
        return sign * figures[target.metric.name], figures.get("mean_kl", float("inf")), trial.number

    return min(meeting(target, trials), key=rank, default=None)


def meeting(target: Target, trials: Sequence[Trial]) -> list[Trial]:
    """The complete trials that hold every limit."""
    return [trial for trial in trials if trial.state == "complete" and target.feasible(trial.figures)]


def nearest(target: Target, trials: Sequence[Trial], count: int) -> list[Trial]:
    """The trials that miss the target by the least, complete ones before those that were given up."""
    known = [trial for trial in trials if trial.known]
    ordered = sorted(known, key=lambda t: (t.state != "complete", target.violation(t.known), t.number))
    return ordered[:count]


def gates_of(target: Target, source_bytes: int) -> tuple[dict[str, float], list[str]]:
    """The target's limits as gates of a recipe, and those limits that no gate can express.

    source_bytes: of the source's weights, by which a limit of the size is one of the compression.
    """
    gates: dict[str, float] = {}
    others = []
    for limit in target.limits:
        name, value = GATES.get(limit.metric.name), limit.limit
        upper = name is not None and name.startswith("max_")
        if limit.metric.name == "size" and limit.upper and value > 0:
            name, value = "min_compression", source_bytes / value
        elif name is None or upper != limit.upper:
            others.append(str(limit))
            continue
        gates[name] = (min if upper else max)(value, gates.get(name, value))
    return gates, others


def with_gates(draw: Draw, name: str, gates: dict[str, float]) -> Draw:
    """The draw with a name and gates in its recipe."""
    data: dict[str, Any] = dict(draw.source.data)
    head = {key: data.pop(key) for key in ("version",) if key in data}
    data = {**head, "name": name, **{key: value for key, value in data.items() if key != "name"}}
    if gates:
        data["gates"] = Gates(**gates).model_dump(exclude_none=True)
    return Draw(YamlSource(draw.source.name, data, draw.source.lines), draw.values)


def recipe_text(draw: Draw, loaded: LoadedRecipe, folder: Path, remarks: Sequence[str]) -> str:
    """The recipe as YAML, for a file in `folder`, after remarks as comments. loaded: the same recipe, validated."""
    data = dict(draw.source.data)
    for part, keys in (("evaluate", ("text",)), ("calibration", ("text", "chat", "dataset"))):
        section = data.get(part)
        if not isinstance(section, dict):
            continue
        data[part] = dict(section)
        for key in keys:
            resolved = getattr(getattr(loaded.recipe, part), key)
            if section.get(key) not in (None, "default") and resolved and Path(resolved).exists():
                data[part][key] = _seen_from(folder, str(section[key]), resolved)
    lines = [f"# {line}".rstrip() for remark in remarks for line in remark.splitlines()]
    return "\n".join(lines) + "\n" + yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)


def _seen_from(folder: Path, given: str, resolved: str) -> str:
    """A path as it stands in a file in `folder`: an absolute one as it was given."""
    if Path(given).is_absolute():
        return given
    with suppress(ValueError):  # another drive
        return Path(os.path.relpath(Path(resolved).absolute(), folder.absolute())).as_posix()
    return str(Path(resolved).absolute())
