"""The part of an artifact's page about its layers: errors, bits, the modules that came off worst, all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import layer_charts
from .layers import Module, kinds, modules, places, short_kinds
from .page import Cell, Chart, Column, Details, Missing, Section, Table, Text
from .svg import draw
from .values import ABSENT, short, size

MOST_ROWS = 3000
WORST = 10
SHOWN = ("method", "group_size", "symmetric", "bytes", "error_rtn", "scale_min", "scale_max", "damping", "seconds")
"""Keys of a layer's record that the table of all modules has, beside bits and error, where any module has them."""


def layer_section(passes: Sequence[dict[str, Any]]) -> Section:
    found = modules(passes)
    if not found:
        return Section("Layers", [Text("No pass recorded a change to single layers.")])
    laid, names = places(found), short_kinds(kinds(found))
    blocks: list[Any] = [_errors(found, laid, names), _bits(found, laid, names)]
    worst = sorted((module for module in found if module.error), key=_error)[:WORST]
    if worst:
        rows: list[list[str | Cell]] = [[m.name, _shown(m.bits), short(m.error, 3)] for m in worst]
        columns = [Column("module", code=True), Column("bits", True), Column("relative error", True)]
        blocks.append(Table(f"The {len(worst)} modules with the greatest error", columns, rows))
    blocks.append(Details(f"All {len(found):,} modules", _all(found)))
    return Section("Layers", blocks)


def _error(module: Module) -> float:
    return -(module.error or 0.0)


def _errors(found: Sequence[Module], laid: Sequence[Any], names: dict[str, str]) -> Any:
    measured = [module for module in found if module.error is not None]
    if not measured:
        return Missing("The error of single layers", "No pass recorded it.")
    drawn = [place for place in laid if place.error]
    if not drawn:
        return Text(
            "Every recorded error of a layer is 0, or lies outside the numbered layers; see the table of all modules."
        )
    lines = len(names) <= layer_charts.MOST_LINES
    spec = layer_charts.error_lines(laid, names) if lines else layer_charts.error_map(laid, names)
    top = max(measured, key=lambda module: module.error or 0.0)
    low = min(module.error for module in measured if module.error)
    alt = (
        f"Relative error of {len(measured):,} modules by layer and kind, "
        f"from {short(low, 3)} to {short(top.error, 3)}, greatest at {top.name}."
    )
    exact = sum(module.error == 0 for module in measured)
    note = "Mean squared error of a module's outputs over their mean square"
    if not all(module.record.get("weighted") for module in measured):
        note += "; of its weights where no calibration data went through"
    note += "."
    if exact:
        note += f" {exact:,} modules have an error of 0 and no point."
    return Chart("Error of each layer", draw(spec, alt), alt, _grid(laid, names, "error"), note, wide=True)


def _bits(found: Sequence[Module], laid: Sequence[Any], names: dict[str, str]) -> Any:
    drawn = [place for place in laid if place.bits is not None]
    if not drawn:
        return Missing("The bits of each layer", "No pass recorded bits.")
    counts: dict[float, int] = {}
    for module in found:
        if module.bits is not None:
            counts[module.bits] = counts.get(module.bits, 0) + 1
    told = ", ".join(f"{count:,} modules of {bits:g} bits" for bits, count in sorted(counts.items()))
    alt = f"Map of the bits of a weight by layer and kind of module: {told}."
    outside = sum(module.bits is not None and module.layer is None for module in found)
    note = told[0].upper() + told[1:] + ". An empty place was left as it was."
    if outside:
        note += f" {outside} of them lie outside the numbered layers and are in the table of all modules."
    return Chart(
        "Bits of each layer",
        draw(layer_charts.bits_map(laid, names), alt),
        alt,
        _grid(laid, names, "bits"),
        note,
        wide=True,
    )


def _grid(laid: Sequence[Any], names: dict[str, str], key: str) -> Table:
    """The map as a table: a row a layer, a column a kind."""
    values = {(place.layer, place.kind): getattr(place, key) for place in laid}
    layers = sorted({place.layer for place in laid})
    show = _shown if key == "bits" else lambda value: ABSENT if value is None else short(value, 3)
    rows: list[list[str | Cell]] = [
        [str(layer), *(show(values.get((layer, kind))) for kind in names)] for layer in layers[:MOST_ROWS]
    ]
    columns = [Column("layer"), *(Column(name, True) for name in names.values())]
    caption = "Bits of a weight" if key == "bits" else "Relative error"
    return Table(caption, columns, rows, more=max(0, len(layers) - MOST_ROWS))


def _shown(bits: float | None) -> str:
    return ABSENT if bits is None else f"{bits:g}"


def _all(found: Sequence[Module]) -> Table:
    keys = [key for key in SHOWN if any(module.record.get(key) is not None for module in found)]
    kept = list(found)
    if len(kept) > MOST_ROWS:
        kept = sorted(kept, key=_error)[:MOST_ROWS]
    rows: list[list[str | Cell]] = [
        [
            module.name,
            module.stage,
            _shown(module.bits),
            ABSENT if module.error is None else short(module.error, 3),
            *(_value(key, module.record.get(key)) for key in keys),
        ]
        for module in kept
    ]
    columns = [Column("module", code=True), Column("pass"), Column("bits", True), Column("error", True)]
    columns += [Column(key.replace("_", " "), True) for key in keys]
    return Table("Changed modules", columns, rows, more=len(found) - len(kept))


def _value(key: str, value: Any) -> str:
    if value is None:
        return ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key == "bytes":
        return size(value)
    return short(value, 3)
