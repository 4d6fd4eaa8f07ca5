"""Speculation in whole engines without a model: every kind, with sampling, aborts, preemption and shared prefixes."""

import random
from functools import partial

import pytest
import torch
from llmopt.runtime.engine.blocks import BlockPool
from llmopt.runtime.engine.draft_costs import StepCosts
from llmopt.runtime.engine.draft_lookup import LookupSource
from llmopt.runtime.engine.draft_model import OwnLayers, SecondModel, fit
from llmopt.runtime.engine.draft_speculator import Speculator
from llmopt.runtime.engine.engine import Engine
from llmopt.runtime.engine.fake_runner import FakeRunner, greedy_continuation
from llmopt.runtime.engine.loop import collect_outputs
from llmopt.runtime.engine.outputs import join_outputs
from llmopt.runtime.engine.sampling_params import SamplingParams
from llmopt.runtime.engine.scheduler_config import SchedulerConfig

V = 24
CHEAP = StepCosts((1, 65), (1.0, 1.5))
KINDS = ("ngram", "suffix", "suffix with history", "model", "other model", "layer_skip")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors this small gain nothing from more, and threads that wait for busy neighbours cost milliseconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Repeating(FakeRunner):
    """Logits depend on the last two tokens only, so that texts repeat themselves."""

    def _history(self, row, end):
        return super()._history(row, end)[-2:]


class Other(FakeRunner):
    """Another model, which often agrees."""

    def execute(self, plan):
        logits = super().execute(plan)
        return logits + 0.8 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(plan.rows[0].start))


class Partly(FakeRunner):
    """The target itself with the logits that a part of its layers could have; slots are checked as ever."""

    def execute(self, plan, noise=0.0):
        logits = super().execute(plan)
        return logits + noise * torch.randn(logits.shape, generator=torch.Generator().manual_seed(len(plan.rows)))


def build(kind, blocks=64, size=4, num_tokens=None, drafts=True, costs=CHEAP, **limits):
    """(engine, runner, the draft model's runner or None)."""
    target = {"model": FakeRunner, "other model": FakeRunner, "layer_skip": Partly}.get(kind, Repeating)
    runner, second = target(blocks, size, V), None
    if kind.startswith(("ngram", "suffix")):
        source = LookupSource(kind.split()[0], 3, 400 if "history" in kind else 0)
    elif kind == "layer_skip":
        source = OwnLayers(partial(runner.execute, noise=0.8), V, 128, 64)
    else:
        second = (FakeRunner if kind == "model" else Other)(blocks, size, V)
        source = SecondModel(second, V, 24)
    draft_costs = StepCosts((1, 65), (0.05, 0.1)) if kind in ("model", "other model", "layer_skip") else None
    drafter = Speculator(source, num_tokens, costs, draft_costs, learn=False) if drafts else None
    config = SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 40, **limits})
    return Engine(runner, scheduler=config, eos_token_ids=[0], drafter=drafter), runner, second


def params_of(rng, greedy):
    common = {"max_new_tokens": rng.randrange(1, 32), "logprobs": rng.choice([None, 1])}
    if greedy:
        return SamplingParams(temperature=0.0, repetition_penalty=rng.choice([1.0, 1.0, 1.3]), **common)
    more = rng.choice([{"top_p": 0.8}, {"top_k": 4}, {"presence_penalty": 0.7}, {"frequency_penalty": 0.5}, {"n": 2}])
    return SamplingParams(temperature=rng.choice([0.3, 1.0]), seed=rng.randrange(100), **more, **common)


def requests(seed, count):
    """Mixed prompts, some with shared beginnings, and their parameters."""
    rng = random.Random(seed)
    shared = [rng.randrange(1, V) for _ in range(16)]
    made = []
    for number in range(count):
        prompt = [rng.randrange(1, V) for _ in range(rng.randrange(1, 24))]
        made.append(((shared + prompt if number % 3 == 0 else prompt), params_of(rng, number % 2 == 0)))
    return made


def run(engine, given, rng, aborts=()):
    """Random arrivals; outputs, checked for what must hold after every step."""
    outputs, waiting = [], list(enumerate(given))
    while waiting or engine.has_work:
        for _ in range(rng.choice([0, 1, 3])):
            if waiting:
                number, (prompt, params) = waiting.pop(0)
                engine.add_request(prompt, params, request_id=str(number), priority=rng.randrange(2))
        running = engine.scheduler.running
        if aborts and running and rng.random() < 0.1:
            engine.abort(rng.choice(running).request_id)
        outputs += engine.step()
        for request in engine.scheduler.running:
            assert request.table.missing(request.num_tokens) >= 0, "blocks of drafts are kept"
    return outputs


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_that_of_plain_decoding(kind):
    """64 mixed prompts, greedy and sampled, on a pool too small for all, with aborts."""
    given = requests(7, 64)
    plain = join_outputs(run(build(kind, drafts=False)[0], given, random.Random(1)))
    engine, runner, second = build(kind, blocks=32)
    outputs = run(engine, given, random.Random(2), aborts=True)
    done, metrics = join_outputs(outputs), engine.metrics()
    assert set(done) == set(plain)
    aborted = 0
    for key, one in done.items():
        expected = plain[key]
        if one.finish_reason == "abort":
            aborted += 1
            assert one.token_ids == expected.token_ids[: len(one.token_ids)]
            continue
        assert (one.token_ids, one.finish_reason, one.error) == (expected.token_ids, expected.finish_reason, None)
        if expected.logprobs is not None:
            assert [p.token_id for p in one.logprobs] == one.token_ids
    assert 0 < aborted < 20 and metrics.num_preemptions_total > 0 and metrics.prefix_cache_hits_total > 0
    assert metrics.spec_decode_num_accepted_tokens_total > 20
    assert engine.scheduler.pool.num_free == runner.num_blocks and not engine._drafter._kinds
    engine.close()
    assert second is None or second.closed


def test_acceptance_by_position_adds_up():
    engine = build("other model", num_tokens=3)[0]
    run(engine, requests(3, 12), random.Random(0))
    metrics = engine.metrics()
    drafted = metrics.spec_decode_num_draft_tokens_per_pos_total
    accepted = metrics.spec_decode_num_accepted_tokens_per_pos_total
    assert len(drafted) == 3 and sum(drafted) == metrics.spec_decode_num_draft_tokens_total
    assert sum(accepted) == metrics.spec_decode_num_accepted_tokens_total
    assert drafted == sorted(drafted, reverse=True) and accepted == sorted(accepted, reverse=True)
    assert drafted[0] == metrics.spec_decode_num_drafts_total


@pytest.mark.parametrize("seed", range(4))
def test_a_draft_model_equal_to_the_target_is_always_right(seed):
    """Its keys and values are the right text's after prefix hits, forks, rejections, preemption and pauses: a wrong
    one would change what it drafts. Greedy or not, since drafts are drawn as the target draws."""
    engine, _, second = build("model", blocks=24, num_tokens=2 + seed % 3)
    rng = random.Random(seed)
    outputs = run(engine, requests(seed, 40), rng, aborts=True)
    metrics = engine.metrics()
    assert metrics.num_preemptions_total > 0 and all(o.error is None for o in outputs)
    assert metrics.spec_decode_num_draft_tokens_total > 100
    assert metrics.spec_decode_num_accepted_tokens_total == metrics.spec_decode_num_draft_tokens_total
    assert second.num_tokens_run > 0


def test_a_prefix_that_the_draft_model_knows_is_not_computed_again():
    engine, _, second = build("model", num_tokens=2, max_num_batched_tokens=64)
    prompt = [1 + i % 7 for i in range(32)]
    for number, expected in enumerate((32 + 5, 5 + 4)):
        before = second.num_tokens_run
        engine.add_request([*prompt, 9], SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True))
        collect_outputs(engine)
        assert second.num_tokens_run - before <= expected + 4, number


def test_long_prompts_reach_the_draft_model_in_pieces():
    engine, _, second = build("model", num_tokens=2, max_num_batched_tokens=64)
    widest = []
    execute = second.execute
    engine._drafter.source._execute = lambda plan: (widest.append(plan.total_tokens), execute(plan))[1]
    engine.add_request([1 + i % 5 for i in range(60)], SamplingParams(temperature=0.0, max_new_tokens=12))
    outputs = collect_outputs(engine)
    assert max(widest) == 24 and widest[:3] == [24, 24, 60 - 48 + 3]  # two steps went by
    assert all(output.error is None for output in outputs)
    assert engine.metrics().spec_decode_num_accepted_tokens_total > 0


def test_adaptation_goes_to_zero_under_load():
    """One request drafts; with many that keep the machine busy nobody does; where blocks are short nobody does."""
    steep = StepCosts((1, 4, 64), (1.0, 1.05, 16.0))
    drafted = {}
    for count in (1, 8):
        engine = build("model", costs=steep)[0]
        for number in range(count):
            engine.add_request([1 + number, 2], SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True))
        engine.step()
        while len(engine.scheduler.running) == count:
            engine.step()
        drafted[count] = engine.metrics().spec_decode_num_draft_tokens_total
    assert drafted[1] > 5 and drafted[8] == 0
    engine = build("ngram", blocks=6, num_tokens=8, watermark=0.5)[0]
    engine.add_request([1, 2, 1, 2, 1, 2, 1, 2, 1], SamplingParams(temperature=0.0, max_new_tokens=8))
    collect_outputs(engine)
    assert engine.metrics().spec_decode_num_draft_tokens_total == 0  # half of the blocks are to stay free


def test_drafts_take_no_blocks_that_the_step_needs():
    """Two requests on a pool that just holds both: nobody is preempted for drafts."""
    engine = build("model", blocks=8, num_tokens=6, watermark=0.0)[0]
    for number in range(2):
        engine.add_request([3 + number, 2, 5], SamplingParams(temperature=0.0, max_new_tokens=13, ignore_eos=True))
    outputs = join_outputs(collect_outputs(engine))
    assert engine.metrics().num_preemptions_total == 0
    for number, one in enumerate(outputs.values()):
        assert one.token_ids == greedy_continuation([3 + number, 2, 5], 13, V)


def test_a_fixed_number_is_kept_to():
    engine = build("other model", num_tokens=4)[0]
    engine.add_request([1, 2, 3], SamplingParams(temperature=0.0, max_new_tokens=30, ignore_eos=True))
    lengths = []
    while engine.has_work:
        engine.step()
        metrics = engine.metrics()
        lengths.append(metrics.spec_decode_num_draft_tokens_total - sum(lengths))
    assert set(lengths[1:-5]) == {4}


def test_histories_of_earlier_outputs_speed_up_the_next():
    """The same prompt again: its output is drafted from the first one's, but only with history."""
    steps = {}
    for kind in ("suffix", "suffix with history"):
        engine = build(kind)[0]
        for _ in range(2):
            before = engine.metrics().steps_total
            engine.add_request([5, 6, 7], SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True))
            collect_outputs(engine)
        steps[kind] = engine.metrics().steps_total - before
    assert steps["suffix with history"] < steps["suffix"]


def test_block_versions_tell_contents_apart():
    pool = BlockPool(2, 4)
    first = pool.allocate()
    version = pool.versions[first]
    pool.release(first)
    pool.acquire(first)
    assert pool.versions[first] == version  # taken back: the same content
    pool.release(first)
    assert {pool.allocate(), pool.allocate()} == {0, 1} and pool.versions[first] == version + 1


def test_vocabularies_of_other_widths():
    logits = torch.arange(6.0).reshape(2, 3)
    assert fit(logits, 2).tolist() == [[0, 1], [3, 4]]
    assert fit(logits, 4)[:, 3].tolist() == [-torch.inf, -torch.inf]
    engine, _, _ = build("model", num_tokens=2)
    engine._drafter.source.runner.vocab_size = 5
    engine.add_request([1, 9, 2], SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True))
    collect_outputs(engine)
    assert engine.metrics().spec_decode_num_draft_tokens_total == 0  # token 9 is nothing to the draft model
