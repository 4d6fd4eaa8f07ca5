"""`llmopt tune`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import RunError
from ..events import Event, Listener, json_lines, silent

if TYPE_CHECKING:
    from ..tune.journal import Trial
    from ..tune.tune import Tuned

SHOWN = 15
"""Trials of the console's table; the report has all."""


@click.command()
@click.option("--model", "-m", metavar="PATH_OR_ID", help="Folder, hub id, .gguf file or short name.")
@click.option("--space", "-s", required=True, type=click.Path(path_type=Path), metavar="FILE",
              help="YAML file: a recipe in which values may be choices.")  # fmt: skip
@click.option("--target", "-t", required=True, metavar="TEXT",
              help='Such as "min size where mean_kl < 0.03 and decode_speedup > 1.5".')  # fmt: skip
@click.option("--budget", default="30m", show_default=True, metavar="TIME", help="Wall time, such as 90s or 1h30m.")
@click.option("--trials", type=click.IntRange(1), help="End after so many trials have run.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of what is proposed.")
@click.option("--front", is_flag=True, help="Measure trials that cannot come up to the best, too, for the picture.")
@click.option("--out", "-o", type=click.Path(path_type=Path),
              help="Folder of best.yaml, best/, report.html, trials.jsonl; a search there goes on.")  # fmt: skip
@click.option("--force", is_flag=True, help="Begin a search that is at --out anew.")
@click.option("--revision", help="Revision of a hub model.")
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that the model's folder carries.")
@click.option("--cache-dir", type=click.Path(path_type=Path), help="Folder of the cache.")
@click.option("--cache-limit", default="20GB", show_default=True, help="Greatest size of the pass cache.")
@click.option("--report/--no-report", default=True, help="Write report.html (extra `report`).")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON and nothing else.")
@click.option("--log", type=click.Choice(["rich", "plain", "json", "none"]), default="rich", show_default=True)
@click.option("--threads", type=click.IntRange(1), help="CPU threads that torch uses.")
@click.pass_context
def tune(
    context: click.Context,
    model: str | None,
    space: Path,
    target: str,
    cache_dir: Path | None,
    cache_limit: str,
    as_json: bool,
    log: str,
    threads: int | None,
    **options: Any,
) -> None:
    """Search a space of recipes for the one that meets a target best, within a budget of time.

    Needs the extra `tune`. Ctrl-C ends the search and writes what it has found; the same command goes on.
    """
    from ..tune.tune import tune as run
    from .optimize import _size

    limit = _size(cache_limit, "--cache-limit")
    if threads:
        import torch

        torch.set_num_threads(threads)
    with tune_listener("none" if as_json and log == "rich" else log) as listen:
        tuned = run(model, space, target, cache_folder=cache_dir, cache_limit=limit, listener=listen, **options)
    if as_json:
        click.echo(json.dumps(tuned.data, indent=2, ensure_ascii=False))
    else:
        show(tuned)
    if tuned.ended == "interrupted":
        click.echo("llmopt: interrupted; the same command goes on with the search", err=True)
        context.exit(130)
    if tuned.best is None:
        raise RunError(_no_trial(tuned), "tune", "Loosen the target, widen the space, or give more time")


def _no_trial(tuned: Tuned) -> str:
    """Why there is no best trial, with those that came nearest."""
    from ..tune.best import nearest

    if not tuned.trials:
        return f"no trial was finished, as the search ended at once ({tuned.ended})"
    near = nearest(tuned.target, tuned.trials, 3)
    told = "; ".join(f"trial {trial.number}: {_missing(tuned, trial)}" for trial in near)
    return f"none of {len(tuned.trials)} trials met the target. Nearest: {told or 'none was measured'}"


def _missing(tuned: Tuned, trial: Trial) -> str:
    """What a trial has instead of what the target asks for."""
    if trial.state != "complete":
        return trial.reason
    found = [
        f"{limit.metric.name} {limit.metric.show(trial.figures.get(limit.metric.name))}, not {limit}"
        for limit in tuned.target.limits
        if limit.violation(trial.figures.get(limit.metric.name)) > 0
    ]
    return " and ".join(found) or f"{tuned.target.metric.name} was not measured"


def show(tuned: Tuned) -> None:
    """The trials that met the target, best first, then those that came nearest; and where the files are."""
    from rich.table import Table
    from rich.text import Text

    from ...runtime.artifact import REPORT
    from ..tune.best import nearest
    from ..tune.metrics import METRICS
    from .progress import duration
    from .tables import console

    out, target, best = console(), tuned.target, tuned.best
    states = [trial.state for trial in tuned.trials]
    told = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "none"
    out.print(f"{len(states)} trials ({told}) in {duration(tuned.data['seconds'])}", highlight=False)
    complete = [trial for trial in tuned.trials if trial.state == "complete"]
    metrics = list(dict.fromkeys([*target.metrics, METRICS["size"], METRICS["mean_kl"]]))
    table = Table(title=Text(str(target)), title_justify="left")
    table.add_column("trial", justify="right")
    table.add_column("drawn", overflow="fold")
    for metric in metrics:
        table.add_column(metric.name, justify="right")
    table.add_column("verdict", overflow="fold")
    rows = sorted(
        nearest(target, complete, len(complete)),
        key=lambda t: (
            t is not best,
            not target.feasible(t.figures),
            target.violation(t.figures),
            (-1 if target.maximize else 1) * t.figures.get(target.metric.name, 0.0),
        ),
    )
    for trial in rows[:SHOWN]:
        cells = [metric.show(trial.figures.get(metric.name)) for metric in metrics]
        verdict = "best" if trial is best else "meets it" if target.feasible(trial.figures) else _missing(tuned, trial)
        drawn = Text(tuned.titled(trial))
        table.add_row(str(trial.number), drawn, *cells, Text(verdict, style="green" if trial is best else ""))
    if rows:
        out.print(table)
    if len(rows) > SHOWN:
        out.print(f"… and {len(rows) - SHOWN} more measured trials")
    for name, path in (("Recipe", tuned.recipe), ("Artifact", tuned.artifact), ("Report", tuned.out / REPORT)):
        if path.exists():
            click.echo(f"{name}: {path}")


@contextmanager
def tune_listener(log: str) -> Iterator[Listener]:
    """A line a trial and a note, on standard error; on a terminal also what the running trial does."""
    if log == "json":
        yield json_lines()
    elif log == "none":
        yield silent
    elif log == "rich" and sys.stderr.isatty():
        from rich.console import Console

        console = Console(stderr=True)
        with console.status("checking the space") as status:
            yield lambda event: _render(event, console, status)
    else:
        yield _plain


def _plain(event: Event) -> None:
    if event.stage == "tune":
        print(f"{event.data.get('note', 'note')} {event.message}", file=sys.stderr, flush=True)


def _render(event: Event, console: Any, status: Any) -> None:
    from rich.markup import escape

    from .progress import TITLES

    if event.stage == "tune":
        console.print(f"{event.data.get('note', 'note')} {event.message}", highlight=False, markup=False)
    elif event.kind in ("stage_started", "progress"):
        steps = f" {event.step}/{event.total}" if event.step and event.total else ""
        title = TITLES.get(event.stage, event.stage)
        status.update(escape(f"trial {event.data.get('trial')}: {title}{steps}"))
