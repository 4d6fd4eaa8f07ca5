"""The search over recipes on tiny models: what wins, what is given up and why, going on, and what it leaves behind."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llmopt
import pytest
import yaml
from click.testing import CliRunner
from llmopt.evaluation.proof import ProofSettings, examine
from llmopt.optimizer.cli import cli
from llmopt.optimizer.errors import MissingDependency, RunError, UsageError
from llmopt.optimizer.recipe import Gates
from llmopt.optimizer.tune.best import best_of, gates_of, nearest
from llmopt.optimizer.tune.corners import check, corner_draws, parse
from llmopt.optimizer.tune.journal import Trial
from llmopt.optimizer.tune.search import Search
from llmopt.optimizer.tune.space import Space
from llmopt.optimizer.tune.target import parse_target
from llmopt.optimizer.tune.trial import TrialRun
from llmopt.optimizer.yaml_source import parse_yaml

pytestmark = pytest.mark.skipif(find_spec("optuna") is None, reason="the extra tune is not installed")
ROOT = Path(__file__).resolve().parent.parent
EVALUATE = {"windows": 4, "window_length": 64, "new_tokens": 4, "prompts": ["The capital"]}
BITS = "passes.0.quantize.bits"


def space(**options: Any) -> dict[str, Any]:
    """A space of one quantize pass; what is not given is fixed."""
    quantize = {"method": "rtn", "bits": {"choice": [8, 4, 3]}, "group_size": 32, **options}
    return {"name": "tuned", "passes": [{"quantize": quantize}], "evaluate": EVALUATE}


@pytest.fixture(autouse=True)
def in_process(monkeypatch):
    """Proofs without a process of their own, and on transformers' modules: the pipeline's tests have the real ones."""

    def prove(folder, reference, settings):
        return examine(Path(folder), reference, ProofSettings(**{**settings, "engine": "static"}))

    monkeypatch.setattr("llmopt.optimizer.measure.prove", prove)


@pytest.fixture
def stubbed(monkeypatch):
    """Trials whose figures follow from what they drew, without a model. Returns what every trial ran, in order; the
    numbers in `fail` fail, and `stop` is the one at which the user presses Ctrl-C. Each takes 10 s of a made-up clock.
    """
    seen = SimpleNamespace(runs=[], fail={}, stop=None, now=1000.0)
    monkeypatch.setattr("llmopt.optimizer.tune.search.time", SimpleNamespace(monotonic=lambda: seen.now))

    def execute(self):
        options = self.loaded.recipe.passes[0].options
        if len(seen.runs) == seen.stop:
            raise KeyboardInterrupt
        seen.runs.append(options)
        seen.now += 10.0
        if error := seen.fail.get(options["bits"]):
            raise error
        self.settings.out.mkdir()
        size, kl = options["bits"] * 1000 + 3200 // options["group_size"], 0.5 ** options["bits"]
        kl *= 1.1 if options["method"] == "rtn" else 1.0
        part = {"disk_bytes": size, "perplexity": 30.0}
        divergence = {"mean_kl": kl, "compression": 16000 / size, "perplexity_increase": kl}
        measured = {"before": {"disk_bytes": 16000, "perplexity": 29.0}, "after": part, "divergence": divergence}
        return SimpleNamespace(manifest=SimpleNamespace(measured=measured))

    monkeypatch.setattr(TrialRun, "execute", execute)
    monkeypatch.setattr(Search, "keep_best", lambda self: None)
    return seen


def tune(model: Path, folder: Path, target: str, given: dict[str, Any], **more: Any) -> Any:
    return llmopt.tune(model, given, target, out=folder / "out", cache_folder=folder / "cache", report=False, **more)


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()[1:]]


@pytest.fixture
def searched(tiny_model, tmp_path, in_process):
    """A search by the command line: 8 bits meet the target, 4 bits meet it and are smaller, 3 bits do not."""
    text = (ROOT / "data" / "calibration.txt").read_text(encoding="utf-8")
    (tmp_path / "my.txt").write_text(text[40_000:50_000])
    given = {**space(), "evaluate": {**EVALUATE, "text": "my.txt"}}
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(given))
    arguments = ["tune", "-m", str(tiny_model), "-s", str(tmp_path / "space.yaml"), "-o", str(tmp_path / "out")]
    arguments += ["-t", "min size where mean_kl < 0.00015", "--cache-dir", str(tmp_path / "cache"), "--log", "plain"]
    return CliRunner().invoke(cli, arguments), tmp_path


def test_the_best_recipe_meets_its_gates_under_optimize(searched, tiny_model):
    result, folder = searched
    assert result.exit_code == 0, result.output
    eight, four, three = rows(folder / "out")
    assert [row["values"][BITS] for row in (eight, four, three)] == ["8", "4", "3"]
    assert eight["state"] == four["state"] == "complete" and four["figures"]["size"] < eight["figures"]["size"]
    assert three["state"] == "pruned" and "on a few windows, mean_kl" in three["reason"] and three["ran"]
    assert four["proxy"]["mean_kl"] == pytest.approx(four["figures"]["mean_kl"], rel=0.5)

    manifest = llmopt.Artifact.open(folder / "out" / "best").manifest
    assert [(gate.name, gate.passed) for gate in manifest.gates] == [("max_mean_kl", True)]
    assert manifest.recipe["name"] == "tuned" and manifest.recipe["passes"][0]["quantize"]["bits"] == 4

    artifact = llmopt.optimize(tiny_model, folder / "out" / "best.yaml", out=folder / "again", report=False)
    assert [(gate.name, gate.limit, gate.passed) for gate in artifact.manifest.gates] == [
        ("max_mean_kl", 0.00015, True)
    ]
    assert artifact.manifest.measured["divergence"]["mean_kl"] == four["figures"]["mean_kl"]
    assert artifact.manifest.files == manifest.files

    for said in (
        "quantize.bits 4",
        "best",
        "meets it",
        "3 trials (2 complete, 1 pruned)",
        "best.yaml",
        "min size where",
    ):
        assert said in result.output
    if find_spec("vl_convert") is not None:
        page = (folder / "out" / "report.html").read_text(encoding="utf-8")
        assert page.count("<svg") == 1 and page.count('data-tip="trial') == 2 and "2 of 2 measured trials" in page
        table = page[page.index("in the order in which they were tried") :]
        assert all(f'<th scope="row">{number}</th>' in table for number in range(3)) and three["reason"][:30] in table
        assert (folder / "out" / "best" / "report.html").is_file()


def test_plans_and_few_windows_are_looked_at_first(tiny_model, tmp_path):
    given = space(bits={"choice": [8, 3, 4]}) | {"evaluate": {**EVALUATE, "windows": 1}}
    tuned = tune(tiny_model, tmp_path, "min mean_kl where size < 99kB", given)
    planned, three, four = tuned.trials
    assert planned.state == "pruned" and not planned.ran and planned.reason.startswith("by its plan, size 127.")
    assert tuned.best is four and tuned.ended == "space" and tuned.artifact.is_dir()
    assert three.proxy["mean_kl"] == pytest.approx(three.figures["mean_kl"], rel=1e-3)  # all windows are one
    assert yaml.safe_load(tuned.recipe.read_text())["gates"]["min_compression"] > 1


def test_what_cannot_beat_the_best_is_measured_only_for_the_front(tiny_model, tmp_path, stubbed):
    given = space(bits={"choice": [3, 8]})
    assert [t.state for t in tune(tiny_model, tmp_path, "min size", given).trials] == ["complete", "pruned"]
    tuned = tune(tiny_model, tmp_path, "min size", given, front=True, force=True)
    assert [t.state for t in tuned.trials] == ["complete", "complete"] and tuned.best is tuned.trials[0]


WIDE = {
    "method": {"choice": ["rtn", "hqq"]},
    "bits": {"int": [3, 8]},
    "group_size": {"choice": [32, 64]},
    "scale_search": {"choice": [0, 10], "when": {"method": "rtn"}},
}
TARGET = "min size where mean_kl < 0.05"


def test_a_search_that_was_stopped_goes_on_as_if_it_had_not_been(tiny_model, tmp_path, stubbed):
    whole = tune(tiny_model, tmp_path / "whole", TARGET, space(**WIDE), trials=22, front=True)
    assert whole.ended == "trials" and len({trial.key for trial in whole.trials}) == len(whole.trials) == 22
    assert whole.best.values["passes.0.quantize.bits"] == 5

    stubbed.runs.clear()
    stubbed.stop = 14
    heard = []
    options = {"trials": 22, "front": True, "listener": lambda event: heard.append(event.message)}
    stopped = tune(tiny_model, tmp_path / "parts", TARGET, space(**WIDE), **options)
    assert stopped.ended == "interrupted" and len(stopped.trials) == 14 and stopped.best and stopped.recipe.is_file()
    stubbed.stop = None
    path = stopped.out / "trials.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    resumed = tune(tiny_model, tmp_path / "parts", TARGET, space(**WIDE), **options)
    assert any("cut when the search was stopped" in line for line in heard)
    assert any("goes on after 13 trials" in line for line in heard)
    assert [trial.values for trial in resumed.trials] == [trial.values for trial in whole.trials]
    assert [row["number"] for row in rows(stopped.out)] == list(range(22)) and len(stubbed.runs) == 14 + 22 - 13


def test_the_budget_has_room_for_whole_trials_and_counts_what_was_spent(tiny_model, tmp_path, stubbed):
    given = space(bits={"int": [2, 8]})
    first = tune(tiny_model, tmp_path, "min size", given, budget="35s", front=True)
    assert (first.ended, len(first.trials), first.data["seconds"]) == ("budget", 3, 30.0)
    assert len(tune(tiny_model, tmp_path, "min size", given, budget="35s", front=True).trials) == 3
    assert len(tune(tiny_model, tmp_path, "min size", given, budget="1m", front=True).trials) == 6


def test_trials_that_fail_are_recorded_and_the_search_goes_on(tiny_model, tmp_path, stubbed):
    stubbed.fail = {8: RunError("a module broke", "model.layers.0"), 4: UsageError("no such file")}
    tuned = tune(tiny_model, tmp_path, "min size", space())
    assert [(t.state, t.reason) for t in tuned.trials[:2]] == [
        ("failed", "model.layers.0: a module broke"),
        ("refused", "no such file"),
    ]
    assert tuned.best is tuned.trials[2] and not (tuned.out / ".trial").exists()

    stubbed.fail = {bits: RunError("the disk is full") for bits in range(2, 9)}
    with pytest.raises(RunError, match="5 trials in a row failed, the last one so: the disk is full"):
        tune(tiny_model, tmp_path / "stuck", "min size", space(bits={"int": [2, 8]}))


def test_a_target_that_no_trial_meets_names_the_nearest(tiny_model, tmp_path, stubbed):
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(space()))
    arguments = ["tune", "-m", str(tiny_model), "-s", str(tmp_path / "space.yaml"), "-o", str(tmp_path / "out")]
    arguments += ["-t", "min size where mean_kl < 0.001", "--cache-dir", str(tmp_path / "cache"), "--no-report"]
    stubbed.stop = 1
    assert CliRunner().invoke(cli, arguments).exit_code == 130 and len(rows(tmp_path / "out")) == 1
    stubbed.stop = None
    result = CliRunner().invoke(cli, arguments)
    assert isinstance(result.exception, RunError) and result.exception.exit_code == 1
    for said in ("none of 3 trials", "trial 0: mean_kl 0.004297, not mean_kl < 0.001", "trial 1: mean_kl 0.06875"):
        assert said in str(result.exception)
    assert not (tmp_path / "out" / "best.yaml").exists() and len(rows(tmp_path / "out")) == 3
    again = CliRunner().invoke(cli, [*arguments, "--json"])
    found = json.loads(again.output)
    assert found["best"] is None and [t["misses"] for t in found["trials"]] == [["mean_kl < 0.001"]] * 3
    assert len(stubbed.runs) == 3  # what is written down is not run again


def test_the_spaces_of_example_and_documentation_are_valid():
    text = (ROOT / "docs" / "tune.md").read_text(encoding="utf-8")
    documented = text.split("```yaml\n")[1].split("```")[0]
    assert len(check(Space.load(ROOT / "examples" / "tune.yaml"))) == 12
    recipes = [parse(draw).recipe for draw in corner_draws(Space(parse_yaml(documented, "tune.md")))]
    assert {len(recipe.passes) for recipe in recipes} == {1, 2} and len(recipes) == 7


@pytest.mark.parametrize(
    ("changes", "target", "message"),
    [
        ({"group_size": {"choice": [32, 48]}}, "min size", "48"),
        ({"bitss": 4}, "min size", "bitss"),
        ({}, "min sise", "Did you mean 'size'"),
        ({}, "min size where decode_speedup > 1", "speed is not measured"),
    ],
)
def test_errors_come_before_anything_runs(changes, target, message, tiny_model, tmp_path, stubbed):
    given = space(**changes)
    given["evaluate"] = {**EVALUATE, "speed": False}
    with pytest.raises(UsageError, match=message):
        tune(tiny_model, tmp_path, target, given)
    assert not stubbed.runs and not (tmp_path / "out").exists()


def test_folders_in_the_way_and_an_absent_library(tiny_model, tmp_path, stubbed, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    for force in (False, True):
        with pytest.raises(UsageError, match="no search's folder"):
            tune(tiny_model, tmp_path, "min size", space(), force=force)
    (tmp_path / "out" / "mine.txt").unlink()
    tune(tiny_model, tmp_path, "min size", space())
    with pytest.raises(UsageError, match=r"begun with another target.*--force"):
        tune(tiny_model, tmp_path, "min mean_kl", space())
    journal = tmp_path / "out" / "trials.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join([lines[0], "{]\n", *lines[2:]]))
    with pytest.raises(RunError, match=r"trials\.jsonl:2"):
        tune(tiny_model, tmp_path, "min size", space())
    assert len(tune(tiny_model, tmp_path, "min mean_kl", space(), force=True).trials) == 3
    monkeypatch.setattr("llmopt.optimizer.tune.propose.find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"llmopt\[tune\]"):
        tune(tiny_model, tmp_path / "other", "min size", space())


def test_limits_become_gates_and_ties_fall_to_the_lesser_divergence():
    target = parse_target("min size where size < 4kB and mean_kl < 0.1 and mean_kl < 0.2 and memory < 1GB")
    target = target.with_gates(Gates(min_compression=3, max_mean_kl=0.15))
    gates, others = gates_of(target, 16_000)
    assert gates == {"min_compression": 4.0, "max_mean_kl": 0.1} and others == ["memory < 953.7 MiB"]

    def trial(number: int, size: float, kl: float, state: Any = "complete") -> Trial:
        return Trial(number, {}, state, figures={"size": size, "mean_kl": kl})

    small = parse_target("min size where mean_kl < 0.1")
    trials = [trial(0, 3, 0.05), trial(1, 2, 0.09), trial(2, 2, 0.08), trial(3, 1, 0.2), trial(4, 1, 0.01, "failed")]
    assert best_of(small, trials) is trials[2] and best_of(small, trials[3:]) is None
    assert [each.number for each in nearest(small, trials[3:], 5)] == [3, 4]
    assert best_of(parse_target("max size"), trials) is trials[0]
