"""One forward pass a window: the logits that every measure of quality reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..optimizer.errors import RunError
from ..runtime.cached_forward import vocabulary_size
from .texts import check_vocabulary

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def window_logits(model: PreTrainedModel, windows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For each row of `windows` (int64 `[n, length]`): its ids `[length]` and the model's logits, both on the model's
    device; logits `[length - 1, vocab]` in the model's dtype, row i predicting token i + 1.

    Raises RunError where a logit is NaN or infinite in every position (the weights are broken).
    """
    import torch

    check_vocabulary(windows, vocabulary_size(model))
    for index, row in enumerate(windows):
        ids = row.to(model.device)
        with torch.inference_mode():
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        if not bool(torch.isfinite(logits[-1].float()).any()):
            raise RunError(
                f"the model's logits are not numbers (window {index})",
                where=type(model).__name__,
                what_to_do="Look for NaN or infinite weights; in float16 try bfloat16.",
            )
        yield ids, logits
