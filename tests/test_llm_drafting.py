"""Where drafts come from."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmopt.optimizer.errors import RunError
from llmopt.optimizer.runtime_spec import DraftSpec
from llmopt.runtime.draft_setup import draft_folder
from llmopt.runtime.drafting import FIRST_LENGTH, LONGEST, DraftLength, NgramDrafter, make_drafter


def looked_up(tokens: list[int], longest: int, shortest: int, count: int) -> tuple[int, ...]:
    """The definition: the longest n-gram at the end that was there before, its last earlier place, what followed."""
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[-length:]:
                return tuple(tokens[start + length : start + length + count])
    return ()


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    longest=st.integers(1, 4),
    count=st.integers(1, 5),
    pieces=st.lists(st.integers(1, 5), min_size=1, max_size=8),
)
def test_ngrams_are_those_of_the_definition(tokens, longest, count, pieces):
    drafter, end = NgramDrafter(longest), 0
    for piece in [*pieces, len(tokens)]:  # the text grows by several tokens at a time
        end = min(end + piece, len(tokens))
        text = tokens[:end]
        assert drafter.propose(text, count) == looked_up(text, longest, min(2, longest), count)


def test_another_text_is_noticed_even_without_reset():
    drafter = NgramDrafter(2)
    drafter.propose([1, 2, 3, 1, 2], 3)
    assert drafter.propose([4, 5, 6, 4, 5], 3) == (6, 4, 5)
    assert drafter.propose([9], 3) == ()


def test_length_adapts_unless_it_is_fixed():
    length = DraftLength(None)
    assert length.now == FIRST_LENGTH
    for _ in range(5):
        length.update(length.now, length.now)
    assert length.now == LONGEST
    length.update(LONGEST, 2)
    assert length.now == 3
    length.update(3, 0)
    assert length.now == 1
    length.update(0, 0)
    assert length.now == 1
    fixed = DraftLength(5)
    fixed.update(5, 0)
    assert fixed.now == 5


def test_draft_models_are_found_inside_the_artifact_first(tmp_path: Path):
    (tmp_path / "draft").mkdir()
    assert draft_folder(DraftSpec(kind="model", model="draft"), tmp_path) == tmp_path / "draft"
    outside = DraftSpec(kind="model", model=str(tmp_path), sha256="0" * 64)
    assert draft_folder(outside, tmp_path / "x") == tmp_path
    with pytest.raises(RunError, match="not on this machine"):
        draft_folder(DraftSpec(kind="model", model=".."), tmp_path / "draft")
    with pytest.raises(RunError, match=r"'org/absent' is not on this machine.*draft=False"):
        draft_folder(DraftSpec(kind="model", model="org/absent"), tmp_path)


def test_a_draft_model_that_was_exchanged_is_an_error(tiny_model: Path, make_model, tmp_path: Path):
    from llmopt.optimizer.sources import resolve
    from llmopt.runtime.open import open_model

    paired = make_model(seed=1)
    spec = DraftSpec(kind="model", model=str(paired), sha256=resolve(paired).sha256)
    target = open_model(tiny_model)
    target.runtime, target.folder = target.runtime.model_copy(update={"draft": spec}), tmp_path / "artifact"
    assert make_drafter(target) is not None
    spec.sha256 = resolve(make_model(seed=2)).sha256
    with pytest.raises(RunError, match="not the one that was paired"):
        make_drafter(target)
