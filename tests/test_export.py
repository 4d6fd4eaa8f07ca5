"""`llmopt export`: another format of a finished artifact, its manifest and model card, and the upload to the hub."""

from __future__ import annotations

import hashlib
import json
from types import SimpleNamespace
from typing import Any

import llmopt
import pytest
import torch
from click.testing import CliRunner
from llmopt.optimizer.cli import cli
from llmopt.optimizer.export import export_artifact
from llmopt.optimizer.files import fsync_tree
from llmopt.optimizer.hub import push_to_hub
from llmopt.optimizer.manifest import Manifest, read_manifest
from llmopt.optimizer.model_card import model_card
from llmopt.tests.manifests import manifest
from llmopt.tests.runs import leftovers
from safetensors.torch import save_file


def command(*arguments: object) -> str:
    """Standard output of `llmopt ARGUMENTS`; its error is raised."""
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


class Copy(llmopt.Exporter):
    """Writes the model as it is; `fail` breaks off half-way."""

    name = "copy"

    class Config(llmopt.Options):
        fail: bool = False

    config: Config

    def export(self, model, directory, context):
        model.module.save_pretrained(directory)
        if self.config.fail:
            raise llmopt.RunError("it broke", str(directory / "half"))
        model.tokenizer.save_pretrained(directory)
        context.note("fallback", "something stayed behind")
        return {"name": self.name, "parity": {"largest_difference": 0.00012345}}


@pytest.fixture
def copying(monkeypatch):
    """The exporter `copy`, registered for one test."""
    from llmopt.optimizer import registry

    monkeypatch.setitem(registry._registered["exporters"], "copy", Copy)


def test_a_plain_model(tiny_model, tmp_path, copying):
    out = tmp_path / "out"
    shown = command("export", tiny_model, "-f", "copy", "--set", "fail=false", "-o", out, "--log", "none")
    assert f"Artifact: {out}" in shown and "largest difference: 0.000123" in shown
    made = read_manifest(out)
    assert made.recipe["name"] == "export" and made.passes == []
    assert made.certificate["samples"][0]["prompt"] == "The capital of France is"
    assert made.files["README.md"] == hashlib.sha256((out / "README.md").read_bytes()).hexdigest()
    card = (out / "README.md").read_text()
    assert "something stayed behind" in card and "0.000123" in card and str(tiny_model.parent) not in card
    assert "size on disk" in command("inspect", out)
    with llmopt.load(out) as llm:
        assert llm.manifest["exporter"]["name"] == "copy"


def test_files_are_for_all_who_may_read_the_folder(tmp_path):
    """safetensors makes its files readable by their owner alone."""
    folder = tmp_path / "out"
    (folder / "draft").mkdir(parents=True)
    files = [folder / "model.safetensors", folder / "draft" / "model.safetensors"]
    for mode, wanted in ((0o755, 0o644), (0o750, 0o640), (0o700, 0o600)):
        for file in files:
            save_file({"x": torch.zeros(1)}, file)
            file.chmod(0o600)
        folder.chmod(mode)
        fsync_tree(folder)
        assert [file.stat().st_mode & 0o777 for file in files] == [wanted] * 2


def test_an_artifact_keeps_its_history(tiny_model, tmp_path):
    evaluate = {"windows": 2, "window_length": 64, "new_tokens": 6, "prompts": ["Once"], "speed": False}
    passes: list[Any] = [{"quantize": {"method": "rtn", "bits": 8, "group_size": 32}}]
    first = llmopt.optimize(tiny_model, passes=passes, out=tmp_path / "first", evaluate=evaluate, report=False)
    made = export_artifact(first.path, Copy(), tmp_path / "second").manifest
    assert [record.name for record in made.passes] == ["quantize"]
    assert made.source == first.manifest.source and made.exporter["name"] == "copy"
    before = first.manifest.measured["after"]["perplexity"]
    assert made.measured["after"]["perplexity"] == before and "load_seconds" not in made.measured["after"]
    assert any("measured before this export" in note.message for note in made.notes)
    (first.path / "config.json").write_text("{}")
    with pytest.raises(llmopt.RunError, match=r"config\.json: the file was changed or damaged"):
        export_artifact(first.path, Copy(), tmp_path / "third")


def test_a_failure_leaves_nothing(tiny_model, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(llmopt.RunError, match=r"out/half: it broke"):
        export_artifact(tiny_model, Copy(fail=True), out)
    assert not out.exists() and not leftovers(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-f", "coppy", "-o", "x"], "unknown exporter 'coppy'"),
        (["-f", "copy"], "no folder is named"),
        (["-f", "copy", "--set", "fail", "-o", "x"], "'fail' is not KEY=VALUE"),
        (["-f", "copy", "--set", "fial=1", "-o", "x"], "copy.fial"),
        ([], "there is nothing to do"),
        (["--push-to-hub", "no-slash"], "'no-slash' is not a repository"),
    ],
)
def test_bad_requests(arguments, message, tiny_model, copying, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(llmopt.UsageError, match=message):
        command("export", tiny_model, *arguments, "--log", "none")
    assert not list(tmp_path.iterdir())


def test_out_that_is_taken(tiny_model, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(llmopt.UsageError, match="exists already"):
        export_artifact(tiny_model, Copy(), tmp_path / "out")
    with pytest.raises(llmopt.UsageError, match="is not an llmopt artifact"):
        export_artifact(tiny_model, Copy(), tmp_path / "out", force=True)
    with pytest.raises(llmopt.UsageError, match="is not an llmopt artifact"):
        export_artifact(tiny_model, Copy(), tiny_model, force=True)


def finished(tmp_path, **source):
    """An artifact's folder that has but a manifest and one file."""
    data = manifest()
    data["source"].update(source)
    made = Manifest.model_validate(data)
    (tmp_path / "weights.bin").write_bytes(b"weights")
    made.write(tmp_path)
    return made


def test_card(tmp_path):
    made = finished(tmp_path, id="org/model", kind="hub", license="apache-2.0")
    card = command("export", tmp_path, "--dry-run", "--push-to-hub", "me/mine")
    head = card.split("---")[1].splitlines()
    assert "license: apache-2.0" in head and "base_model: org/model" in head and "- llmopt" in head
    assert "# mine" in card and model_card(made, "mine") in card
    for record in made.passes:
        assert f"- `{record.name}`: {record.summary}" in card
    assert f"| {made.measured['divergence']['mean_kl']:.4f} |" in card
    assert "license" not in model_card(finished(tmp_path, id="/home/me/model", kind="folder", license=None), "x")
    assert "/home/me" not in model_card(finished(tmp_path, id="/home/me/model", kind="folder"), "x")


def test_upload(tmp_path, monkeypatch):
    import huggingface_hub

    calls: dict[str, Any] = {}

    class Api:
        def create_repo(self, repository, private, exist_ok):
            calls["repo"] = (repository, private, exist_ok)

        def create_commit(self, repository, operations, commit_message):
            calls["files"] = {item.path_in_repo: item.path_or_fileobj for item in operations}
            return SimpleNamespace(commit_url=f"https://hub/{repository}/commit/1")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    made = finished(tmp_path)
    assert push_to_hub(tmp_path, made, "me/mine", private=True) == "https://hub/me/mine/commit/1"
    assert calls["repo"] == ("me/mine", True, True)
    assert set(calls["files"]) == {"README.md", "llmopt.json", "weights.bin"}
    sent = json.loads(calls["files"]["llmopt.json"])
    assert sent["files"]["README.md"] == hashlib.sha256(calls["files"]["README.md"]).hexdigest()

    def refuse(self, *arguments, **more):
        raise OSError("401: not logged in\nlong explanation")

    monkeypatch.setattr(Api, "create_repo", refuse)
    with pytest.raises(llmopt.RunError, match=r"the hub refused the upload \(401: not logged in\)"):
        push_to_hub(tmp_path, made, "me/mine")
