"""Charts of layers, as Vega-Lite specifications: errors as lines or as a map, bits as a map."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .charts import LOG_LABELS, SERIES, TIP, WIDTH, Spec
from .layers import Place
from .values import short

DASHES = [[1, 0], [6, 2], [2, 2], [8, 2, 2, 2], [4, 4], [10, 3], [1, 3], [6, 2, 1, 2]]
STEPS = 7
"""Shades of a map, `--s1` … in the page's style."""
MOST_LINES = len(SERIES)
NUMBERED = 40
"""Layers up to which a map's cells hold their number."""


def error_lines(places: Sequence[Place], names: dict[str, str]) -> Spec:
    """Error over layers, a line a kind, log scale. Places without an error above 0 have no point."""
    order = [kind for kind in names if any(place.kind == kind and place.error for place in places)]
    data: list[dict[str, Any]] = [
        {
            "layer": place.layer,
            "kind": names[place.kind],
            "error": place.error,
            "tip": f"layer {place.layer}, {place.kind}\nrelative error {short(place.error, 3)}",
        }
        for place in places
        if place.error and place.kind in order
    ]
    domain = [names[kind] for kind in order]
    colour = {
        "field": "kind",
        "type": "nominal",
        "scale": {"domain": domain, "range": SERIES[: len(domain)]},
        "legend": {"orient": "bottom", "columns": 4, "title": None, "symbolType": "stroke", "symbolSize": 300},
    }
    dash = {"field": "kind", "type": "nominal", "scale": {"domain": domain, "range": DASHES[: len(domain)]}}
    layers = [row["layer"] for row in data]
    x = {
        "field": "layer",
        "type": "quantitative",
        "scale": {"domain": [min(layers), max(max(layers), min(layers) + 1)], "nice": False, "padding": 6},
        "axis": {"title": "layer", "format": "d", "tickMinStep": 1, "grid": False},
    }
    y = {
        "field": "error",
        "type": "quantitative",
        "scale": {"type": "log", "nice": True},
        "axis": {"title": "relative output error (log scale)", "labelExpr": LOG_LABELS, "values": _ticks(data)},
    }
    few = len(set(layers)) <= 60
    return {
        "data": {"values": data},
        "width": WIDTH,
        "height": 260,
        "encoding": {"x": x, "y": y, "color": colour},
        "layer": [
            {"mark": {"type": "line", "strokeWidth": 1.6, "aria": False}, "encoding": {"strokeDash": dash}},
            {"mark": {"type": "circle", "size": 22 if few else 9, "opacity": 1}, "encoding": {"description": TIP}},
        ],
    }


def _ticks(data: Sequence[dict[str, Any]]) -> list[float]:
    """Decades that the errors span; with twos and fives between where there are few."""
    low = math.floor(math.log10(min(row["error"] for row in data)))
    high = math.ceil(math.log10(max(row["error"] for row in data)))
    steps = (1, 2, 5) if high - low <= 3 else (1,)
    return [step * 10.0**power for power in range(low, high + 1) for step in steps]


def bits_map(places: Sequence[Place], names: dict[str, str]) -> Spec:
    """Bits of a weight: a cell a (layer, kind)."""
    with_bits = [place for place in places if place.bits is not None]
    levels = sorted({round(place.bits, 1) for place in with_bits})  # type: ignore[arg-type]
    steps = _steps(len(levels))
    domain = [_bits(level) for level in levels]
    data: list[dict[str, Any]] = [
        {
            "layer": place.layer,
            "kind": names[place.kind],
            "bits": _bits(round(place.bits, 1)),  # type: ignore[arg-type]
            "tip": f"layer {place.layer}, {place.kind}\n{_bits(round(place.bits, 1))} bits a weight"  # type: ignore[arg-type]
            + (f" on average of {place.modules} modules" if place.modules > 1 else ""),
        }
        for place in with_bits
    ]
    return _cells(data, "bits", domain, steps, list(names.values()), "bits a weight")


def error_map(places: Sequence[Place], names: dict[str, str]) -> Spec:
    """Error of each (layer, kind), in decades: stands in for the lines where there are many kinds."""
    found = [place for place in places if place.error]
    decades = sorted({math.floor(math.log10(place.error)) for place in found})[-STEPS:]  # type: ignore[arg-type]

    def band(error: float) -> str:
        low = max(math.floor(math.log10(error)), decades[0])
        return f"{10.0**low:g} to {10.0 ** (low + 1):g}"

    data: list[dict[str, Any]] = [
        {
            "layer": place.layer,
            "kind": names[place.kind],
            "band": band(place.error),  # type: ignore[arg-type]
            "tip": f"layer {place.layer}, {place.kind}\nrelative error {short(place.error, 3)}"
            + (f", the greatest of {place.modules} modules" if place.modules > 1 else ""),
        }
        for place in found
    ]
    domain = [f"{10.0**low:g} to {10.0 ** (low + 1):g}" for low in decades]
    return _cells(data, "band", domain, _steps(len(decades)), list(names.values()), "relative output error")


def _cells(
    data: list[dict[str, Any]], key: str, domain: list[str], steps: list[int], rows: list[str], title: str
) -> Spec:
    layers = sorted({row["layer"] for row in data})
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100, 1000, 10**6) if len(layers) / n <= 40)
    x = {
        "field": "layer",
        "type": "ordinal",
        "axis": {"title": "layer", "labelAngle": 0, "ticks": False, "domain": False,
                 "values": [layer for layer in layers if layer % every == 0]},
        "scale": {"domain": list(range(layers[0], layers[-1] + 1)) if layers[-1] < 5000 else layers, "padding": 0},
    }  # fmt: skip
    y = {
        "field": "kind",
        "type": "nominal",
        "scale": {"domain": rows},
        "axis": {"title": None, "ticks": False, "domain": False},
    }
    colour = {
        "field": key,
        "type": "ordinal",
        "scale": {"domain": domain, "range": [f"var(--s{step})" for step in steps]},
        "legend": {"orient": "bottom", "title": title, "symbolType": "square", "symbolSize": 160, "columns": 7,
                   "symbolStrokeColor": "var(--line)"},
    }  # fmt: skip
    numbered = key == "bits" and len(layers) <= NUMBERED
    rects = {
        "mark": {"type": "rect", "stroke": "var(--surface)", "strokeWidth": 1.5 if len(layers) <= 80 else 0.3},
        "encoding": {"color": colour, "description": TIP},
    }
    ink = {
        "field": key,
        "type": "ordinal",
        "scale": {"domain": domain, "range": [f"var(--t{step})" for step in steps]},
        "legend": None,
    }
    texts = {
        "mark": {"type": "text", "aria": False, "fontSize": 10},
        "encoding": {"text": {"field": key}, "color": ink},
    }
    return {
        "data": {"values": data},
        "width": WIDTH - 60,
        "height": {"step": 22},
        "encoding": {"x": x, "y": y},
        "layer": [rects, texts] if numbered else [rects],
        "resolve": {"scale": {"color": "independent"}},
    }


def _steps(count: int) -> list[int]:
    """`count` of the STEPS shades, spread out."""
    if count <= 1:
        return [3]
    return [1 + round(place * (STEPS - 1) / (count - 1)) if count > 2 else (2, 5)[place] for place in range(count)]


def _bits(value: float) -> str:
    return f"{value:g}"
