"""The `quantize` pass: plan, run, restore. Numerics, block-wise driver and format live in their own files."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, ClassVar, cast

from ...optimizer.base import Context, ModulePlan, Pass, PassReport, PlanItem
from ...optimizer.errors import RunError
from .config import CALIBRATED
from .config import Config as QuantizeConfig
from .schemes import describe

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from ...optimizer.model import LoadedModel, ModelInfo
    from .preflight import Preflight
    from .targets import Target, Targets

ASSUMED_TOKENS = 32 * 512
"""Calibration tokens that a plan's figures for `gptq` assume; the calibration text is not read for a plan."""


class Quantize(Pass):
    """Quantization of the linear layers, held as compressed-tensors stores them."""

    name = "quantize"
    version = "1"
    streams: ClassVar[bool] = True
    provides: ClassVar[frozenset[str]] = frozenset({"quantized_weights"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"quantized_weights"})
    Config = QuantizeConfig
    config: QuantizeConfig

    def calibrates(self) -> bool:
        """Whether any method, also one of the overrides, measures activations."""
        methods = {self.config.method, *(override.method for override in self.config.overrides.values())}
        return bool(methods & {*CALIBRATED, "auto"})

    def plan(self, info: ModelInfo) -> PlanItem:
        """Modules, bytes and refusals from the headers. Raises UsageError where a pattern matches no module."""
        from .targets import resolve

        targets = resolve(self.config, info)
        planned = {target.name: _module_plan(target, info) for target in targets.modules}
        summary, notes, seconds = _summary(targets), list(targets.notes), 0.0
        if self.config.auto is not None and not targets.refusals:
            from .auto.plan import foresee

            found = foresee(targets, self.config, info)
            planned |= {module.name: module for module in found.modules}
            summary, notes, targets = found.summary, notes + found.notes, found.targets
            seconds = 2 * found.work / 2.5e11 * 2 / max(1, os.cpu_count() or 1)
        item = PlanItem(
            summary=summary,
            modules=list(planned.values()),
            refusals=list(targets.refusals),
            notes=notes,
            peak_memory=_peak_memory(targets, info, self.config),
            seconds=seconds + _seconds(targets, self.config),
        )
        if any(target.method in CALIBRATED for target in targets.modules):
            item.notes.append(f"memory and time assume {ASSUMED_TOKENS} calibration tokens")
        return item

    def run(self, model: LoadedModel, context: Context) -> PassReport:
        """Replace the planned modules by packed ones and check that counts and bytes came out as planned.

        Raises UsageError as `plan` does; RunError on NaN or infinite weights or activations, an empty calibration
        text, a Hessian that does not factorize, and wherever the result differs from the plan.
        """
        from .coverage import few_tokens_note
        from .targets import resolve

        targets = resolve(self.config, context.info)
        if targets.refusals:
            raise RunError(targets.refusals[0], where=self.name)
        smaller = tuple(f"{target.name}: " for target in targets.smaller_groups)
        for told in targets.notes:
            context.note("fallback" if told.startswith(smaller) else "note", told)
        started = time.perf_counter()
        _split_experts(model, [target.name for target in targets.modules])
        details: dict[str, Any] = {}
        facts: dict[str, dict[str, float]] = {}
        if self.config.auto is not None:
            from .auto.search import search

            targets, details["auto"], facts = search(model, targets, self.config, context)
        untied = [target.name for target in targets.modules if target.untied]
        layers, checked = self._quantize(model, targets.modules, context)
        if untied:
            _untie(model.module)
        order = {target.name: i for i, target in enumerate(targets.modules)}
        layers.sort(key=lambda line: order[line["name"]])
        for line in layers:
            line.update(facts.get(line["name"], {}))
        _note_damping(layers, self.config.damping, context)
        if (note := few_tokens_note(layers, self.config)) is not None:
            context.note("fallback", note)
        _note_learning(layers, self.config.learn_steps, context)
        before, after = _check(model.module, targets.modules, context.info)
        return PassReport(
            summary=_summary(targets),
            details={
                "modules": len(targets.modules),
                "skipped": targets.skipped,
                "bytes_before": before,
                "bytes_after": after,
                "untied": untied,
                "preflight": checked.as_dict() if checked is not None else None,
                "seconds": round(time.perf_counter() - started, 2),
                **details,
            },
            layers=layers,
        )

    def _quantize(
        self, model: LoadedModel, targets: list[Target], context: Context
    ) -> tuple[list[dict[str, Any]], Preflight | None]:
        """Quantize all targets, block by block where there is calibration or the weights are in files; see `driver`."""
        import torch

        if model.weights is not None or any(target.method in CALIBRATED for target in targets):
            from .driver import quantize_blocks

            def restore(lines: list[dict[str, Any]]) -> None:
                self.restore(model, PassReport("", layers=lines))

            return quantize_blocks(model, targets, self.config, context, restore)
        from .apply import rtn_module

        layers = []
        with torch.no_grad():
            for step, target in enumerate(targets, start=1):
                layers.append(rtn_module(model.module, target, self.config.scale_search))
                context.progress(step, len(targets), target.name, error=layers[-1]["error"])
        return layers, None

    def restore(self, model: LoadedModel, report: PassReport) -> None:
        """Replace the modules that the report lists by empty packed ones, on whatever device the model is."""
        from ...runtime.kernels.formats import empty_like, make_scheme

        _split_experts(model, [line["name"] for line in report.layers])
        for line in report.layers:
            figures = (line["format"], line["bits"], line["group_size"], line["symmetric"])
            scheme = make_scheme(*figures, g_idx=line.get("g_idx", False))
            layer = empty_like(cast("nn.Linear", model.module.get_submodule(line["name"])), scheme)
            model.module.set_submodule(line["name"], layer)
        if report.details.get("untied"):
            _untie(model.module)


def _split_experts(model: LoadedModel, names: list[str]) -> None:
    """Make single layers of the stacked experts that the named layers are part of."""
    from ...runtime.experts import find_stacked, leaves_among, split_experts

    found = {name: leaves_among(names, name, module) for name, module in find_stacked(model.module).items()}
    chosen = {name: leaves for name, leaves in found.items() if leaves is not None}
    if model.weights is not None:
        model.weights.split_experts(chosen)
    else:
        split_experts(model.module, chosen)


def _note_damping(layers: list[dict[str, Any]], asked: float, context: Context) -> None:
    """Tell of layers whose Hessian needed more damping than the options ask for."""
    raised = {line["name"]: line["damping"] for line in layers if line.get("damping", asked) > asked}
    if raised:
        worst = max(raised, key=lambda name: raised[name])
        context.note(
            "fallback",
            f"{len(raised)} layers did not factorize with damping {asked:g}: it was raised, most to {raised[worst]:g} "
            f"({worst})",
        )


def _note_learning(layers: list[dict[str, Any]], steps: int, context: Context) -> None:
    """Tell of layers in blocks whose learned rounding was no better than the method's own, which they keep."""
    learned = [line for line in layers if "block_error" in line]
    kept = [line for line in learned if not line["block_error"] < line["block_error_rounded"]]
    if kept:
        context.note(
            "fallback",
            f"{len(kept)} of {len(learned)} layers ({kept[0]['name']} …) keep the method's own rounding: {steps} steps "
            "of learned rounding brought their blocks no closer to the original (more `learn_steps`, or more and "
            "longer calibration sequences, may)",
        )


def _untie(module: PreTrainedModel) -> None:
    """Let the configuration say that the head has a weight of its own."""
    for config in {id(c): c for c in (module.config, module.config.get_text_config())}.values():
        config.tie_word_embeddings = False


def _module_plan(target: Target, info: ModelInfo) -> ModulePlan:
    return ModulePlan(
        name=target.name,
        action=f"{target.method} to {describe(target.scheme)}",
        bytes_before=0 if target.untied else target.num_weights * info.dtype_bytes,
        bytes_after=target.scheme.nbytes(target.out_features, target.in_features, info.dtype_bytes),
        scheme=target.scheme,
    )


def _summary(targets: Targets) -> str:
    if targets.refusals:
        return "cannot quantize this model as asked"
    kinds: dict[str, int] = {}
    for target in targets.modules:
        label = f"{target.method} {describe(target.scheme)}"
        kinds[label] = kinds.get(label, 0) + 1
    return ", ".join(f"{count} linear layers to {label}" for label, count in kinds.items())


def _check(module: nn.Module, targets: list[Target], info: ModelInfo) -> tuple[int, int]:
    """Bytes of the planned modules before and after. Raises RunError where the model is not as planned."""
    import torch

    from ...runtime.kernels.formats import QUANTIZED

    packed = {name: m for name, m in module.named_modules() if isinstance(m, QUANTIZED)}
    expected = {target.name for target in targets}
    if set(packed) != expected:
        odd = sorted(set(packed) ^ expected)
        raise RunError(f"{len(packed)} modules are packed, {len(expected)} were planned", where=odd[0])
    for target in targets:
        dtype_bytes = getattr(packed[target.name], "weight_scale", torch.empty(0)).element_size()
        planned = target.scheme.nbytes(target.out_features, target.in_features, dtype_bytes)
        if packed[target.name].packed_nbytes != planned:
            raise RunError(
                f"the packed weight takes {packed[target.name].packed_nbytes} bytes, {planned} were planned",
                where=target.name,
            )
    before = sum(_module_plan(target, info).bytes_before for target in targets)
    return before, sum(m.packed_nbytes for m in packed.values())


def _peak_memory(targets: Targets, info: ModelInfo, config: QuantizeConfig) -> int:
    """Bytes on top of the model: work copies of the widest layer; with gptq also Hessians and activations."""
    if not targets.modules:
        return 0
    widest = max(target.num_weights for target in targets.modules)
    peak = widest * 4 * 6
    inputs = {target.in_features for target in targets.modules if target.method in CALIBRATED}
    if inputs:
        hidden = info.config.get_text_config().hidden_size
        peak += sum(3 * k * k * 4 for k in inputs) + 5 * max(inputs) ** 2 * 4
        peak += ASSUMED_TOKENS * hidden * info.dtype_bytes * 3
        if config.learn_steps:
            from .preflight import LEARN_BYTES

            blocks = info.config.get_text_config().num_hidden_layers
            peak += LEARN_BYTES * sum(target.num_weights for target in targets.modules) // max(1, blocks)
    return peak


def _seconds(targets: Targets, config: QuantizeConfig) -> float:
    """Rough time from rates measured on two cores of a server CPU, scaled by the cores of this one."""
    passes = 3 if config.match_original else 2
    seconds = 0.0
    for target in targets.modules:
        seconds += target.num_weights * (5e-9 + (config.scale_search and 2e-8))
        if target.method in CALIBRATED:
            flops = ASSUMED_TOKENS * target.num_weights * 2 * passes
            flops += target.num_weights * target.in_features * 12
            seconds += flops / 2.5e11 + target.in_features * 2e-5
        if target.method in CALIBRATED and config.learn_steps:
            seconds += config.learn_steps * config.batch_tokens * target.num_weights * 6 / 1.5e11
        if target.method in ("awq", "smoothquant"):
            tries, rows = config.scale_steps, 2048
            if target.method == "awq":
                tries, rows = tries // 2 + 3, target.in_features
            seconds += tries * target.num_weights * (2 * rows / 2.5e11 + 5e-9)
    for columns in {target.in_features for target in targets.modules if target.method in CALIBRATED}:
        layers = sum(target.in_features == columns for target in targets.modules)
        seconds += layers / 3 * ASSUMED_TOKENS * columns**2 * passes / 1.8e11
    return seconds * 2 / max(1, os.cpu_count() or 1)
