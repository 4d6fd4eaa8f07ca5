"""Drafted tokens for a single sequence of the static engine: from its own text, or from a smaller model.

The engine with continuous batching has its own, for many requests at once (`engine/draft_speculator.py`).

Drafts are proposed as certain, and verified by sampling every position as plain decoding would (see
`engine/sampler.py`), so they change how many tokens a step gives, never which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .open import OpenedModel

FIRST_LENGTH, LONGEST = 4, 16
"""Drafts of the first step and most drafts of a step where the RuntimeSpec leaves the number open."""


class Drafter(Protocol):
    """Proposes what comes after `token_ids` (prompt and output so far, at least one token)."""

    def propose(self, token_ids: Sequence[int], count: int) -> tuple[int, ...]:
        """At most `count` tokens; none where it has no idea."""
        ...

    def reset(self) -> None:
        """Forget the sequence; the next call brings another one."""
        ...


class NgramDrafter:
    """Proposes what followed the longest n-gram that the text ends with, where that came last before.

    Prompt lookup decoding (Saxena 2023). The index grows with the text: a step costs O(max_ngram), not O(text).
    n-grams are at least 2 long, unless `max_ngram` is 1: single tokens recur too often to predict anything.
    """

    def __init__(self, max_ngram: int = 3) -> None:
        self.max_ngram = max_ngram
        self.min_ngram = min(2, max_ngram)
        self.reset()

    def reset(self) -> None:
        self._tokens: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}

    def propose(self, token_ids: Sequence[int], count: int) -> tuple[int, ...]:
        known = len(self._tokens)
        if len(token_ids) < known or list(token_ids[max(0, known - 8) : known]) != self._tokens[-8:]:
            self.reset()
            known = 0
        for position in range(known, len(token_ids)):
            self._add(token_ids[position])
        tokens = self._tokens
        for length in range(min(self.max_ngram, len(tokens)), self.min_ngram - 1, -1):
            start = self._next.get(tuple(tokens[-length:]))
            if start is not None:
                return tuple(tokens[start : start + count])
        return ()

    def _add(self, token: int) -> None:
        """Every n-gram that ended just before `token` is followed by it."""
        end = len(self._tokens)
        for length in range(self.min_ngram, min(self.max_ngram, end) + 1):
            self._next[tuple(self._tokens[end - length : end])] = end
        self._tokens.append(token)


class SuffixDrafter:
    """Proposes what followed the longest suffix of the text that occurred before, where that came last."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        from .engine.draft_lookup import SuffixIndex

        self._index = SuffixIndex()

    def propose(self, token_ids: Sequence[int], count: int) -> tuple[int, ...]:
        return self._index.find(token_ids, count)[0]


class ModelDrafter:
    """Greedy continuation by a smaller model of the same vocabulary, with a cache of its own.

    vocab_size: of the target; a token that the target does not have is never proposed.
    """

    def __init__(self, model: PreTrainedModel, vocab_size: int) -> None:
        from .cached_forward import CachedForward

        self._forward = CachedForward(model)
        self._vocab_size = vocab_size
        self.reset()

    def reset(self) -> None:
        self._cache = self._forward.new_cache(rollback=True)
        self._seen: list[int] = []

    def propose(self, token_ids: Sequence[int], count: int) -> tuple[int, ...]:
        import torch

        limit = min(len(self._seen), len(token_ids) - 1)
        same = next((i for i in range(limit) if self._seen[i] != token_ids[i]), limit)
        if self._cache is None or not self._forward.can_roll_back(self._cache):
            self.reset()
            same = 0
        else:
            self._forward.roll_back(self._cache, len(self._seen) - same)
        self._seen = list(token_ids[:same])
        fresh, drafts = list(token_ids[same:]), []
        for _ in range(count):
            ids = torch.tensor([fresh], device=self._forward.device)
            logits = self._forward(ids, self._cache, keep=1, history=[[*self._seen, *fresh]])
            self._seen += fresh
            token = int(logits[0, -1, : self._vocab_size].argmax())
            drafts.append(token)
            fresh = [token]
        return tuple(drafts)


class DraftLength:
    """How many tokens to draft: fixed, or doubled after a step that took all, cut to one more than was taken after
    another."""

    def __init__(self, fixed: int | None) -> None:
        self.fixed = fixed
        self.now = fixed or FIRST_LENGTH

    def update(self, drafted: int, accepted: int) -> None:
        if self.fixed is None and drafted:
            self.now = min(2 * self.now, LONGEST) if accepted == drafted else accepted + 1


def make_drafter(target: OpenedModel) -> Drafter | None:
    """The drafter that a model's RuntimeSpec asks for; None for kind `none`, and, with a note, for `layer_skip`.

    Raises as `checked_draft_folder` does.
    """
    from .draft_setup import checked_draft_folder

    spec = target.runtime.draft
    if spec.kind == "ngram":
        return NgramDrafter(spec.max_ngram)
    if spec.kind == "suffix":
        return SuffixDrafter()
    if spec.kind == "layer_skip":
        target.note("drafts are off: the static engine cannot run a part of the model's layers", "fallback")
    where = checked_draft_folder(target)
    if where is None:
        return None
    from .cached_forward import vocabulary_size
    from .open import open_model

    module = target.module
    opened = open_model(where, str(module.device), str(module.dtype).removeprefix("torch."))
    return ModelDrafter(opened.module, vocabulary_size(module))
