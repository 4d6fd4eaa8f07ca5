"""A transformers model called step by step with its cache, whatever its architecture."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

if TYPE_CHECKING:
    import torch
    from transformers import Cache, PreTrainedModel


def vocabulary_size(model: Any) -> int:
    """Rows of the model's input embedding: token ids lie below it."""
    return int(model.get_input_embeddings().weight.shape[0])


class CachedForward:
    """Calls `model` on new tokens with a DynamicCache, or the kind of it that the architecture has for itself.

    An architecture whose forward takes no cache (`cache_argument` is None) gets the whole sequence at every call:
    slower, and right.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        parameters = inspect.signature(model.forward).parameters
        self.model = model
        self.device = model.device
        self.cache_argument = next((n for n in ("cache", "past_key_values") if n in parameters), None)
        self._keeps_logits = "logits_to_keep" in parameters

    def new_cache(self, rollback: bool = False) -> Cache | None:
        """An empty cache for one batch; with `rollback` it keeps what taking tokens back needs."""
        from transformers import DynamicCache

        if self.cache_argument is None:
            return None
        own = self._own_cache()
        cache = own() if own is not None else DynamicCache(config=self.model.config)
        if rollback and hasattr(cache, "activate_past_recording"):
            cache.activate_past_recording()
        return cache

    def _own_cache(self) -> type[Cache] | None:
        """The subclass of DynamicCache that the decoder's forward names as its argument, such as MiniMax's, which takes
        no other; None where it names none."""
        from transformers import DynamicCache

        decoder: Any = self.model.base_model
        parameter = inspect.signature(decoder.forward).parameters.get(self.cache_argument or "cache")
        named = [] if parameter is None else [parameter.annotation, *get_args(parameter.annotation)]
        own = [kind for kind in named if isinstance(kind, type) and issubclass(kind, DynamicCache)]
        return next((kind for kind in own if kind is not DynamicCache), None)

    def can_roll_back(self, cache: Cache | None) -> bool:
        """Whether tokens can be taken back from this cache (states of linear attention cannot)."""
        if cache is None:
            return True
        croppable = getattr(cache, "is_croppable", None)
        if croppable is not None:
            return bool(croppable)
        return not any(getattr(layer, "is_sliding", False) for layer in cache.layers)

    def roll_back(self, cache: Cache | None, count: int) -> None:
        """Take the last `count` tokens back; to be called after every step of a cache made with `rollback`."""
        if cache is not None and cache.get_seq_length() > 0:
            cache.crop(-count)

    def select(self, cache: Cache | None, rows: Sequence[int]) -> None:
        """Keep only these rows of the batch."""
        import torch

        if cache is not None:
            cache.batch_select_indices(torch.tensor(list(rows), device=self.device))

    def __call__(
        self, ids: torch.Tensor, cache: Cache | None, keep: int, history: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """Float32 logits `[rows, keep, vocab]` of the last `keep` positions of `ids` (int64 `[rows, new]`).

        `history` holds each row's whole sequence, `ids` included; it is read only where there is no cache.
        """
        import torch

        arguments: dict[str, Any] = {"use_cache": cache is not None}
        if cache is not None:
            arguments[self.cache_argument or "cache"] = cache
        else:
            ids = torch.tensor([list(row) for row in history], device=self.device)
        if self._keeps_logits:
            arguments["logits_to_keep"] = keep
        with torch.inference_mode():
            return self.model(input_ids=ids, **arguments).logits[:, -keep:].float()
