"""The charts of an artifact's report, as Vega-Lite specifications: plain data in, a dict out.

Each mark that a reader may ask about has a `tip`; colours are the page's CSS variables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .layers import Place
from .values import percent, short, size

WIDTH = 640
SERIES = [f"var(--c{n})" for n in range(1, 9)]
DASHES = [[1, 0], [6, 2], [2, 2], [8, 2, 2, 2], [4, 4], [10, 3], [1, 3], [6, 2, 1, 2]]
STEPS = 7
MOST_LINES = len(SERIES)
NUMBERED = 40
"""Layers up to which a map's cells hold their number."""
LOG_LABELS = "datum.value < 0.001 ? format(datum.value, '.0e') : format(datum.value, '~g')"
RATIOS = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 16, 32, 64, 128)
TIP = {"field": "tip", "type": "nominal"}
Spec = dict[str, Any]


def relative(rows: Sequence[dict[str, Any]]) -> Spec:
    """Bars from 1 to each `ratio` (artifact / source) on a log scale. rows: label, ratio, better (bool), tip."""
    data: list[dict[str, Any]] = [
        {**row, "one": 1, "shown": f"{row['ratio']:.2f}×", "verdict": "better" if row["better"] else "worse"}
        for row in rows
    ]
    low = min(0.7, *(row["ratio"] for row in rows)) * 0.8
    high = max(1.4, *(row["ratio"] for row in rows)) * 1.25
    y = {"field": "label", "type": "nominal", "sort": None, "title": None, "axis": {"ticks": False, "domain": False}}
    scale = {"type": "log", "base": 2, "domain": [low, high], "nice": False}
    axis = {
        "format": "~g",
        "values": [at for at in RATIOS if low <= at <= high],
        "title": "artifact ÷ source (log scale)",
    }
    colour = {
        "field": "verdict",
        "type": "nominal",
        "scale": {"domain": ["better", "worse"], "range": ["var(--c1)", "var(--c2)"]},
        "legend": {"orient": "bottom", "title": None, "symbolType": "square"},
    }
    x = {"field": "ratio", "type": "quantitative", "scale": scale, "axis": axis}
    where = [("right", "datum.ratio >= 1", 7), ("left", "datum.ratio < 1", -7)]
    labels = [
        {
            "transform": [{"filter": test}],
            "mark": {"type": "text", "align": "left" if side == "right" else "right", "dx": dx, "aria": False},
            "encoding": {"y": y, "x": x, "text": {"field": "shown"}},
        }
        for side, test, dx in where
        if any((row["ratio"] >= 1) == (side == "right") for row in rows)
    ]
    bars = {
        "mark": {"type": "bar", "height": 14, "cornerRadius": 2},
        "encoding": {"y": y, "x": x, "x2": {"field": "one"}, "color": colour, "description": TIP},
    }
    line = {
        "data": {"values": [{"one": 1}]},
        "mark": {"type": "rule", "aria": False},
        "encoding": {"x": {"field": "one", "type": "quantitative", "scale": scale}},
    }
    return {
        "data": {"values": data},
        "width": WIDTH - 200,
        "height": {"step": 27},
        "layer": [bars, line, *labels],
    }


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


def kl_histogram(edges: Sequence[float], counts: Sequence[int], marks: dict[str, float]) -> Spec:
    """Share of positions by their divergence, log scale; `counts[i]` lies above `edges[i]`, the last without an end.

    marks: name → nats, drawn as lines.
    """
    total = sum(counts) or 1
    first = edges[1] / 3
    bounds = [first, *edges[1:], edges[-1] * 3]
    data: list[dict[str, Any]] = [
        {
            "from": bounds[place],
            "to": bounds[place + 1],
            "share": count / total,
            "tip": f"{bin_label(edges, place)} nats\n{percent(count / total, 2)} of positions ({count:,})",
        }
        for place, count in enumerate(counts)
    ]
    scale = {"type": "log", "domain": [first, bounds[-1]], "nice": False}
    x_axis = {
        "title": "KL divergence from the source, nats a token (log scale)",
        "labelExpr": LOG_LABELS,
        "values": [10.0**power for power in range(-6, 2)],
        "grid": False,
    }
    x = {"field": "from", "type": "quantitative", "scale": scale, "axis": x_axis}
    y_axis = {"title": "share of positions", "format": "~%"}
    bars = {
        "mark": {"type": "rect", "color": "var(--c1)", "stroke": "var(--surface)", "strokeWidth": 1},
        "encoding": {
            "x": x,
            "x2": {"field": "to"},
            "y": {"field": "share", "type": "quantitative", "axis": y_axis},
            "y2": {"datum": 0},
            "description": TIP,
        },
    }
    return {"data": {"values": data}, "width": WIDTH - 40, "height": 220, "layer": [bars, *_lines(marks, scale)]}


def bin_label(edges: Sequence[float], place: int) -> str:
    if place == 0:
        return f"below {edges[1]:g}"
    return f"{edges[place]:g} to {edges[place + 1]:g}" if place + 1 < len(edges) else f"{edges[place]:g} and more"


def _lines(marks: dict[str, float], scale: Spec) -> list[Spec]:
    low, high = scale["domain"]
    rows = [
        {"name": name, "at": min(max(value, low), high), "row": n * 15} for n, (name, value) in enumerate(marks.items())
    ]
    if not rows:
        return []
    x = {"field": "at", "type": "quantitative", "scale": scale}
    rule = {"mark": {"type": "rule", "color": "var(--c2)", "strokeDash": [4, 3], "strokeWidth": 1.5, "aria": False},
            "encoding": {"x": x}}  # fmt: skip
    texts = [
        {
            "transform": [{"filter": f"datum.row == {row['row']}"}],
            "mark": {"type": "text", "align": "right", "dx": -4, "y": 8 + row["row"], "aria": False},
            "encoding": {"x": x, "text": {"field": "name"}},
        }
        for row in rows
    ]
    return [{"data": {"values": rows}, "layer": [rule, *texts]}]


def memory_timeline(timeline: dict[str, Any], series: dict[str, list[float]]) -> Spec:
    """Memory over the run, with its stages as bands. timeline: see the manifest; series: name → bytes a sample."""
    times = timeline["times"]
    end = max([times[-1], *(stage["end"] for stage in timeline["stages"])]) or 1.0
    bands = [_band(stage, place, timeline, series, end) for place, stage in enumerate(timeline["stages"])]
    lines = [
        {"time": time, "series": name, "mib": value / 2**20}
        for name, values in series.items()
        for time, value in zip(times, values)
    ]
    scale = {"domain": [0, end], "nice": False}
    x = {"field": "start", "type": "quantitative", "scale": scale}
    shade = {"field": "odd", "type": "nominal", "legend": None,
             "scale": {"domain": [0, 1], "range": ["var(--band)", "var(--surface)"]}}  # fmt: skip
    colour = {
        "field": "series",
        "type": "nominal",
        "scale": {"domain": list(series), "range": SERIES[: len(series)]},
        "legend": {"orient": "bottom", "title": None, "symbolType": "stroke", "symbolSize": 300},
    }
    time_axis = {"title": "seconds since the run began", "grid": False}
    most = max((row["mib"] for row in lines), default=1.0)
    y_scale = {"domain": [0, most * 1.3], "nice": False}
    labels = [
        {
            "transform": [{"filter": f"datum.fits == '{fits}'"}],
            "mark": {"type": "text", "y": 12 if fits == "flat" else 6, "angle": 0 if fits == "flat" else 270,
                     "align": "center" if fits == "flat" else "right", "baseline": "middle", "aria": False,
                     "color": "var(--soft)", "fontSize": 10},
            "encoding": {"x": {"field": "middle", "type": "quantitative", "scale": scale}, "text": {"field": "name"}},
        }
        for fits in ("flat", "upright")
        if any(band["fits"] == fits for band in bands)
    ]  # fmt: skip
    rect = {
        "data": {"values": bands},
        "layer": [
            {
                "mark": {"type": "rect", "stroke": "var(--grid)", "strokeWidth": 1},
                "encoding": {"x": {**x, "axis": time_axis}, "x2": {"field": "end"}, "color": shade, "description": TIP},
            },
            *labels,
        ],
    }
    line = {
        "data": {"values": lines},
        "mark": {"type": "line", "strokeWidth": 1.8, "aria": False},
        "encoding": {
            "x": {"field": "time", "type": "quantitative", "scale": scale},
            "y": {"field": "mib", "type": "quantitative", "scale": y_scale, "axis": {"title": "MiB", "tickCount": 6}},
            "color": colour,
        },
    }
    layers = ([rect] if bands else []) + [line]
    return {"width": WIDTH, "height": 260, "layer": layers, "resolve": {"scale": {"color": "independent"}}}


def _band(
    stage: dict[str, Any], place: int, timeline: dict[str, Any], series: dict[str, list[float]], end: float
) -> dict[str, Any]:
    width = (stage["end"] - stage["start"]) / end * WIDTH
    name = str(stage["name"])[:40]
    fits = "flat" if width > 6.5 * len(name) + 6 else "upright" if width > 12 and len(name) < 22 else "no"
    peaks = [
        f"{title}: {size(peak)} at most"
        for title, values in series.items()
        if (peak := stage_peak(stage, timeline["times"], values)) is not None
    ]
    return {
        "name": name,
        "start": stage["start"],
        "end": stage["end"],
        "middle": (stage["start"] + stage["end"]) / 2,
        "odd": place % 2,
        "fits": fits,
        "tip": "\n".join([f"{name}, {stage['end'] - stage['start']:.1f} s", *peaks]),
    }


def stage_peak(stage: dict[str, Any], times: Sequence[float], values: Sequence[float]) -> float | None:
    """Most bytes of the samples taken during a stage; None where there are none."""
    inside = [value for time, value in zip(times, values) if stage["start"] <= time <= stage["end"]]
    return max(inside) if inside else None
