"""Putting a quantized weight into the model, checked, and its line in the pass report."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...optimizer.errors import RunError
from ...runtime.kernels.formats import QuantizedLinear, layer_class, scale_values
from ...runtime.tensor_files import all_finite
from .data_free import METHODS, fused_with
from .fp8 import FloatQuantized
from .rtn import CHUNK, Quantized
from .targets import Target


def check_weight(name: str, linear: Any) -> None:
    """Raise RunError where the weight has a NaN or an infinity."""
    if not all_finite(linear.weight.detach()):
        raise RunError("the weight has NaN or infinite values", where=name, what_to_do="Check the weight file.")


def replace_linear(model: nn.Module, target: Target, quantized: Quantized | FloatQuantized) -> QuantizedLinear:
    """Put a quantized layer in the place of the target's linear one. Raises RunError where a scale is not finite."""
    if not bool(torch.isfinite(quantized.scales.float()).all()):
        raise RunError(
            f"a scale is not finite in {quantized.scales.dtype}",
            where=target.name,
            what_to_do="Skip this module by `ignore`, or load the model in a wider dtype.",
        )
    linear: Any = model.get_submodule(target.name)
    offset = quantized.zeros if isinstance(quantized, Quantized) else quantized.global_scale
    order = {"g_idx": quantized.g_idx} if isinstance(quantized, Quantized) and quantized.g_idx is not None else {}
    layer: Any = layer_class(target.scheme)
    packed = layer.from_linear(linear, quantized.codes, quantized.scales, offset, target.scheme, **order)
    packed.train(linear.training)
    model.set_submodule(target.name, packed)
    return packed


def rtn_module(model: nn.Module, target: Target, search_steps: int) -> dict[str, Any]:
    """Quantize one module by a method that needs no calibration and return its line of the report."""
    started = time.perf_counter()
    linear: Any = model.get_submodule(target.name)
    check_weight(target.name, linear)
    weight = linear.weight.detach()
    quantized = METHODS[target.method](weight, target.scheme, search_steps, fused_with(model, target.name))
    if target.scheme.g_idx and isinstance(quantized, Quantized):
        quantized = replace(quantized, g_idx=_plain_groups(target, weight.device))
    packed = replace_linear(model, target, quantized)
    error = finite_error(target, weight.dtype, _relative_error(weight, quantized, packed, target.scheme.bits))
    seconds = round(time.perf_counter() - started, 4)
    return report_line(target, packed, error=error, weighted=False, seconds=seconds)


def _plain_groups(target: Target, device: torch.device) -> torch.Tensor:
    """The index int32 [K] of groups that follow one another, for a layer that falls back in a scheme with g_idx."""
    columns = target.in_features
    return torch.arange(columns, dtype=torch.int32, device=device) // target.scheme.columns_per_group(columns)


def _relative_error(
    weight: torch.Tensor, quantized: Quantized | FloatQuantized, packed: QuantizedLinear, bits: int
) -> float:
    """Squared error of the quantized weight, as layers compute with it, over the weight's own squares; a few rows at a
    time, as caches like it."""
    whole = weight if isinstance(quantized, Quantized) else packed.dequantize()
    total = error = 0.0
    for start in range(0, len(weight), step := max(1, CHUNK // weight.shape[1])):
        rows = slice(start, start + step)
        values = weight[rows].double()
        rounded = quantized.rows(rows).dequantize(bits) if isinstance(quantized, Quantized) else whole[rows]
        total += float(energy(values, None).sum())
        error += float(energy(values - rounded.to(weight.dtype), None).sum())
    return error / total if total > 0 else 0.0


def finite_error(target: Target, dtype: torch.dtype, error: float) -> float:
    """That error. Raises RunError where it is no number, because a value of the quantized weight overflows."""
    if math.isfinite(error):
        return error
    raise RunError(
        f"the quantized weight has values that {str(dtype).removeprefix('torch.')} does not hold",
        where=target.name,
        what_to_do="Skip this module by `ignore`, or load the model in a wider dtype (the recipe's `dtype`).",
    )


def energy(matrix: torch.Tensor, hessian: torch.Tensor | None) -> torch.Tensor:
    """`m H m^T` of every row m of `matrix` [N, K]; without a Hessian the squared norm. Returns [N], in its dtype."""
    return ((matrix if hessian is None else matrix @ hessian) * matrix).sum(1)


def report_line(target: Target, packed: QuantizedLinear, **measured: Any) -> dict[str, Any]:
    """One module's entry in the pass report: its scheme, bytes, scale range and what was measured."""
    scales = scale_values(packed).abs()
    scheme = target.scheme
    return {
        "name": target.name,
        "method": target.method,
        "format": scheme.format,
        "bits": scheme.bits,
        "group_size": scheme.group_size,
        "symmetric": scheme.symmetric,
        **({"g_idx": True} if scheme.g_idx else {}),
        "bytes": packed.packed_nbytes,
        "scale_min": float(scales.min()),
        "scale_max": float(scales.max()),
        **measured,
    }
