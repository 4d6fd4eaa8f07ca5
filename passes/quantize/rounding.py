"""Rounding layers on calibration: the table of methods, and layers with the same inputs solved as one problem."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...optimizer.errors import RunError
from ...runtime.kernels.packed import QuantScheme
from .apply import energy, replace_linear, report_line
from .gptq import NotPositiveDefinite, matched_weight, quantize_gptq
from .hessian import InputGroup
from .rtn import Quantized, quantize_rtn

if TYPE_CHECKING:
    from .config import Config
    from .targets import Target


MEASURED = 1024
"""Rows whose errors are computed at once, so that temporaries stay small."""


@dataclass(frozen=True)
class Rounded:
    """Codes and grids of a stack of layers, and what the method reports of it."""

    quantized: Quantized
    measured: dict[str, Any] = field(default_factory=dict)


Rounding = Callable[[torch.Tensor, torch.Tensor, QuantScheme, torch.dtype, "Config"], Rounded]
"""(weight float32 [N, K], Hessian float32 [K, K], scheme, dtype of the scales, options) → Rounded."""


def _gptq(
    weight: torch.Tensor, hessian: torch.Tensor, scheme: QuantScheme, dtype: torch.dtype, config: Config
) -> Rounded:
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
    return Rounded(result.quantized, {"damping": result.damping, "dead_columns": result.dead})


def _scaled(
    weight: torch.Tensor, hessian: torch.Tensor, scheme: QuantScheme, dtype: torch.dtype, config: Config
) -> Rounded:
    """What follows the scaling of a weight and its inputs; errors of columns count by the columns' squared inputs."""
    if config.rounding == "gptq":
        return _gptq(weight, hessian, scheme, dtype, config)
    return Rounded(quantize_rtn(weight, scheme, dtype, config.scale_search, hessian.diagonal()))


ROUNDINGS: dict[str, Rounding] = {"gptq": _gptq, "awq": _scaled, "smoothquant": _scaled}
"""Every method of `config.CALIBRATED` by name."""


def round_group(model: nn.Module, targets: list[Target], group: InputGroup, config: Config) -> list[dict[str, Any]]:
    """Quantize layers with the same inputs and return their report lines; those with the same method and scheme are
    stacked into one problem. Raises RunError where no token reached them or an input was not finite.
    """
    names = ", ".join(target.name for target in targets)
    if group.hessian.rows == 0:
        raise RunError(
            "no calibration token reached the module",
            where=names,
            what_to_do="Calibrate on more text, or give this module `method: rtn` in `overrides`.",
        )
    cross = group.hessian.cross()
    hessian = group.hessian.take_mean()
    if not bool(torch.isfinite(hessian.diagonal()).all()):
        raise RunError(
            "the inputs have NaN or infinite values",
            where=names,
            what_to_do="Check the weights before this module, or load the model in a wider dtype.",
        )
    stacks: dict[Any, list[Target]] = {}
    for target in targets:
        stacks.setdefault((target.method, target.scheme), []).append(target)
    return [line for stack in stacks.values() for line in _round_stack(model, stack, hessian, cross, config)]


def _round_stack(
    model: nn.Module, stack: list[Target], hessian: torch.Tensor, cross: torch.Tensor | None, config: Config
) -> list[dict[str, Any]]:
    started = time.perf_counter()
    scheme = stack[0].scheme
    weights = [model.get_submodule(target.name).weight.detach() for target in stack]
    dtype, weight = weights[0].dtype, torch.cat(weights).float()
    try:
        if cross is not None:
            weight = matched_weight(weight, hessian, cross, config.damping, config.match_original)
        rounded = ROUNDINGS[stack[0].method](weight, hessian, scheme, dtype, config)
    except NotPositiveDefinite as failure:
        raise RunError(
            f"{failure}, even with damping 1",
            where=", ".join(target.name for target in stack),
            what_to_do="Calibrate on more varied text, or give these modules `method: rtn` in `overrides`.",
        ) from None
    quantized = rounded.quantized
    total, error, error_rtn = _energies(weight, quantized, scheme.bits, hessian)
    seconds = (time.perf_counter() - started) / len(stack)
    lines, start = [], 0
    for target, own in zip(stack, weights):
        rows = slice(start, start + own.shape[0])
        start = rows.stop
        zeros = None if quantized.zeros is None else quantized.zeros[rows]
        packed = replace_linear(model, target, Quantized(quantized.codes[rows], quantized.scales[rows], zeros))
        lines.append(
            report_line(
                target,
                packed,
                error=float(error[rows].sum() / total[rows].sum()),
                error_rtn=float(error_rtn[rows].sum() / total[rows].sum()),
                weighted=True,
                **rounded.measured,
                seconds=round(seconds, 4),
            )
        )
    return lines


def _energies(
    weight: torch.Tensor, quantized: Quantized, bits: int, hessian: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of every row, float32 [N]: the energy of `weight` [N, K], of the error made, and of that of nearest rounding."""
    parts = []
    for start in range(0, len(weight), MEASURED):
        rows = slice(start, start + MEASURED)
        own, part = weight[rows], quantized.rows(rows)
        total = energy(own, hessian).clamp_(min=torch.finfo(torch.float32).tiny)
        errors = energy(own - part.dequantize(bits), hessian), energy(own - part.nearest(own, bits), hessian)
        parts.append((total, *errors))
    total, error, error_rtn = (torch.cat(column) for column in zip(*parts))
    return total, error, error_rtn
