"""How plain transformers opens experts that a folder holds as single quantized layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from .kernels.packed import QuantScheme


def merges_experts(model: nn.Module) -> bool:
    """Whether transformers stacks this architecture's single experts as it loads, quantized ones decompressed."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import MergeModulelist, WeightConverter

    rules: Any = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    return any(
        isinstance(operation, MergeModulelist) and any(".experts" in target for target in rule.target_patterns)
        for rule in rules
        if isinstance(rule, WeightConverter)
        for operation in rule.operations
    )


def is_patched(stacked: nn.Module) -> bool:
    """Whether transformers puts single layers in the place of this module wherever a folder is quantized: then its
    experts cannot be stored stacked there, and are layers like all others."""
    from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION

    return type(stacked).__name__ in MODULES_TO_PATCH_FOR_QUANTIZATION


def unreadable_experts(schemes: Iterable[QuantScheme]) -> str:
    """Why transformers could not read experts in these schemes, one each; empty where it can.

    While it stacks them it decompresses them, all by one scheme, and knows neither zero points nor nvfp4's divisor nor
    int8 weights with int8 inputs nor blocks there. The inputs of float8 experts it leaves as they are.
    """
    distinct = set(schemes)
    if len(distinct) > 1:
        return f"experts in {len(distinct)} schemes cannot be loaded by transformers: give all of them one scheme"
    for scheme in distinct:
        plain = scheme.format == "pack-quantized" and scheme.symmetric
        channels = scheme.format == "float-quantized" and scheme.group_size == -1
        if not (plain or channels or scheme.format == "mxfp4-pack-quantized"):
            return (
                "experts in this scheme cannot be loaded by transformers: use a symmetric one without int8 "
                "activations, fp8 with a scale a channel, or mxfp4, or keep the experts (`experts: keep`)"
            )
    return ""
