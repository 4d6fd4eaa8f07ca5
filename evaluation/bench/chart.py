"""The picture of the techniques table: a bar a row, as an SVG file that needs no style sheet."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

COLOURS = {
    "ink": "#1f2328",
    "soft": "#57606a",
    "grid": "#dfe3e8",
    "line": "#9aa4af",
    "bar": "#2f6f9f",
    "base": "#9aa4af",
}


def speedup_chart(rows: Sequence[dict[str, Any]], title: str) -> str:
    """SVG of the rows' speed-ups over the first, on a logarithmic scale, with the range of the rounds.

    Raises MissingDependency where the extra `report`, which draws, is not installed.
    """
    from ..report.svg import draw

    shown = [row for row in rows if not row["absent"]]
    data = [
        {
            "title": row["title"],
            "speedup": row["speedup"]["median"],
            "low": row["speedup"]["min"],
            "high": row["speedup"]["max"],
            "one": 1,
            "colour": "var(--base)" if number == 0 else "var(--bar)",
            "label": f"{row['speedup']['median']:.1f}×",
        }
        for number, row in enumerate(shown)
    ]
    label = f"{title}: " + "; ".join(f"{one['title']} {one['label']}" for one in data)
    return standalone(draw(specification(data, title), label))


def specification(data: Sequence[dict[str, Any]], title: str) -> dict[str, Any]:
    """The Vega-Lite specification. Bars begin at a half, so that the baseline's has a length."""
    largest = max(one["high"] for one in data)
    scale = {"type": "log", "domain": [0.5, largest * 1.5], "nice": False}
    names = {"field": "title", "type": "nominal", "sort": None, "title": None}
    across = {"field": "speedup", "type": "quantitative", "scale": scale, "title": "times as fast as the first row"}
    across["axis"] = {"values": [0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500], "format": "~g"}
    start = {"datum": 0.5}
    return {
        "title": {"text": title, "anchor": "start", "color": "var(--ink)", "fontSize": 13},
        "width": 420,
        "height": {"step": 26},
        "data": {"values": list(data)},
        "encoding": {"y": names},
        "layer": [
            {"mark": {"type": "bar", "height": 16}, "encoding": {
                "x": across, "x2": start, "color": {"field": "colour", "type": "nominal", "scale": None}}},
            {"mark": {"type": "rule", "strokeWidth": 2, "color": "var(--ink)"}, "encoding": {
                "x": {"field": "low", "type": "quantitative"}, "x2": {"field": "high"}}},
            {"mark": {"type": "text", "align": "left", "dx": 6, "color": "var(--ink)"}, "encoding": {
                "x": {"field": "high", "type": "quantitative"}, "text": {"field": "label"}}},
        ],
    }  # fmt: skip


def standalone(svg: str) -> str:
    """A drawing as a file: its namespace named, colours in the place of a page's variables, on white."""
    svg = re.sub(r"var\(--(\w+)\)", lambda found: COLOURS.get(found[1], COLOURS["ink"]), svg)
    svg = svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" ', 1)
    head, end, rest = svg.partition(">")
    return f'{head}{end}<rect width="100%" height="100%" fill="white"/>{rest}\n'
