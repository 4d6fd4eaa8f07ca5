"""A draft model made of the target: the loss, the layers, training that goes on where it was killed, the artifact."""

from __future__ import annotations

import itertools
import json

import llmopt
import pytest
import torch
from llmopt.optimizer.base import Context
from llmopt.optimizer.calibration import Calibration
from llmopt.optimizer.errors import RunError, UsageError
from llmopt.optimizer.source_model import load_source
from llmopt.optimizer.sources import describe, resolve
from llmopt.passes import draft_distill, draft_texts
from llmopt.passes.draft import Draft
from llmopt.passes.draft_distill import REPORT, Distillation
from llmopt.passes.draft_loss import Head, batch_loss, divergence, log_partition
from llmopt.passes.draft_measure import target_runner
from llmopt.passes.draft_student import layer_sets, prune, set_trainable
from llmopt.passes.draft_texts import Texts
from torch.nn.functional import kl_div


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Short texts, few of them, one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(draft_distill, "LENGTH", 32)
    monkeypatch.setattr(draft_distill, "MOST_ROUNDS", 4)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def target(make_model):
    return make_model(num_hidden_layers=4, initializer_range=0.15, dtype="float32")


def prepared(folder, workdir):
    source = resolve(folder)
    model = load_source(source)
    return model, Context(describe(source), Calibration(model.tokenizer, "default", 6, 48), 0, workdir)


class Ticks:
    """A clock that goes on by a second each time it is read: every run has the same schedule."""

    def __init__(self):
        self.count = itertools.count()

    def __call__(self):
        return float(next(self.count))


def test_divergence_is_that_of_the_whole_distributions():
    torch.manual_seed(0)
    target, student = torch.randn(5, 40, dtype=torch.float64), torch.randn(5, 40, dtype=torch.float64)
    whole = kl_div(student.log_softmax(-1), target.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    best = target.log_softmax(-1).topk(39, dim=-1)  # of one token it is known without being named
    found = divergence(student.gather(1, best.indices), student.logsumexp(-1), best.values)
    torch.testing.assert_close(found, whole, atol=1e-6, rtol=1e-6)
    few = target.log_softmax(-1).topk(4, dim=-1)
    coarse = divergence(student.gather(1, few.indices), student.logsumexp(-1), few.values)
    assert (coarse <= whole + 1e-9).all() and (coarse >= 0).all()  # putting outcomes together never adds divergence


def test_the_partition_function_is_estimated_without_bias(tiny_model):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    head = Head(model)
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    exact = model.lm_head(hidden).logsumexp(-1)
    candidates, others = torch.arange(50), torch.arange(50, 400)
    torch.testing.assert_close(log_partition(hidden, head, candidates, others), exact, atol=1e-4, rtol=1e-4)
    drawn = [others[torch.randperm(350)[:100]] for _ in range(200)]
    mean = torch.stack([log_partition(hidden, head, candidates, one).exp() for one in drawn]).mean(0)
    torch.testing.assert_close(mean, exact.exp(), rtol=0.02, atol=0)


def test_layer_sets():
    assert layer_sets(30, 3) == [(0, 14, 29), (0, 1, 2), (0, 1, 29)]
    assert layer_sets(4, 1) == [(0,), (3,)]
    for count, wanted in itertools.product((2, 5, 12), (1, 2, 3, 9)):
        for layers in layer_sets(count, wanted):
            assert len(set(layers)) == min(count, wanted) and list(layers) == sorted(layers) and layers[-1] < count


def test_a_pruned_model_is_the_model_without_the_other_layers(target):
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    student = prune(whole, (0, 3))
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        found = student(ids, use_cache=False).logits
        whole.model.layers = torch.nn.ModuleList([whole.model.layers[0], whole.model.layers[3]])
        torch.testing.assert_close(found, whole(ids, use_cache=False).logits)
    before = whole.model.layers[0].mlp.up_proj.weight.clone()
    trained = set_trainable(student)
    assert not any("embed" in name or "lm_head" in name for name in trained) and len(trained) == 2 * 9 + 1
    with torch.no_grad():
        for parameter in trained.values():
            parameter += 1.0
    assert torch.equal(whole.model.layers[0].mlp.up_proj.weight, before)  # the target's own are not touched
    assert student.lm_head.weight.data_ptr() == whole.lm_head.weight.data_ptr()


def test_padding_has_no_part_in_the_loss(target):
    from transformers import AutoModelForCausalLM

    student = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.no_grad():
        tokens = torch.arange(4, 24).reshape(2, 10)
        best = student(tokens).logits[:, :-1].log_softmax(-1).topk(16, dim=-1)
        texts = Texts(tokens, torch.tensor([10, 6]), best.indices, best.values)
        assert batch_loss(student, Head(student), texts, torch.Generator()) < 1e-5
        texts.log_probs[1, 5:] = -5.0
        assert batch_loss(student, Head(student), texts, torch.Generator()) < 1e-5
        texts.log_probs[1, 4] = -5.0
        assert batch_loss(student, Head(student), texts, torch.Generator()) > 1e-3


def distilled(target, workdir, folder, steps_before_death=None, monkeypatch=None):
    model, context = prepared(target, workdir)
    making = Distillation(model, context, folder, 1.0, 2, [], clock=Ticks())
    if steps_before_death is not None:
        original, count = Distillation._step, itertools.count()

        def step(self, *arguments):
            if next(count) == steps_before_death:
                raise KeyboardInterrupt
            return original(self, *arguments)

        monkeypatch.setattr(Distillation, "_step", step)
    with target_runner(model) as runner:
        return making.run(runner), context


def test_training_lowers_the_loss_and_goes_on_after_a_crash(target, tmp_path, monkeypatch):
    report, _ = distilled(target, tmp_path, tmp_path / "whole")
    assert report["after"]["loss"] < 0.8 * report["before"]["loss"]
    assert report["after"]["agreement"] > report["before"]["agreement"]
    steps = [point[0] for point in report["loss_curve"]]
    assert steps == sorted(set(steps)) and steps[-1] == report["steps"] and len(steps) > 5
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        distilled(target, tmp_path, tmp_path / "killed", report["steps"] // 2, patch)
    assert not (tmp_path / "killed" / "draft").exists()
    again, context = distilled(target, tmp_path, tmp_path / "killed")
    assert again == report and "goes on after step" in context.notes[-1]["message"]
    first, second = (
        load_source(resolve(tmp_path / name / "draft"), "float32").module.state_dict() for name in ("whole", "killed")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not (tmp_path / "killed" / "progress").exists()
    monkeypatch.setattr(draft_texts.Writer, "round", None)
    assert distilled(target, tmp_path, tmp_path / "whole")[0] == report  # what is there is not made again


def test_a_distilled_draft_goes_into_the_artifact_and_is_loaded(target, tmp_path):
    options = {"kind": "model", "distill": True, "minutes": 0.05, "num_tokens": 2, "num_prompts": 2, "new_tokens": 8}
    recipe = {"passes": [{"draft": {**options, "force": True}}], "calibration": {"num_samples": 6}}
    recipe["evaluate"] = {"window_length": 32, "windows": 2, "new_tokens": 4}
    artifact = llmopt.optimize(str(target), recipe, out=tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "llmopt.json").read_text())
    draft = manifest["runtime"]["draft"]
    assert draft["kind"] == "model" and draft["model"] == "draft"
    assert {"draft/config.json", "draft/model.safetensors", f"draft/{REPORT}"} <= set(manifest["files"])
    details = manifest["passes"][0]["details"]
    assert details["distillation"]["loss_curve"] and details["model"] == "draft"
    assert details["measured"]["model"]["drafted"] > 0
    with artifact.load() as llm:
        one = llm.generate("the", max_new_tokens=12)
        assert llm._backend.engine.metrics().spec_decode_num_draft_tokens_total > 0
    with artifact.load(draft=False) as llm:
        assert llm.generate("the", max_new_tokens=12).token_ids == one.token_ids


def test_what_cannot_be_distilled_is_refused(tmp_path, target):
    for options in ({"kind": "ngram", "distill": True}, {"kind": "model", "model": "x", "distill": True}):
        with pytest.raises(UsageError, match="distill"):
            Draft(**options)
    with pytest.raises(UsageError, match="belong to `distill: true`"):
        Draft(kind="model", model="x", minutes=3)
    single = describe(resolve(target))
    single.skeleton.model.layers = single.skeleton.model.layers[:1]
    (refusal,) = Draft(kind="model", distill=True).plan(single).refusals
    assert "no layers that could be left out" in refusal
    model, _ = prepared(target, tmp_path)
    with pytest.raises(RunError, match="no layers"):
        prune(torch.nn.Linear(2, 2), (0,))
    assert model.runtime.draft.kind == "none"
