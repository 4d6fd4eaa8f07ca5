"""Scales that are folded into what precedes a block's linear layers, before any of these is rounded.

One pass over the calibration batches gives Hessians and statistics of all inputs; for every fold of the block (see
`folding.py`) the method then searches scales, and they are applied. The Hessians of the scaled inputs follow from those
of the unscaled ones, so that rounding needs no pass of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...runtime.decoder_blocks import BlockCall
from .awq import Layer, ScaleChoice, search_scales
from .collect import on_one_sequence
from .folding import BlockOutput, Fold, apply_fold, find_folds, shared_modules
from .samples import InputSample, sampling
from .smoothquant import search_strength

if TYPE_CHECKING:
    from .hessian import Hessian
    from .stages import BlockWork
    from .targets import Target

SAMPLED_ROWS = 2048
"""Input rows on which smoothquant judges a strength."""


def scale_block(work: BlockWork, targets: list[Target]) -> None:
    """Fold scales into what precedes `targets`, all of one method, as far as the block's structure allows.

    The report line of every target gets its exponent and errors before and after, or the reason why it is unscaled.
    """
    method = targets[0].method
    block_name = next(name for name, module in work.model.named_modules() if module is work.block)
    prefix = f"{block_name}."
    own = {target.name.removeprefix(prefix): target for target in targets}
    found = find_folds(work.block, _probe(work), shared_modules(work.model, block_name))
    for refused, reason in found.refused.items():
        for name in refused:
            work.facts[prefix + name] = {"unscaled": reason}
    consumers = [(fold, [name for name in fold.consumers if name in own]) for fold in found.folds]
    folds = {names[0]: (fold, names) for fold, names in consumers if names}
    leaders = {name: work.block.get_submodule(name) for name in folds}
    keep = -(-SAMPLED_ROWS // len(work.captured)) if method == "smoothquant" else 0
    with sampling(leaders, keep) as samples:
        groups = work.collect([target.name for target in work.calibrated])
    for leader, (fold, names) in folds.items():
        hessian = next(group.hessian for group in groups if prefix + leader in group.names)
        if hessian.rows == 0:
            facts: dict[str, Any] = {"unscaled": "no calibration token reached it"}
        else:
            layers = [(work.block.get_parameter(f"{name}.weight").detach(), own[name].scheme) for name in names]
            choice = _choose(method, fold, layers, hessian, samples[leader], work.config.scale_steps)
            columns = fold.columns(apply_fold(work.block, fold, choice.scales))
            if work.original is not None:
                apply_fold(work.original, fold, choice.scales)
            for group in groups:
                if any(prefix + name in group.names for name in fold.consumers):
                    _rescale(group.hessian, columns)
            facts = {
                "scaled_by": fold.source,
                "exponent": round(choice.exponent, 4),
                "error_scaled": choice.error,
                "error_unscaled": choice.error_unscaled,
            }
        for name in names:
            work.facts[prefix + name] = facts
    # With `true_sequential` every layer is calibrated anew, on the quantized layers before it.
    work.groups = None if work.config.true_sequential else groups


def _choose(
    method: str, fold: Fold, layers: Sequence[Layer], hessian: Hessian, sample: InputSample, steps: int
) -> ScaleChoice:
    """The scales that the method's search finds, float32 [C]."""
    dtype, channels = layers[0][0].dtype, fold.channels
    if method == "smoothquant":
        largest = torch.zeros(len(fold.rows), device=channels.device)
        largest.scatter_reduce_(0, channels, sample.largest, "amax")
        return search_strength(layers, sample.rows, largest, channels, dtype, steps)
    return search_scales(layers, hessian.mean(), fold.pool(sample.mean_magnitude), channels, dtype, steps)


def _probe(work: BlockWork) -> BlockOutput:
    """Runs the block on one sequence of the first batch, or on all of it where its arguments do not allow that."""

    def probe(call: BlockCall, hidden: torch.Tensor) -> BlockOutput:
        call.run(work.block, hidden)
        return lambda: call.run(work.block, hidden)

    return on_one_sequence(work.captured[0], work.index, probe)


def _rescale(hessian: Hessian, columns: torch.Tensor) -> None:
    """Turn the Hessian of inputs x, in place, into that of x / columns."""
    hessian.sum.div_(columns[:, None]).div_(columns)
    if hessian.cross_sum is not None:
        hessian.cross_sum.div_(columns[:, None]).div_(columns)
