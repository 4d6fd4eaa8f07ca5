"""A suffix automaton over token ids that grows with a text, to find where the text's end has occurred before.

Blumer et al. 1985 ("The smallest automaton recognizing the subwords of a text"), in the online form; used for drafts as
in SuffixDecoding (Oliaro et al. 2024, https://arxiv.org/abs/2411.04975). A state stands for all substrings that end at
the same places; its suffix link leads to the longest of their suffixes that ends at more. Beside the links each state
keeps the end of its latest occurrence before the present one, so that the text after it can be proposed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class SuffixAutomaton:
    """Substrings of the tokens that `extend` was given. Pure Python; about 2 states and 3 transitions a token.

    Most states have one transition, kept in two arrays; only those that branch have a dict.
    """

    __slots__ = ("_first_to", "_first_token", "_last", "_latest", "_length", "_link", "_more", "tokens")

    def __init__(self) -> None:
        self.tokens = array("q")
        self._length, self._link, self._latest = array("i", [0]), array("i", [-1]), array("i", [-1])
        self._first_token, self._first_to = array("q", [0]), array("i", [-1])
        self._more: dict[int, dict[int, int]] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_states(self) -> int:
        return len(self._length)

    def extend(self, token: int) -> None:
        """Append a token: amortized constant time, but for the walk over the links of the last state (as many as the
        text's end has distinct repeats)."""
        self._note_occurrences()
        length, link = self._length, self._link
        self.tokens.append(token)
        current = self._new_state(length[self._last] + 1, 0, len(self.tokens) - 1)
        state = self._last
        while state != -1 and (target := self.step(state, token)) == -1:
            self._connect(state, token, current)
            state = link[state]
        if state != -1:
            link[current] = target if length[state] + 1 == length[target] else self._split(state, token, target)
        self._last = current

    def longest_repeat(self) -> tuple[int, int]:
        """(length, end) of the text's longest suffix that also ends earlier, and that latest earlier end (the position
        of its last token); (0, -1) where there is none."""
        state = self._link[self._last]
        if state <= 0:
            return 0, -1
        return self._length[state], self._latest[state]

    def step(self, state: int, token: int) -> int:
        """The state that `token` leads to, or -1. State 0 is the empty string."""
        if self._first_to[state] != -1 and self._first_token[state] == token:
            return self._first_to[state]
        more = self._more.get(state)
        return -1 if more is None else more.get(token, -1)

    def follow(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """Match one token more of another text: the new (state, matched length), from those before.

        Begin with (0, 0). The automaton may grow between calls: a state that was split meanwhile is put right first.
        """
        length, link = self._length, self._link
        while state > 0 and matched <= length[link[state]]:
            state = link[state]
        while (target := self.step(state, token)) == -1:
            if state == 0:
                return 0, 0
            state = link[state]
            matched = length[state]
        return target, matched + 1

    def latest_end(self, state: int) -> int:
        """The position of the last token of a state's strings where they occurred last, as far as it is known."""
        return self._latest[state]

    def _note_occurrences(self) -> None:
        """The strings that end where the text ends now occur here: told late, so that `longest_repeat` sees before."""
        state, end, link, latest = self._link[self._last], len(self.tokens) - 1, self._link, self._latest
        while state > 0:
            latest[state] = end
            state = link[state]

    def _new_state(self, length: int, link: int, latest: int) -> int:
        self._length.append(length)
        self._link.append(link)
        self._latest.append(latest)
        self._first_token.append(0)
        self._first_to.append(-1)
        return len(self._length) - 1

    def _connect(self, state: int, token: int, target: int) -> None:
        if self._first_to[state] == -1 or self._first_token[state] == token:
            self._first_token[state], self._first_to[state] = token, target
            return
        self._more.setdefault(state, {})[token] = target

    def _split(self, state: int, token: int, target: int) -> int:
        """A copy of `target` for its strings of at most length[state] + 1 tokens, which end at more places now."""
        length, link = self._length, self._link
        copy = self._new_state(length[state] + 1, link[target], self._latest[target])
        self._first_token[copy], self._first_to[copy] = self._first_token[target], self._first_to[target]
        if target in self._more:
            self._more[copy] = dict(self._more[target])
        while state != -1 and self.step(state, token) == target:
            self._connect(state, token, copy)
            state = link[state]
        link[target] = copy
        return copy


class SharedSuffixes:
    """Suffixes of earlier texts, of the last `max_tokens` tokens or so: two automata, of which the older is dropped
    when the younger is half as long."""

    def __init__(self, max_tokens: int) -> None:
        self.half = max(1, max_tokens // 2)
        self.young, self.old = SuffixAutomaton(), SuffixAutomaton()
        self._texts = 0

    def add(self, token_ids: Sequence[int]) -> None:
        """Remember a text; nothing matches across its end."""
        for token in token_ids[-self.half :]:
            self.young.extend(token)
        self._texts += 1
        self.young.extend(-self._texts)  # no token: ids are not negative
        if len(self.young) >= self.half:
            self.young, self.old = SuffixAutomaton(), self.young

    def __len__(self) -> int:
        return len(self.young) + len(self.old)


class SharedMatch:
    """How far one growing text's end matches the texts in a `SharedSuffixes`."""

    __slots__ = ("_places", "_shared")

    def __init__(self, shared: SharedSuffixes) -> None:
        self._shared = shared
        self._places: list[tuple[SuffixAutomaton, int, int]] = []

    def follow(self, token: int) -> None:
        known = {id(place[0]): place for place in self._places}
        places = []
        for automaton in (self._shared.young, self._shared.old):
            _, state, matched = known.get(id(automaton), (automaton, 0, 0))
            places.append((automaton, *automaton.follow(state, matched, token)))
        self._places = places

    def best(self) -> tuple[int, Sequence[int], int]:
        """(length of the longest match, the tokens it lies in, the position of its last token); (0, (), -1): none."""
        best: tuple[int, Sequence[int], int] = (0, (), -1)
        for automaton, state, matched in self._places:
            if state and matched > best[0]:
                best = (matched, automaton.tokens, automaton.latest_end(state))
        return best
