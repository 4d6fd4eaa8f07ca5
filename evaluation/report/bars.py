"""Bars of one figure over names, as a Vega-Lite specification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .charts import SERIES, TIP, WIDTH, Spec

MOST_BARS = 60


def bars(rows: Sequence[dict[str, Any]], title: str, *, zero_line: float | None = None) -> Spec:
    """A bar a row, with its value beside it. rows: label, value (at least 0), shown, tip, and perhaps low and high (a
    range that is drawn as a line). zero_line: where a line is drawn across, such as 1 for ratios."""
    data = [{"low": None, "high": None, **row} for row in rows]
    high = max([*(row["high"] or row["value"] for row in data), zero_line or 0.0]) or 1.0
    scale = {"domain": [0, high * 1.18], "nice": False}
    y = {"field": "label", "type": "nominal", "sort": None, "title": None, "axis": {"ticks": False, "domain": False}}
    x = {"field": "value", "type": "quantitative", "scale": scale, "axis": {"title": title, "tickCount": 6}}
    layers: list[Spec] = [
        {
            "mark": {"type": "bar", "height": 13, "cornerRadiusEnd": 2, "color": SERIES[0]},
            "encoding": {"y": y, "x": x, "description": TIP},
        },
        {
            "mark": {"type": "text", "align": "left", "dx": 5, "aria": False},
            "encoding": {"y": y, "x": {**x, "field": "end"}, "text": {"field": "shown"}},
        },
    ]
    for row in data:
        row["end"] = max(row["value"], row["high"] or 0.0)
    if any(row["low"] is not None for row in data):
        span = {"y": y, "x": {**x, "field": "low"}, "x2": {"field": "high"}}
        layers.append(
            {"mark": {"type": "rule", "color": "var(--ink)", "strokeWidth": 1.5, "aria": False}, "encoding": span}
        )
    if zero_line is not None:
        across = {"x": {"field": "at", "type": "quantitative", "scale": scale}}
        line = {"data": {"values": [{"at": zero_line}]}, "mark": {"type": "rule", "aria": False}, "encoding": across}
        layers.append(line)
    return {"data": {"values": data}, "width": WIDTH - 190, "height": {"step": 22}, "layer": layers}
