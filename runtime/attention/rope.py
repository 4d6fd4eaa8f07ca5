"""Rotary embeddings that look at the whole batch: freeze them, and say how long a request may be.

transformers' `dynamic` and `longrope` variants pick their frequencies from the largest position in the batch, so one
long request would change every other one (and its own tokens already in the cache). Up to the original length both are
constant. We hold them there: the frequencies are fixed and `max_model_len` is at most that length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

FROZEN = "frozen"
"""Stands in for `rope_type` while an engine holds the model: transformers then leaves `inv_freq` alone."""


def _types(module: nn.Module) -> dict[str | None, str]:
    """{layer type or None: rope type} of a rotary module; empty for any other module."""
    kind = getattr(module, "rope_type", None)
    if isinstance(kind, str):
        return {None: kind}
    return {k: v for k, v in kind.items() if isinstance(v, str)} if isinstance(kind, dict) else {}


def _batch_wide(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _limit(module: Any, layer_type: str | None, kind: str) -> int:
    parameters = module.config.rope_parameters
    if layer_type is not None:
        parameters = parameters[layer_type]
    if kind == "longrope":
        return int(parameters["original_max_position_embeddings"])
    return int(parameters.get("original_max_position_embeddings") or module.original_max_seq_len)


def rope_limit(model: nn.Module) -> tuple[int, str] | None:
    """(longest request, rope type) that batch-wide rotary embeddings allow, or None where there are none."""
    found = [
        (_limit(module, layer_type, kind), kind)
        for module in model.modules()
        for layer_type, kind in _types(module).items()
        if _batch_wide(kind)
    ]
    return min(found) if found else None


def freeze_rope(model: nn.Module) -> list[tuple[nn.Module, Any]]:
    """Hold every batch-wide rotary embedding at its original frequencies; returns what `thaw_rope` needs."""
    frozen = []
    for module in model.modules():
        kinds = _types(module)
        if not any(_batch_wide(kind) for kind in kinds.values()):
            continue
        frozen.append((module, module.rope_type))
        for layer_type, kind in kinds.items():
            if _batch_wide(kind):
                prefix = "" if layer_type is None else f"{layer_type}_"
                original = getattr(module, f"{prefix}original_inv_freq")
                getattr(module, f"{prefix}inv_freq").data = original.detach().clone()
        held: Any = {k: FROZEN if _batch_wide(v) else v for k, v in kinds.items()}
        module.rope_type = held.get(None, held)
    return frozen


def thaw_rope(frozen: list[tuple[nn.Module, Any]]) -> None:
    """Undo `freeze_rope`."""
    for module, kind in frozen:
        module.rope_type = kind
