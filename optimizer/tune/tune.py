"""`llmopt.tune`: names resolved, the folder made ready, the search run, its outcome written."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...runtime.artifact import REPORT
from ..api import default_out
from ..environment import environment, library_version
from ..errors import LlmoptError, UsageError
from ..events import Event, Listener, silent
from ..files import cache_dir, scratch_folder, write_atomic
from ..manifest import read_manifest
from .best import best_of, meeting, recipe_text
from .budget import parse_budget
from .journal import NAME, Journal, Trial
from .metrics import METRICS
from .propose import require_optuna
from .search import KEPT, WORK, Search, TuneSettings
from .space import Space
from .target import Target, parse_target
from .trial import Shared

RECIPE = "best.yaml"


@dataclass(frozen=True)
class Tuned:
    """The outcome of a search. best: the trial that meets the target best; None where none meets it. ended: `budget`,
    `trials`, `space` (every draw was tried), `idle` (nothing that could meet the target was left to be found) or
    `interrupted`. data: all of it as one JSON object, which the report is drawn from."""

    out: Path
    target: Target
    trials: list[Trial]
    ended: str
    data: dict[str, Any]

    @property
    def best(self) -> Trial | None:
        return best_of(self.target, self.trials)

    def titled(self, trial: Trial) -> str:
        """What a trial drew, in words."""
        titles = self.data["titles"]
        return ", ".join(f"{titles[name]} {value}" for name, value in trial.values.items())

    @property
    def artifact(self) -> Path:
        """Folder of the best trial's artifact."""
        return self.out / KEPT

    @property
    def recipe(self) -> Path:
        """The best trial's recipe."""
        return self.out / RECIPE


def tune(
    model: str | Path | None,
    space: str | Path | dict[str, Any],
    target: str,
    *,
    out: str | Path | None = None,
    budget: str | float = "30m",
    trials: int | None = None,
    seed: int = 0,
    front: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    force: bool = False,
    cache_folder: str | Path | None = None,
    cache_limit: int = 20 * 2**30,
    report: bool = True,
    listener: Listener = silent,
) -> Tuned:
    """Search the recipe of a space that meets a target best, within a budget of wall time.

    space: a YAML file, or a dict of the same form: a recipe in which values may be choices (docs/tune.md).
    target: "min|max METRIC where METRIC op NUMBER and …". budget: seconds, or a text such as "30m". trials: how many
    may run. front: measure trials that cannot come up to the best, too, so that the report has the whole front.
    out: folder of best.yaml, best/ (the artifact), trials.jsonl and report.html; a search that is there already goes
    on, or with `force` begins anew. Ctrl-C ends the search, and what it has found is written.

    Raises UsageError where the request is wrong, before anything runs; RunError where the source cannot be measured.
    """
    from ..sources import describe, resolve

    require_optuna()
    wanted = parse_target(target)
    seconds = parse_budget(budget) if isinstance(budget, str) else float(budget)
    found = Space.load(space)
    source_name, revision = _source_name(found, model, revision)
    source = resolve(source_name, revision)
    folder = Path(out) if out is not None else Path(default_out(str(source_name), "tuned"))
    cache = Path(cache_folder) if cache_folder else cache_dir()
    _check_out(folder, force)
    settings = TuneSettings(
        folder, seconds, trials, seed, front, trust_remote_code, cache, cache_limit, report, listener
    )
    with scratch_folder(cache) as scratch:
        shared = Shared(source, describe(source, trust_remote_code), scratch)
        search = Search(found, wanted, shared, settings)
        search.prepare()
        journal = _opened(search, force)
        ended = search.run(journal)
        return _written(search, ended)


def _source_name(space: Space, model: str | Path | None, revision: str | None) -> tuple[str | Path, str | None]:
    named = model or space.source.data.get("model")
    if not named or not isinstance(named, (str, Path)):
        raise UsageError("no model is named", what_to_do="Pass --model PATH_OR_HUB_ID or set `model:` in the space")
    return named, revision or space.source.data.get("revision")


def _check_out(folder: Path, force: bool) -> None:
    """Raise UsageError where the folder is in the way."""
    if folder.exists() and not (folder.is_dir() and ((folder / NAME).is_file() or not any(folder.iterdir()))):
        raise UsageError("exists already and is no search's folder", str(folder), "Choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot be written: {error.strerror}", str(folder), "Choose another --out") from None
    if not force and not any(folder.iterdir()):
        with suppress(OSError):
            folder.rmdir()


def _opened(search: Search, force: bool) -> Journal:
    """The search's journal, begun or taken up."""
    folder, listener = search.settings.out, search.settings.listener
    if force:
        for name in (NAME, RECIPE, REPORT):
            (folder / name).unlink(missing_ok=True)
        for name in (KEPT, WORK):
            shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(folder / NAME, _identity(search))
    for note in journal.notes:
        listener(Event("note", "tune", note, data={"note": "note"}))
    if journal.trials:
        spent = journal.trials[-1].elapsed
        message = f"goes on after {len(journal.trials)} trials and {spent:.0f} s"
        listener(Event("note", "tune", message, data={"note": "note"}))
    return journal


def _identity(search: Search) -> dict[str, Any]:
    """What makes two searches the same, by the names that an error gives them."""
    space = json.dumps(search.space.source.data, sort_keys=True, default=str)
    text, target = search.text, search.target
    return {
        "model": search.shared.source.sha256,
        "space": hashlib.sha256(space.encode()).hexdigest(),
        "evaluation text": "default" if text == "default" else hashlib.sha256(Path(text).read_bytes()).hexdigest(),
        "target": [target.metric.name, target.maximize, *([c.metric.name, c.op, c.limit] for c in target.limits)],
        "seed": search.settings.seed,
        "--front": search.settings.front,
        **{f"version of {name}": library_version(name) for name in ("llmopt", "torch", "transformers", "optuna")},
    }


def _written(search: Search, ended: str) -> Tuned:
    """Write best.yaml, the artifact's report and the search's; what cannot be drawn is said, and costs no more."""
    out, best = search.settings.out, search.best
    text = None
    if best is not None:
        named = search.named(search.drawn(best))
        text = recipe_text(named, search.recipe(search.drawn(best)), out, _remarks(search, best))
        write_atomic(out / RECIPE, text)
    else:
        (out / RECIPE).unlink(missing_ok=True)
    if ended != "interrupted":
        search.keep_best()
    data = outcome(search, ended, text)
    if search.settings.report:
        _draw(search, "search", data, out / REPORT)
        if (out / KEPT / "llmopt.json").is_file():
            manifest = read_manifest(out / KEPT).model_dump(mode="json")
            _draw(search, "artifact", manifest, out / KEPT / REPORT)
    return Tuned(out, search.target, search.trials, ended, data)


def _draw(search: Search, kind: str, data: dict[str, Any], path: Path) -> None:
    from ...evaluation.report import write_report

    try:
        write_report(kind, data, path)
    except LlmoptError as error:
        message = f"no {path.name} was written: {error}"
        search.settings.listener(Event("note", "tune", message, data={"note": "note"}))


def _remarks(search: Search, best: Trial) -> list[str]:
    """What stands above the best recipe."""
    shown = ", ".join(f"{metric.name} {metric.show(best.figures.get(metric.name))}" for metric in search.target.metrics)
    remarks = [
        f"Trial {best.number} of llmopt tune on {search.shared.source.id}, the best of {len(search.trials)}.",
        f"Target: {search.target}",
        f"Measured: {shown}",
    ]
    if search.ungated:
        remarks.append(f"No gate below holds this limit: {', '.join(search.ungated)}")
    return remarks


def outcome(search: Search, ended: str, recipe: str | None) -> dict[str, Any]:
    """The search as one JSON object; see docs/tune.md."""
    target, best = search.target, search.best
    meet = {trial.number for trial in meeting(target, search.trials)}
    rows = []
    for trial in search.trials:
        verdict = "best" if trial is best else "meets" if trial.number in meet else "misses"
        verdict = verdict if trial.state == "complete" else trial.state
        misses = [str(limit) for limit in target.misses(trial.figures)]
        rows.append({**asdict(trial), "verdict": verdict, "misses": misses})
    measured = [trial.source for trial in search.trials if trial.source]
    return {
        "kind": "search",
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "ended": ended,
        "budget": search.settings.seconds,
        "seconds": search.trials[-1].elapsed if search.trials else 0.0,
        "seed": search.settings.seed,
        "model": search.shared.source.as_dict(),
        "space": search.space.source.name,
        "target": {
            "text": str(target),
            "metric": target.metric.name,
            "maximize": target.maximize,
            "limits": [
                {"text": str(limit), "metric": limit.metric.name, "op": limit.op, "limit": limit.limit}
                for limit in target.limits
            ],
        },
        "metrics": {name: {"unit": metric.unit, "more": metric.more} for name, metric in METRICS.items()},
        "titles": search.space.titles,
        "source": measured[-1] if measured else {},
        "trials": rows,
        "best": best.number if best else None,
        "recipe": recipe,
        "environment": environment(),
    }
