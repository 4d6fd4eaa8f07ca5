"""`llmopt eval` and `llmopt diff` on the command line: what they print, JSON alone, exit codes."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from llmopt.optimizer.cli import main

TEXT = "It was the best of times; it was the worst of times. " * 30
FAST = ["--windows", 2, "--window-length", 64, "--log", "none"]


@pytest.fixture
def command(capsys, monkeypatch):
    """Runs `llmopt ARGUMENTS` in this process; asserts the exit code and gives what it printed."""
    monkeypatch.setenv("NO_COLOR", "1")
    before = signal.getsignal(signal.SIGTERM)

    def run(*arguments: object, code: int = 0):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([*map(str, arguments)])
        printed = capsys.readouterr()
        assert stop.value.code == code, printed.err + printed.out
        return printed

    yield run
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "my.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_eval_prints_tables_and_json(command, tiny_model, packed_model, text_file, tmp_path):
    call = ["eval", packed_model, "--against", tiny_model, "--text", text_file, "--new-tokens", 4, *FAST]
    shown = command(*call, "--out", tmp_path / "found.json").out
    for part in ("perplexity", "bits per byte", "p99 KL", "top-1 agreement", "16 prompts differ", "native engine"):
        assert part in shown, shown
    assert "\x1b" not in shown
    again = json.loads(command(*call, "--json").out)
    assert again["cached"] and again["kind"] == "evaluation"
    assert {**again, "cached": False} == {**json.loads((tmp_path / "found.json").read_text()), "cached": False}


def test_diff_prints_tables_and_json(command, tiny_model, packed_model, text_file, tmp_path):
    call = ["diff", tiny_model, packed_model, "--text", text_file, *FAST]
    shown = command(*call, "--modules", "--out", tmp_path / "found.json").out
    for part in ("harm (KL)", "model.layers.1", "pack-quantized W4 g32", "most likely tokens flip"):
        assert part in shown, shown
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["kind"] == "difference" and len(found["units"]) == 4
    assert json.loads(command(*call, "--json").out)["units"] == found["units"]


def test_bad_requests_exit_2(command, tiny_model, text_file, tmp_path):
    (tmp_path / "empty.txt").write_text("\n")
    cases = [
        (["eval", "./nowhere"], "no such model"),
        (["eval", tiny_model, "--text", tmp_path / "absent.txt"], "no such text file"),
        (["eval", tiny_model, "--text", tmp_path / "empty.txt"], "the text is empty"),
        (["eval", tiny_model, "--text", text_file, "--stride", 99, *FAST], "longer than the window"),
        (["eval", tiny_model, "--text", text_file, "--dataset", "x"], "one of the two"),
        (["eval", tiny_model, "--windows", -1], "0 for the whole text"),
        (["diff", tiny_model, "./nowhere"], "no such model"),
        (["diff", tiny_model, tiny_model, "--out", tmp_path / "x.txt"], ".json"),
    ]
    for call, words in cases:
        error = command(*call, code=2).err
        assert words in error and len(error.strip().splitlines()) == 1, error
    assert not list(tmp_path.glob("*.json"))
