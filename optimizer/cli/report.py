"""`llmopt report`, and the option `--report FILE` of the commands that measure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..errors import MissingDependency, UsageError

report_option = click.option(
    "--report", "report_file", type=click.Path(path_type=Path), metavar="FILE", help="Draw an HTML file, too."
)


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--out", "-o", type=click.Path(path_type=Path), help="HTML file. [default: report.html in the artifact]")
def report(artifact: Path, out: Path | None) -> None:
    """Draw an artifact's report from its llmopt.json: one HTML file that loads nothing."""
    from ...runtime.artifact import REPORT
    from ..manifest import read_manifest

    manifest = read_manifest(artifact)
    draw_report(out or artifact / REPORT, "artifact", manifest.model_dump(mode="json"))


def check_report(path: Path | None) -> None:
    """Raise UsageError before the run for a report that could not be drawn after it."""
    from ...evaluation.report import available

    if path is None:
        return
    if path.is_dir():
        raise UsageError("is a folder; --report names a file", str(path))
    if not available():
        raise MissingDependency("vl-convert-python", "report", "--report")


def draw_report(path: Path | None, kind: str, data: dict[str, Any]) -> None:
    """Write the report that was asked for, and say where; `kind` as `evaluation.report.write_report` knows it."""
    from ...evaluation.report import write_report

    if path is not None:
        click.echo(f"Report: {write_report(kind, data, path)}", err=True)
