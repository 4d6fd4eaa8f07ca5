"""What a normalization layer computes, found by running it: RMSNorm or LayerNorm, weight w or 1 + w, bias or none."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn

PROBE_SCALE = 100.0
"""Size of the probe's values, so large that no epsilon shows in the result."""
TOLERANCE = 1e-3


@dataclass(frozen=True)
class NormForm:
    """`z * (offset + weight) + bias` of z = x / rms(x), or z = (x - mean) / std(x) where it is `centered`.

    has_weight, has_bias: whether the module has these parameters.
    """

    centered: bool
    offset: float
    has_weight: bool
    has_bias: bool


def norm_form(module: nn.Module) -> NormForm | None:
    """The form of a norm over the last dimension, None where it is none of those. `module` may be on meta."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    if not set(shapes) <= {"weight", "bias"} or any(len(shape) != 1 for shape in shapes.values()):
        return None
    size = _size(module, shapes)
    if size is None:
        return None
    generator = torch.Generator().manual_seed(0)
    twin = copy.deepcopy(module).to_empty(device="cpu").float()
    values = {name: torch.rand(size, generator=generator) + 0.5 for name in shapes}
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            parameter.copy_(values[name])
        x = torch.randn(2, 3, size, generator=generator) * PROBE_SCALE + PROBE_SCALE
        try:
            found = twin(x)
        except (TypeError, RuntimeError, ValueError):
            return None
    if not isinstance(found, torch.Tensor) or found.shape != x.shape:
        return None
    for centered in (False, True):
        z = x - x.mean(-1, keepdim=True) if centered else x
        z = z / z.pow(2).mean(-1, keepdim=True).sqrt()
        for offset in (0.0, 1.0):
            expected = z * (offset + values["weight"]) if "weight" in values else z
            expected = expected + values.get("bias", 0.0)
            if torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE):
                return NormForm(centered, offset, "weight" in values, "bias" in values)
    return None


def _size(module: nn.Module, shapes: dict[str, tuple[int, ...]]) -> int | None:
    sizes = {shape[0] for shape in shapes.values()}
    if len(sizes) == 1:
        return sizes.pop()
    shape = getattr(module, "normalized_shape", None)
    return int(shape[-1]) if not sizes and isinstance(shape, (tuple, list)) and shape else None
