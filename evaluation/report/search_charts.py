"""Charts of a search: a point a trial, the one that was chosen marked, limits as lines; as Vega-Lite specifications."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .charts import LOG_LABELS, TIP, WIDTH, Spec
from .pareto import dominators

KINDS = ("best", "meets the target", "misses the target", "source")
RANGES = {
    "color": ["var(--c2)", "var(--c1)", "var(--soft)", "var(--ink)"],
    "shape": ["diamond", "circle", "cross", "square"],
}
WIDE, HIGH = WIDTH - 40, 320
SPREAD = 20
"""Greatest over least value from which on an axis is logarithmic."""


def scatter(
    points: Sequence[dict[str, Any]],
    titles: tuple[str, str],
    more: tuple[bool, bool],
    limits: tuple[Sequence[float], Sequence[float]],
) -> Spec:
    """points: x, y, kind (of KINDS), name (shown where it is not empty), tip. titles, more (whether more is better) and
    limits (where dashed lines stand): of x and y. A line joins the trials that no other beats in both; the source is
    left out where an axis is logarithmic and it has a 0 there."""
    data = [dict(point) for point in points]
    trials = [row for row in data if row["kind"] != KINDS[3]]
    for row, beaten in zip(trials, dominators([(row["x"], row["y"]) for row in trials], list(more))):
        row["edge"] = not beaten
    logs = [_spread([row[channel] for row in trials]) for channel in "xy"]
    data = [row for row in data if all(row[channel] > 0 or not log for channel, log in zip("xy", logs))]
    axes = [_axis(*each) for each in zip("xy", titles, logs, [[row[c] for row in data] for c in "xy"], limits)]
    x, y = axes
    kind: dict[str, Any] = {"field": "kind", "type": "nominal"}
    present = [place for place, name in enumerate(KINDS) if any(row["kind"] == name for row in data)]
    marked = {
        channel: {
            **kind,
            "scale": {"domain": [KINDS[place] for place in present], "range": [values[place] for place in present]},
            "legend": {"orient": "bottom", "title": None},
        }
        for channel, values in RANGES.items()
    }
    front = {
        "transform": [{"filter": "datum.edge"}],
        "mark": {"type": "line", "color": "var(--line)", "strokeWidth": 2, "aria": False},
        "encoding": {"x": x, "y": y, "order": {"field": "x"}},
    }
    marks = {
        "mark": {"type": "point", "filled": True, "size": 110, "opacity": 1},
        "encoding": {"x": x, "y": y, **marked, "description": TIP},
    }
    layers = [*_lines(axes, limits), front, marks, *_names(data, x, y)]
    return {"data": {"values": data}, "width": WIDE, "height": HIGH, "layer": layers}


def _spread(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) / min(values) >= SPREAD


def _axis(channel: str, title: str, log: bool, points: Sequence[float], limits: Sequence[float]) -> dict[str, Any]:
    """Wide enough for the limits, too."""
    values = [*points, *limits]
    if log:
        values = [value for value in values if value > 0]
        scale: dict[str, Any] = {"type": "log", "domain": [min(values) / 1.4, max(values) * 1.4], "nice": False}
        axis = {"title": f"{title} (log scale)", "labelExpr": LOG_LABELS, "tickCount": 6}
        return {"field": channel, "type": "quantitative", "scale": scale, "axis": axis}
    low, high = min(values), max(values)
    room = (high - low) * 0.1 or abs(high) * 0.1 or 1.0
    bottom = max(0.0, low - room) if low >= 0 and low - room > 0 else low - room * 0.3
    scale = {"type": "linear", "domain": [bottom, high + room], "nice": False, "zero": False}
    return {"field": channel, "type": "quantitative", "scale": scale, "axis": {"title": title, "tickCount": 6}}


def _lines(axes: Sequence[dict[str, Any]], limits: Sequence[Sequence[float]]) -> list[Spec]:
    """A dashed line at each limit of each axis."""
    return [
        {
            "data": {"values": [{"at": value} for value in own]},
            "mark": {"type": "rule", "strokeDash": [5, 4], "color": "var(--c2)", "aria": False},
            "encoding": {axis["field"]: {"field": "at", "type": "quantitative", "scale": axis["scale"]}},
        }
        for axis, own in zip(axes, limits)
        if own
    ]


def _names(data: Sequence[dict[str, Any]], x: Spec, y: Spec) -> list[Spec]:
    """The names of the points that have one, to the side where there is room."""
    low, high = x["scale"]["domain"]
    middle = (low * high) ** 0.5 if x["scale"]["type"] == "log" else (low + high) / 2
    return [
        {
            "transform": [{"filter": f"datum.name != '' && datum.x {'>' if align == 'right' else '<='} {middle}"}],
            "mark": {"type": "text", "align": align, "dx": dx, "dy": -9, "aria": False, "limit": 260},
            "encoding": {"x": x, "y": y, "text": {"field": "name"}},
        }
        for align, dx in (("left", 9), ("right", -9))
        if any(row["name"] and (row["x"] > middle) == (align == "right") for row in data)
    ]
