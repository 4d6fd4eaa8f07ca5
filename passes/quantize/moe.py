"""Which experts of a mixture-of-experts model are quantized, and what plain transformers could not open afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...runtime.expert_readers import is_patched, merged_leaves, single_shapes, unreadable_experts
from ...runtime.experts import find_stacked
from .schemes import LIBRARY_FORMATS

if TYPE_CHECKING:
    from ...optimizer.model import ModelInfo
    from ...runtime.kernels.packed import QuantScheme


def quantizable_experts(info: ModelInfo, everywhere: bool = False) -> dict[str, tuple[int, int]]:
    """Name → (out_features, in_features) of the experts' linear layers, where transformers opens them as single ones.

    everywhere: also where it does not.
    """
    stacked = find_stacked(info.skeleton)
    merged = bool(stacked) and merged_leaves(info.skeleton) is not None
    chosen = [name for name, module in stacked.items() if everywhere or merged or is_patched(module)]
    return single_shapes(info.skeleton, info.tensors, chosen)


def expert_refusals(
    info: ModelInfo, shapes: dict[str, tuple[int, int]], schemes: dict[str, QuantScheme], asked: bool
) -> list[str]:
    """Why transformers could not open the result, in sentences.

    shapes: what `quantizable_experts` gives, empty where experts are kept; schemes: those of all modules by name;
    asked: whether experts were to be quantized.
    """
    if not schemes:
        return []
    stacked = find_stacked(info.skeleton)
    merged = bool(stacked) and merged_leaves(info.skeleton) is not None
    patched = [name for name, module in stacked.items() if is_patched(module)]
    unknown = [n for n, p in info.skeleton.named_parameters() if p.ndim == 3 and "experts" in n]
    singly = [name for name in unknown if name not in info.tensors]
    chosen = [schemes[name] for name in shapes if name in schemes]
    kept = len(chosen) < max(1, len(shapes))
    formats = {scheme.format for scheme in schemes.values()}
    if kept and patched:
        return [
            f"transformers puts single layers in the place of {patched[0]} wherever a folder is quantized, and takes "
            "all of them to be: quantize all experts (`experts: quantize`)"
        ]
    if kept and singly and formats - {"float-quantized", *LIBRARY_FORMATS.values()}:
        if asked and not shapes:
            return [
                f"{singly[0]} is stored as single experts under names that cannot be split yet, and transformers would "
                "take them to be quantized like the other layers: use `method: fp8`, beside which they may stay as "
                "they are"
            ]
        return [
            f"{singly[0]} is stored as single experts, which transformers takes to be quantized like the other layers: "
            "quantize all experts (`experts: quantize`), or use `method: fp8`"
        ]
    if not merged:
        return []
    uneven = _uneven(shapes, schemes)
    if uneven:
        return [
            f"some of the experts' layers {uneven} would be quantized and others not, and transformers reads them "
            "alike: leave out all of a block or none"
        ]
    reason = unreadable_experts(chosen)
    return [reason] if reason else []


def _uneven(shapes: dict[str, tuple[int, int]], schemes: dict[str, QuantScheme]) -> str:
    """A pattern of layers of one block's experts of which only some are to be quantized; empty where there is none."""
    numbers: dict[str, list[bool]] = {}
    for name in shapes:
        block, _, leaf = name.rsplit(".", 2)
        numbers.setdefault(f"{block}.*.{leaf}", []).append(name in schemes)
    return next((pattern for pattern, quantized in numbers.items() if any(quantized) and not all(quantized)), "")


def expert_notes(info: ModelInfo, names: list[str]) -> list[str]:
    """What to tell of experts: those that stay as they are, and those that transformers could not open; names: of the
    layers that are going to be quantized."""
    stacked = find_stacked(info.skeleton)
    tensors = [n for n, p in info.skeleton.named_parameters() if p.ndim == 3 and "experts" in n]
    split = [name for name in stacked if any(own.startswith(f"{name}.") for own in names)]
    merged = bool(stacked) and merged_leaves(info.skeleton) is not None
    readable = merged or any(map(is_patched, stacked.values()))
    if not split and tensors:
        more = (
            ": plain transformers reads them no other way. `experts: always` quantizes them, for llmopt and for "
            "engines that look for single experts"
        )
        return [
            f"{len(tensors)} stacked expert tensors ({tensors[0]} …) are no linear layers and stay as they are"
            f"{more if stacked and not readable else ''}"
        ]
    if split and not readable:
        return [
            f"the experts of {len(split)} blocks ({split[0]} …) become single layers, which llmopt opens, and engines "
            "that look for them there. Plain transformers does not: it gives the model random experts and says so in "
            "its load report only (`experts: always`)"
        ]
    return []
