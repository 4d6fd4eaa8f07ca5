"""Speculation over real (tiny) models: every kind gives the text of plain decoding; the pass measures and refuses."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import llmopt
import pytest
import torch
from llmopt.optimizer.base import Context
from llmopt.optimizer.calibration import Calibration
from llmopt.optimizer.errors import RunError, UsageError
from llmopt.optimizer.runtime_spec import DraftSpec
from llmopt.optimizer.source_model import load_source
from llmopt.optimizer.sources import describe, resolve
from llmopt.passes import draft_measure
from llmopt.passes.draft import Draft
from llmopt.passes.draft_measure import Measured
from llmopt.runtime.draft_setup import make_speculator, num_layers, own_layers
from llmopt.runtime.engine.draft_costs import StepCosts
from llmopt.runtime.engine.draft_layers import candidates, promised_speedup
from llmopt.runtime.engine.engine import Engine
from llmopt.runtime.engine.outputs import join_outputs
from llmopt.runtime.engine.plan import Row, StepPlan
from llmopt.runtime.engine.runner_select import build_runner
from llmopt.runtime.engine.sampling_params import SamplingParams
from llmopt.runtime.engine.scheduler_config import SchedulerConfig

SPECS = {
    "ngram": DraftSpec(kind="ngram", num_tokens=4),
    "suffix": DraftSpec(kind="suffix", history=2000, num_tokens=5),
    "model": DraftSpec(kind="model", num_tokens=3),
    "layer_skip": DraftSpec(kind="layer_skip", layers=[0, 2], num_tokens=3),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors this small gain nothing from more, and threads that wait for busy neighbours cost milliseconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folders(tiny_model, tmp_path_factory) -> tuple[Path, Path]:
    """A float32 target of three layers, and a draft model that is its first two."""
    from transformers import AutoConfig, LlamaForCausalLM

    root = tmp_path_factory.mktemp("pair")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(tiny_model)
    config.num_hidden_layers, config.initializer_range, config.dtype = 3, 0.15, torch.float32
    model = LlamaForCausalLM(config).float()
    for name in ("target", "draft"):
        shutil.copytree(tiny_model, root / name)
        model.save_pretrained(root / name)
        model.model.layers = model.model.layers[:2]
        model.config.num_hidden_layers = 2
    return root / "target", root / "draft"


def module_of(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def mixed(count, seed=0):
    rng = random.Random(seed)
    made = []
    for number in range(count):
        prompt = [rng.randrange(2, 400) for _ in range(rng.randrange(1, 40))]
        if number % 3 == 0:
            prompt = (prompt * 3)[:60]  # something to copy
        greedy = {"temperature": 0.0} if number % 4 else {"temperature": 0.8, "top_p": 0.9, "seed": number}
        made.append((prompt, SamplingParams(max_new_tokens=rng.randrange(4, 20), **greedy)))
    return made


def complete(engine, given, rng, aborts):
    outputs, waiting = [], list(enumerate(given))
    while waiting or engine.has_work:
        for _ in range(rng.choice([0, 2, 4])):
            if waiting:
                number, (prompt, params) = waiting.pop(0)
                engine.add_request(prompt, params, request_id=str(number))
        if aborts and engine.scheduler.running and rng.random() < 0.08:
            engine.abort(rng.choice(engine.scheduler.running).request_id)
        outputs += engine.step()
    return join_outputs(outputs)


@pytest.mark.parametrize("kind", ["native", "eager"])
def test_every_kind_gives_the_text_of_plain_decoding(folders, kind):
    """Mixed prompts in a batch (64 on the native runner), some aborted, in a pool too small for all."""
    target, draft = folders
    runner = build_runner(module_of(target), kind, block_size=32, num_blocks=10, self_check=False)
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=96)
    given = mixed(64 if kind == "native" else 16)
    plain = complete(Engine(runner, scheduler=config), given, random.Random(0), aborts=False)
    for name, spec in SPECS.items():
        runner.decoder.kv_cache[0].zero_() if kind == "native" else None
        speculator = make_speculator(spec, runner, config, draft)
        engine = Engine(runner, scheduler=config, drafter=speculator)
        done = complete(engine, given, random.Random(1), aborts=True)
        for key, one in done.items():
            expected = plain[key].token_ids
            if one.finish_reason == "abort":
                expected = expected[: len(one.token_ids)]
            assert one.token_ids == expected and one.error is None, f"{name}, request {key}"
        metrics = engine.metrics()
        assert metrics.spec_decode_num_accepted_tokens_total > 0, name
        assert engine.scheduler.pool.num_free == runner.num_blocks
        if kind == "native":
            assert metrics.num_preemptions_total > 0
            assert any(one.finish_reason == "abort" for one in done.values())
        speculator.close()
    runner.close()


@pytest.mark.parametrize("kind", ["native", "eager"])
def test_a_part_of_the_layers_is_the_model_without_the_others(folders, kind):
    target, _ = folders
    module = module_of(target)
    shorter = module_of(target)
    shorter.model.layers = torch.nn.ModuleList([shorter.model.layers[0], shorter.model.layers[2]])
    shorter.config.num_hidden_layers = 2
    ids = list(range(5, 25))
    with torch.inference_mode():
        expected = shorter(torch.tensor([ids]), use_cache=False).logits[0]
        whole = module(torch.tensor([ids]), use_cache=False).logits[0]
    runner = build_runner(module, kind, block_size=32, num_blocks=2)
    plan = StepPlan((Row(0, 0, tuple(ids), (1,), len(ids)),))
    assert num_layers(runner) == 3
    torch.testing.assert_close(own_layers(runner, [0, 2])(plan), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(runner.execute(plan), whole, atol=1e-4, rtol=1e-4)
    for wrong in ([], [2, 0], [0, 3], [-1]):
        with pytest.raises(RunError, match="of a model of 3"):
            own_layers(runner, wrong)
    runner.close()


def test_bits_of_verification_are_those_of_plain_decoding(tiny_model):
    """A bfloat16 model with transformers' own roundings: each draft is summed as a token alone is."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).eval()
    runner = build_runner(module, "native", num_blocks=8)
    if not runner.decoder.rounds:
        pytest.skip("this machine runs the model without its roundings")
    tokens = tuple(range(3, 73))
    runner.execute(StepPlan((Row(0, 0, tokens[:60], (0, 1), 0),)))
    one_by_one = [
        runner.execute(StepPlan((Row(0, i, tokens[i : i + 1], (0, 1, 2), 1),))).clone() for i in range(60, 70)
    ]
    runner.execute(StepPlan((Row(1, 0, tokens[:60], (3, 4), 0),)))
    together = runner.execute(StepPlan((Row(1, 60, tokens[60:], (3, 4, 5), 10, 9),)))
    assert torch.equal(together, torch.cat(one_by_one))
    runner.close()


def test_drafts_are_an_option_of_load(folders):
    target, draft = folders
    prompt, settings = "the the the the the", {"max_new_tokens": 24}
    with llmopt.load(target, draft=False) as llm:
        expected = llm.generate(prompt, **settings).token_ids
    for given in ({"kind": "ngram", "num_tokens": 4}, {"kind": "model", "model": str(draft), "num_tokens": 2}):
        with llmopt.load(target, draft=given) as llm:
            assert llm.generate(prompt, **settings).token_ids == expected
            assert any(given["kind"].replace("model", "draft model") in note["message"] for note in llm.notes)
            assert llm._backend.engine.metrics().spec_decode_num_draft_tokens_total > 0
    with llmopt.load(target, engine="static", draft={"kind": "suffix"}) as llm:
        assert llm.generate(prompt, **settings).token_ids == expected
    with llmopt.load(target, engine="static", draft={"kind": "layer_skip", "layers": [0]}) as llm:
        assert any("cannot run a part" in note["message"] for note in llm.notes)
    with pytest.raises(UsageError, match=r"draft\.kind"):
        llmopt.load(target, draft={"kind": "magic"})


# -- the pass


@pytest.fixture
def prepared(folders, tmp_path):
    source = resolve(folders[0])
    model = load_source(source)
    return model, Context(describe(source), Calibration(model.tokenizer, "default", 4, 64), 0, tmp_path)


def measured(spec, speedup, acceptance=0.5, error=0.01):
    return Measured(spec, speedup, error, acceptance, 1.5, 100, 50, [30, 20], [60, 40], 10.0, 10.0 * speedup, 6, 6)


def test_the_pass_measures_on_calibration_prompts_and_records(prepared):
    model, context = prepared
    item = Draft(kind="suffix", force=True, num_prompts=2, new_tokens=12)
    report = item.run(model, context)
    figures = report.details["measured"]["suffix"]
    assert figures["same_text"] == "2 of 2" and figures["plain_tokens_per_second"] > 0
    assert figures["tokens_per_step"] >= 1 and 0 <= figures["acceptance_rate"] <= 1
    assert model.runtime.draft.kind == "suffix" and "times plain decoding" in report.summary


def test_layers_are_chosen_by_trial(prepared):
    model, context = prepared
    report = Draft(kind="layer_skip", num_tokens=2, force=True, num_prompts=2, new_tokens=8).run(model, context)
    trials = report.details["layer_trials"]
    assert model.runtime.draft.layers == list(trials[0]["layers"])
    assert trials == sorted(trials, key=lambda t: -t["speedup"])
    assert model.runtime.draft.acceptance == report.details["measured"]["layer_skip"]["acceptance_rate"]


def test_what_slows_down_is_refused_with_the_figures(prepared, monkeypatch):
    model, context = prepared
    speeds = {"ngram": 0.8, "suffix": 0.7, "layer_skip": 0.5, "model": 0.6}
    monkeypatch.setattr(
        draft_measure, "measure", lambda runner, specs, *_: [measured(s, speeds[s.kind]) for s in specs]
    )
    with pytest.raises(RunError, match=r"ngram does not pay: it reaches 0\.80 of the 1 times.*50% of 100 drafts"):
        Draft(kind="ngram").run(model, context)
    assert model.runtime.draft.kind == "none"
    Draft(kind="ngram", force=True).run(model, context)
    assert model.runtime.draft.kind == "ngram" and "kept by force" in context.notes[-1]["message"]
    Draft(kind="ngram", min_speedup=0.5).run(model, context)
    with pytest.raises(RunError, match="50% are accepted of the 90% asked for"):
        Draft(kind="ngram", min_speedup=0.5, min_acceptance=0.9).run(model, context)
    with pytest.raises(RunError, match=r"ngram: 0\.80.*suffix: 0\.70.*layer_skip: 0\.50"):
        Draft(kind="auto").run(model, context)
    speeds["suffix"] = 1.4
    report = Draft(kind="auto").run(model, context)
    assert model.runtime.draft.kind == "suffix" and set(report.details["measured"]) == {"ngram", "suffix", "layer_skip"}
    speeds["ngram"] = 0.995  # within the error of the measurement
    Draft(kind="ngram").run(model, context)


def test_without_measuring_nothing_is_refused(prepared):
    model, context = prepared
    report = Draft(kind="ngram", measure=False, num_tokens="auto").run(model, context)
    assert "measured" not in report.details and model.runtime.draft.num_tokens is None
    for options in ({"kind": "auto"}, {"kind": "layer_skip"}):
        with pytest.raises(UsageError, match="measure: false"):
            Draft(measure=False, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "suffix", "max_ngram": 2}, "belongs to kind: ngram"),
        ({"kind": "ngram", "history": 100}, "belongs to kind: suffix"),
        ({"kind": "auto", "layers": [0]}, "belongs to kind: layer_skip"),
        ({"kind": "suffix", "model": "x"}, "belong to kind: model"),
    ],
)
def test_options_of_other_kinds_are_errors(options, words):
    with pytest.raises(UsageError, match=words):
        Draft(**options)


def test_candidates_and_what_they_promise():
    for count in (2, 3, 12, 30):
        found = candidates(count)
        assert all(list(c) == sorted(set(c)) and 0 < len(c) < count and c[0] == 0 for c in found)
        assert len(found) == len(set(found)) and len(found) < 40
    costs = StepCosts((1, 9), (1.0, 1.4))
    assert promised_speedup(0.0, 0.1, costs) == 1.0
    assert promised_speedup(0.9, 0.1, costs) > promised_speedup(0.9, 0.5, costs) > 1.0
    assert promised_speedup(0.6, 0.9, costs) == 1.0
