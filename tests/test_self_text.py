"""Calibration that the model writes itself: from openings, or going on from excerpts of a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llmopt.optimizer.calibration import LENGTH_STEP, Calibration
from llmopt.optimizer.errors import RunError
from llmopt.optimizer.self_text import EXCERPT, OPENINGS, Continuations, Progress, SelfSource, end_tokens, openings
from llmopt.optimizer.sources import resolve

from .conftest import build_tokenizer
from .test_calibration_sources import WORDS, sequences


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


def own(folder: Path, seed: int = 0, cache: Path | None = None) -> SelfSource:
    return SelfSource(resolve(str(folder)), seed=seed, num_samples=4, sequence_length=48, cache=cache, engine="static")


@pytest.fixture(scope="module")
def kept(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the tiny model's own texts are kept."""
    folder = tmp_path_factory.mktemp("own")
    own(tiny_model, cache=folder).documents(None, 0)  # type: ignore[arg-type]
    return folder


def test_the_model_writes_its_own_text_reproducibly(tiny_model: Path, kept: Path, tokenizer: Any) -> None:
    calibration = Calibration(tokenizer, own(tiny_model, cache=kept), 4, 48)
    found = sequences(calibration)
    assert sum(map(len, found)) > 4 * 48 * 0.6 and all(LENGTH_STEP <= len(s) <= 48 for s in found)
    assert sequences(Calibration(tokenizer, own(tiny_model), 4, 48)) == found
    assert own(tiny_model, seed=1).identity() != own(tiny_model).identity()
    starts = openings(tokenizer)
    assert all(any(s[: len(start)] == start for start in starts) for s in found)
    said = calibration.describe()
    assert said["source"] == "self" and said["seed"] == 0 and said["num_tokens"] == sum(map(len, found))
    assert said["bos_sequences"] == 2 and said["bos"] is False


def test_a_second_run_reads_what_the_first_wrote(
    tiny_model: Path, kept: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file,) = (kept / "calibration").iterdir()
    whole = file.read_text()
    monkeypatch.setattr(SelfSource, "_write", lambda self: pytest.fail("written again"))
    assert Calibration(tokenizer, own(tiny_model, cache=kept), 4, 48).num_tokens == 4 * 48
    file.write_text("[[1, 2")
    monkeypatch.setattr(SelfSource, "_write", lambda self: [[7] * 48])
    assert sequences(Calibration(tokenizer, own(tiny_model, cache=kept), 4, 48)) == [[7] * 48]
    file.write_text(whole)


def test_a_model_too_large_to_write_says_so(tiny_model: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmopt.optimizer.self_text.available_memory", lambda: 1000)
    with pytest.raises(RunError, match=r"MiB are available.*calibration\.text"):
        Calibration(tokenizer, own(tiny_model), 4, 48).batches()


def continued(folder: Path, cache: Path | None = None, progress: Progress | None = None) -> Continuations:
    return Continuations(resolve(str(folder)), seed=0, num_samples=3, cache=cache, engine="static", progress=progress)


def test_the_model_goes_on_from_excerpts(
    tiny_model: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.txt").write_text(WORDS * 40)
    plain = Calibration(tokenizer, str(tmp_path / "t.txt"), 2, 48)
    given = sequences(plain)
    monkeypatch.setattr("llmopt.optimizer.self_text.TOGETHER", 2)
    told: list[tuple[int, int, float]] = []
    further = continued(tiny_model, tmp_path, lambda *news: told.append(news))
    calibration = Calibration(tokenizer, str(tmp_path / "t.txt"), 2, 48, further)
    found = sequences(calibration)
    assert [news[:2] for news in told] == [(2, 3), (3, 3)] and told[0][2] > told[1][2] == 0
    added = [s for s in found if s not in given]
    assert len(found) == 5 and len(added) == 3 and all(s in found for s in given)
    head = 1 if calibration.bos.token is not None else 0
    flat = [" ".join(map(str, s)) for s in given]
    for text in added:
        assert len(text) <= 48 and text[:head] == given[0][:head]
        assert any(" ".join(map(str, text[head : head + EXCERPT])) in s for s in flat)
        assert " ".join(map(str, text)) not in " ".join(flat)
    said = calibration.describe()
    assert (said["num_samples"], said["self_samples"]) == (5, 3) and "self_samples" not in plain.describe()
    assert calibration.shortfall == 0 and said["sha256"] != plain.describe()["sha256"]
    monkeypatch.setattr(Continuations, "_write", lambda *_: pytest.fail("written again"))
    again = Calibration(tokenizer, str(tmp_path / "t.txt"), 2, 48, continued(tiny_model, tmp_path))
    assert sequences(again) == found
    assert sequences(Calibration(tokenizer, str(tmp_path / "t.txt"), 2, 48)) == given


def test_openings_and_ends(tiny_model: Path, tokenizer: Any) -> None:
    starts = openings(tokenizer)
    assert len(starts) == 2 * len(OPENINGS) and starts[0] == starts[2] == [tokenizer.bos_token_id]
    # The template ends every turn by <eos>, so that token does not end a text; without a template it does.
    assert end_tokens(tiny_model, tokenizer) == ()
    import copy

    other = copy.deepcopy(tokenizer)
    other.chat_template = None
    assert end_tokens(tiny_model, other) == (tokenizer.eos_token_id,)
