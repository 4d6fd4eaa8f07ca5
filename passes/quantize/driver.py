"""The block-wise driver: each decoder block is calibrated on the outputs of the quantized blocks before it.

For every block: run it on all calibration batches with hooks that gather the Hessians of its linear layers, quantize
those layers, run it again to hand its now quantized outputs on. Only the current block's Hessians and one hidden state
per batch are held. The result depends on weights, tokens and options alone: there is no randomness.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...optimizer.errors import RunError
from .apply import check_weight, energy, replace_linear, report_line, rtn_module
from .blocks import CapturedBatch, StopForward, capture, evaluation_mode, find_blocks, join_batches
from .gptq import NotPositiveDefinite, matched_weight, quantize_gptq
from .hessian import HessianCollector, InputGroup
from .rtn import Quantized

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
    prefix = f"{blocks_name}."
    inside: list[list[Target]] = [[] for _ in blocks]
    outside: list[Target] = []
    for target in targets:
        if target.name.startswith(prefix):
            inside[int(target.name[len(prefix) :].split(".", 1)[0])].append(target)
        else:
            outside.append(target)

    run = _Run(model, config)
    with torch.no_grad(), evaluation_mode(model):
        captured = capture(model, blocks, join_batches(batches, config.batch_tokens))
        total = len(blocks) + bool(outside)
        for index, block in enumerate(blocks):
            if context.cancelled():
                raise RunError("the run was cancelled", where=f"{blocks_name}.{index}")
            done = len(run.layers)
            started = time.perf_counter()
            run.block(index, block, inside[index], captured)
            before, after = _mean_errors(run.layers[done:])
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
        if outside:
            run.outside(outside, batches)
            context.progress(total, total, "outside the blocks")
    return run.layers


@dataclass
class _Run:
    """State of one run over the blocks."""

    model: nn.Module
    config: Config
    layers: list[dict[str, Any]] = field(default_factory=list)

    def block(self, index: int, block: nn.Module, targets: list[Target], captured: list[CapturedBatch]) -> None:
        """Calibrate and quantize one block, then replace each batch's hidden state by the block's output."""
        for target in targets:
            check_weight(target.name, self.model.get_submodule(target.name))
        calibrated = {t.name: t for t in targets if t.method == "gptq"}
        original = copy.deepcopy(block) if calibrated and self.config.match_original else None
        for target in targets:
            if target.name not in calibrated:
                self.layers.append(rtn_module(self.model, target, self.config.scale_search))
        stages = [list(calibrated)] if calibrated else []
        if self.config.true_sequential and calibrated:
            stages = self._call_order(index, block, list(calibrated), captured[0])
        for names in stages:
            for group in self._collect(index, block, original, names, captured, whole=names is stages[-1]):
                self._quantize_group([calibrated[name] for name in group.names], group)
        for batch in captured:
            if original is not None:
                batch.original = batch.followed
            batch.hidden = batch.calls[index].run(block, batch.hidden)

    def outside(self, targets: list[Target], batches: list[torch.Tensor]) -> None:
        """Quantize what lies outside the blocks, one module after another, each on the model as it is by then."""
        for target in targets:
            linear = self.model.get_submodule(target.name)
            check_weight(target.name, linear)
            if target.method == "rtn":
                self.layers.append(rtn_module(self.model, target, self.config.scale_search))
                continue
            collector = HessianCollector({target.name: linear})
            with collector.hooks(), _stop_after_input(linear):
                for batch in join_batches(batches, self.config.batch_tokens):
                    with suppress(StopForward):
                        self.model(input_ids=batch.to(linear.weight.device), use_cache=False)
                    collector.flush()
            self._quantize_group([target], collector.groups[0])

    def _call_order(self, index: int, block: nn.Module, names: list[str], batch: CapturedBatch) -> list[list[str]]:
        """The named layers in the order in which the block calls them, those with the same input together."""
        collector = HessianCollector({name: self.model.get_submodule(name) for name in names})
        with collector.hooks():
            batch.calls[index].run(block, batch.hidden)
            collector.flush()
        return [group.names for group in sorted(collector.groups, key=lambda group: group.first_call)]

    def _collect(
        self,
        index: int,
        block: nn.Module,
        original: nn.Module | None,
        names: list[str],
        captured: list[CapturedBatch],
        whole: bool,
    ) -> list[InputGroup]:
        """Hessians of the named layers of `block`; `original` is its unquantized copy, if outputs are to match it.

        whole: run all of the block, and follow the original's hidden state; otherwise stop at the last named layer.
        """
        own = {module: name for name, module in block.named_modules()}
        layers = {name: self.model.get_submodule(name) for name in names}
        originals = {}
        if original is not None:
            originals = {name: original.get_submodule(own[layer]) for name, layer in layers.items()}
        collector = HessianCollector(layers, originals)
        with collector.hooks(), ExitStack() as stack:
            if not whole:
                for stopped in (layers, originals):
                    if stopped:
                        stack.enter_context(_stop_after_input(stopped[names[-1]]))
            for batch in captured:
                call = batch.calls[index]
                if original is not None:
                    with suppress(StopForward):
                        batch.followed = call.run(original, batch.hidden if batch.original is None else batch.original)
                with suppress(StopForward):
                    call.run(block, batch.hidden)
                collector.flush()
        return sorted(collector.groups, key=lambda group: group.first_call)

    def _quantize_group(self, targets: list[Target], group: InputGroup) -> None:
        """Quantize layers with the same inputs; those with the same scheme are stacked into one problem."""
        names = ", ".join(target.name for target in targets)
        if group.hessian.rows == 0:
            raise RunError(
                "no calibration token reached the module",
                where=names,
                what_to_do="Calibrate on more text, or give this module `method: rtn` in `overrides`.",
            )
        hessian = group.hessian.mean()
        if not bool(torch.isfinite(hessian.diagonal()).all()):
            raise RunError(
                "the inputs have NaN or infinite values",
                where=names,
                what_to_do="Check the weights before this module, or load the model in a wider dtype.",
            )
        stacks: dict[Any, list[Target]] = {}
        for target in targets:
            stacks.setdefault(target.scheme, []).append(target)
        for stack in stacks.values():
            self._quantize_stack(stack, hessian, group.hessian.cross())

    def _quantize_stack(self, stack: list[Target], hessian: torch.Tensor, cross: torch.Tensor | None) -> None:
        started = time.perf_counter()
        config, scheme = self.config, stack[0].scheme
        weights = [self.model.get_submodule(target.name).weight.detach() for target in stack]
        dtype, weight = weights[0].dtype, torch.cat(weights).float()
        try:
            if cross is not None:
                weight = matched_weight(weight, hessian, cross, config.damping, config.match_original)
            result = quantize_gptq(
                weight,
                hessian,
                scheme,
                dtype,
                desc_act=config.desc_act,
                static_groups=config.static_groups,
                damping=config.damping,
                search_steps=config.scale_search,
                block_size=config.block_size,
            )
        except NotPositiveDefinite as error:
            raise RunError(
                f"{error}, even with damping 1",
                where=", ".join(target.name for target in stack),
                what_to_do="Calibrate on more varied text, or give these modules `method: rtn` in `overrides`.",
            ) from None
        quantized = result.quantized
        total = energy(weight, hessian).clamp_(min=torch.finfo(torch.float32).tiny)
        error = energy(weight - quantized.dequantize(scheme.bits), hessian)
        error_rtn = energy(weight - quantized.nearest(weight, scheme.bits), hessian)
        seconds = (time.perf_counter() - started) / len(stack)
        start = 0
        for target, own in zip(stack, weights):
            rows = slice(start, start + own.shape[0])
            start = rows.stop
            zeros = None if quantized.zeros is None else quantized.zeros[rows]
            packed = replace_linear(self.model, target, Quantized(quantized.codes[rows], quantized.scales[rows], zeros))
            self.layers.append(
                report_line(
                    target,
                    packed,
                    error=float(error[rows].sum() / total[rows].sum()),
                    error_rtn=float(error_rtn[rows].sum() / total[rows].sum()),
                    weighted=True,
                    damping=result.damping,
                    dead_columns=result.dead,
                    seconds=round(seconds, 4),
                )
            )


def _mean_errors(lines: list[dict[str, Any]]) -> tuple[float | None, float | None]:
    """Mean relative error of rounding to nearest, and of what was done, over a block's calibrated layers."""
    calibrated = [line for line in lines if "error_rtn" in line]
    if not calibrated:
        return None, None
    count = len(calibrated)
    return sum(line["error_rtn"] for line in calibrated) / count, sum(line["error"] for line in calibrated) / count


@contextmanager
def _stop_after_input(module: nn.Module) -> Iterator[None]:
    """End a forward pass once `module` has received its input; entered after the hooks that read it."""

    def stop(module: nn.Module, args: tuple[Any, ...]) -> None:
        raise StopForward

    handle = module.register_forward_pre_hook(stop)
    try:
        yield
    finally:
        handle.remove()
