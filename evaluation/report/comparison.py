"""The page of several artifacts of one source: which of them are on the Pareto front, and why the others are not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import comparison_charts
from .page import Cell, Chart, Column, Details, Page, Section, Table, Text
from .pareto import DEFAULT, OBJECTIVES, Objective, dominators
from .svg import draw
from .values import ABSENT, number, short

SHOWN = ("size", "memory", "kl", "perplexity", "top1", "speed", "tokens")


def page(data: dict[str, Any]) -> Page:
    """data: `artifacts` (objects with `name` and `manifest`), `by` (names of OBJECTIVES), `warnings` (texts)."""
    artifacts = data["artifacts"]
    compared = compare(artifacts, data.get("by") or DEFAULT)
    names = [row["name"] for row in compared["rows"]]
    front = [row["name"] for row in compared["rows"] if not row["dominated_by"]]
    source = artifacts[0]["manifest"].get("source") or {}
    by = ", ".join(OBJECTIVES[name].title for name in compared["by"])
    lines = [
        f"Artifacts of {source.get('id', ABSENT)}, compared by {by}",
        f"SHA-256 of the source: {source.get('sha256', ABSENT)}",
    ]
    blocks: list[Any] = [Text(warning, "warn") for warning in data.get("warnings") or []]
    blocks.append(_table(compared))
    charts = _charts(compared, artifacts)
    recipes = [Details(_made(row), _passes(item)) for row, item in zip(compared["rows"], artifacts)]
    verdict = f"On the Pareto front: {', '.join(front)} ({len(front)} of {len(names)})"
    sections = [
        Section(
            "Which to take",
            blocks,
            "An artifact is dominated where another one is as good in every figure and better in one.",
        ),
        Section("Pictures", charts),
        Section("How they were made", recipes),
    ]
    return Page(f"{len(names)} artifacts compared", sections, lines, "llmopt comparison", verdict, "")


def compare(artifacts: Sequence[dict[str, Any]], by: Sequence[str] = DEFAULT) -> dict[str, Any]:
    """`by`, and `rows`: for each artifact its name, recipe, `values` (of every known figure) and `dominated_by`."""
    chosen = [OBJECTIVES[name] for name in by]
    values = [[objective.of(item["manifest"]) for objective in chosen] for item in artifacts]
    beaten = dominators(values, [objective.more for objective in chosen])
    rows = [
        {
            "name": item["name"],
            "recipe": (item["manifest"].get("recipe") or {}).get("name"),
            "values": {name: OBJECTIVES[name].of(item["manifest"]) for name in SHOWN},
            "dominated_by": [artifacts[place]["name"] for place in places],
            "gates_missed": [gate["name"] for gate in item["manifest"].get("gates") or [] if not gate.get("passed")],
        }
        for item, places in zip(artifacts, beaten)
    ]
    return {"by": list(by), "rows": rows}


def _table(compared: dict[str, Any]) -> Table:
    shown = [OBJECTIVES[name] for name in SHOWN if any(row["values"][name] is not None for row in compared["rows"])]
    columns = [Column("artifact", code=True), Column("verdict"), *(Column(each.title, True) for each in shown)]
    columns += [Column("gates")]
    rows: list[list[str | Cell]] = [
        [
            row["name"],
            _verdict(row),
            *(_value(each, row["values"][each.name]) for each in shown),
            Cell(f"{len(row['gates_missed'])} missed", "bad") if row["gates_missed"] else Cell("hold", "good"),
        ]
        for row in compared["rows"]
    ]
    return Table("Artifacts", columns, rows)


def _made(row: dict[str, Any]) -> str:
    missed = f"; gates missed: {', '.join(row['gates_missed'])}" if row["gates_missed"] else ""
    return f"{row['name']}: recipe {row['recipe'] or ABSENT}{missed}"


def _verdict(row: dict[str, Any]) -> Cell:
    beaten = row["dominated_by"]
    return Cell("dominated by " + ", ".join(beaten)) if beaten else Cell("on the front", "good")


def _value(objective: Objective, value: float | None) -> str:
    return "not measured" if value is None else objective.show(value)


def _charts(compared: dict[str, Any], artifacts: Sequence[dict[str, Any]]) -> list[Any]:
    """Size against quality, and speed against quality."""
    quality = next((name for name in compared["by"] if name in ("kl", "perplexity", "top1")), "kl")
    source = (artifacts[0]["manifest"].get("measured") or {}).get("before") or {}
    origin = {
        "size": source.get("disk_bytes"),
        "memory": source.get("memory_bytes"),
        "speed": 1.0,
        "kl": 0.0,
        "perplexity": source.get("perplexity"),
        "top1": 1.0,
    }
    blocks: list[Any] = []
    for across in ("size" if "memory" not in compared["by"] else "memory", "speed"):
        points = [
            row for row in compared["rows"] if row["values"][across] is not None and row["values"][quality] is not None
        ]
        left_out = [row["name"] for row in compared["rows"] if row not in points]
        if not points:
            blocks.append(
                Text(f"{OBJECTIVES[across].title} was not measured for any of them, so there is no picture of it.")
            )
            continue
        blocks.append(
            _chart(
                points,
                OBJECTIVES[across],
                OBJECTIVES[quality],
                number(origin[across]),
                number(origin[quality]),
                left_out,
            )
        )
    return blocks


def _chart(
    points: list[dict[str, Any]],
    across: Objective,
    up: Objective,
    source_x: float | None,
    source_y: float | None,
    left_out: list[str],
) -> Chart:
    front = [row["name"] for row in points if not row["dominated_by"]]
    alt = (
        f"{up.title} against {across.title} of {len(points)} artifacts and their source. "
        f"On the front by all figures: {', '.join(front) or 'none of these'}."
    )
    columns = [Column("artifact", code=True), Column(across.title, True), Column(up.title, True), Column("front")]
    rows: list[list[str | Cell]] = [
        [
            row["name"],
            across.show(row["values"][across.name]),
            up.show(row["values"][up.name]),
            "no" if row["dominated_by"] else "yes",
        ]
        for row in points
    ]
    if source_x is not None and source_y is not None:
        rows.append(["source", across.show(source_x), up.show(source_y), ABSENT])
    spec = comparison_charts.scatter(points, across, up, source_x, source_y)
    better = f"Better is {'right' if across.more else 'left'} and {'up' if up.more else 'down'}."
    note = f"{better} The line joins the best by these two figures alone." + (
        f" Not measured: {', '.join(left_out)}." if left_out else ""
    )
    return Chart(f"{up.title} against {across.title}", draw(spec, alt), alt, Table("Points", columns, rows), note)


def _passes(item: dict[str, Any]) -> Table:
    columns = [Column("pass", code=True), Column("what it did", wrap=True), Column("seconds", True)]
    rows: list[list[str | Cell]] = [
        [str(record.get("name")), str(record.get("summary"))[:1000], short(record.get("seconds"))]
        for record in item["manifest"].get("passes") or []
    ]
    return Table(f"Passes of {item['name']}", columns, rows)
