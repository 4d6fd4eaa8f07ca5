"""A block's work as a sequence of stages: check, transform, round without data, round on calibration, learn, hand on.

A stage is a function of the block's `BlockWork`. A method that changes weights or norms before anything is rounded
(activation-aware scales, say) puts a function into `TRANSFORMS`; one that rounds on calibration puts one into
`rounding.ROUNDINGS`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ...runtime.decoder_blocks import CapturedBatch
from ...runtime.kernels.formats import scale_values
from ...runtime.kernels.packed import PackedLinear
from ...runtime.memory import give_back
from .apply import check_weight, rtn_module
from .collect import call_order, collect, on_one_sequence
from .config import CALIBRATED
from .coverage import round_covered
from .hessian import Hessian, InputGroup
from .learn import learn_rounding
from .live import LiveStates, Stash
from .parts import Parts, dense, plan_parts
from .scaling import scale_block

if TYPE_CHECKING:
    from .config import Config
    from .targets import Target


@dataclass
class BlockWork:
    """One block on its way through the stages. `lines` are the report lines of the layers quantized so far.

    original: an unquantized copy of the block, where layers are fitted to the original model's outputs. live: where the
    states after the block go; last: whether no later block needs them. groups: Hessians of all calibrated layers as the
    block is now, where a transform has gathered them; facts: what it reports of layers, by name. handed_on: whether the
    batches' states are those after the block already. reference: an unquantized copy of the block where rounding is
    learned; values: its layers' weights just before they are rounded, by name; followed: its outputs by batch.
    """

    model: nn.Module
    config: Config
    index: int
    block: nn.Module
    targets: list[Target]
    captured: list[CapturedBatch]
    live: LiveStates = field(default_factory=LiveStates)
    last: bool = False
    original: nn.Module | None = None
    groups: list[InputGroup] | None = None
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list)
    handed_on: bool = False
    reference: nn.Module | None = None
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    followed: Stash | None = None

    @property
    def calibrated(self) -> list[Target]:
        """The targets whose method needs calibration."""
        return [target for target in self.targets if target.method in CALIBRATED]

    @property
    def learns(self) -> bool:
        """Whether the block's rounding is learned; blocks that no calibration reaches are left as they are rounded."""
        return self.config.learn_steps > 0 and bool(self.captured)

    def layers(self, names: list[str]) -> dict[str, nn.Module]:
        """The named layers of the model, by full name."""
        return {name: self.model.get_submodule(name) for name in names}

    def collect(self, names: list[str], whole: bool = True) -> list[InputGroup]:
        """Hessians of the named layers on the block as it is now; see `collect.collect`."""
        return collect(self.block, self.index, self.layers(names), self.captured, self.original, whole)


Stage = Callable[[BlockWork], None]

TRANSFORMS: dict[str, Callable[[BlockWork, list[Target]], None]] = {
    "awq": scale_block,
    "smoothquant": scale_block,
}
"""Method → what it does to the block before any layer is rounded, given its own targets in the block."""


def check(work: BlockWork) -> None:
    """Raise RunError where a weight that is to be calibrated is not finite; keep the original where it is followed."""
    for target in work.calibrated:
        check_weight(target.name, work.model.get_submodule(target.name))
    if work.calibrated and work.config.match_original:
        work.original = copy.deepcopy(work.block)
    if work.learns:
        work.reference = copy.deepcopy(work.block)


def transform(work: BlockWork) -> None:
    """Let every method that has a transform change the block."""
    for method, change in TRANSFORMS.items():
        targets = [target for target in work.targets if target.method == method]
        if targets:
            change(work, targets)


def remember(work: BlockWork) -> None:
    """Keep the weights that learned rounding starts from."""
    if work.learns:
        for target in work.targets:
            layer: Any = work.model.get_submodule(target.name)
            work.values[target.name] = layer.weight.detach().clone()


def round_without_data(work: BlockWork) -> None:
    """Quantize the layers whose method needs no calibration."""
    for target in work.targets:
        if target.method not in CALIBRATED:
            work.lines.append(rtn_module(work.model, target, work.config.scale_search))


def round_on_calibration(work: BlockWork) -> None:
    """Quantize the other layers: one after another on what is quantized before them, if `true_sequential` is set or the
    block can be run in parts for it, else all on the same pass over the block as it was.
    """
    calibrated = {target.name: target for target in work.calibrated}
    if not calibrated:
        return
    parts = _parts(work, calibrated)
    if parts is not None:
        _round_in_parts(work, parts, calibrated)
    else:
        steps = [list(calibrated)]
        if work.config.true_sequential:
            steps = call_order(work.block, work.index, work.layers(steps[0]), work.captured[0])
        for names in steps:
            groups = work.collect(names, whole=names is steps[-1]) if work.groups is None else work.groups
            for group in groups:
                work.lines += round_covered(work.model, [calibrated[name] for name in group.names], group, work.config)
            give_back()
    for line in work.lines:
        if line["name"] in calibrated:
            line["sequential"] = parts is not None or bool(work.config.true_sequential)
        line.update(work.facts.get(line["name"], {}))


def _parts(work: BlockWork, calibrated: dict[str, Target]) -> Parts | None:
    """How the block is run in parts; None where it cannot be, or the layers are not to be calibrated so."""
    wanted = work.config.true_sequential is not False
    if not wanted or work.groups is not None or work.original is not None:
        return None
    names = {module: name for name, module in work.block.named_modules()}
    layers = {names[layer]: layer for layer in work.layers(list(calibrated)).values()}
    parts = on_one_sequence(
        work.captured[0], work.index, lambda call, hidden: plan_parts(work.block, layers, call, hidden)
    )
    if parts is not None:
        parts.stash = Stash(work.live.scratch)
    return parts


def _round_in_parts(work: BlockWork, parts: Parts, calibrated: dict[str, Target]) -> None:
    """Quantize the layers part by part; the last run through the block hands its states on."""
    own = {module: name for name, module in work.block.named_modules()}
    full = {own[layer]: name for name, layer in work.layers(list(calibrated)).items()}
    before: tuple[str, ...] = ()
    for number, part in enumerate(parts.parts):
        layer: Any = work.block.get_submodule(part.names[0])  # nn.Linear, or a module that stands in for one
        hessian = Hessian(layer.in_features, layer.weight.device)
        with dense(work.block, before), parts.entered(number):
            for key, batch in enumerate(work.captured):
                hessian.add(parts.run_to(number, key, batch.calls[work.index], batch.hidden))
        targets = [calibrated[full[name]] for name in part.names]
        group = InputGroup([target.name for target in targets], hessian, number)
        work.lines += round_covered(work.model, targets, group, work.config)
        before = part.names
        give_back()
    if not work.last and not work.learns:
        with dense(work.block, before), parts.entered(len(parts.parts)):
            for key, batch in enumerate(work.captured):
                batch.hidden = parts.run_through(key, batch.calls[work.index], batch.hidden)
                work.live.keep(key, batch)
        work.handed_on = True
    parts.stash.clear()


def learn(work: BlockWork) -> None:
    """Move the codes and scales of the block's packed layers until its outputs come closer to the original's."""
    reference = work.reference
    if reference is None:
        return
    work.followed = followed = Stash(work.live.scratch)
    for number, batch in enumerate(work.captured):
        start = batch.hidden if batch.original is None else batch.original
        followed.put(f"followed-{number}", batch.calls[work.index].run(reference, start))
    work.reference = None
    own = {module: name for name, module in work.block.named_modules()}
    packed = {name: m for name, m in work.layers(list(work.values)).items() if isinstance(m, PackedLinear)}
    values = {own[layer]: work.values.pop(name) for name, layer in packed.items()}
    if not values:
        return

    def forward(number: int) -> torch.Tensor:
        batch = work.captured[number]
        return batch.calls[work.index].run(work.block, batch.hidden)

    def target(number: int) -> torch.Tensor:
        return followed.get(f"followed-{number}")

    found = learn_rounding(
        work.block, values, forward, target, len(work.captured), work.config.learn_steps, seed=work.index
    )
    for line in work.lines:
        if line["name"] in packed:
            scales = scale_values(cast("PackedLinear", work.model.get_submodule(line["name"]))).abs()
            line.update(
                scale_min=float(scales.min()),
                scale_max=float(scales.max()),
                codes_learned=found.changed[own[packed[line["name"]]]],
                block_error_rounded=found.error_before,
                block_error=found.error_after,
            )
    if work.last:
        followed.clear()


def hand_on(work: BlockWork) -> None:
    """Replace each batch's hidden state by the output of the block as it is now, unless no later block needs it."""
    if work.last or work.handed_on:
        return
    with dense(work.block):
        for number, batch in enumerate(work.captured):
            if work.followed is not None:
                batch.original = work.followed.take(f"followed-{number}")
            elif work.original is not None:
                batch.original = batch.followed
            batch.hidden = batch.calls[work.index].run(work.block, batch.hidden)
            work.live.keep(number, batch)


STAGES: tuple[Stage, ...] = (check, transform, remember, round_without_data, round_on_calibration, learn, hand_on)
