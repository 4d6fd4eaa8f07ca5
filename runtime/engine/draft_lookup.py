"""Drafts that are copied from text: of the request itself, and, where that is allowed, of earlier outputs.

Both indices say where the text's end occurred before; what followed there is proposed. Copying runs on into the draft
itself, as in LZ77, so that a text with a period is continued for as long as one likes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .request import Request
from .suffix_automaton import SharedMatch, SharedSuffixes, SuffixAutomaton

CLASSES = (2, 3, 5, 8, 16)
"""Upper ends of the classes of match lengths; the last class is open."""
PRIORS = (0.25, 0.35, 0.5, 0.6, 0.75, 0.9)
"""Acceptance of drafts by class before anything is known."""
FAR = 24
"""Tokens beyond which a match is not measured: longer ones all belong to the last class."""
MAX_INDEXED = 32768
"""Most tokens of a request that a suffix automaton holds (some 300 bytes each); beyond, the older half is forgotten."""


def class_of(matched: int) -> int:
    """The class of a match of so many tokens."""
    return next((i for i, end in enumerate(CLASSES) if matched <= end), len(CLASSES))


def copied(text: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `start` on, going on with what was copied where the text ends. start < len(text)."""
    out = list(text[start : start + count])
    while len(out) < count:
        out += out[len(out) - (len(text) - start) :][: count - len(out)]
    return tuple(out)


class TextIndex(Protocol):
    """One request's text as far as it was given."""

    def find(self, token_ids: Sequence[int], count: int) -> tuple[tuple[int, ...], int]:
        """(what may follow `token_ids`, the text so far; length of the match), ((), 0) where there is none."""
        ...


class NgramIndex:
    """Where the longest n-gram at the text's end came last before: prompt lookup decoding (Saxena 2023).

    The index grows with the text: a step costs O(max_ngram). n-grams are at least 2 long, unless `max_ngram` is 1.
    """

    def __init__(self, max_ngram: int) -> None:
        self.max_ngram, self.min_ngram = max_ngram, min(2, max_ngram)
        self._known = 0
        self._next: list[dict[tuple[int, ...], int]] = [{} for _ in range(max_ngram + 1)]

    def find(self, token_ids: Sequence[int], count: int) -> tuple[tuple[int, ...], int]:
        self._grow(token_ids)
        end = len(token_ids)
        for length in range(min(self.max_ngram, end), self.min_ngram - 1, -1):
            start = self._next[length].get(tuple(token_ids[end - length :]))
            if start is not None:
                matched = length
                while matched < FAR and matched < start and token_ids[start - 1 - matched] == token_ids[-1 - matched]:
                    matched += 1
                return copied(token_ids, start, count), matched
        return (), 0

    def _grow(self, token_ids: Sequence[int]) -> None:
        """Every n-gram that ends just before a token is followed by it."""
        for length in range(self.min_ngram, self.max_ngram + 1):
            following, begin = self._next[length], max(self._known, length)
            for end in range(begin, len(token_ids)):
                following[tuple(token_ids[end - length : end])] = end
        self._known = max(self._known, len(token_ids))


class SuffixIndex:
    """The longest suffix of the text that occurred before, in the text or in earlier ones."""

    def __init__(self, shared: SharedSuffixes | None = None, max_tokens: int = MAX_INDEXED) -> None:
        self._own, self._max = SuffixAutomaton(), max_tokens
        self._known = 0
        self._shared = None if shared is None else SharedMatch(shared)

    def find(self, token_ids: Sequence[int], count: int) -> tuple[tuple[int, ...], int]:
        self._grow(token_ids)
        matched, end = self._own.longest_repeat()
        text: Sequence[int] = self._own.tokens
        if self._shared is not None:
            far, other, place = self._shared.best()
            if far > matched:
                matched, text, end = far, other, place
        if matched < 2 or end + 1 >= len(text):
            return (), 0
        found = copied(text, end + 1, count)
        stop = next((i for i, token in enumerate(found) if token < 0), len(found))  # where an earlier text ended
        return found[:stop], matched if stop else 0

    def _grow(self, token_ids: Sequence[int]) -> None:
        if len(self._own) + len(token_ids) - self._known > self._max:
            self._own, begin = SuffixAutomaton(), max(0, len(token_ids) - self._max // 2)
            for token in token_ids[begin : max(begin, self._known)]:
                self._own.extend(token)
            self._known = max(begin, self._known)
        for token in token_ids[self._known :]:
            self._own.extend(token)
            if self._shared is not None:
                self._shared.follow(token)
        self._known = len(token_ids)


class LookupSource:
    """Indices of all running requests.

    kind: `ngram` (n-grams of up to `max_ngram`) or `suffix`. history: tokens of earlier outputs that `suffix` also
    looks at, 0 for none: a request's drafts then come from other requests' texts, which changes its speed, not its
    output.
    """

    priors = PRIORS

    def __init__(self, kind: str, max_ngram: int = 3, history: int = 0) -> None:
        self.kind, self._max_ngram = kind, max_ngram
        self.shared = SharedSuffixes(history) if kind == "suffix" and history else None
        self._indices: dict[int, TextIndex] = {}

    def find(self, request: Request, count: int) -> tuple[tuple[int, ...], int]:
        """(at most `count` drafts, their class)."""
        index = self._indices.get(request.id)
        if index is None:
            index = NgramIndex(self._max_ngram) if self.kind == "ngram" else SuffixIndex(self.shared)
            self._indices[request.id] = index
        drafts, matched = index.find(request.token_ids, count)
        return drafts, class_of(matched)

    def forget(self, request: Request) -> None:
        """The request has ended; its output joins the earlier ones, if they are used."""
        self._indices.pop(request.id, None)
        if self.shared is not None and request.num_output_tokens > 2:
            self.shared.add(request.output_token_ids)
