"""Charts that compare artifacts, as Vega-Lite specifications."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .charts import TIP, WIDTH, Spec
from .pareto import Objective, dominators

KINDS = ("on the front", "dominated", "source")
BYTES = {"size", "memory"}
WIDE, HIGH = WIDTH - 40, 300
LINE, LETTER = 13, 6.5
"""Pixels of a label's line, and about of a letter."""


def scatter(
    points: Sequence[dict[str, Any]], across: Objective, up: Objective, source_x: float | None, source_y: float | None
) -> Spec:
    """A point an artifact, with its name, and the source where it is known. A line joins the best by both figures."""
    data: list[dict[str, Any]] = [
        {
            "name": row["name"],
            "x": _unit(across, row["values"][across.name]),
            "y": _unit(up, row["values"][up.name]),
            "kind": KINDS[1] if row["dominated_by"] else KINDS[0],
            "tip": _tip(row, across, up),
        }
        for row in points
    ]
    if source_x is not None and source_y is not None:
        tip = f"source\n{across.title}: {across.show(source_x)}\n{up.title}: {up.show(source_y)}"
        data.append(
            {"name": "source", "x": _unit(across, source_x), "y": _unit(up, source_y), "kind": KINDS[2], "tip": tip}
        )
    pairs = [(row["x"], row["y"]) for row in data]
    for row, beaten in zip(data, dominators(pairs, [across.more, up.more])):
        row["edge"] = not beaten
    xs, ys = [row["x"] for row in data], [row["y"] for row in data]
    x = _axis("x", across, xs)
    y = _axis("y", up, ys)
    kind = {
        "field": "kind",
        "type": "nominal",
        "legend": {"orient": "bottom", "title": None},
    }
    colour = {**kind, "scale": {"domain": list(KINDS), "range": ["var(--c1)", "var(--c2)", "var(--soft)"]}}
    shape = {**kind, "scale": {"domain": list(KINDS), "range": ["circle", "cross", "diamond"]}}
    _place_labels(data, x["scale"]["domain"], y["scale"]["domain"])
    labels = [
        {
            "transform": [{"filter": f"datum.side == '{align}'"}],
            "mark": {"type": "text", "align": align, "dx": dx, "aria": False, "limit": 260, "dy": -1},
            "encoding": {"x": x, "y": {**y, "field": "label_y"}, "text": {"field": "name"}},
        }
        for align, dx in (("left", 10), ("right", -10))
        if any(row["side"] == align for row in data)
    ]
    line = {
        "transform": [{"filter": "datum.edge"}],
        "mark": {"type": "line", "color": "var(--line)", "strokeWidth": 2, "aria": False},
        "encoding": {"x": x, "y": y, "order": {"field": "x"}},
    }
    marks = {
        "mark": {"type": "point", "filled": True, "size": 110, "opacity": 1},
        "encoding": {"x": x, "y": y, "color": colour, "shape": shape, "description": TIP},
    }
    return {"data": {"values": data}, "width": WIDE, "height": HIGH, "layer": [line, marks, *labels]}


def _place_labels(data: list[dict[str, Any]], across: Sequence[float], up: Sequence[float]) -> None:
    """Give each row `side` (where its label starts) and `label_y`: below the labels that would be in its way."""
    a_pixel = (up[1] - up[0]) / HIGH
    taken: list[tuple[float, float, float]] = []
    for row in sorted(data, key=lambda row: -row["y"]):
        at = (row["x"] - across[0]) / (across[1] - across[0]) * WIDE
        width = min(LETTER * len(row["name"]) + 12, 260)
        row["side"] = "left" if at + width < WIDE else "right"
        start = at if row["side"] == "left" else at - width
        line = (up[1] - row["y"]) / a_pixel
        while any(start < right and left < start + width and abs(line - other) < LINE for left, right, other in taken):
            line += 1
        taken.append((start, start + width, line))
        row["label_y"] = up[1] - line * a_pixel


def _unit(objective: Objective, value: float) -> float:
    return value / 2**20 if objective.name in BYTES else value


def _axis(channel: str, objective: Objective, values: Sequence[float]) -> dict[str, Any]:
    low, high = min(values), max(values)
    room = (high - low) * 0.12 or abs(high) * 0.1 or 1.0
    bottom = low - room
    if low >= 0:
        bottom = max(0.0, bottom) if low - room > 0 or channel == "x" else -room * 0.3
    title = objective.title + (", MiB" if objective.name in BYTES else "")
    scale = {"domain": [bottom, high + room], "nice": False, "zero": False}
    return {"field": channel, "type": "quantitative", "scale": scale, "axis": {"title": title, "tickCount": 6}}


def _tip(row: dict[str, Any], across: Objective, up: Objective) -> str:
    lines = [row["name"], f"{across.title}: {across.show(row['values'][across.name])}"]
    lines.append(f"{up.title}: {up.show(row['values'][up.name])}")
    lines.append("dominated by " + ", ".join(row["dominated_by"]) if row["dominated_by"] else "on the front")
    return "\n".join(lines)
