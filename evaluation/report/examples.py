"""Continuations of one prompt side by side, with the first token that differs marked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .page import Marked, Pair, Pairs, shorten

LIMIT = 4000
END = "⟨ends here⟩"


def pairs(left: Sequence[dict[str, Any]], right: Sequence[dict[str, Any]], titles: tuple[str, str]) -> Pairs:
    """Samples with the same prompts, in the order of `right`. Each: prompt, text, token_ids, and token_ends where known
    (characters of `text` that the first n tokens make)."""
    by_prompt = {sample.get("prompt"): sample for sample in left}
    return Pairs([_pair(by_prompt[s["prompt"]], s, titles) for s in right if s.get("prompt") in by_prompt])


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> int | None:
    """Number of equal items before the first that differs; None where the two are equal."""
    for place, (a, b) in enumerate(zip(one, other)):
        if a != b:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def _pair(left: dict[str, Any], right: dict[str, Any], titles: tuple[str, str]) -> Pair:
    prompt = shorten(str(right["prompt"]), LIMIT)
    one, other = _ids(left), _ids(right)
    if one is not None and other is not None:
        place = first_difference(one, other)
        if place is None:
            verdict = f"All {len(one)} tokens are the same."
        else:
            verdict = f"The first {place} tokens are the same; token {place + 1} differs."
            if place == 0:
                verdict = "The first token differs."
    else:
        place = None
        characters = first_difference(str(left.get("text", "")), str(right.get("text", "")))
        verdict = "The texts are the same." if characters is None else f"The texts part after {characters} characters."
    sides = [_marked(title, mine, str(theirs.get("text", "")), place)
             for title, mine, theirs in zip(titles, (left, right), (right, left))]  # fmt: skip
    return Pair(prompt, verdict, *sides)


def _ids(sample: dict[str, Any]) -> list[int] | None:
    ids = sample.get("token_ids")
    return list(ids) if isinstance(ids, (list, tuple)) and ids else None


def _marked(title: str, sample: dict[str, Any], other: str, place: int | None) -> Marked:
    """The text with its differing token marked; by characters where the tokens' ends are not known."""
    whole = str(sample.get("text", ""))
    text = whole[:LIMIT]
    ends = sample.get("token_ends")
    if place is not None and isinstance(ends, list) and all(isinstance(end, int) for end in ends):
        start = ends[min(place, len(ends)) - 1] if place and ends else 0
        end = ends[place] if place < len(ends) else start
    else:
        found = first_difference(whole, other)
        if found is None:
            return Marked(title, shorten(whole, LIMIT))
        start, end = found, _word_end(whole, found)
    start, end = min(max(start, 0), len(whole)), min(max(end, 0), len(whole))
    if start >= LIMIT:
        return Marked(title, shorten(whole, LIMIT))
    if end <= start:  # the text stops here, or the token writes nothing (an end of text)
        return Marked(title, text[:start] + END + text[start:], start, start + len(END))
    end = min(end, LIMIT)
    if text[start:end].isspace():  # blanks show little under a mark
        seen = text[start:end].replace("\n", "⏎\n").replace(" ", "␣")
        return Marked(title, text[:start] + seen + shorten(whole, LIMIT)[end:], start, start + len(seen))
    return Marked(title, shorten(whole, LIMIT), start, end)


def _word_end(text: str, start: int) -> int:
    """Where the run of characters that begins at `start` reaches a space (leading spaces belong to it)."""
    end = start
    while end < len(text) and text[end].isspace():
        end += 1
    while end < len(text) and not text[end].isspace():
        end += 1
    return end
