"""Which layers of a changed model hurt most: each one alone put into the source model, and the damage measured."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .divergence import kl_rows
from .texts import token_windows

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

WORST = 3
"""Units whose share is divided among their linears."""


def attribute(
    source: str | Path, artifact: str | Path, text: str, *, num_tokens: int = 256, device: str = "auto"
) -> list[tuple[str, float]]:
    """Open both folders and return (module name, share of the error), worst first; see `attribute_error`.

    The text's first `num_tokens` tokens are used. Both models are in memory at once.
    """
    from ..runtime.open import open_model

    before, after = open_model(source, device), open_model(artifact, device, verify=False)
    windows = token_windows(text, before.tokenizer, length=num_tokens, limit=1, where="attribution text")
    return attribute_error(before.module, after.module, windows[0])


def attribute_error(source: PreTrainedModel, changed: PreTrainedModel, ids: torch.Tensor) -> list[tuple[str, float]]:
    """(module name, share of the error), worst first; shares add up to 1.

    ids: int64 `[length]`. A unit is a decoder block or a module outside the blocks that holds parameters (embedding,
    norm, head). Its harm is the mean KL(source ‖ source with only this unit taken from `changed`). The shares of the
    worst units are divided among their linears by the harm of each alone. Empty where nothing differs or the two models
    have no units of the same names.
    """
    plain = _logits(source, ids)
    theirs = dict(changed.named_modules())
    harms = {}
    for name, module in units(source).items():
        if name in theirs and differs(module, theirs[name]):
            harms[name] = _harm(module, theirs[name], source, ids, plain)
    total = sum(harms.values())
    if total <= 0:
        return []
    shares = {name: harm / total for name, harm in harms.items()}
    for name in sorted(shares, key=lambda n: -shares[n])[:WORST]:
        parts = _inside(source, changed, name, ids, plain)
        whole = sum(parts.values())
        if whole > 0:
            share = shares.pop(name)
            shares.update({part: share * harm / whole for part, harm in parts.items()})
    return sorted(shares.items(), key=lambda item: -item[1])


def units(model: nn.Module) -> dict[str, nn.Module]:
    """The decoder blocks (members of the largest ModuleList) and what lies outside them, by name."""
    from torch import nn

    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    found: dict[str, nn.Module] = {}
    prefix = None
    if lists:
        prefix, blocks = max(lists, key=lambda item: sum(p.numel() for p in item[1].parameters()))
        found = {f"{prefix}.{index}": block for index, block in blocks.named_children()}
    for name, module in model.named_modules():
        outside = prefix is None or not (name == prefix or name.startswith(prefix + "."))
        if outside and next(module.parameters(recurse=False), None) is not None:
            found[name] = module
    return found


def differs(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules hold other tensors."""
    import torch

    a, b = one.state_dict(), other.state_dict()
    if a.keys() != b.keys():
        return True
    return any(x.shape != b[k].shape or x.dtype != b[k].dtype or not torch.equal(x, b[k]) for k, x in a.items())


def _inside(
    source: PreTrainedModel, changed: PreTrainedModel, unit: str, ids: torch.Tensor, plain: torch.Tensor
) -> dict[str, float]:
    """Harm of each linear inside a unit that differs and has a namesake in the other model."""
    from torch import nn

    theirs = dict(changed.named_modules())
    return {
        name: _harm(module, theirs[name], source, ids, plain)
        for name, module in source.named_modules()
        if name.startswith(unit + ".") and isinstance(module, nn.Linear) and name in theirs
        if differs(module, theirs[name])
    }


def _harm(
    module: nn.Module, replacement: nn.Module, source: PreTrainedModel, ids: torch.Tensor, plain: torch.Tensor
) -> float:
    with _standing_in(module, replacement):
        kl, _ = kl_rows(plain, _logits(source, ids))
    return kl.double().mean().item()


@contextmanager
def _standing_in(module: nn.Module, replacement: nn.Module) -> Any:
    """While it lasts, `module` answers with what `replacement` makes of the same arguments."""
    handle = module.register_forward_hook(
        lambda _module, args, kwargs, _output: replacement(*args, **kwargs), with_kwargs=True
    )
    try:
        yield
    finally:
        handle.remove()


def _logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    import torch

    with torch.inference_mode():
        return model(input_ids=ids[None].to(model.device), use_cache=False).logits[0]
