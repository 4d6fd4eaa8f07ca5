"""What a search tries next: the corners of its space first, then what optuna's TPE sampler proposes.

A proposal depends on the space, the target, the seed and the finished trials alone: the sampler is made anew for each,
its seed from the search's and the number of trials. A search that was stopped therefore goes on as if it had not been.
TPE: Bergstra et al., Algorithms for Hyper-Parameter Optimization, 2011; limits are optuna's constraints.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..errors import MissingDependency
from .corners import corner_draws, every_draw
from .journal import Trial
from .space import Domain, Draw, Space
from .target import Target

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.study import Study
    from optuna.trial import FrozenTrial

STARTUP = 10
"""Trials before the sampler learns from them: corners, then random draws."""
LISTED = 1000
"""Draws up to which a space is known whole, so that its end is seen."""
TRIES = 30
"""Proposals that were all tried before, after which one is drawn at random from what is left."""
FAR = 1000.0
"""Violation of a trial that is no valid recipe, or failed: further than any figure is."""


def require_optuna() -> None:
    """Raise MissingDependency where optuna is absent."""
    if find_spec("optuna") is None:
        raise MissingDependency("optuna", "tune", "llmopt tune")


class Proposer:
    """Proposes draws of a space for a target."""

    def __init__(self, space: Space, target: Target, seed: int) -> None:
        require_optuna()
        self.space, self.target, self.seed = space, target, seed
        self.first = corner_draws(space)[:STARTUP]
        self.all = every_draw(space, LISTED)

    def next(self, done: Sequence[Trial]) -> Draw | None:
        """The draw to try after the finished trials; None where every draw was tried."""
        tried = {trial.key for trial in done}
        corner = next((draw for draw in self.first if draw.key not in tried), None)
        if corner is not None:
            return corner
        if self.all is not None and all(draw.key in tried for draw in self.all):
            return None
        return self._sampled(done, tried) or self._left(len(done), tried)

    def _sampled(self, done: Sequence[Trial], tried: set[str]) -> Draw | None:
        with _quiet():
            study = self._study(done)
            for _ in range(TRIES):
                trial = study.ask()
                draw = self.space.draw(lambda domain, trial=trial: suggest(trial, domain))  # type: ignore[misc]
                if draw.key not in tried:
                    return draw
        return None

    def _left(self, count: int, tried: set[str]) -> Draw | None:
        left = [draw for draw in self.all or () if draw.key not in tried]
        return random.Random(self._seed(count)).choice(left) if left else None

    def _seed(self, count: int) -> int:
        return int.from_bytes(hashlib.sha256(f"{self.seed}:{count}".encode()).digest()[:4], "little")

    def _study(self, done: Sequence[Trial]) -> Study:
        import optuna

        sampler = optuna.samplers.TPESampler(n_startup_trials=STARTUP, seed=self._seed(len(done)))
        study = optuna.create_study(sampler=sampler, direction="maximize" if self.target.maximize else "minimize")
        study.add_trials([self._frozen(trial) for trial in done])
        return study

    def _frozen(self, trial: Trial) -> FrozenTrial:
        """A finished trial as optuna knows it; one without the figure that decides counts as given up."""
        from optuna.trial import TrialState, create_trial

        value = trial.figures.get(self.target.metric.name) if trial.state == "complete" else None
        return create_trial(
            state=TrialState.PRUNED if value is None else TrialState.COMPLETE,
            value=value,
            params=dict(trial.values),
            distributions={name: distribution(self.space.domains[name]) for name in trial.values},
            constraints=self._constraints(trial),
        )

    def _constraints(self, trial: Trial) -> dict[str, float]:
        """By how much it misses each limit, as far as that is known: above 0 where one does not hold."""
        if trial.state in ("refused", "failed"):
            return {"recipe": FAR}
        complete = trial.state == "complete"
        return {
            f"{place}: {limit}": limit.violation(trial.known.get(limit.metric.name))
            for place, limit in enumerate(self.target.limits)
            if complete or limit.metric.name in trial.known
        }


def distribution(domain: Domain) -> BaseDistribution:
    """A domain as optuna has it."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if domain.kind == "choice":
        return CategoricalDistribution(domain.labels)
    if domain.kind == "int":
        return IntDistribution(int(domain.low), int(domain.last), log=domain.log, step=int(domain.step or 1))
    return FloatDistribution(domain.low, domain.last, log=domain.log, step=domain.step)


def suggest(trial: Any, domain: Domain) -> Any:
    """What an optuna trial proposes for a domain."""
    if domain.kind == "choice":
        return trial.suggest_categorical(domain.name, domain.labels)
    if domain.kind == "int":
        low, high, step = int(domain.low), int(domain.last), int(domain.step or 1)
        return trial.suggest_int(domain.name, low, high, log=domain.log, step=step)
    value = trial.suggest_float(domain.name, domain.low, domain.last, log=domain.log, step=domain.step)
    return round(value, 12) if domain.step is not None else value


@contextmanager
def _quiet() -> Iterator[None]:
    """Optuna's own log lines are left out for the duration."""
    from optuna import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)
