"""The indices that drafts are copied from, against their definitions by brute force."""

from hypothesis import given, settings
from hypothesis import strategies as st
from llmopt.runtime.engine.draft_lookup import CLASSES, NgramIndex, SuffixIndex, class_of, copied
from llmopt.runtime.engine.suffix_automaton import SharedMatch, SharedSuffixes, SuffixAutomaton

texts = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def longest_repeat(text):
    """(length, latest earlier end) of the longest suffix that occurs before."""
    for length in range(len(text) - 1, 0, -1):
        for end in range(len(text) - 2, length - 2, -1):
            if text[end - length + 1 : end + 1] == text[-length:]:
                return length, end
    return 0, -1


@settings(max_examples=200, deadline=None)
@given(texts)
def test_longest_repeat_after_every_token(text):
    automaton = SuffixAutomaton()
    for size, token in enumerate(text, start=1):
        automaton.extend(token)
        assert automaton.longest_repeat() == longest_repeat(text[:size])
    assert automaton.num_states <= 2 * len(text)


@settings(max_examples=100, deadline=None)
@given(texts, texts)
def test_the_automaton_holds_exactly_the_substrings(text, other):
    automaton = SuffixAutomaton()
    for token in text:
        automaton.extend(token)
    joined = ",".join(map(str, text))
    state = 0
    for size, token in enumerate(other, start=1):
        state = automaton.step(state, token)
        inside = f",{','.join(map(str, other[:size]))}," in f",{joined},"
        assert (state != -1) == inside
        if not inside:
            break


@settings(max_examples=150, deadline=None)
@given(st.lists(texts, min_size=1, max_size=3), texts, st.integers(0, 5))
def test_a_text_is_matched_against_earlier_ones_while_they_grow(earlier, text, late):
    """The longest suffix of the text that lies in one earlier text; one of those comes while the text is matched."""
    shared = SharedSuffixes(10_000)
    match = SharedMatch(shared)
    for one in earlier[:-1]:
        shared.add(one)
    for size, token in enumerate(text, start=1):
        if size == late:
            shared.add(earlier[-1])
        match.follow(token)
        known = earlier if 0 < late <= size else earlier[:-1]
        length, tokens, end = match.best()
        best = max((n for n in range(size + 1) for one in known if contains(one, text[size - n : size])), default=0)
        grown = 0 < late <= size
        assert length == best if not grown else length <= best  # what came late is not matched backwards
        if length:
            assert list(tokens[end - length + 1 : end + 1]) == text[size - length : size]


def contains(text, part):
    return any(text[i : i + len(part)] == part for i in range(len(text) - len(part) + 1))


def test_earlier_texts_are_forgotten_and_memory_is_bounded():
    shared = SharedSuffixes(64)
    for number in range(50):
        shared.add([number, number + 1, number + 2] * 5)
        assert len(shared) <= 64 + 16 + 16
    old, new = SharedMatch(shared), SharedMatch(shared)
    for token in (0, 1, 2):
        old.follow(token)
    for token in (49, 50, 51):
        new.follow(token)
    assert old.best()[0] == 0 and new.best()[0] == 3
    index = SuffixIndex(max_tokens=100)
    text = []
    for number in range(400):
        text.append(number % 7)
        drafts, matched = index.find(text, 4)
        assert len(index._own) <= 100
    assert drafts == tuple((400 + i) % 7 for i in range(4)) and matched > 20


@settings(max_examples=200, deadline=None)
@given(texts, st.integers(1, 4), st.integers(1, 12), st.lists(st.integers(1, 5), min_size=1, max_size=8))
def test_ngrams_by_their_definition(text, longest, count, pieces):
    index, end, shortest = NgramIndex(longest), 0, min(2, longest)
    for piece in [*pieces, len(text)]:  # the text grows by several tokens at a time
        end = min(end + piece, len(text))
        part = text[:end]
        drafts, matched = index.find(part, count)
        starts = [
            (n, s) for n in range(shortest, longest + 1) for s in range(n, end) if part[s - n : s] == part[end - n :]
        ]
        if not starts:
            assert (drafts, matched) == ((), 0)
            continue
        _, start = max(starts)
        assert drafts == continued(part, start, count)
        assert part[start - matched : start] == part[end - matched :]


def continued(text, start, count):
    """Token by token: each is a copy of the one a period before it."""
    text, period = list(text), len(text) - start
    for _ in range(count):
        text.append(text[-period])
    return tuple(text[len(text) - count :])


@given(texts, st.integers(0, 39), st.integers(1, 60))
def test_copying_runs_on_into_the_copy(text, start, count):
    if start < len(text):
        assert copied(text, start, count) == continued(text, start, count)


def test_classes_of_matches_ascend():
    assert [class_of(n) for n in (1, 2, 3, 4, 9, 17, 1000)] == [0, 0, 1, 2, 4, 5, 5]
    assert list(CLASSES) == sorted(CLASSES)


def test_earlier_outputs_are_drafted_from_only_where_allowed():
    shared = SharedSuffixes(1000)
    shared.add([5, 6, 7, 8, 9])
    for index, expected in ((SuffixIndex(shared), (8, 9)), (SuffixIndex(), ())):
        assert index.find([1, 6, 7], 2)[0] == expected
    assert SuffixIndex(shared).find([1, 8, 9], 2) == ((), 0)  # the end of a text is not continued by the next
