"""The search: sensitivities, every candidate's error, the knapsack, and trials where a KL divergence is the limit."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from ....optimizer.errors import RunError, UsageError
from ....runtime.decoder_blocks import evaluation_mode
from ..apply import check_weight
from ..gptq import NotPositiveDefinite
from .estimate import row_errors
from .knapsack import Knapsack, Option
from .sensitivity import SharedInput, measure
from .trial import Trials
from .units import Unit, assign, budget_of, find_units, limits_of

if TYPE_CHECKING:
    from ....optimizer.base import Context
    from ....optimizer.model import LoadedModel
    from ..config import Config
    from ..targets import Targets

CLOSE = 0.9
"""Share of `max_mean_kl` above which a trial ends the search."""
LARGEST_STEP = 8.0
"""Factor by which the predicted error changes at most between two trials."""


@dataclass
class Found:
    """What a search came to. choice: a candidate's number for every unit; predicted: KL in nats by unit and candidate;
    sensitivity: by layer, the KL that losing all of its outputs would cost by the same quadratic measure; trials: size,
    predicted and measured KL of each. JSON throughout, for checkpoint and report."""

    choice: list[int]
    predicted: list[list[float]]
    sensitivity: dict[str, float]
    unmeasured: list[str] = field(default_factory=list)
    trials: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0


def search(
    model: LoadedModel, targets: Targets, config: Config, context: Context
) -> tuple[Targets, dict[str, Any], dict[str, dict[str, float]]]:
    """The targets with bits and method chosen, the report of the search, and what it adds to each layer's report line.

    The result is the checkpoint's preparation: a run that finds it there does not search again. Raises UsageError where
    the limit is out of reach, RunError as the driver does.
    """
    units = find_units(targets, config, context.info)
    checkpoint = context.checkpoint
    if checkpoint is not None and checkpoint.prepared is not None:
        found = Found(**checkpoint.prepared)
    else:
        found = _Search(model, targets, units, config, context).run()
        if checkpoint is not None:
            checkpoint.prepare(vars(found))
    budget = budget_of(units, targets, config, context.info)
    chosen = assign(targets, units, found.choice)
    return chosen, _report(units, found, budget), _lines(units, found)


class _Search:
    """One search."""

    def __init__(
        self, model: LoadedModel, targets: Targets, units: list[Unit], config: Config, context: Context
    ) -> None:
        self.model, self.targets, self.units, self.config, self.context = model, targets, units, config, context
        self.options = limits_of(config)
        self.unit_of = {name: number for number, unit in enumerate(units) for name in unit.names}
        self.predicted = [[0.0] * len(unit.candidates) for unit in units]
        self.sensitivity: dict[str, float] = {}
        self.trials: list[dict[str, float]] = []

    def run(self) -> Found:
        started = time.perf_counter()
        budget = budget_of(self.units, self.targets, self.config, self.context.info)
        batches = self._batches()
        with evaluation_mode(self.model.module), self._folder() as folder:
            layers = list(self.unit_of)
            last = measure(self.model, layers, batches, self.context.seed, folder, self._visit, self._progress)
            missed = [name for name in layers if name not in self.sensitivity]
            knapsack = Knapsack([self._options(number, missed) for number in range(len(self.units))])
            if self.options.max_mean_kl is None:
                choice = knapsack.least_error(budget.nbytes)
                assert choice is not None  # `budget_of` has refused a limit below the smallest size
            else:
                choice = self._tried(knapsack, Trials(self.model, self.config, batches, last))
        if missed:
            self.context.note("fallback", f"no gradient reached {', '.join(missed)}: they get their largest candidates")
        seconds = round(time.perf_counter() - started, 2)
        return Found(choice, self.predicted, self.sensitivity, missed, self.trials, seconds)

    def _batches(self) -> list[torch.Tensor]:
        """The calibration's sequences up to `tokens`, spread over all of them."""
        batches = [row[None] for batch in self.context.calibration.batches() for row in batch]
        total = sum(batch.numel() for batch in batches)
        if total == 0:
            raise RunError("the calibration has no tokens", "quantize", "Give a text that is not empty.")
        count = max(1, min(len(batches), len(batches) * self.options.tokens // total))
        return [batches[i * len(batches) // count] for i in range(count)]

    @contextmanager
    def _folder(self) -> Iterator[Path | None]:
        """Where the blocks' inputs go: to files where the weights are in files too."""
        checkpoint = self.context.checkpoint
        if self.model.weights is None or checkpoint is None:
            yield None
            return
        folder = checkpoint.scratch("auto")
        yield folder
        shutil.rmtree(folder, ignore_errors=True)

    def _progress(self, step: int, total: int) -> None:
        if self.context.cancelled():
            raise RunError("the run was cancelled", where="quantize.auto")
        self.context.progress(step, total, "sensitivity")

    def _visit(self, groups: list[SharedInput]) -> None:
        """Add what every candidate would cost in these layers."""
        for group in groups:
            members: dict[int, list[str]] = {}
            for name in group.outputs:
                check_weight(name, self.model.module.get_submodule(name))
                members.setdefault(self.unit_of[name], []).append(name)
            for number, names in members.items():
                self._candidates(number, names, group)

    def _candidates(self, number: int, names: list[str], group: SharedInput) -> None:
        weights = [cast("torch.Tensor", self.model.module.get_submodule(name).weight).detach() for name in names]
        outputs = [group.outputs[name].double() for name in names]
        for name, weight, output in zip(names, weights, outputs):
            whole = ((weight.float() @ group.inputs.metric) * weight.float()).sum(1)
            self.sensitivity[name] = float((whole.double() * output).sum())
        for i, candidate in enumerate(self.units[number].candidates):
            if candidate.scheme is None or candidate.method is None:
                continue
            try:
                rows = row_errors(candidate.method, weights, candidate.scheme, group.inputs, self.config)
            except NotPositiveDefinite as failure:
                where, mend = ", ".join(names), "Calibrate on more varied text, or ignore these modules."
                raise RunError(f"{failure}, even with damping 1", where, mend) from None
            total = sum(float((row.double() * output).sum()) for row, output in zip(rows, outputs))
            if not math.isfinite(total):
                raise RunError("the estimated error is not finite", ", ".join(names), "Check the weights.")
            self.predicted[number][i] += max(0.0, total)

    def _options(self, number: int, missed: Sequence[str]) -> list[Option]:
        """The options of a unit. Without a measure the largest counts as exact and the others as ruinous."""
        unit = self.units[number]
        errors = self.predicted[number]
        if set(unit.names) <= set(missed):
            errors = [0.0 if size == max(unit.sizes) else 1e6 for size in unit.sizes]
        return [Option(size, error) for size, error in zip(unit.sizes, errors)]

    def _tried(self, knapsack: Knapsack, trials: Trials) -> list[int]:
        """The smallest choice whose measured KL is within the limit, with its uncertainty.

        The prediction is calibrated on the trials so far: measured = a * predicted^b, with b = 1 after the first.
        """
        limit = self.options.max_mean_kl
        assert limit is not None
        best: list[int] | None = None
        tried: list[tuple[float, float]] = []
        wanted = limit
        for number in range(self.options.trials):
            choice = knapsack.least_size(wanted) or knapsack.least_error(sum(max(unit.sizes) for unit in self.units))
            assert choice is not None
            if any(knapsack.error(choice) == predicted for predicted, _ in tried):
                break
            kl = trials.measure(assign(self.targets, self.units, choice).modules)
            predicted, size = knapsack.error(choice), knapsack.size(choice)
            tried.append((predicted, kl.bound))
            self.trials.append(
                {"bytes": size, "predicted_kl": predicted, "measured_kl": kl.mean, "measured_bound": kl.bound}
            )
            self.context.progress(number + 1, self.options.trials, "trial", measured_kl=kl.mean)
            if kl.bound <= limit and (best is None or size < knapsack.size(best)):
                best = choice
            if CLOSE * limit <= kl.bound <= limit:
                break
            wanted = next_error(tried, limit)
        if best is None:
            least = min(tried, key=lambda pair: pair[1])[1]
            raise UsageError(
                f"no trial stayed within {limit:g}: the least mean KL that {len(tried)} trials measured is at most "
                f"{least:.4g} with 95% confidence",
                where="quantize.auto.max_mean_kl",
                what_to_do="Raise it, allow more bits (16 keeps a layer), or more `trials`.",
            )
        return best


def next_error(tried: Sequence[tuple[float, float]], limit: float) -> float:
    """The predicted error to try next: where a power law through the two trials nearest to the limit, or a line from 0
    through the only one, meets a little less than the limit. tried: (predicted, measured), the last one first wanted.
    """
    goal = math.log(limit * (1 + CLOSE) / 2)
    logs = sorted(
        ((math.log(max(p, 1e-12)), math.log(max(m, 1e-12))) for p, m in tried), key=lambda pair: abs(pair[1] - goal)
    )
    (x, y), slope = logs[0], 1.0
    if len(logs) > 1 and logs[1][0] != x and logs[1][1] != y:
        slope = min(4.0, max(0.5, (logs[1][1] - y) / (logs[1][0] - x)))
    step = (goal - y) / slope
    bound = math.log(LARGEST_STEP)
    return math.exp(x + min(bound, max(-bound, step)))


def _report(units: Sequence[Unit], found: Found, budget: Any) -> dict[str, Any]:
    """The search's part of the pass report."""
    chosen = [(unit, i, errors) for unit, i, errors in zip(units, found.choice, found.predicted)]
    nbytes = sum(unit.sizes[i] for unit, i, _ in chosen)
    kinds: dict[str, int] = {}
    for unit, i, _ in chosen:
        label = str(unit.candidates[i])
        kinds[label] = kinds.get(label, 0) + len(unit.targets)
    return {
        "bytes": nbytes,
        "bits_per_weight": round(8 * nbytes / budget.num_weights, 4),
        "model_bytes": nbytes + budget.beside,
        "predicted_kl": sum(errors[i] for _, i, errors in chosen),
        "layers": kinds,
        "unmeasured": found.unmeasured,
        "trials": found.trials,
        "seconds": found.seconds,
        "units": [
            {
                "names": unit.names,
                "chosen": str(unit.candidates[i]),
                "bytes": unit.sizes[i],
                "candidates": {
                    str(candidate): {"bytes": size, "predicted_kl": float(f"{error:.4g}")}
                    for candidate, size, error in zip(unit.candidates, unit.sizes, errors)
                },
            }
            for unit, i, errors in chosen
        ],
    }


def _lines(units: Sequence[Unit], found: Found) -> dict[str, dict[str, float]]:
    """By layer: its sensitivity, and the KL predicted for its unit as chosen."""
    return {
        name: {"sensitivity": found.sensitivity.get(name, 0.0), "predicted_kl": errors[i]}
        for unit, i, errors in zip(units, found.choice, found.predicted)
        for name in unit.names
    }
