"""How plain transformers opens experts that a folder holds as single quantized layers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .experts import LLAMA, MIXTRAL, UNGATED, Leaves, expert_shapes, find_stacked, stored_singly

if TYPE_CHECKING:
    from torch import nn

    from .kernels.packed import QuantScheme

EXPERT = re.compile(r"experts\\?\.\*\\?\.(\w+)\\?\.weight")
"""An expert's layer in a pattern of transformers' conversion rules."""


def merged_leaves(model: nn.Module) -> Leaves | None:
    """How transformers wants single experts of this architecture called, which it stacks as it loads, quantized ones
    decompressed; None where it stacks none, or under names that are not known."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import MergeModulelist, WeightConverter

    rules: Any = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    found: dict[str, list[str]] = {}
    for rule in rules:
        if isinstance(rule, WeightConverter) and any(isinstance(op, MergeModulelist) for op in rule.operations):
            sources = [EXPERT.search(pattern) for pattern in rule.source_patterns]
            target = rule.target_patterns[0].rpartition(".")[2]
            if "experts" in rule.target_patterns[0] and all(sources):
                found[target] = [match[1] for match in sources if match]
    first = found.get("gate_up_proj", ["", *found.get("up_proj", [])])
    leaves = tuple([*first, *found.get("down_proj", [])])
    return next((known for known in (LLAMA, MIXTRAL, UNGATED) if known == leaves), None)


def single_shapes(
    model: nn.Module, names: Iterable[str], only: Iterable[str] | None = None
) -> dict[str, tuple[int, int]]:
    """`expert_shapes` of stacked experts of `model`, all or `only` those modules, called as among the `names` of a
    checkpoint, or else as transformers wants them."""
    stacked = find_stacked(model)
    singly, usual = stored_singly(names, stacked), merged_leaves(model) if stacked else None
    chosen = stacked if only is None else {name: stacked[name] for name in only}
    found = (expert_shapes(name, module, singly.get(name) or usual) for name, module in chosen.items())
    return {name: shape for shapes in found for name, shape in shapes.items()}


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
