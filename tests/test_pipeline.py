"""The pipeline on tiny models: artifact whole or absent, proof, gates, cache, resume, Ctrl-C and kill -9."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import llmopt
import pytest
from llmopt.optimizer.errors import GateError, LlmoptError, RunError, UsageError
from llmopt.optimizer.manifest import hash_files
from llmopt.tests.runs import CALIBRATION, EVALUATE, QUANTIZE, leftovers, run


class Collect:
    def __init__(self):
        self.events = []

    def __call__(self, event):
        self.events.append(event)


@pytest.fixture(scope="module")
def finished(tiny_model, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "artifact"
    listener = Collect()
    return run(tiny_model, [QUANTIZE, "flash_attention", "kv_cache"], out, listener=listener), listener.events


def test_artifact_is_complete(finished, tiny_model):
    artifact, _ = finished
    files = set(os.listdir(artifact.path))
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "llmopt.json"} <= files
    manifest = artifact.manifest
    assert manifest.files == hash_files(artifact.path)
    assert [record.name for record in manifest.passes] == ["quantize", "flash_attention", "kv_cache"]
    assert len(manifest.passes[0].layers) == 14
    assert manifest.runtime.attention.chosen in ("sdpa", "eager")
    assert manifest.runtime.kv_cache.kind == "paged"
    measured = manifest.measured
    assert measured["after"]["disk_bytes"] < measured["before"]["disk_bytes"]
    assert measured["after"]["memory_bytes"] < measured["before"]["memory_bytes"]
    assert measured["divergence"]["mean_kl"] > 0
    assert measured["divergence"]["compression"] > 1.2
    assert manifest.calibration["num_tokens"] == 256
    assert [len(sample["token_ids"]) for sample in manifest.certificate["samples"]] == [8, 8]
    assert not leftovers(artifact.path.parent)


def test_manifest_is_valid_against_its_published_schema(finished):
    import jsonschema
    from llmopt.optimizer.manifest import json_schema

    published = json.loads((Path(__file__).parent.parent / "docs" / "manifest.schema.json").read_text())
    assert published == json_schema(), "remake docs/manifest.schema.json: see docs/manifest.md"
    jsonschema.validate(json.loads((finished[0].path / "llmopt.json").read_text()), published)


def test_events_tell_the_whole_run(finished):
    events = finished[1]
    kinds = [event.kind for event in events]
    assert kinds[0] == "run_started" and kinds[-1] == "run_finished"
    started = [event.stage for event in events if event.kind == "stage_started"]
    assert started == ["load", "reference", "quantize", "flash_attention", "kv_cache", "huggingface", "prove"]
    steps = [(e.step, e.total) for e in events if e.kind == "progress" and e.stage == "quantize"]
    assert steps[-1][0] == steps[-1][1] and steps[-1][0] >= 2
    for event in events:
        json.dumps(event.as_dict(), default=str)


def test_python_entrance_with_own_pass(tiny_model, tmp_path):
    class Halve(llmopt.Pass):
        """Halves the last norm."""

        name = "halve"

        def plan(self, info):
            return llmopt.PlanItem("halves the last norm")

        def run(self, model, context):
            import torch

            with torch.no_grad():
                model.module.model.norm.weight.mul_(0.5)
            model.runtime.extra["halve"] = {"done": True}
            return llmopt.PassReport("halved", details={"norm": float(model.module.model.norm.weight[0])})

    passes = [Halve(), llmopt.passes.Quantize(bits=8, group_size=32), "flash_attention"]
    artifact = run(tiny_model, passes, tmp_path / "out")
    assert [p["name"] for p in artifact.report["passes"]] == ["halve", "quantize", "flash_attention"]
    assert artifact.manifest.passes[0].details["norm"] == 0.5
    assert artifact.manifest.runtime.extra == {"halve": {"done": True}}
    with artifact.load() as llm:
        assert float(llm.module.model.norm.weight[0]) == 0.5
        assert llm.generate("The capital", max_new_tokens=4, ignore_eos=True).num_tokens == 4


def test_model_in_memory(tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with pytest.raises(UsageError, match="tokenizer"):
        run(model, ["kv_cache"], tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    artifact = run(model, ["kv_cache"], tmp_path / "out", tokenizer=tokenizer)
    assert artifact.manifest.measured["divergence"]["mean_kl"] < 1e-4
    assert artifact.manifest.measured["divergence"]["top1_agreement"] > 0.95


def test_local_draft_model_travels_with_the_artifact(tiny_model, make_model, tmp_path):
    draft = make_model(num_hidden_layers=1, seed=5)
    artifact = run(tiny_model, [{"draft": {"kind": "model", "model": str(draft), "force": True}}], tmp_path / "out")
    assert artifact.manifest.runtime.draft.model == "draft"
    assert "draft/model.safetensors" in artifact.manifest.files
    import shutil

    shutil.rmtree(draft)
    with artifact.load() as llm, llmopt.load(tiny_model) as plain:
        prompt = "The capital of"
        expected = plain.generate(prompt, max_new_tokens=12).token_ids
        assert llm.generate(prompt, max_new_tokens=12).token_ids == expected
    other = make_model(num_hidden_layers=1)
    tokenizer = other / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"\u0120the"', '"\u0120xqz"').replace('"Ġthe"', '"Ġxqz"'))
    with pytest.raises(UsageError, match="tokenizer"):
        run(tiny_model, [{"draft": {"kind": "model", "model": str(other)}}], tmp_path / "other")


def test_gate_fails_and_names_layers(tiny_model, tmp_path):
    out = tmp_path / "out"
    crude = {"quantize": {"method": "rtn", "bits": 2, "group_size": -1}}
    with pytest.raises(GateError) as caught:
        run(tiny_model, [crude], out, gates={"max_mean_kl": 1e-6})
    assert "max_mean_kl" in str(caught.value) and caught.value.exit_code == 1
    assert caught.value.shares and sum(share for _, share in caught.value.shares) == pytest.approx(1.0, abs=0.01)
    assert not out.exists() and not leftovers(tmp_path)
    with pytest.raises(GateError, match="was kept"):
        run(tiny_model, [crude], out, gates={"max_mean_kl": 1e-6}, keep_failed=True)
    assert [gate.passed for gate in llmopt.Artifact.open(out).manifest.gates] == [False]


def test_absent_figure_fails_its_gate(tiny_model, tmp_path):
    with pytest.raises(GateError, match="min_decode_speedup"):
        run(tiny_model, ["kv_cache"], tmp_path / "out", gates={"min_decode_speedup": 0.1})


def test_existing_folder(tiny_model, tmp_path):
    out = tmp_path / "out"
    run(tiny_model, ["kv_cache"], out)
    with pytest.raises(UsageError, match="--force"):
        run(tiny_model, ["kv_cache"], out)
    run(tiny_model, [{"kv_cache": {"kind": "dynamic"}}], out, force=True)
    assert llmopt.Artifact.open(out).manifest.runtime.kv_cache.kind == "dynamic"
    other = tmp_path / "precious"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="not an llmopt artifact"):
        run(tiny_model, ["kv_cache"], other, force=True)
    assert (other / "thesis.txt").read_text() == "years of work"
    with pytest.raises(UsageError):
        run(tiny_model, ["kv_cache"], tiny_model, force=True)


def test_context_is_checked_before_the_passes(make_model, tmp_path):
    small = make_model(max_position_embeddings=32)
    with pytest.raises(UsageError, match="context of 32"):
        run(small, ["kv_cache"], tmp_path / "out")
    small = make_model(max_position_embeddings=100)
    calibration = {"num_samples": 2, "sequence_length": 101}
    with pytest.raises(UsageError, match=r"calibration.*101 tokens do not fit the model's context of 100"):
        run(small, [{"quantize": {"method": "gptq", "group_size": 32}}], tmp_path / "out", calibration=calibration)


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system can only be mounted by root")
def test_no_disk_space(tiny_model, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(small)]).returncode:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        with pytest.raises(RunError, match="free"):
            run(tiny_model, ["kv_cache"], small / "out")
        assert not list(small.iterdir())
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_disk_that_fills_up_during_the_export(tiny_model, tmp_path, monkeypatch):
    import errno

    from llmopt.exporters.huggingface import HuggingFaceExporter

    def full(self, model, directory, context):
        (directory / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(HuggingFaceExporter, "export", full)
    with pytest.raises(RunError, match="No space left"):
        run(tiny_model, ["kv_cache"], tmp_path / "out")
    assert not (tmp_path / "out").exists() and not leftovers(tmp_path)


def test_unwritable_out(tiny_model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        run(tiny_model, ["kv_cache"], tmp_path / "file" / "out")


def test_empty_and_short_texts(tiny_model, tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "short.txt").write_text("two words")
    for text, what in (("empty.txt", "empty"), ("short.txt", "less than one sequence")):
        with pytest.raises(LlmoptError, match=what):
            run(tiny_model, [QUANTIZE], tmp_path / "out", calibration={**CALIBRATION, "text": str(tmp_path / text)})
    with pytest.raises(LlmoptError, match="window"):
        run(tiny_model, ["kv_cache"], tmp_path / "out", evaluate={**EVALUATE, "text": str(tmp_path / "short.txt")})
    assert not (tmp_path / "out").exists() and not leftovers(tmp_path)


def test_chain_rules(tiny_model, tmp_path):
    def make(name, **tags):
        def plan(self, info):
            return llmopt.PlanItem("")

        def run_(self, model, context):
            raise AssertionError("must not run")

        return type(name, (llmopt.Pass,), {"name": name, "plan": plan, "run": run_, **tags})

    a = make("a", provides=frozenset({"x"}))
    b = make("b", requires=frozenset({"x"}), provides=frozenset({"y"}))
    c = make("c", requires=frozenset({"y"}), provides=frozenset({"z"}))
    d = make("d", requires=frozenset({"z"}), provides=frozenset({"y"}))
    for chain, what in (
        ([b], "requires 'x', which no earlier pass provides"),
        ([b, a], "Move 'a' before 'b'"),
        ([c, d], "require each other"),
        (["quantize", "quantize"], "cannot follow"),
    ):
        with pytest.raises(UsageError, match=what):
            run(tiny_model, chain, tmp_path / "out")
