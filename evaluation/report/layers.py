"""The changed modules of a manifest as places in a map: layer by kind of module."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .values import number

PLACE = re.compile(r"(?:^|\.)(\d+)\.(.+)$")
EXPERT = re.compile(r"\.experts\.\d+\.")
MOST_KINDS = 24
"""Rows of a map; modules of other kinds are in the table alone."""
ORDER = (
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv",
    "o_proj",
    "out_proj",
    "gate",
    "up",
    "fc1",
    "down",
    "fc2",
    "w1",
    "w2",
    "w3",
)


@dataclass(frozen=True)
class Module:
    """A changed module. layer: its number, None outside the stack. kind: its name without the stack and the number.

    bits: of a weight; error: relative output error (weighted: by the calibration data), None where not recorded.
    """

    name: str
    stage: str
    layer: int | None
    kind: str
    bits: float | None
    error: float | None
    record: dict[str, Any]


@dataclass(frozen=True)
class Place:
    """What a map shows at (layer, kind): the mean bits and the greatest error of its modules (several: experts)."""

    layer: int
    kind: str
    modules: int
    bits: float | None
    error: float | None


def modules(passes: Sequence[dict[str, Any]]) -> list[Module]:
    """Every module that a pass recorded, once; where several passes changed it, by the last that recorded its bits."""
    found: dict[str, Module] = {}
    for record in passes:
        for line in record.get("layers") or []:
            name = str(line.get("name", ""))
            if name not in found or line.get("bits") is not None:
                found[name] = _module(name, str(record.get("name", "")), line)
    return list(found.values())


def _module(name: str, stage: str, line: dict[str, Any]) -> Module:
    match = PLACE.search(name)
    layer = int(match[1]) if match and len(match[1]) < 6 else None
    kind = EXPERT.sub(".experts.", f".{match[2]}").lstrip(".") if match and layer is not None else name
    return Module(name, stage, layer, kind, number(line.get("bits")), number(line.get("error")), line)


def kinds(found: Sequence[Module]) -> list[str]:
    """Kinds of modules inside the stack, in the order in which data meets them; at most MOST_KINDS, most frequent."""
    counts: dict[str, int] = {}
    for module in found:
        if module.layer is not None:
            counts[module.kind] = counts.get(module.kind, 0) + 1
    kept = sorted(counts, key=lambda kind: -counts[kind])[:MOST_KINDS]
    return sorted(kept, key=lambda kind: ("attn" not in kind and "attention" not in kind, _rank(kind), kind))


def _rank(kind: str) -> int:
    last = kind.rpartition(".")[2]
    return next((place for place, name in enumerate(ORDER) if name in last), len(ORDER))


def places(found: Sequence[Module]) -> list[Place]:
    """The map's places, by layer and kind."""
    shown = set(kinds(found))
    groups: dict[tuple[int, str], list[Module]] = {}
    for module in found:
        if module.layer is not None and module.kind in shown:
            groups.setdefault((module.layer, module.kind), []).append(module)
    return [_place(layer, kind, groups[layer, kind]) for layer, kind in sorted(groups)]


def _place(layer: int, kind: str, group: list[Module]) -> Place:
    bits = [module.bits for module in group if module.bits is not None]
    errors = [module.error for module in group if module.error is not None]
    mean = sum(bits) / len(bits) if bits else None
    return Place(layer, kind, len(group), mean, max(errors) if errors else None)


def short_kinds(names: Sequence[str]) -> dict[str, str]:
    """Kind → the last part of its name where that tells it from the others, else the whole."""
    last = [name.rpartition(".")[2] for name in names]
    return {name: part if last.count(part) == 1 else name for name, part in zip(names, last)}
