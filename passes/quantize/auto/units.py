"""Units: layers that get the same bits, what they may get, and what that takes; limits in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ....optimizer.errors import UsageError
from ....runtime.kernels.packed import QuantScheme
from ..data_free import fused_key
from ..moe import quantizable_experts
from ..schemes import describe
from ..targets import Target, Targets
from .options import KEEP

if TYPE_CHECKING:
    from ....optimizer.model import ModelInfo
    from ..config import Config
    from .options import AutoOptions

METHOD = "auto"
EXPERTS = "experts"
"""The unit of all experts, which transformers reads in one scheme only."""


@dataclass(frozen=True)
class Candidate:
    """What a unit may get: a method and a grid, or, where both are None, to stay as it is."""

    method: str | None
    scheme: QuantScheme | None

    def __str__(self) -> str:
        return f"{self.method} {describe(self.scheme)}" if self.scheme is not None else "kept"

    def nbytes(self, target: Target, dtype_bytes: int) -> int:
        """Bytes of the target's weight; one that was untied to be quantized takes none where it is not."""
        if self.scheme is not None:
            return self.scheme.nbytes(target.out_features, target.in_features, dtype_bytes)
        return 0 if target.untied else target.num_weights * dtype_bytes


@dataclass(frozen=True)
class Unit:
    """Layers with one choice. sizes: bytes of all of them, one for each candidate."""

    targets: tuple[Target, ...]
    candidates: tuple[Candidate, ...]
    sizes: tuple[int, ...]

    @property
    def names(self) -> list[str]:
        return [target.name for target in self.targets]


def find_units(targets: Targets, config: Config, info: ModelInfo) -> list[Unit]:
    """The units of the targets whose method is `auto`, in the order of their first layers.

    Raises UsageError where no layer is left to choose for, or a layer's settings leave nothing to choose from.
    """
    options = limits_of(config)
    experts = set(quantizable_experts(info, everywhere=True))
    members: dict[object, list[Target]] = {}
    for target in targets.modules:
        if target.method == METHOD:
            members.setdefault(_key(target.name, options, experts), []).append(target)
    if not members:
        raise UsageError(
            "every layer has a method of its own, so that `method: auto` has nothing to choose",
            where="quantize.overrides",
            what_to_do="Give the pass one of these methods, or take the `method` out of an override.",
        )
    return [_unit(own, config, info.dtype_bytes, keepable=key != EXPERTS) for key, own in members.items()]


def limits_of(config: Config) -> AutoOptions:
    """The options of `auto`, which a configuration with this method has."""
    assert config.auto is not None
    return config.auto


def _key(name: str, options: AutoOptions, experts: set[str]) -> object:
    if name in experts:
        return EXPERTS
    return name if options.fused == "free" else fused_key(name)


def _unit(targets: list[Target], config: Config, dtype_bytes: int, keepable: bool) -> Unit:
    options = limits_of(config)
    odd = next((t for t in targets if t.scheme.format != "pack-quantized" or not t.scheme.symmetric), None)
    if odd is not None:
        raise UsageError(
            f"{odd.name} would get a grid that cannot be mixed with others ({describe(odd.scheme)})",
            where="quantize.overrides",
            what_to_do="Layers of `method: auto` are symmetric and weight-only; give this one a method of its own.",
        )
    groups = options.group_sizes or sorted({target.scheme.group_size for target in targets}, reverse=True)[-1:]
    usable = [g for g in groups if all(t.in_features % (g if g > 0 else 1) == 0 for t in targets)]
    if not usable:
        raise UsageError(
            f"none of the group sizes {', '.join(map(str, groups))} divides the {targets[0].in_features} input "
            f"features of {targets[0].name}",
            where="quantize.auto.group_sizes",
            what_to_do="Add one that does, or ignore the layer.",
        )
    candidates = [
        Candidate(method, QuantScheme(bits, group))
        for bits in options.bits
        if bits != KEEP
        for group in usable
        for method in options.methods
    ]
    if KEEP in options.bits and keepable:
        candidates.append(Candidate(None, None))
    sizes = tuple(sum(candidate.nbytes(target, dtype_bytes) for target in targets) for candidate in candidates)
    return Unit(tuple(targets), tuple(candidates), sizes)


@dataclass(frozen=True)
class Budget:
    """A limit on the bytes of all units. option: the one it comes from; num_weights: of all units; beside: bytes of the
    model's other tensors."""

    option: str
    nbytes: int
    num_weights: int
    beside: int

    def shown(self, nbytes: int) -> str:
        """A size of the units in terms of the option."""
        if self.option == "target_size":
            return f"{(nbytes + self.beside) / 1e6:,.3f} MB"
        return f"{8 * nbytes / self.num_weights:.3f} bits a weight"


def budget_of(units: Sequence[Unit], targets: Targets, config: Config, info: ModelInfo) -> Budget:
    """The limit in bytes; for `max_mean_kl` the size of the largest candidates.

    Raises UsageError where a size is out of reach, naming the smallest that is not, or leaves nothing to quantize.
    """
    options = limits_of(config)
    num_weights = sum(target.num_weights for unit in units for target in unit.targets)
    smallest, largest = (sum(pick(unit.sizes) for unit in units) for pick in (min, max))
    before = sum(0 if t.untied else t.num_weights * info.dtype_bytes for t in targets.modules)
    fixed = [target for target in targets.modules if target.method != METHOD]
    fixed_bytes = sum(t.scheme.nbytes(t.out_features, t.in_features, info.dtype_bytes) for t in fixed)
    beside = info.weight_bytes - before + fixed_bytes
    if options.target_bits is not None:
        budget = Budget("target_bits", int(options.target_bits * num_weights / 8), num_weights, beside)
    elif options.target_size is not None:
        budget = Budget("target_size", options.target_size - beside, num_weights, beside)
    else:
        return Budget("max_mean_kl", largest, num_weights, beside)
    if budget.nbytes < smallest:
        raise UsageError(
            f"the limit is {budget.shown(budget.nbytes)}, and the smallest reachable is {budget.shown(smallest)}",
            where=f"quantize.auto.{budget.option}",
            what_to_do=f"Raise it, or allow fewer bits (now {', '.join(map(str, options.bits))}) or larger groups.",
        )
    kept = [size for unit in units for size, own in zip(unit.sizes, unit.candidates) if own.scheme is None]
    if not fixed and len(kept) == len(units) and budget.nbytes >= sum(kept):
        raise nothing_to_quantize(
            f"quantize.auto.{budget.option}", f"{budget.shown(budget.nbytes)}, unquantized {budget.shown(sum(kept))}"
        )
    return budget


def nothing_to_quantize(where: str, sizes: str = "") -> UsageError:
    """The refusal of a limit that every layer meets as it is. sizes: both, where they are compared."""
    what = "the limit lets every layer stay as it is"
    return UsageError(f"{what} ({sizes})" if sizes else what, where, f"Lower it, or leave {KEEP} out of `bits`.")


def assign(targets: Targets, units: Sequence[Unit], choice: Sequence[int]) -> Targets:
    """The targets with the chosen candidates, given as their numbers; layers that stay as they are are skipped.

    Raises UsageError where no layer would be quantized.
    """
    chosen = {name: unit.candidates[i] for unit, i in zip(units, choice) for name in unit.names}
    modules, kept = [], []
    for target in targets.modules:
        candidate = chosen.get(target.name)
        if candidate is None:
            modules.append(target)
        elif candidate.scheme is None or candidate.method is None:
            kept.append(target.name)
        else:
            group = candidate.scheme.group_size
            asked = target.asked_group_size if target.scheme.group_size == group else group
            modules.append(replace(target, scheme=candidate.scheme, method=candidate.method, asked_group_size=asked))
    if not modules:
        raise nothing_to_quantize("quantize.auto")
    return Targets(modules, targets.skipped + kept, targets.refusals, targets.notes)
