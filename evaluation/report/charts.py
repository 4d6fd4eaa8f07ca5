"""The charts of an artifact's report, as Vega-Lite specifications: plain data in, a dict out.

Each mark that a reader may ask about has a `tip`; colours are the page's CSS variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .values import percent

WIDTH = 640
SERIES = [f"var(--c{n})" for n in range(1, 9)]
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
    room = {"domain": [0, max(counts, default=1) / total * 1.3 or 1.0], "nice": False}  # for the lines' names
    bars = {
        "mark": {"type": "rect", "color": "var(--c1)", "stroke": "var(--surface)", "strokeWidth": 1},
        "encoding": {
            "x": x,
            "x2": {"field": "to"},
            "y": {"field": "share", "type": "quantitative", "axis": y_axis, "scale": room},
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
