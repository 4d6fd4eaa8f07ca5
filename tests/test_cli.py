"""The command line: exit codes, one clear line for an error, and every command on a tiny model."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import llmopt
import pytest
import yaml
from llmopt.optimizer.cli.progress import PlainListener, RichListener
from llmopt.optimizer.events import Event
from llmopt.optimizer.recipe import shipped

FAST = ["evaluate.windows=2", "evaluate.window_length=64", "evaluate.speed=false", "evaluate.new_tokens=6"]
FAST += ["calibration.num_samples=4", "calibration.sequence_length=64", "gates.min_compression=1.2"]


def llmopt_command(*arguments: object, stdin: str | None = None, code: int = 0, **environment: str):
    """Run `llmopt ARGUMENTS`; assert the exit code and that no traceback shows."""
    command = [sys.executable, "-m", "llmopt.optimizer.cli", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, input=stdin, env={**os.environ, **environment})
    assert result.returncode == code, result.stderr + result.stdout
    assert "Traceback" not in result.stderr
    return result


def settings(*more: str) -> list[str]:
    return [word for assignment in [*FAST, *more] for word in ("--set", assignment)]


@pytest.fixture(scope="module")
def artifact(tiny_model, tmp_path_factory) -> Path:
    """A quantized tiny model, made through the command line from a shipped recipe by name."""
    out = tmp_path_factory.mktemp("cli") / "made"
    result = llmopt_command("optimize", "--recipe", "int8.yaml", "--model", tiny_model, "--out", out, *settings())
    assert "size on disk" in result.stdout and "perplexity" in result.stdout and "top-1 agreement" in result.stdout
    return out


@pytest.mark.parametrize("name", sorted(shipped()))
def test_every_shipped_recipe_runs(name, tiny_model, tmp_path):
    gates = {f"gates.{gate}=null" for gate in llmopt.Recipe.load(name).recipe.gates.model_dump()}
    llmopt_command("optimize", "-r", name, "-m", tiny_model, "-o", tmp_path / "out", *settings(*sorted(gates)))
    assert llmopt.Artifact.open(tmp_path / "out").manifest.recipe["name"] == name


def test_inspect(artifact):
    shown = llmopt_command("inspect", artifact).stdout
    for part in ("recipe int8", "pass quantize", "W8", "size on disk", "KV cache paged"):
        assert part in shown, shown
    assert "model.layers.1.mlp.up_proj" in llmopt_command("inspect", artifact, "--layers").stdout
    assert json.loads(llmopt_command("inspect", artifact, "--json").stdout)["schema_version"] == 1


def test_verify_holds_and_then_does_not(artifact, tmp_path):
    assert "holds" in llmopt_command("verify", artifact, "--log", "none").stdout
    copy = Path(shutil.copytree(artifact, tmp_path / "copy"))
    config = copy / "generation_config.json"
    config.write_text(config.read_text().replace("{", "{ ", 1))
    assert "generation_config.json" in llmopt_command("verify", copy, "--log", "none", code=1).stderr
    (copy / "generation_config.json").unlink()
    assert "missing" in llmopt_command("verify", copy, "--log", "none", code=1).stderr
    shutil.copy(artifact / "generation_config.json", copy)
    (copy / "extra.txt").write_text("x")
    assert "extra.txt" in llmopt_command("verify", copy, "--log", "none", code=1).stderr
    assert "llmopt.json" in llmopt_command("verify", tmp_path, "--log", "none", code=1).stderr
    assert "no such folder" in llmopt_command("verify", tmp_path / "nowhere", code=1).stderr


def test_verify_compares_answers(artifact, tmp_path):
    copy = Path(shutil.copytree(artifact, tmp_path / "copy"))
    manifest = json.loads((copy / "llmopt.json").read_text())
    manifest["certificate"]["samples"][0]["token_ids"][0] += 1
    (copy / "llmopt.json").write_text(json.dumps(manifest))
    assert "otherwise" in llmopt_command("verify", copy, "--log", "none", code=1).stderr


@pytest.mark.parametrize(
    "change",
    [
        {"recipe": {}},
        {"measured": {}},
        {"measured": {"before": {"perplexity": "x"}, "after": {}, "divergence": {}}},
        {"certificate": {"samples": "abc"}},
        {"certificate": {"samples": [{}]}},
        {"schema_version": 2},
        {"runtime": {"nonsense": 1}},
    ],
)
def test_damaged_manifest_is_one_clear_line(change, artifact, tmp_path):
    from llmopt.optimizer.errors import RunError
    from llmopt.optimizer.manifest import read_manifest

    manifest = json.loads((artifact / "llmopt.json").read_text())
    (tmp_path / "llmopt.json").write_text(json.dumps({**manifest, **change}))
    with pytest.raises(RunError) as caught:
        read_manifest(tmp_path)
    assert "llmopt.json" in str(caught.value) and "\n" not in str(caught.value)


def test_generate(artifact):
    with llmopt.load(artifact) as llm:
        expected = [c.text for c in llm.generate(["The capital", "Once upon"], max_new_tokens=5)]
    one = llmopt_command("generate", artifact, "The capital", "--max-new-tokens", 5).stdout
    assert one == expected[0] + "\n"
    piped = llmopt_command("generate", artifact, "-n", 5, "--json", stdin="The capital\nOnce upon\n").stdout
    assert [json.loads(line)["text"] for line in piped.splitlines()] == expected
    chat = llmopt_command("generate", artifact, "hi", "--chat", "-n", 5).stdout
    talk = llmopt_command("generate", artifact, "-i", "-n", 5, stdin="hi\n\n").stdout
    assert chat == talk


def test_generate_errors(artifact, tmp_path):
    assert "no prompt" in llmopt_command("generate", artifact, stdin="", code=2).stderr
    assert "nowhere" in llmopt_command("generate", "./nowhere", "x", code=2).stderr
    assert "-i" in llmopt_command("generate", artifact, "x", "-i", code=2).stderr
    assert "context" in llmopt_command("generate", artifact, "word " * 600, code=2).stderr
    llmopt_command("generate", artifact, "x", "--temperature", "-1", code=2)
    for arguments, stdin in (([b"\xff\xfe hi"], None), ([], b"\xff\n")):
        command = [sys.executable, "-m", "llmopt.optimizer.cli", "generate", str(artifact), *arguments]
        result = subprocess.run(command, capture_output=True, input=stdin)
        assert result.returncode == 2 and b"Traceback" not in result.stderr and result.stderr.count(b"\n") == 1
    assert "name too long" in llmopt_command("inspect", "x" * 300, code=2).stderr


def test_plan(tiny_model, tmp_path):
    shown = llmopt_command("plan", "-r", "int4-flash", "-m", tiny_model).stdout
    assert "linear layers" in shown and "W5 g64 sym" in shown and "peak memory" in shown
    data = json.loads(llmopt_command("plan", "-r", "int8", "-m", tiny_model, "--json").stdout)
    assert data["bytes_after"] < data["bytes_before"] and len(data["passes"][0]["modules"]) == 14
    refused = llmopt_command(
        "plan", "-r", "int4-flash", "-m", tiny_model, "--set", "passes.quantize.group_size=48", code=2
    )
    assert "48" in refused.stderr and "refused" in refused.stdout


def test_plan_bytes_are_what_is_written(tiny_model, artifact):
    planned = json.loads(llmopt_command("plan", "-r", "int8", "-m", tiny_model, "--json").stdout)["bytes_after"]
    assert abs(llmopt.Artifact.open(artifact).manifest.measured["after"]["disk_bytes"] - planned) < 8192


def test_pattern_that_matches_nothing(tiny_model):
    wrong = llmopt_command(
        "plan", "-r", "int8", "-m", tiny_model, "--set", "passes.quantize.ignore=['*.mlp.dwon_proj']", code=2
    )
    assert "dwon_proj" in wrong.stderr and wrong.stderr.count("down_proj") >= 1


def test_catalogues():
    assert "int4-flash" in llmopt_command("recipes").stdout
    assert yaml.safe_load(llmopt_command("recipes", "int8").stdout)["name"] == "int8"
    keys = llmopt_command("recipes", "keys").stdout
    assert "max_perplexity_increase" in keys and "calibration" in keys
    options = llmopt_command("passes", "quantize").stdout
    for name, field in llmopt.passes.Quantize.Config.model_fields.items():
        assert name in options and field.description.split()[0].strip("`") in options
    assert "max_shard_size" in llmopt_command("exporters", "huggingface").stdout
    assert "'quantize'" in llmopt_command("passes", "quantise", code=2).stderr
    assert "'int8'" in llmopt_command("recipes", "int9", code=2).stderr


def test_doctor():
    report = json.loads(llmopt_command("doctor", "--json").stdout)
    states = {finding["name"]: finding["state"] for finding in report["required"]}
    assert states["torch"] == "ok" and set(states.values()) == {"ok"}
    assert {"gpu", "flash-attn", "c++ compiler"} <= {finding["name"] for finding in report["optional"]}
    extras = {finding["name"]: finding for finding in report["extras"]}
    for package in ("fastapi", "uvicorn", "prometheus-client"):
        assert package in extras["extra serve"]["detail"]


def test_doctor_says_what_an_extra_lacks(monkeypatch):
    from llmopt.optimizer import environment
    from llmopt.optimizer.cli import doctor_extras

    versions = {"fastapi": "0.115", "uvicorn": "0.20"}
    declared = ["fastapi>=0.115; extra == 'serve'", "uvicorn; extra == 'serve'", "absent-one; extra == 'serve'"]
    monkeypatch.setattr(environment, "library_version", versions.get)
    monkeypatch.setattr(doctor_extras, "requires", lambda name: declared)
    (found,) = doctor_extras.extras()
    assert found.name == "extra serve" and found.state == "absent"
    assert "missing: absent-one" in found.detail and "pip install 'llmopt[serve]'" in found.detail
    declared[1:] = ["uvicorn>=0.30; extra == 'serve'", "torch>=2", "pytest; extra == 'dev'"]
    (found,) = doctor_extras.extras()
    assert found.state == "broken" and "uvicorn 0.20 is not >=0.30" in found.detail
    del declared[1]
    assert [(one.state, one.detail) for one in doctor_extras.extras()] == [("ok", "fastapi 0.115")]


def test_usage_errors_exit_with_2(tiny_model, tmp_path):
    for arguments in (["optimize"], ["optimise"], ["optimize", "-r", "int8"], ["plan", "-r", "nope", "-m", "x"]):
        result = llmopt_command(*arguments, code=2)
        assert result.stderr.strip()
    bad = tmp_path / "bad.yaml"
    bad.write_text("passes:\n  - quantize: {bits: 77}\n")
    error = llmopt_command("optimize", "-r", bad, "-m", tiny_model, code=2).stderr
    assert f"{bad}:2" in error and len(error.strip().splitlines()) == 1
    error = llmopt_command("optimize", "-r", "int8", "-m", tiny_model, "--cache-limit", "lots", code=2).stderr
    assert "--cache-limit" in error


def test_gate_failure_exits_with_1_and_lists_layers(tiny_model, tmp_path):
    out = tmp_path / "out"
    crude = settings("passes.quantize.bits=2", "gates.max_mean_kl=0.0000001")
    result = llmopt_command("optimize", "-r", "int8", "-m", tiny_model, "-o", out, *crude, code=1)
    assert "share" in result.stdout and "model.layers" in result.stdout
    assert "max_mean_kl" in result.stderr and not out.exists()


def test_json_log(tiny_model, tmp_path):
    result = llmopt_command(
        "optimize", "-r", "int8", "-m", tiny_model, "-o", tmp_path / "out", "--log", "json", *settings()
    )
    events = [json.loads(line) for line in result.stderr.splitlines()]
    assert events[0]["kind"] == "run_started" and events[-1]["kind"] == "run_finished"


@pytest.mark.parametrize("listener", [PlainListener, RichListener])
def test_time_left_is_the_events_own_where_it_has_one(listener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("llmopt.optimizer.cli.progress.time.monotonic", lambda: now[0])
    said: list[str] = []

    def duration(seconds: float) -> str:
        said.append(f"{seconds:g}")
        return "x"

    monkeypatch.setattr("llmopt.optimizer.cli.progress.duration", duration)
    opened: Any = contextlib.nullcontext(listener()) if listener is PlainListener else listener()
    with opened as heard:
        heard(Event("stage_started", "quantize"))
        for seconds, step, total, data in (
            (60, 1, 2, {"left": 77.0}),
            (60, 2, 2, {"left": 0.0}),
            (9, 4, 5, {"left": None}),
            (10, 1, 5, {}),
        ):
            now[0] += seconds
            heard(Event("progress", "quantize", "", step, total, data))
    assert said == ["77", "0", "40"]
