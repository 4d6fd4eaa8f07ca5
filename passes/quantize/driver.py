"""The block-wise driver: each decoder block is calibrated on the outputs of the quantized blocks before it.

For every block: run it on all calibration batches up to each group of layers with the same input, gather the Hessian
of that input, quantize the group, and go on, so that its end hands the quantized outputs on (`parts.py`); where a block
cannot be divided so, run it once for all Hessians, quantize, and run it again (the stages of `stages.py`). Only the
current Hessians and one hidden state per batch are held, and of a lazy model the current block's weights. Every
finished block is committed to the context's checkpoint, and a run that finds some goes on after them. The result
depends on weights, tokens and options alone: what is random (the order of batches in learned rounding) has fixed seeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...optimizer.errors import RunError
from ...runtime.decoder_blocks import CapturedBatch, capture, evaluation_mode, find_blocks, join_batches
from ...runtime.embedding_rows import loaded_around
from ...runtime.lazy import outside_blocks
from .apply import check_weight, rtn_module
from .collect import call_order, collect_outside
from .config import CALIBRATED
from .coverage import round_covered
from .live import LiveStates
from .preflight import Preflight, hessian_bytes, named_groups, preflight, shapes_of, weights_of
from .stages import STAGES, BlockWork
from .steps import FinishedSteps, Lines

if TYPE_CHECKING:
    from ...optimizer.base import Context
    from ...optimizer.model import LoadedModel
    from .config import Config
    from .targets import Target

HELD = 64 << 20
"""Bytes of states between two parts of a block that are kept in memory where a checkpoint's folder could take them."""


def quantize_blocks(
    model: LoadedModel, targets: list[Target], config: Config, context: Context, restore: Callable[[Lines], None]
) -> tuple[Lines, Preflight | None]:
    """Quantize `targets` block by block; returns a report line for each, and the preflight where there is calibration.

    What lies outside the blocks (the output head, say) comes last. restore: see `FinishedSteps`. Raises RunError on an
    empty calibration, NaN or infinite weights or activations, a Hessian that does not factorize, and a block that does
    not fit into memory.
    """
    run = _Run(model, targets, config, context, FinishedSteps(model, context.checkpoint, restore))
    with torch.no_grad(), evaluation_mode(model.module):
        return run.execute()


class _Run:
    """One run over the blocks of a model."""

    def __init__(
        self, model: LoadedModel, targets: list[Target], config: Config, context: Context, steps: FinishedSteps
    ) -> None:
        self.model, self.module, self.config, self.context, self.steps = model, model.module, config, context, steps
        self.name, self.blocks = find_blocks(self.module)
        self.inside, self.outside = by_block(targets, self.name, len(self.blocks))
        self.calibrated = [target for target in targets if target.method in CALIBRATED]
        self.batches: list[torch.Tensor] = []
        self.captured: list[CapturedBatch] = []
        self.live = LiveStates()
        self.spent: list[float] = []
        """Seconds of each block that this run has quantized layers of."""

    def execute(self) -> tuple[Lines, Preflight | None]:
        if self.calibrated:
            self.batches = self._batches()
        lines = self.steps.resume()
        done, total = self.steps.done, len(self.blocks) + bool(self.outside)
        if done:
            self.context.progress(done, total, f"{done} blocks were finished by an earlier run", left=None)
        last = self._last_calibrated()
        checked = self._capture(done, last) if done <= last else None
        for index in range(done, len(self.blocks)):
            lines += self._block(index, last, total)
        for number, target in enumerate(self.outside):
            if len(self.blocks) + number >= done:
                lines += self._outside(target)
        if self.outside:
            self.context.progress(total, total, "outside the blocks")
        return lines, checked

    def _batches(self) -> list[torch.Tensor]:
        batches = self.context.calibration.batches()
        if not batches or sum(batch.numel() for batch in batches) == 0:
            what = "the calibration has no tokens"
            raise RunError(what, where="quantize", what_to_do="Give a text that is not empty.")
        return join_batches(batches, self.config.batch_tokens)

    def _last_calibrated(self) -> int:
        """Number of the last step that needs the batches' states; -1 where none does."""
        if any(target.method in CALIBRATED for target in self.outside):
            return len(self.blocks) + len(self.outside)
        needs = [any(target.method in CALIBRATED for target in targets) for targets in self.inside]
        return max((index for index, need in enumerate(needs) if need), default=-1)

    def _capture(self, done: int, last: int) -> Preflight:
        """Record how the blocks are called, bring the batches' states to where `done` steps left them, and find out
        whether the run will fit. Where the states are to be left in files, they are from the start.
        """
        checkpoint, around = self.steps.checkpoint, (*self._around(), f"{self.name}.0")
        with loaded_around(self.model, *around):
            self.captured = capture(self.module, self.blocks, self.batches[:1])
        checked = self._preflight(self.captured[0], done, last)
        offload = checked.offload and checkpoint is not None
        self.live.offload = offload
        if checkpoint is not None and (offload or checked.between_parts > HELD):
            self.live.scratch = checkpoint.scratch("parts")
        if checkpoint is not None and offload:
            self.live.begin(checkpoint.scratch("start"))
        self.live.keep(0, self.captured[0])
        with loaded_around(self.model, *around):
            plain = self.captured[0].extra is None
            for number, ids in enumerate(self.batches[1:], start=1):
                batch = capture(self.module, self.blocks, [ids], plain)[0]
                batch.share_arguments(self.captured[0])
                self.live.keep(number, batch)
                self.captured.append(batch)
        if checkpoint is not None and checkpoint.live is not None:
            self.live.resume(checkpoint.live, self.captured)
        return checked

    def _preflight(self, batch: CapturedBatch, done: int, last: int) -> Preflight:
        """Try the first calibrated block on one batch, and hold the widest one against the memory there is.

        Where that is built otherwise (experts behind a dense block), its equal inputs are told by the layers' names.
        """
        inside = {f"{self.name}.{i}": own for i, own in enumerate(self.inside) if done <= i <= last}
        calibrated = {name: [t for t in own if t.method in CALIBRATED] for name, own in inside.items()}
        tried = next((name for name, own in calibrated.items() if own), None)
        groups = [[target] for target in self.calibrated]
        if tried is not None:
            with self.model.loaded(tried):
                own = {target.name: target for target in calibrated[tried]}
                layers = {name: self.module.get_submodule(name) for name in own}
                block = self.module.get_submodule(tried)
                order = call_order(block, int(tried.rpartition(".")[2]), layers, batch)
                groups = [[own[name] for name in names] for names in order]
            widest = max(calibrated.values(), key=lambda own: hessian_bytes(named_groups(own)))
            if shapes_of(widest) != shapes_of(calibrated[tried]):
                groups = max(groups, named_groups(widest), key=hessian_bytes)
        checked = preflight(
            {name: weights_of(self.module.get_submodule(name)) for name in inside} or {self.name: 0},
            [target for own in calibrated.values() for target in own] or self.calibrated,
            groups,
            batch,
            sum(ids.numel() for ids in self.batches),
            self.context.max_memory,
            follows_original=self.config.match_original > 0,
            in_parts=self.config.true_sequential is not False and self.config.match_original == 0,
            learns=self.config.learn_steps > 0,
        )
        checked.check()
        return checked

    def _block(self, index: int, last: int, total: int) -> Lines:
        """Quantize one block and commit it."""
        name, targets = f"{self.name}.{index}", self.inside[index]
        if self.context.cancelled():
            raise RunError("the run was cancelled", where=name)
        started = time.perf_counter()
        lines: Lines = []
        if targets or index < last:
            folder = self._next_live(index < last)
            with self.model.loaded(name):
                captured = self.captured if index <= last else []
                block = self.module.get_submodule(name)
                work = BlockWork(
                    self.module, self.config, index, block, targets, captured, self.live, last=index >= last
                )
                for stage in STAGES:
                    stage(work)
                lines = work.lines
                self.steps.save([name], lines, folder)
        else:
            self.steps.save([], [])
        before, after = mean_errors(lines)
        seconds = time.perf_counter() - started
        self.spent += [seconds] if targets else []
        self.context.progress(
            index + 1,
            total,
            f"block {index + 1} of {len(self.blocks)}{_shown(before, after)}",
            error_before=before,
            error_after=after,
            seconds=round(seconds, 3),
            left=self._left(index + 1),
        )
        for batch in self.captured:
            batch.calls[index] = None  # type: ignore[call-overload]  # frees what only this block was called with
        if index >= last:
            self.captured = []
        return lines

    def _left(self, done: int) -> float | None:
        """Seconds for the blocks from number `done` on, by the pace of those that this run has quantized."""
        if not self.spent:
            return None
        coming = sum(bool(own) for own in [*self.inside[done:], self.outside])
        return round(sum(self.spent) / len(self.spent) * coming, 1)

    def _next_live(self, wanted: bool) -> Path | None:
        folder = self.steps.checkpoint.next_live() if self.steps.checkpoint is not None and wanted else None
        self.live.begin(folder)
        return folder

    def _outside(self, target: Target) -> Lines:
        """Quantize one layer outside the blocks, on the quantized blocks' outputs, and commit it."""
        calibrated = target.method in CALIBRATED
        names = self._around(head=True) if calibrated else [target.name]
        with loaded_around(self.model, *names):
            check_weight(target.name, self.module.get_submodule(target.name))
            if calibrated:
                group = collect_outside(self.module, self.blocks, target.name, self.batches, self.captured)
                lines = round_covered(self.module, [target], group, self.config)
            else:
                lines = [rtn_module(self.module, target, self.config.scale_search)]
            checkpoint = self.steps.checkpoint
            self.steps.save([target.name], lines, checkpoint.live if checkpoint is not None else None)
        return lines

    def _around(self, head: bool = False) -> list[str]:
        """Names of what lies outside the blocks; without the head unless asked for."""
        own = self.module.get_output_embeddings()  # type: ignore[operator]
        names = outside_blocks(self.module, self.name)
        return [name for name in names if head or self.module.get_submodule(name) is not own]


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


def mean_errors(lines: Lines) -> tuple[float | None, float | None]:
    """Mean relative error of rounding to nearest, and of what was done, over a block's calibrated layers."""
    calibrated = [line for line in lines if "error_rtn" in line]
    if not calibrated:
        return None, None
    count = len(calibrated)
    return sum(line["error_rtn"] for line in calibrated) / count, sum(line["error"] for line in calibrated) / count


def _shown(before: float | None, after: float | None) -> str:
    """A block's errors behind the message of its progress; empty where nothing was calibrated."""
    return "" if before is None or after is None else f": error {after:.3g}, {before:.3g} by rounding to nearest"
