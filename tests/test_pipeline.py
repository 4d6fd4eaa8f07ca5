"""The pipeline on tiny models: artifact whole or absent, proof, gates, cache, resume, Ctrl-C and kill -9."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import llmopt
import pytest
from llmopt.optimizer.errors import GateError, LlmoptError, RunError, UsageError
from llmopt.optimizer.manifest import hash_files

EVALUATE = {"windows": 2, "window_length": 64, "speed": False, "new_tokens": 8, "prompts": ["The capital", "Once"]}
CALIBRATION = {"num_samples": 4, "sequence_length": 64}
QUANTIZE = {"quantize": {"method": "gptq", "bits": 4, "group_size": 32, "symmetric": False}}


def run(model, passes, out, **more):
    settings = {"evaluate": EVALUATE, "calibration": CALIBRATION, **more}
    return llmopt.optimize(model, passes=passes, out=out, **settings)


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


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
    artifact = run(tiny_model, [{"draft": {"kind": "model", "model": str(draft)}}], tmp_path / "out")
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


def test_failing_pass_leaves_nothing_and_its_predecessors_are_cached(tiny_model, tmp_path):
    fail = {"now": True}

    class Fails(llmopt.Pass):
        """Fails when told to."""

        name = "fails"

        def plan(self, info):
            return llmopt.PlanItem("may fail")

        def run(self, model, context):
            if fail["now"]:
                raise RunError("the pass broke", "fails")
            return llmopt.PassReport("went well")

    cache = tmp_path / "cache"
    out = tmp_path / "out"
    with pytest.raises(RunError, match="the pass broke"):
        run(tiny_model, [QUANTIZE, Fails], out, cache_folder=cache)
    assert not out.exists() and not leftovers(tmp_path)
    assert not list((cache / "work").iterdir())
    fail["now"] = False
    again = run(tiny_model, [QUANTIZE, Fails], out, cache_folder=cache)
    assert [record.cached for record in again.manifest.passes] == [True, False]
    fresh = run(tiny_model, [QUANTIZE, Fails], tmp_path / "fresh", cache_folder=cache, cache=False)
    assert [record.cached for record in fresh.manifest.passes] == [False, False]
    weights = "model.safetensors"
    assert again.manifest.files[weights] == fresh.manifest.files[weights]
    other_seed = run(tiny_model, [QUANTIZE, Fails], tmp_path / "seed", cache_folder=cache, seed=1)
    assert not any(record.cached for record in other_seed.manifest.passes)


def test_pass_that_changes_weights_behind_autograds_back_is_cached_with_them(tiny_model, tmp_path):
    class Scale(llmopt.Pass):
        """Scales the last norm through `.data`, which leaves no trace in the tensor's version."""

        name = "scale"

        def plan(self, info):
            return llmopt.PlanItem("")

        def run(self, model, context):
            model.module.model.norm.weight.data.mul_(3.0)
            return llmopt.PassReport("")

    made = [run(tiny_model, [Scale, "kv_cache"], tmp_path / name, cache_folder=tmp_path / "c") for name in "ab"]
    assert [record.cached for record in made[1].manifest.passes] == [True, True]
    assert made[0].manifest.files["model.safetensors"] == made[1].manifest.files["model.safetensors"]
    entries = [path for path in (tmp_path / "c" / "passes").iterdir() if (path / "state.safetensors").exists()]
    assert len(entries) == 1  # kv_cache says that it changes no weights


def test_code_hash_of_a_class_without_a_file():
    from llmopt.optimizer.registry import code_hash

    source = (
        "import llmopt\n"
        "class P(llmopt.Pass):\n"
        "    name = 'p'\n"
        "    def plan(self, info): return llmopt.PlanItem('')\n"
        "    def run(self, model, context): return llmopt.PassReport('%s')\n"
    )
    hashes = []
    for word in ("one", "one", "two"):
        space = {"__name__": "no_such_module"}
        exec(source % word, space)
        hashes.append(code_hash(space["P"]))
    assert hashes[0] == hashes[1] != hashes[2]


def test_context_is_checked_before_the_passes(make_model, tmp_path):
    small = make_model(max_position_embeddings=32)
    with pytest.raises(UsageError, match="context of 32"):
        run(small, ["kv_cache"], tmp_path / "out")


def test_cache_limit_evicts_the_oldest(tiny_model, tmp_path):
    cache = tmp_path / "cache"
    run(tiny_model, [{"quantize": {"bits": 8, "group_size": 32}}], tmp_path / "a", cache_folder=cache, cache_limit=1)
    run(tiny_model, [{"quantize": {"bits": 4, "group_size": 32}}], tmp_path / "b", cache_folder=cache, cache_limit=1)
    assert len(list((cache / "passes").iterdir())) == 1


def test_damaged_cache_entry_is_run_again(tiny_model, tmp_path):
    cache = tmp_path / "cache"
    first = run(tiny_model, [QUANTIZE], tmp_path / "a", cache_folder=cache)
    state = next((cache / "passes").glob("*/state.safetensors"))
    state.write_bytes(state.read_bytes()[:1000])
    second = run(tiny_model, [QUANTIZE], tmp_path / "b", cache_folder=cache)
    assert not second.manifest.passes[0].cached
    assert second.manifest.files["model.safetensors"] == first.manifest.files["model.safetensors"]
    assert any("does not fit" in note.message for note in second.manifest.notes)


def command(model: Path, out: Path, cache: Path, recipe: Path) -> list[str]:
    arguments = ["optimize", "-r", recipe, "-m", model, "-o", out, "--cache-dir", cache, "--log", "json"]
    return [sys.executable, "-m", "llmopt.optimizer.cli", *map(str, arguments)]


@pytest.fixture
def slow_recipe(tmp_path, monkeypatch):
    """A recipe whose second pass takes long enough to be killed in, unless the file `go` exists."""
    (tmp_path / "slow_pass.py").write_text(
        "import time, pathlib, llmopt\n"
        "class Slow(llmopt.Pass):\n"
        "    name = 'slow'\n"
        "    def plan(self, info): return llmopt.PlanItem('waits')\n"
        "    def run(self, model, context):\n"
        "        while not pathlib.Path('go').exists():\n"
        "            context.progress(1, 2, 'waiting'); time.sleep(0.05)\n"
        "        return llmopt.PassReport('waited')\n"
    )
    recipe = tmp_path / "slow.yaml"
    data = {"passes": [QUANTIZE, "slow_pass:Slow"], "evaluate": EVALUATE, "calibration": CALIBRATION}
    import yaml

    recipe.write_text(yaml.safe_dump(data))
    return recipe


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_resumes_bit_for_bit(number, tiny_model, tmp_path, slow_recipe):
    out, cache = tmp_path / "out", tmp_path / "cache"
    arguments = command(tiny_model, out, cache, slow_recipe)
    process = subprocess.Popen(arguments, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if '"stage": "slow"' in line and "progress" in line:
            break
    process.send_signal(number)
    _, rest = process.communicate(timeout=60)
    assert not out.exists()
    if number != signal.SIGKILL:
        assert process.returncode == 130 and "Traceback" not in rest
        assert not list((cache / "work").iterdir()) and not leftovers(tmp_path)
    (tmp_path / "go").touch()
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not leftovers(tmp_path) and not list((cache / "work").iterdir())
    resumed = llmopt.Artifact.open(out)
    assert [record.cached for record in resumed.manifest.passes] == [True, False]
    straight = subprocess.run([*command(tiny_model, tmp_path / "b", tmp_path / "other", slow_recipe)], cwd=tmp_path)
    assert straight.returncode == 0
    assert llmopt.Artifact.open(tmp_path / "b").manifest.files == resumed.manifest.files


def test_kill_in_the_middle_of_quantizing(make_model, tmp_path):
    """Kill -9 while blocks are being quantized; the rerun gives the same bits as an uninterrupted run."""
    model = make_model(num_hidden_layers=12, hidden_size=256, intermediate_size=512)
    recipe = tmp_path / "r.yaml"
    import yaml

    data = {"passes": [QUANTIZE], "evaluate": EVALUATE, "calibration": {"num_samples": 16, "sequence_length": 128}}
    recipe.write_text(yaml.safe_dump(data))
    out, cache = tmp_path / "out", tmp_path / "cache"
    process = subprocess.Popen(command(model, out, cache, recipe), stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if '"kind": "progress"' in line and '"stage": "quantize"' in line:
            break
    process.kill()
    process.communicate()
    assert not out.exists()
    results = [
        subprocess.run(command(model, o, c, recipe)).returncode
        for o, c in ((out, cache), (tmp_path / "b", cache / "x"))
    ]
    assert results == [0, 0]
    assert llmopt.Artifact.open(out).manifest.files == llmopt.Artifact.open(tmp_path / "b").manifest.files
    assert not leftovers(tmp_path)


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


def test_import_time_is_not_spent_on_what_is_cached(tiny_model, tmp_path):
    """A rerun with a later pass changed takes the earlier passes' results."""
    cache = tmp_path / "cache"
    run(tiny_model, [QUANTIZE, "kv_cache"], tmp_path / "a", cache_folder=cache)
    start = time.perf_counter()
    second = run(tiny_model, [QUANTIZE, {"kv_cache": {"kind": "dynamic"}}], tmp_path / "b", cache_folder=cache)
    assert [record.cached for record in second.manifest.passes] == [True, False]
    assert second.manifest.passes[0].seconds > 0 and time.perf_counter() > start
