"""The block-wise driver: each decoder block is calibrated on the outputs of the quantized blocks before it.

For every block: run it on all calibration batches with hooks that gather the Hessians of its linear layers, quantize
those layers, run it again to hand its now quantized outputs on (the stages of `stages.py`). Only the current block's
Hessians and one hidden state per batch are held. The result depends on weights, tokens and options alone: there is no
randomness.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...optimizer.errors import RunError
from ...runtime.decoder_blocks import capture, evaluation_mode, find_blocks, join_batches
from .apply import check_weight, rtn_module
from .collect import collect_outside
from .config import CALIBRATED
from .rounding import round_group
from .stages import STAGES, BlockWork

if TYPE_CHECKING:
    from ...optimizer.base import Context
    from .config import Config
    from .targets import Target


def quantize_blocks(model: nn.Module, targets: list[Target], config: Config, context: Context) -> list[dict[str, Any]]:
    """Quantize `targets` in the order in which the model runs them; returns a report line for each.

    What lies outside the blocks (the output head, say) comes last, calibrated on the quantized model. Raises RunError
    on an empty calibration, NaN or infinite weights or activations, and a Hessian that does not factorize.
    """
    batches = context.calibration.batches()
    if not batches or sum(batch.numel() for batch in batches) == 0:
        raise RunError("the calibration has no tokens", where="quantize", what_to_do="Give a text that is not empty.")
    blocks_name, blocks = find_blocks(model)
    inside, outside = by_block(targets, blocks_name, len(blocks))
    lines: list[dict[str, Any]] = []
    with torch.no_grad(), evaluation_mode(model):
        captured = capture(model, blocks, join_batches(batches, config.batch_tokens))
        total = len(blocks) + bool(outside)
        for index, block in enumerate(blocks):
            if context.cancelled():
                raise RunError("the run was cancelled", where=f"{blocks_name}.{index}")
            started = time.perf_counter()
            work = BlockWork(model, config, index, block, inside[index], captured)
            for stage in STAGES:
                stage(work)
            lines += work.lines
            before, after = mean_errors(work.lines)
            context.progress(
                index + 1,
                total,
                f"block {index + 1} of {len(blocks)}",
                error_before=before,
                error_after=after,
                seconds=round(time.perf_counter() - started, 3),
            )
            for batch in captured:
                batch.calls[index] = None  # frees what only this block was called with
        for target in outside:
            lines += quantize_outside(model, target, batches, config)
        if outside:
            context.progress(total, total, "outside the blocks")
    return lines


def by_block(targets: list[Target], blocks_name: str, count: int) -> tuple[list[list[Target]], list[Target]]:
    """The targets inside each of the `count` blocks, and those outside them, in order."""
    prefix = f"{blocks_name}."
    inside: list[list[Target]] = [[] for _ in range(count)]
    outside: list[Target] = []
    for target in targets:
        if target.name.startswith(prefix):
            inside[int(target.name[len(prefix) :].split(".", 1)[0])].append(target)
        else:
            outside.append(target)
    return inside, outside


def quantize_outside(
    model: nn.Module, target: Target, batches: list[torch.Tensor], config: Config
) -> list[dict[str, Any]]:
    """Quantize one layer outside the blocks on the model as it is by then; returns its report line."""
    check_weight(target.name, model.get_submodule(target.name))
    if target.method not in CALIBRATED:
        return [rtn_module(model, target, config.scale_search)]
    group = collect_outside(model, target.name, join_batches(batches, config.batch_tokens))
    return round_group(model, [target], group, config)


def mean_errors(lines: list[dict[str, Any]]) -> tuple[float | None, float | None]:
    """Mean relative error of rounding to nearest, and of what was done, over a block's calibrated layers."""
    calibrated = [line for line in lines if "error_rtn" in line]
    if not calibrated:
        return None, None
    count = len(calibrated)
    return sum(line["error_rtn"] for line in calibrated) / count, sum(line["error"] for line in calibrated) / count
