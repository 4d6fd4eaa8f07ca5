"""The table and the picture of `llmopt bench --techniques`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLUMNS = (
    "technique", "seconds", "tok/s", "speed-up", "over", "peak MiB", "weights MiB", "perplexity", "mean KL",
    "same answers",
)  # fmt: skip
PIPED = 170
"""Columns where the output is no terminal: all cells fit a line."""


def show(data: dict[str, Any]) -> None:
    """The table, what was not measured and why, warnings."""
    from rich.table import Table

    from .tables import console

    out = console()
    if not out.is_terminal:
        out.width = PIPED
    settings, environment, rows = data["settings"], data["environment"], data["rows"]
    out.print(
        f"{data['model']['id']}: {settings['num_prompts']} prompts of {settings['input_len']} tokens, "
        f"{settings['tokens']['output']} new tokens in all, {environment['cpu']}, {environment['cores']} cores",
        highlight=False,
        markup=False,
    )
    table = Table()
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*cells(row, rows))
    out.print(table)
    for row in rows:
        if row["absent"]:
            out.print(f"{row['title']}: not on this machine: {row['absent']}", highlight=False, markup=False)
        for note in row.get("notes", ()):
            if note["kind"] == "fallback":
                out.print(f"{row['title']}: fallback: {note['message']}", style="yellow", highlight=False, markup=False)
    out.print(f"times: median of {settings['rounds']} rounds (range), each row in a process of its own", style="dim")
    for warning in data["warnings"]:
        out.print(f"warning: {warning}", style="yellow", highlight=False, markup=False)


def cells(row: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """Texts of one row. "over" is the speed-up over the row that isolates the technique, with that row's number."""
    numbers = {one["key"]: str(place + 1) for place, one in enumerate(rows)}
    title = f"{numbers[row['key']]} {row['title']}"
    if row["absent"]:
        return [title, *["–"] * (len(COLUMNS) - 1)]
    seconds, over = row["seconds"], row["speedup_against"]
    spread = f" ({seconds['min']:.1f}–{seconds['max']:.1f})" if len(seconds["rounds"]) > 1 else ""
    kl = (row.get("divergence") or {}).get("mean_kl")
    same = row["same_answers"]
    return [
        title,
        f"{seconds['median']:.1f}{spread}",
        f"{row['output_throughput']:.1f}",
        f"{row['speedup']['median']:.1f}×",
        "" if over is None else f"{over['median']:.2f}× row {numbers[row['against']]}",
        f"{row['memory']['rss_bytes'] / 2**20:,.0f}",
        f"{row['weight_bytes'] / 2**20:,.0f}",
        f"{row['perplexity']:.3f}",
        "" if kl is None else f"{kl:.4f}",
        f"{same['equal']}/{same['of']}",
    ]


def table_text(rows: list[dict[str, Any]]) -> str:
    """The same table in Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" + "|---:" * (len(COLUMNS) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(cells(row, rows)) + " |" for row in rows)]) + "\n"


def require_charts() -> None:
    """Raise MissingDependency before the run where nothing could draw after it."""
    from ...evaluation.report.svg import available
    from ..errors import MissingDependency

    if not available():
        raise MissingDependency("vl-convert-python", "report", "a picture")


def draw(path: Path, data: dict[str, Any]) -> None:
    """Write the picture, whole or not at all."""
    from ...evaluation.bench.chart import speedup_chart
    from ..files import write_atomic

    name = Path(data["model"]["id"]).name
    write_atomic(path, speedup_chart(data["rows"], f"{name}, {data['environment']['cpu']}"))
