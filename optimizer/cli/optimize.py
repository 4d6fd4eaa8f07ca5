"""`llmopt optimize` and `llmopt plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ..errors import GateError, UsageError


def source_options(function: Any) -> Any:
    """The options that name recipe and model, shared by both commands."""
    for option in reversed(
        [
            click.option("--recipe", "-r", required=True, metavar="NAME_OR_FILE", help="Shipped recipe, or YAML file."),
            click.option("--model", "-m", metavar="PATH_OR_ID", help="Folder, hub id, .gguf file or short name."),
            click.option("--revision", help="Revision of a hub model."),
            click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a recipe key."),
            click.option("--trust-remote-code", is_flag=True, help="Run Python code that the model's folder carries."),
        ]
    ):
        function = option(function)
    return function


@click.command()
@source_options
@click.option("--out", "-o", type=click.Path(path_type=Path), help="Folder of the artifact.")
@click.option("--force", is_flag=True, help="Replace an artifact that is at --out.")
@click.option("--keep-failed", is_flag=True, help="Keep an artifact that misses a gate (the exit code stays 1).")
@click.option("--cache/--no-cache", default=True, help="Reuse and keep results of completed passes.")
@click.option("--cache-dir", type=click.Path(path_type=Path), help="Folder of the cache.")
@click.option("--cache-limit", default="20GB", show_default=True, help="Greatest size of the pass cache.")
@click.option("--report/--no-report", default=True, help="Write report.html into the artifact (extra `report`).")
@click.option("--log", type=click.Choice(["rich", "plain", "json", "none"]), default="rich", show_default=True)
@click.option("--max-memory", metavar="SIZE", help="Memory that the run may take, such as 8GB (`--set max_memory=…`).")
@click.option("--threads", type=click.IntRange(1), help="CPU threads that torch uses.")
def optimize(
    recipe: str,
    model: str | None,
    revision: str | None,
    overrides: tuple[str, ...],
    trust_remote_code: bool,
    out: Path | None,
    force: bool,
    keep_failed: bool,
    cache: bool,
    cache_dir: Path | None,
    cache_limit: str,
    report: bool,
    log: str,
    max_memory: str | None,
    threads: int | None,
) -> None:
    """Run a recipe over a model and write an artifact that has proved itself."""
    from ...runtime.artifact import REPORT
    from ..api import optimize as run
    from .progress import listener
    from .tables import before_after, shares_table

    limit = _size(cache_limit, "--cache-limit")
    if max_memory is not None:
        overrides = (*overrides, f"max_memory={_size(max_memory, '--max-memory')}")
    if threads:
        import torch

        torch.set_num_threads(threads)
    try:
        with listener(log) as listen:
            artifact = run(
                model,
                recipe,
                out=out,
                overrides=overrides,
                revision=revision,
                trust_remote_code=trust_remote_code,
                force=force,
                keep_failed=keep_failed,
                cache=cache,
                cache_folder=cache_dir,
                cache_limit=limit,
                report=report,
                listener=listen,
            )
    except GateError as error:
        shares_table(error.shares)
        raise
    before_after(artifact.manifest)
    click.echo(f"Artifact: {artifact.path}")
    if (artifact.path / REPORT).is_file():
        click.echo(f"Report: {artifact.path / REPORT}")


@click.command()
@source_options
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.option("--all", "show_all", is_flag=True, help="List every module.")
def plan(
    recipe: str,
    model: str | None,
    revision: str | None,
    overrides: tuple[str, ...],
    trust_remote_code: bool,
    as_json: bool,
    show_all: bool,
) -> None:
    """Say what a recipe would do to a model: modules, refusals, size, memory, time. Loads no weights."""
    from ..planning import make_plan
    from ..recipe import Recipe
    from ..sources import describe, resolve
    from .tables import plan_table

    loaded = Recipe.load(recipe, overrides)
    named = model or loaded.recipe.model
    if not named:
        raise UsageError("no model is named", what_to_do="Pass --model PATH_OR_HUB_ID or set `model:` in the recipe")
    info = describe(resolve(named, revision or loaded.recipe.revision), trust_remote_code)
    made = make_plan(loaded, info)
    if as_json:
        click.echo(json.dumps(made.as_dict(), indent=2, default=str))
    else:
        plan_table(made, info, show_all)
    made.raise_refusals()


def _size(text: str, option: str) -> int:
    """Bytes of a size that an option was given. Raises UsageError."""
    from ...runtime.memory import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise UsageError(str(error), option) from None
