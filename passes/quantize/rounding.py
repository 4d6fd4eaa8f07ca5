"""Rounding layers on calibration: the table of methods, and layers with the same inputs solved as one problem."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ...optimizer.errors import RunError
from ...runtime.kernels.packed import QuantScheme
from .apply import finite_error, replace_linear, report_line
from .factor import FactoredHessian, NotPositiveDefinite
from .gptq import matched_weight, quantize_stack
from .hessian import InputGroup
from .rtn import Quantized, quantize_rtn

if TYPE_CHECKING:
    from .config import Config
    from .targets import Target


MEASURED = 1 << 20
"""Weights whose errors are computed at once, so that temporaries stay small."""


@dataclass(frozen=True)
class Rounded:
    """Codes and grids of a layer, and what the method reports of it."""

    quantized: Quantized
    measured: dict[str, Any] = field(default_factory=dict)


Rounding = Callable[[Sequence[torch.Tensor], FactoredHessian, QuantScheme, torch.dtype, "Config"], Sequence[Rounded]]
"""(weights of layers with the same inputs, each [N_i, K]; their Hessian; scheme; dtype of the scales; options) → one
for each layer."""


def _gptq(
    weights: Sequence[torch.Tensor], hessian: FactoredHessian, scheme: QuantScheme, dtype: torch.dtype, config: Config
) -> list[Rounded]:
    results = quantize_stack(
        weights,
        hessian,
        scheme,
        dtype,
        desc_act=config.desc_act,
        static_groups=config.static_groups,
        damping=config.damping,
        search_steps=config.scale_search,
        block_size=config.block_size,
    )
    return [Rounded(r.quantized, {"damping": r.damping, "dead_columns": r.dead}) for r in results]


def _scaled(
    weights: Sequence[torch.Tensor], hessian: FactoredHessian, scheme: QuantScheme, dtype: torch.dtype, config: Config
) -> list[Rounded]:
    """What follows the scaling of a weight and its inputs; errors of columns count by the columns' squared inputs."""
    if config.rounding == "gptq":
        return _gptq(weights, hessian, scheme, dtype, config)
    return [Rounded(quantize_rtn(w, scheme, dtype, config.scale_search, hessian.diagonal)) for w in weights]


ROUNDINGS: dict[str, Rounding] = {"gptq": _gptq, "awq": _scaled, "smoothquant": _scaled}
"""Every method of `config.CALIBRATED` by name."""


def round_group(model: nn.Module, targets: list[Target], group: InputGroup, config: Config) -> list[dict[str, Any]]:
    """Quantize layers with the same inputs and return their report lines; those with the same method and scheme are
    stacked into one problem. Raises RunError where an input was not finite.
    """
    names = ", ".join(target.name for target in targets)
    cross = group.hessian.take_cross()
    hessian = FactoredHessian(group.hessian.take_mean())
    if not bool(torch.isfinite(hessian.diagonal).all()):
        raise RunError(
            "the inputs have NaN or infinite values",
            where=names,
            what_to_do="Check the weights before this module, or load the model in a wider dtype.",
        )
    weights = {t.name: cast("torch.Tensor", model.get_submodule(t.name).weight).detach() for t in targets}
    dtypes = {name: weight.dtype for name, weight in weights.items()}
    if cross is not None:
        with _factorizing(names):
            stacked = torch.cat(list(weights.values()))
            matched = matched_weight(stacked, hessian.matrix, cross, config.damping, config.match_original)
        weights = dict(zip(weights, matched.split([len(weight) for weight in weights.values()])))
    stacks: dict[Any, list[Target]] = {}
    for target in targets:
        stacks.setdefault((target.method, target.scheme, dtypes[target.name]), []).append(target)
    lines = []
    for (_, _, dtype), stack in stacks.items():
        lines += _round_stack(model, stack, [weights.pop(target.name) for target in stack], dtype, hessian, config)
    return lines


def _round_stack(
    model: nn.Module,
    stack: list[Target],
    weights: list[torch.Tensor],
    dtype: torch.dtype,
    hessian: FactoredHessian,
    config: Config,
) -> list[dict[str, Any]]:
    """Quantize layers of one method and scheme, given the weights to be rounded; dtype: that of their scales."""
    started, scheme = time.perf_counter(), stack[0].scheme
    with _factorizing(", ".join(target.name for target in stack)):
        rounded = ROUNDINGS[stack[0].method](weights, hessian, scheme, dtype, config)
    lines = []
    for target, weight, result in zip(stack, weights, rounded):
        total, error, error_rtn = _energies(weight, result.quantized, scheme.bits, hessian, dtype)
        packed = replace_linear(model, target, result.quantized)
        error = finite_error(target, dtype, error / total)
        measured = {"error": error, "error_rtn": error_rtn / total, "weighted": True, **result.measured}
        lines.append(report_line(target, packed, **measured))
    seconds = (time.perf_counter() - started) / len(stack)
    for line in lines:
        line["seconds"] = round(seconds, 4)
    return lines


@contextmanager
def _factorizing(names: str) -> Iterator[None]:
    """Turn a failed factorization into an error that names the layers."""
    try:
        yield
    except NotPositiveDefinite as failure:
        raise RunError(
            f"{failure}, even with damping 1",
            where=names,
            what_to_do="Calibrate on more varied text, or give these modules `method: rtn` in `overrides`.",
        ) from None


def _energies(
    weight: torch.Tensor, quantized: Quantized, bits: int, hessian: FactoredHessian, dtype: torch.dtype
) -> tuple[float, float, float]:
    """The energy of `weight` [N, K], of the error made, and of that of nearest rounding on the same grid; both with the
    values rounded to `dtype`, as layers compute with them."""
    sums = torch.zeros(3, dtype=torch.float64, device=weight.device)
    for start in range(0, len(weight), step := max(1, MEASURED // weight.shape[1])):
        rows = slice(start, start + step)
        own, part = weight[rows].float(), quantized.rows(rows)
        for i, rounded in enumerate((None, part.dequantize(bits), part.nearest(own, bits))):
            sums[i] += hessian.energy(own if rounded is None else rounded.to(dtype).float().sub_(own)).sum()
    total, error, error_rtn = sums.tolist()
    return max(total, torch.finfo(torch.float32).tiny), error, error_rtn
