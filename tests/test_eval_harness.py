"""lm-evaluation-harness over the engine: the same numbers as its own `hf` backend, local tasks, clear errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import llmopt
import pytest
from llmopt.optimizer.errors import MissingDependency, RunError, UsageError

CHOICES = [" the king", " a river of gold", " nothing", " two more"]
TASK = """\
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list:
  - {{metric: acc}}
  - {{metric: acc_norm}}
"""


@pytest.fixture(scope="module")
def harness():
    return pytest.importorskip("lm_eval")


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one local task of 12 items."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {"context": f"In the {n}th year of his reign, he saw" + " and saw" * n, "choices": CHOICES, "label": n % 4}
        for n in range(12)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "local_choice.yaml").write_text(TASK.format(file=folder / "rows.jsonl"))
    return folder


def requests(pairs):
    return [SimpleNamespace(args=pair) for pair in pairs]


@pytest.fixture(scope="module", params=["native", "static"])
def both(request, harness, tiny_model):
    """Our adapter and the harness's own backend over one model in float32."""
    from llmopt.evaluation.harness import harness_model
    from lm_eval.models.huggingface import HFLM

    theirs = HFLM(pretrained=str(tiny_model), dtype="float32", device="cpu", batch_size=1)
    with llmopt.load(tiny_model, dtype="float32", engine=request.param) as llm:
        yield harness_model(llm), theirs


def test_loglikelihoods_are_those_of_the_hf_backend(both):
    ours, theirs = both
    pairs = [(f"Once {'upon ' * n}a time, ", choice) for n in (0, 1, 7) for choice in CHOICES]
    pairs += [("", "The whole text"), ("ends with spaces  ", "and goes on"), ("<bos>told", " so")]
    pairs += [("far too long " * 200, " end")]  # loses its beginning
    found, expected = ours.loglikelihood(requests(pairs)), theirs.loglikelihood(requests(pairs), disable_tqdm=True)
    for (value, greedy), (other, other_greedy) in list(zip(found, expected))[:-1]:
        assert value == pytest.approx(other, abs=2e-4)
        assert greedy == other_greedy
    assert found[-1][0] == pytest.approx(expected[-1][0], rel=0.05)  # one token of context less


def test_rolling_loglikelihoods_are_those_of_the_hf_backend(both):
    ours, theirs = both
    texts = [("The whole of a short text.",), ("x",)]
    found = ours.loglikelihood_rolling(requests(texts))
    assert found == pytest.approx(theirs.loglikelihood_rolling(requests(texts), disable_tqdm=True), abs=1e-3)
    long = ours.loglikelihood_rolling(requests([("many words " * 200,)]))[0]
    assert long == pytest.approx(theirs.loglikelihood_rolling(requests([("many words " * 200,)]))[0], rel=0.01)


def test_generated_texts_are_those_of_the_hf_backend(both):
    ours, theirs = both
    settings = {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False}
    asked = [("The capital of France is", settings), ("Once", settings), ("Water boils when", settings)]
    assert ours.generate_until(requests(asked)) == theirs.generate_until(requests(asked), disable_tqdm=True)


def test_generation_stops_at_a_string_and_leaves_it_out(both):
    ours, _ = both
    (whole,) = ours.generate_until(requests([("The capital", {"until": [], "max_gen_toks": 12})]))
    stop = whole[3:5]
    (cut,) = ours.generate_until(requests([("The capital", {"until": stop, "max_gen_toks": 12})]))
    assert cut == whole[: whole.index(stop)]
    with pytest.raises(RunError, match="do not fit the context"):
        ours.generate_until(requests([("The capital", {"max_gen_toks": 512})]))


def test_a_local_task(harness, tiny_model, task_folder):
    from llmopt.evaluation.harness import check_tasks
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    options = {"tasks": ["local_choice"], "task_path": str(task_folder), "dtype": "float32"}
    found = llmopt.evaluate(tiny_model, cache=False, **options)
    result = found.tasks["local_choice"]
    assert result["num_items"] == 12 and found.perplexity is None
    expected = harness.simple_evaluate(
        model=HFLM(pretrained=str(tiny_model), dtype="float32", device="cpu", batch_size=1),
        tasks=["local_choice"],
        task_manager=TaskManager(include_path=str(task_folder), include_defaults=False),
        bootstrap_iters=10,
    )["results"]["local_choice"]
    for metric in ("acc", "acc_norm"):
        assert result["metrics"][metric] == pytest.approx(expected[f"{metric},none"])
        assert result["stderr"][metric] == pytest.approx(expected[f"{metric}_stderr,none"])
    few = llmopt.evaluate(tiny_model, cache=False, limit=5, **options)
    assert few.tasks["local_choice"]["num_items"] == 5
    with pytest.raises(UsageError, match="Did you mean 'local_choice'"):
        check_tasks(["local_choise"], TaskManager(include_path=str(task_folder), include_defaults=False))
    with pytest.raises(UsageError, match="no such folder of tasks"):
        llmopt.evaluate(tiny_model, cache=False, **{**options, "task_path": "nowhere"})


def test_without_the_library(tiny_model, monkeypatch):
    for name in [key for key in sys.modules if key.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(MissingDependency, match=r"llmopt\[eval\]"):
        llmopt.evaluate(tiny_model, tasks=["arc_easy"], cache=False)
