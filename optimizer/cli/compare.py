"""`llmopt compare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from .report import check_report, draw_report


@click.command()
@click.argument("artifacts", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", "-o", type=click.Path(path_type=Path), help="HTML file to draw.")
@click.option("--by", default="size,kl,speed", show_default=True, metavar="A,B",
              help="Figures that decide: size, memory, kl, perplexity, top1, speed (÷ source's), tokens.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON and nothing else.")
def compare(artifacts: tuple[Path, ...], out: Path | None, by: str, as_json: bool) -> None:
    """Compare artifacts of one source: size, quality, speed, and which are beaten in everything by another."""
    from ..compare import compare as run

    check_report(out)
    data = run(artifacts, [name.strip() for name in by.split(",") if name.strip()])
    draw_report(out, "comparison", data)
    if as_json:
        click.echo(json.dumps({key: data[key] for key in ("by", "rows", "warnings")}, indent=2, ensure_ascii=False))
        return
    show(data)


def show(data: dict[str, Any]) -> None:
    """The table of a comparison, and what is doubtful about it."""
    from rich.table import Table
    from rich.text import Text

    from ...evaluation.report.pareto import OBJECTIVES
    from ...evaluation.report.values import ABSENT
    from .tables import console

    out = console()
    asked = {"size", "kl", "perplexity", "top1", "speed", *data["by"]}
    known = [each for each in OBJECTIVES.values() if each.name in asked]
    shown = [each for each in known if any(row["values"].get(each.name) is not None for row in data["rows"])]
    deciding = ", ".join(OBJECTIVES[name].title for name in data["by"])
    table = Table(title=f"by {deciding}", title_justify="left")
    table.add_column("artifact", overflow="fold")
    for each in shown:
        table.add_column(each.brief, justify="right", no_wrap=True)
    table.add_column("gates")
    table.add_column("verdict", overflow="fold")
    for row in data["rows"]:
        values = [row["values"].get(each.name) for each in shown]
        cells = [ABSENT if value is None else each.show(value) for each, value in zip(shown, values)]
        beaten, missed = row["dominated_by"], len(row["gates_missed"])
        verdict = f"dominated by {', '.join(beaten)}" if beaten else "on the front"
        table.add_row(Text(row["name"]), *cells, f"{missed} missed" if missed else "hold", Text(verdict))
    out.print(table)
    for warning in data["warnings"]:
        out.print(f"note: {warning}", style="yellow", highlight=False, markup=False)
