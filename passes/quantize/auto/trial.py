"""A trial: the model quantized by a choice of bits, block by block on copies, and its KL divergence measured.

The copies go through the driver's own stages, so that what is measured is what the run would make of the tokens that a
trial is calibrated on. The model is left as it was. Sequences take turns: one is calibrated on, the next is measured.
What is held against a limit is the upper end of a confidence interval, since few sequences are measured.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ....evaluation.divergence import kl_rows
from ....optimizer.errors import RunError
from ....runtime.decoder_blocks import CapturedBatch, capture, find_blocks, join_batches, logits_after
from ....runtime.embedding_rows import loaded_around
from ....runtime.lazy import outside_blocks
from ..apply import rtn_module
from ..collect import collect_outside
from ..config import CALIBRATED
from ..parts import dense
from ..rounding import round_group
from ..stages import STAGES, BlockWork

if TYPE_CHECKING:
    from torch import nn

    from ....optimizer.model import LoadedModel
    from ..config import Config
    from ..targets import Target


SEQUENCES = 4
"""Least number of sequences: two to calibrate on, two to measure on."""
CONFIDENCE = 1.645
"""Standard errors above the mean: the one-sided 95% quantile of the normal distribution."""


@dataclass(frozen=True)
class MeasuredKL:
    """KL(source || quantized) a token, in nats: mean over positions, and its upper bound with 95% confidence, from the
    spread of the sequences' means."""

    mean: float
    bound: float

    @classmethod
    def of(cls, sequences: Sequence[torch.Tensor]) -> MeasuredKL:
        """sequences: the positions' KL divergences [L] of two or more sequences."""
        mean = float(torch.cat(list(sequences)).double().mean())
        spread = statistics.stdev(float(own.double().mean()) for own in sequences)
        return cls(mean, mean + CONFIDENCE * spread / len(sequences) ** 0.5)


class Trials:
    """Trials of one model on the same tokens.

    batches: token ids, int64 [1, L]; last: the model's own states after its last block, one for each. Raises RunError
    where there are less than `SEQUENCES` of them.
    """

    def __init__(
        self, model: LoadedModel, config: Config, batches: Sequence[torch.Tensor], last: Sequence[torch.Tensor]
    ) -> None:
        if len(batches) < SEQUENCES:
            raise RunError(
                f"`max_mean_kl` needs {SEQUENCES} calibration sequences, half of them to measure on, and there are "
                f"{len(batches)}",
                "quantize.auto",
                "Raise `tokens`, or give more calibration text.",
            )
        self.model, self.module, self.config = model, model.module, config
        self.name, self.blocks = find_blocks(model.module)
        self.fitted = join_batches(batches[::2], config.batch_tokens)
        self.measured, self.last = batches[1::2], last[1::2]

    def measure(self, targets: Sequence[Target]) -> MeasuredKL:
        """The divergence of the model quantized with these targets."""
        with torch.no_grad():
            captured = self._capture()
            for index in range(len(self.blocks)):
                with self.model.loaded(f"{self.name}.{index}"):
                    self._block(index, targets, captured)
            return self._compare(targets, captured)

    def _capture(self) -> list[CapturedBatch]:
        head = self.module.get_output_embeddings()  # type: ignore[operator]
        around = [n for n in outside_blocks(self.module, self.name) if self.module.get_submodule(n) is not head]
        captured: list[CapturedBatch] = []
        with loaded_around(self.model, *around, f"{self.name}.0"):
            for ids in [*self.fitted, *self.measured]:
                captured += capture(self.module, self.blocks, [ids])
                captured[-1].share_arguments(captured[0])
        return captured

    def _block(self, index: int, targets: Sequence[Target], captured: list[CapturedBatch]) -> None:
        """Quantize a copy of one block on the fitted sequences, and replace all states by its outputs."""
        name = f"{self.name}.{index}"
        own = [target for target in targets if target.name.startswith(f"{name}.")]
        with _standing_in(self.module, name, copy.deepcopy(self.blocks[index])) as block:
            fitted = captured[: len(self.fitted)]
            work = BlockWork(self.module, self.config, index, block, own, fitted, last=True)
            for stage in STAGES:
                stage(work)
            with dense(block):
                for batch in captured:
                    batch.hidden = batch.calls[index].run(block, batch.hidden)

    def _compare(self, targets: Sequence[Target], captured: list[CapturedBatch]) -> MeasuredKL:
        """The divergence of logits after the quantized states, quantized layers outside the blocks too."""
        outside = [target for target in targets if not target.name.startswith(f"{self.name}.")]
        fitted, measured = captured[: len(self.fitted)], captured[len(self.fitted) :]
        found = []
        with loaded_around(self.model, *outside_blocks(self.module, self.name)):
            own = {target.name: self.module.get_submodule(target.name) for target in outside}
            try:
                self._round_outside(outside, fitted)
                packed = {name: self.module.get_submodule(name) for name in own}
                for ids, batch, last in zip(self.measured, measured, self.last):
                    logits = logits_after(self.module, self.blocks, ids, batch)[0]
                    self._put(own)
                    batch.hidden = last
                    reference = logits_after(self.module, self.blocks, ids, batch)[0]
                    self._put(packed)
                    found.append(kl_rows(reference, logits)[0])
            finally:
                self._put(own)
        return MeasuredKL.of(found)

    def _round_outside(self, targets: Sequence[Target], fitted: Sequence[CapturedBatch]) -> None:
        """Quantize layers outside the blocks in place, as the driver does."""
        for target in targets:
            if target.method in CALIBRATED:
                group = collect_outside(self.module, self.blocks, target.name, self.fitted, fitted)
                round_group(self.module, [target], group, self.config)
            else:
                rtn_module(self.module, target, self.config.scale_search)

    def _put(self, layers: dict[str, nn.Module]) -> None:
        for name, layer in layers.items():
            self.module.set_submodule(name, layer)


@contextmanager
def _standing_in(module: nn.Module, name: str, other: nn.Module) -> Iterator[nn.Module]:
    """Put `other` in the place of the named module for the duration."""
    original = module.get_submodule(name)
    module.set_submodule(name, other)
    try:
        yield other
    finally:
        module.set_submodule(name, original)
