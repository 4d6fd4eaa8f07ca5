"""The search: draws are proposed, tried and written down until the budget, the space or the user's patience ends."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import LlmoptError, RunError, UsageError
from ..events import Event, Listener, silent
from ..files import replace_folder
from ..manifest import read_manifest
from ..pipeline import Settings
from ..planning import make_plan
from ..recipe import LoadedRecipe
from .best import best_of, gates_of, with_gates
from .budget import Budget
from .corners import check, parse
from .journal import Journal, State, Trial
from .metrics import figures
from .propose import Proposer
from .proxy import Bar, Pruned, asks_quality, bars_of, prune_by_plan
from .space import Draw, Space
from .target import Target
from .trial import Shared, SourceError, TrialRun

IDLE = 200
"""Trials in a row that were given up before they ran, after which a search ends."""
STUCK = 5
"""Trials in a row that failed, after which a search ends."""
KEPT, WORK = "best", ".trial"
"""Folders of the best trial's artifact, and of the one being made."""


@dataclass
class TuneSettings:
    """Where a search writes, how long it may take, and who listens. trials: how many may run; front: whether those
    that cannot come up to the best are measured, too."""

    out: Path
    seconds: float
    trials: int | None = None
    seed: int = 0
    front: bool = False
    trust_remote_code: bool = False
    cache_folder: Path = field(default_factory=Path)
    cache_limit: int = 20 * 2**30
    report: bool = True
    listener: Listener = silent


class Search:
    """A search of `space` for `target`. `prepare` raises whatever is wrong with the request; then `run`."""

    def __init__(self, space: Space, target: Target, shared: Shared, settings: TuneSettings) -> None:
        self.space, self.shared, self.settings = space, shared, settings
        self.proposer: Proposer
        self.target = target
        self.trials: list[Trial] = []

    def prepare(self) -> None:
        """Check the space against the model, without weights. Raises UsageError before anything runs."""
        recipe = check(self.space, self._valid)[0].recipe
        self.target = self.target.with_gates(recipe.gates)
        written = self.space.source.data.get("evaluate") or {}
        if self.target.speed and not recipe.evaluate.speed:
            where = self.space.source.where(("evaluate", "speed"))
            raise UsageError("the target names a speed, and speed is not measured", where, "Remove `speed: false`")
        self.speed = self.target.speed or bool(written.get("speed"))
        self.name, self.text = recipe.name, recipe.evaluate.text
        self.gates, self.ungated = gates_of(self.target, self.shared.info.weight_bytes)
        self.proposer = Proposer(self.space, self.target, self.settings.seed)

    def _valid(self, draw: Draw) -> LoadedRecipe:
        """The recipe of a draw, if it fits the model."""
        loaded = parse(draw)
        make_plan(loaded, self.shared.info).raise_refusals()
        return loaded

    def recipe(self, draw: Draw) -> LoadedRecipe:
        """A draw's recipe as its trial runs it: the target's limits are its gates."""
        loaded = parse(self.named(draw))
        loaded.recipe.evaluate.speed = self.speed
        return loaded

    def named(self, draw: Draw) -> Draw:
        return with_gates(draw, self.name, self.gates)

    def drawn(self, trial: Trial) -> Draw:
        """The draw of a finished trial."""
        return self.space.draw(lambda domain: trial.values[domain.name])

    @property
    def best(self) -> Trial | None:
        return best_of(self.target, self.trials)

    def run(self, journal: Journal) -> str:
        """Try draws until something ends the search; returns what: budget, trials, space, idle or interrupted.

        What the journal holds counts as done. Raises the error of a source that cannot be measured, and RunError where
        one trial after another fails.
        """
        self.trials = journal.trials
        spent = self.trials[-1].elapsed if self.trials else 0.0
        budget = Budget(self.settings.seconds, spent, time.monotonic)
        try:
            while (ended := self._ended(budget)) is None:
                draw = self.proposer.next(self.trials)
                if draw is None:
                    return "space"
                journal.append(self._timed(draw, budget))
                self._told(self.trials[-1])
            return ended
        except SourceError as error:
            raise error.__cause__ or error from None
        except KeyboardInterrupt:
            return "interrupted"
        finally:
            shutil.rmtree(self.settings.out / WORK, ignore_errors=True)

    def _ended(self, budget: Budget) -> str | None:
        ran = [trial for trial in self.trials if trial.ran]
        if self.settings.trials is not None and len(ran) >= self.settings.trials:
            return "trials"
        if not budget.allows([trial.seconds for trial in self.trials if trial.state == "complete"]):
            return "budget"
        if len(self.trials) >= IDLE and not any(trial.ran for trial in self.trials[-IDLE:]):
            return "idle"
        last = ran[-STUCK:]
        if len(last) == STUCK and all(trial.state == "failed" for trial in last):
            raise RunError(f"{STUCK} trials in a row failed, the last one so: {last[-1].reason}", "tune")
        return None

    def _timed(self, draw: Draw, budget: Budget) -> Trial:
        start, reference = time.monotonic(), self.shared.seconds
        trial = self._attempt(len(self.trials), draw)
        seconds = time.monotonic() - start - (self.shared.seconds - reference)
        return replace(trial, seconds=round(max(0.0, seconds), 3), elapsed=round(budget.spent, 3))

    def _attempt(self, number: int, draw: Draw) -> Trial:
        """Try one draw. Whatever becomes of it is a trial, but for an error that every trial would meet."""
        run: TrialRun | None = None

        def trial(state: State, reason: str, **more: Any) -> Trial:
            rough = run.rough if run is not None else {}
            return Trial(number, draw.values, state, reason, run is not None, **{"proxy": rough, **more})

        best = None if self.settings.front else self.best
        leader = None if best is None else best.number
        try:
            loaded = self.recipe(draw)
            plan = make_plan(loaded, self.shared.info)
            plan.raise_refusals()
            if loaded.exporter.name == "huggingface":
                prune_by_plan(plan, bars_of(self.target, leader, best.figures if best else {}))
            bars = bars_of(self.target, leader, best.proxy if best else {})
            run = self._run(loaded, number, self.settings.out / WORK, bars)
            measured = run.execute().manifest.measured
        except Pruned as pruned:
            return trial("pruned", pruned.reason, proxy=pruned.figures)
        except UsageError as error:
            return trial("refused", str(error))
        except LlmoptError as error:
            return trial("failed", str(error))
        busy = [measured[part].get("foreign_cpu") for part in ("before", "after")]
        made = trial(
            "complete",
            "",
            figures=figures(measured),
            source=figures({"after": measured["before"]}),
            foreign_cpu=max((share for share in busy if share is not None), default=None),
        )
        if best_of(self.target, [*self.trials, made]) is made:
            replace_folder(self.settings.out / WORK, self.settings.out / KEPT)
        else:
            shutil.rmtree(self.settings.out / WORK, ignore_errors=True)
        return made

    def _run(self, loaded: LoadedRecipe, number: int, out: Path, bars: Sequence[Bar] | None) -> TrialRun:
        """bars: what a look at the quality is held against; None for no look."""

        def listener(event: Event) -> None:
            self.settings.listener(replace(event, data={**event.data, "trial": number}))

        settings = Settings(
            out,
            force=True,
            keep_failed=True,
            trust_remote_code=self.settings.trust_remote_code,
            cache_folder=self.settings.cache_folder,
            cache_limit=self.settings.cache_limit,
            listener=listener,
            report=False,
        )
        looks = bars is not None and asks_quality(self.target)
        return TrialRun(loaded, self.shared, settings, looks, bars or [])

    def _told(self, trial: Trial) -> None:
        said = trial.reason or ", ".join(
            f"{metric.name} {metric.show(trial.figures.get(metric.name))}" for metric in self.target.metrics
        )
        missed = " and ".join(map(str, self.target.misses(trial.figures)))
        verdict = f"misses {missed}" if missed else "the best so far" if self.best is trial else "meets the target"
        end = f"; {verdict}" if trial.state == "complete" else ""
        message = f"{trial.number} ({self.space.titled(trial.values)}): {trial.state}: {said}{end}"
        self.settings.listener(Event("note", "tune", message, data={"note": "trial", "record": asdict(trial)}))

    def keep_best(self) -> Path | None:
        """The best trial's artifact; made again from the cache where it is not there. None where no trial is best."""
        best, folder = self.best, self.settings.out / KEPT
        if best is None:
            shutil.rmtree(folder, ignore_errors=True)
            return None
        loaded = self.recipe(self.drawn(best))
        if not self._holds(folder, loaded):
            try:
                self._run(loaded, best.number, folder, None).execute()
            except SourceError as error:
                raise error.__cause__ or error from None
        return folder

    def _holds(self, folder: Path, loaded: LoadedRecipe) -> bool:
        """Whether the folder is the artifact of this recipe and source."""
        try:
            manifest = read_manifest(folder)
        except LlmoptError:
            return False
        return manifest.recipe == loaded.as_run() and manifest.source.sha256 == self.shared.source.sha256
