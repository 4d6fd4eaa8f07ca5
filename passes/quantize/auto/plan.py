"""What `method: auto` will do, as far as that is known before anything is measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ....optimizer.base import ModulePlan
from ..config import CALIBRATED
from .units import METHOD, budget_of, find_units, limits_of

if TYPE_CHECKING:
    from ....optimizer.model import ModelInfo
    from ..config import Config
    from ..targets import Target, Targets


@dataclass(frozen=True)
class Foreseen:
    """modules: what becomes of the free layers; notes; targets: as many layers of a definite method, for estimates of
    memory and time; work: multiply-adds of the search."""

    summary: str
    modules: list[ModulePlan]
    notes: list[str]
    targets: Targets
    work: float


def foresee(targets: Targets, config: Config, info: ModelInfo) -> Foreseen:
    """Raises UsageError where the limit is out of reach."""
    options = limits_of(config)
    units = find_units(targets, config, info)
    budget = budget_of(units, targets, config, info)
    num_weights = max(1, budget.num_weights)
    average = min(budget.nbytes, sum(max(unit.sizes) for unit in units)) / num_weights
    method = next((name for name in options.methods if name in CALIBRATED), options.methods[0])
    bits = f"{options.bits[0]} to {options.bits[-1]} bits"
    number_of = {name: number for number, unit in enumerate(units) for name in unit.names}

    def planned(target: Target) -> ModulePlan:
        before, number = 0 if target.untied else target.num_weights * info.dtype_bytes, number_of[target.name]
        schemes = dict.fromkeys(c.scheme for c in units[number].candidates if c.scheme is not None)
        after = int(average * target.num_weights)
        return ModulePlan(target.name, f"auto, {bits}", before, after, candidates=tuple(schemes), unit=number)

    notes = [f"bits and method of {len(number_of)} layers are chosen when sensitivities have been measured"]
    if options.max_mean_kl is None:
        reach = [budget.shown(sum(pick(unit.sizes) for unit in units)) for pick in (min, max)]
        limit = f"at most {budget.shown(budget.nbytes)}"
        notes.append(f"what can be chosen from takes {reach[0]} to {reach[1]}")
    else:
        limit = f"a mean KL of at most {options.max_mean_kl:g}"
        notes.append("the size is unknown before that, and given as that of the largest candidates")
    definite = [replace(t, method=method) if t.method == METHOD else t for t in targets.modules]
    passes = 4 + (0 if options.max_mean_kl is None else 3 * options.trials)
    return Foreseen(
        f"{len(number_of)} linear layers by measured sensitivity, {limit}",
        [planned(target) for target in targets.modules if target.name in number_of],
        notes,
        replace(targets, modules=definite),
        float(num_weights) * options.tokens * passes,
    )
