"""The cache of completed passes and of finished blocks, and that a run goes on from it bit for bit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import llmopt
import pytest
import yaml
from llmopt.optimizer.errors import RunError
from llmopt.tests.runs import CALIBRATION, EVALUATE, QUANTIZE, leftovers, run


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


def test_cache_limit_evicts_the_oldest(tiny_model, tmp_path):
    cache = tmp_path / "cache"
    run(tiny_model, [{"quantize": {"bits": 8, "group_size": 32}}], tmp_path / "a", cache_folder=cache, cache_limit=1)
    run(tiny_model, [{"quantize": {"bits": 4, "group_size": 32}}], tmp_path / "b", cache_folder=cache, cache_limit=1)
    assert len(list((cache / "passes").iterdir())) == 1


def test_damaged_cache_entry_is_run_again(tiny_model, tmp_path):
    cache = tmp_path / "cache"
    first = run(tiny_model, [QUANTIZE], tmp_path / "a", cache_folder=cache)
    state = next((cache / "passes").glob("*/step-00001.safetensors"))
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
    recipe.write_text(yaml.safe_dump(data))
    return recipe


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_resumes_bit_for_bit(number, tiny_model, tmp_path, slow_recipe):
    out, cache = tmp_path / "out", tmp_path / "cache"
    arguments = command(tiny_model, out, cache, slow_recipe)
    # A job in the background of a script starts with SIGINT ignored, and so would its children.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(arguments, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=heed)
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


def killed_after(arguments: list[str], blocks: int) -> list[int]:
    """Run, kill -9 once `blocks` blocks were reported in this run, and return the steps that were."""
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    steps: list[int] = []
    for line in process.stderr:
        if '"kind": "progress"' in line and '"stage": "quantize"' in line:
            steps.append(json.loads(line)["step"])
            if len(steps) == blocks:
                break
    process.kill()
    process.communicate()
    return steps


def test_a_run_that_is_killed_at_several_blocks_ends_with_the_same_bits(make_model, tmp_path):
    """Kill -9 while blocks are being quantized, twice; each rerun goes on there, and the last gives the bits of an
    uninterrupted run.
    """
    model = make_model(num_hidden_layers=8)
    recipe = tmp_path / "r.yaml"
    recipe.write_text(yaml.safe_dump({"passes": [QUANTIZE], "evaluate": EVALUATE, "calibration": CALIBRATION}))
    out, cache = tmp_path / "out", tmp_path / "cache"
    first = killed_after(command(model, out, cache, recipe), 2)
    second = killed_after(command(model, out, cache, recipe), 3)
    assert first == [1, 2] and second[0] in (2, 3) and second[1:] == [second[0] + 1, second[0] + 2]
    assert not out.exists()
    done = subprocess.run(command(model, out, cache, recipe), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "were finished by an earlier run" in done.stderr
    straight = run(model, [QUANTIZE], tmp_path / "straight", cache_folder=tmp_path / "other")
    assert llmopt.Artifact.open(out).manifest.files == straight.manifest.files
    assert not leftovers(tmp_path) and not leftovers(cache / "passes")


def test_a_pass_that_does_not_stream_gets_the_whole_model(tiny_model, tmp_path, monkeypatch):
    from llmopt.optimizer.pipeline import Run

    class Halve(llmopt.Pass):
        """Halves the last norm."""

        name = "halve"

        def plan(self, info):
            return llmopt.PlanItem("halves the last norm")

        def run(self, model, context):
            assert model.weights is None
            model.module.model.norm.weight.data.mul_(0.5)
            return llmopt.PassReport("halved")

    made = []
    for name in ("whole", "large"):
        monkeypatch.setattr(Run, "_is_large", lambda self, name=name: name == "large")
        made.append(run(tiny_model, [QUANTIZE, Halve], tmp_path / name, cache_folder=tmp_path / f"{name}-cache"))
    assert made[0].manifest.files == made[1].manifest.files
    notes = [[note.message for note in artifact.manifest.notes if note.stage == "halve"] for artifact in made]
    assert not notes[0] and "works on the whole model" in notes[1][0]


def test_an_earlier_pass_is_taken_from_the_cache_where_a_later_one_changed(tiny_model, tmp_path):
    """A rerun with a later pass changed takes the earlier passes' results."""
    cache = tmp_path / "cache"
    run(tiny_model, [QUANTIZE, "kv_cache"], tmp_path / "a", cache_folder=cache)
    second = run(tiny_model, [QUANTIZE, {"kv_cache": {"kind": "dynamic"}}], tmp_path / "b", cache_folder=cache)
    assert [record.cached for record in second.manifest.passes] == [True, False]
    assert second.manifest.passes[0].seconds > 0
