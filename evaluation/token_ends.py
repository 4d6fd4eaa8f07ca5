"""Where each token of a continuation ends in its text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST = 2000
"""Tokens of a continuation that are placed; decoding each beginning takes time that grows with the square."""


def token_ends(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], text: str) -> list[int]:
    """For n = 1 … len(token_ids): characters of `text` that the first n tokens make, special tokens making none.

    A character of several tokens counts with its last one.
    """
    ends, last = [], 0
    for count in range(1, min(len(token_ids), MOST) + 1):
        begun = str(tokenizer.decode(list(token_ids[:count]), skip_special_tokens=True))
        last = max(last, _common(begun.rstrip("\ufffd"), text))
        ends.append(last)
    if ends and len(ends) == len(token_ids):
        ends[-1] = len(text)
    return ends


def _common(one: str, other: str) -> int:
    """Length of the beginning that two texts share."""
    for place, (a, b) in enumerate(zip(one, other)):
        if a != b:
            return place
    return min(len(one), len(other))
