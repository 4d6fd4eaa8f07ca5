"""Proof that a change of basis kept the function: logits before and after on the same tokens."""

from __future__ import annotations

import torch
from torch import nn

from ...optimizer.errors import RunError

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
"""Largest allowed norm of the logits' change over their own norm, by dtype: what rounding the weights once explains."""


def probe_logits(model: nn.Module, num_tokens: int, seed: int) -> torch.Tensor:
    """Float32 logits `[num_tokens, vocab]` of random tokens."""
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, embedding.shape[0], (1, num_tokens), generator=generator)
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            logits = model(input_ids=ids.to(embedding.device), use_cache=False).logits
    finally:
        model.train(training)
    return logits[0].float().cpu()


def require_equal(before: torch.Tensor, after: torch.Tensor, dtype: torch.dtype, where: str) -> float:
    """The relative change. Raises RunError where rounding does not explain it."""
    centered = before - before.mean(-1, keepdim=True)
    change = float((after - before).norm() / centered.norm().clamp_min(1e-12))
    limit = TOLERANCES.get(dtype, TOLERANCES[torch.bfloat16])
    if not change <= limit:
        raise RunError(
            f"the model's logits changed by {change:.2g} of their size, rounding explains {limit:g} at most",
            where,
            "This architecture computes something that the pass does not know: leave the pass out",
        )
    return change
