"""`llmopt report`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--out", "-o", type=click.Path(path_type=Path), help="HTML file. [default: report.html in the artifact]")
def report(artifact: Path, out: Path | None) -> None:
    """Draw an artifact's report from its llmopt.json: one HTML file that loads nothing."""
    from ...evaluation.report import write_report
    from ...runtime.artifact import REPORT
    from ..manifest import read_manifest

    manifest = read_manifest(artifact)
    place = write_report("artifact", manifest.model_dump(mode="json"), out or artifact / REPORT)
    click.echo(f"Report: {place}")
