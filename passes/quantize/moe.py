"""Which experts of a mixture-of-experts model are quantized, and what plain transformers could not open afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...runtime.experts import expert_shapes, find_stacked, stored_singly, unreadable_experts
from .schemes import LIBRARY_FORMATS

if TYPE_CHECKING:
    from ...optimizer.model import ModelInfo
    from ...runtime.kernels.packed import QuantScheme


def quantizable_experts(info: ModelInfo) -> dict[str, tuple[int, int]]:
    """Name → (out_features, in_features) of the experts' linear layers, where the weight files have them singly."""
    stacked = find_stacked(info.skeleton)
    names = stored_singly(info.tensors, stacked)
    return {key: shape for name in names for key, shape in expert_shapes(name, stacked[name]).items()}


def expert_refusals(
    info: ModelInfo, shapes: dict[str, tuple[int, int]], schemes: dict[str, QuantScheme], asked: bool
) -> list[str]:
    """Why transformers could not open the result, in sentences.

    shapes: what `quantizable_experts` gives, empty where experts are kept; schemes: those of all modules by name;
    asked: whether experts were to be quantized.
    """
    if not schemes:
        return []
    stacked = [n for n, p in info.skeleton.named_parameters() if p.ndim == 3 and "experts" in n]
    singly = [name for name in stacked if name not in info.tensors]
    chosen = [schemes[name] for name in shapes if name in schemes]
    kept = bool(singly) and len(chosen) < max(1, len(shapes))
    formats = {scheme.format for scheme in schemes.values()}
    if kept and formats - {"float-quantized", *LIBRARY_FORMATS.values()}:
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
    reason = unreadable_experts(chosen)
    return [reason] if reason else []
