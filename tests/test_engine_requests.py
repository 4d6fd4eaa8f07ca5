"""What a request gets from the engine, over a runner that reads its KV back through the block tables."""

import itertools
import random

import pytest
import torch
from llmopt.optimizer.errors import RunError, UsageError
from llmopt.runtime.engine.engine import Engine
from llmopt.runtime.engine.fake_runner import FakeRunner, greedy_continuation, history_logits
from llmopt.runtime.engine.loop import collect_outputs
from llmopt.runtime.engine.outputs import join_outputs
from llmopt.runtime.engine.protocols import ModelRunner
from llmopt.runtime.engine.sampling_params import SamplingParams
from llmopt.runtime.engine.scheduler_config import SchedulerConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

V = 64


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors this small gain nothing from more, and threads that wait for busy neighbours cost milliseconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def letters_tokenizer():
    """Byte-level, one letter a token: ids 0–63 are '!' … '`' (id 32 is 'A')."""
    core = Tokenizer(models.BPE({chr(33 + i): i for i in range(V)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)


def text_of(ids):
    return "".join(chr(33 + i) for i in ids)


def make(tokenizer=None, eos=(), seed=0, drafter=None, clock=None, fault=None, num_blocks=64, **config):
    config.setdefault("max_num_batched_tokens", 32)
    config.setdefault("max_num_seqs", 8)
    runner = FakeRunner(num_blocks=num_blocks, vocab_size=V, fault=fault)
    options = {"clock": clock} if clock else {}
    return Engine(
        runner,
        tokenizer,
        scheduler=SchedulerConfig(**config),
        eos_token_ids=eos,
        seed=seed,
        drafter=drafter,
        **options,
    )


def run(engine, *requests, **common):
    """Add (prompt, params) pairs, run to the end, return the completions of each."""
    names = [engine.add_request(prompt, params, **common) for prompt, params in requests]
    done = join_outputs(collect_outputs(engine, 2000))
    assert not engine.has_work and engine.scheduler.pool.num_free == engine.runner.num_blocks
    return [[done[name, i] for i in range(params.n)] for name, (_, params) in zip(names, requests)]


def greedy(**values):
    return SamplingParams(temperature=0.0, **values)


def test_the_fake_runner_implements_the_protocol():
    assert isinstance(FakeRunner(), ModelRunner)


@pytest.mark.parametrize("mode", ["continuous", "dynamic"])
@pytest.mark.parametrize("num_blocks,budget", [(64, 64), (16, 5), (9, 4)])
def test_greedy_text_is_the_models_whatever_the_schedule(mode, num_blocks, budget):
    rng = random.Random(1)
    prompts = [[rng.randrange(V) for _ in range(rng.choice([1, 3, 4, 8, 17]))] for _ in range(12)]
    prompts[3] = prompts[2][:]  # a full prefix hit
    prompts[4] = [*prompts[2], 5]
    engine = make(mode=mode, num_blocks=num_blocks, max_num_batched_tokens=budget, max_num_seqs=4)
    for [done], prompt in zip(run(engine, *[(p, greedy(max_new_tokens=12)) for p in prompts]), prompts):
        assert done.token_ids == greedy_continuation(prompt, 12, V)
        assert done.finish_reason == "length" and done.num_prompt_tokens == len(prompt)


def test_tight_memory_preempts_and_loses_nothing():
    engine = make(num_blocks=10, max_num_seqs=4)
    prompts = [[i, i + 1, i + 2] for i in range(4)]
    results = run(engine, *[(p, greedy(max_new_tokens=30)) for p in prompts])
    assert engine.metrics().num_preemptions_total > 0
    for [done], prompt in zip(results, prompts):
        assert done.token_ids == greedy_continuation(prompt, 30, V)


def test_a_shared_prefix_is_run_once():
    engine, prefix = make(), list(range(40))
    run(engine, ([*prefix, 1], greedy(max_new_tokens=1)))
    before = engine.runner.num_tokens_run
    [[done]] = run(engine, ([*prefix, 2], greedy(max_new_tokens=1)))
    assert done.num_cached_tokens == 40 and engine.runner.num_tokens_run - before == 1
    assert done.token_ids == greedy_continuation([*prefix, 2], 1, V)
    metrics = engine.metrics()
    assert (metrics.prefix_cache_queries_total, metrics.prefix_cache_hits_total) == (82, 40)


def test_sampled_text_does_not_depend_on_neighbours_or_order():
    wanted = [
        ([1, 2, 3], SamplingParams(seed=5, max_new_tokens=15)),
        ([4], SamplingParams(seed=6, temperature=0.7, top_p=0.9, max_new_tokens=15)),
        ([4], SamplingParams(seed=7, top_k=7, repetition_penalty=1.3, frequency_penalty=0.4, max_new_tokens=15)),
        ([9] * 9, SamplingParams(seed=8, min_p=0.05, presence_penalty=0.7, logit_bias={3: 2.0}, max_new_tokens=15)),
    ]
    alone = [run(make(), request)[0][0].token_ids for request in wanted]
    for order in itertools.permutations(range(4)):
        results = run(make(num_blocks=14, max_num_batched_tokens=6, max_num_seqs=3), *[wanted[i] for i in order])
        assert [results[order.index(i)][0].token_ids for i in range(4)] == alone
    assert len({tuple(t) for t in alone}) == 4


def test_seeds():
    params = SamplingParams(seed=1, max_new_tokens=10)
    one, two = (run(make(seed=s), ([1, 2], params))[0][0].token_ids for s in (0, 9))
    assert one == two  # the request's own seed decides
    [[first], [second]] = run(make(), *[([1, 2], SamplingParams(max_new_tokens=10))] * 2)
    assert first.token_ids != second.token_ids  # without a seed two requests differ …
    [[again], _] = run(make(), *[([1, 2], SamplingParams(max_new_tokens=10))] * 2)
    assert again.token_ids == first.token_ids  # … and an engine's run can be repeated


def test_n_sequences_share_the_prompt_and_differ():
    engine, prompt = make(), list(range(33))
    [sequences] = run(engine, (prompt, SamplingParams(seed=3, n=4, max_new_tokens=6, prompt_logprobs=0)))
    assert len({tuple(s.token_ids) for s in sequences}) == 4
    assert [s.index for s in sequences] == [0, 1, 2, 3]
    assert engine.runner.num_tokens_run < 33 + 4 * (6 + 4)
    assert len(sequences[0].prompt_logprobs) == 32 and sequences[1].prompt_logprobs is None
    [[single]] = run(make(), (prompt, SamplingParams(seed=3, max_new_tokens=6)))
    assert single.token_ids == sequences[0].token_ids
    [off] = run(make(prefix_caching=False), (prompt, SamplingParams(seed=3, n=4, max_new_tokens=6)))
    assert [s.token_ids for s in off] == [s.token_ids for s in sequences]


def test_end_of_text_stop_ids_and_min_tokens():
    text = greedy_continuation([1, 2], 20, V)
    eos = text[6]
    assert eos not in text[:6]
    [[done]] = run(make(eos=[eos]), ([1, 2], greedy(max_new_tokens=20)))
    assert done.token_ids == text[:7] and done.finish_reason == "stop" and done.stop_reason == eos
    [[done]] = run(make(eos=[eos]), ([1, 2], greedy(max_new_tokens=20, ignore_eos=True)))
    assert done.token_ids == text and done.finish_reason == "length" and done.stop_reason is None
    [[done]] = run(make(), ([1, 2], greedy(max_new_tokens=20, stop_token_ids=[text[3]])))
    assert done.token_ids == text[:4] and done.stop_reason == text[3]
    [[done]] = run(make(eos=[eos]), ([1, 2], greedy(max_new_tokens=20, min_tokens=7)))
    assert len(done.token_ids) > 7 and eos not in done.token_ids[:7] and done.token_ids[:6] == text[:6]


def test_stop_strings_and_text():
    engine = make(letters_tokenizer())
    text = text_of(greedy_continuation([1, 2], 20, V))
    [[done]] = run(engine, ([1, 2], greedy(max_new_tokens=20)))
    assert done.text == text
    stop = text[4:7]
    [[done]] = run(engine, ([1, 2], greedy(max_new_tokens=20, stop=["absent", stop])))
    assert done.text == text[: text.index(stop)] and done.finish_reason == "stop" and done.stop_reason == stop
    assert len(done.token_ids) == text.index(stop) + 3
    [[done]] = run(engine, ([1, 2], greedy(max_new_tokens=20, stop=stop, include_stop_in_output=True)))
    assert done.text == text[: text.index(stop) + 3]
    half = text[18:20] + "~"  # begins, and is never completed: the text must come out at the end
    [[done]] = run(engine, ([1, 2], greedy(max_new_tokens=20, stop=half)))
    assert done.text == text and done.finish_reason == "length"
    token = greedy_continuation([1, 2], 3, V)[-1]
    [[done]] = run(engine, ([1, 2], greedy(stop_token_ids=[token])))
    assert done.text == text[:2]


def test_streaming_pieces():
    engine, seen = make(letters_tokenizer()), []
    engine.add_request([1, 2], greedy(max_new_tokens=5), request_id="mine", on_output=seen.append)
    returned = collect_outputs(engine)
    assert returned == seen and [o.request_id for o in seen] == ["mine"] * 5
    assert [o.new_token_ids for o in seen] == [(t,) for t in greedy_continuation([1, 2], 5, V)]
    assert [o.finish_reason for o in seen] == [None] * 4 + ["length"]
    assert [o.num_output_tokens for o in seen] == [1, 2, 3, 4, 5]
    times = seen[-1].times
    assert times.arrival <= times.first_scheduled <= times.first_token <= times.finish
    assert seen[0].times is None


@pytest.mark.parametrize("budget", [3, 64])
def test_prompt_logprobs_in_chunks(budget):
    prompt = [5, 6, 7, 8, 9, 10, 11, 5, 6, 7]
    engine = make(max_num_batched_tokens=max(budget, 3), max_num_seqs=3, max_prompt_logprob_tokens=budget)
    run(engine, (prompt, greedy(max_new_tokens=1)))  # the prompt is in the cache: it must be run all the same
    [[done]] = run(engine, (prompt, greedy(max_new_tokens=2, prompt_logprobs=2, logprobs=1)))
    assert [p.token_id for p in done.prompt_logprobs] == prompt[1:]
    for i, value in enumerate(done.prompt_logprobs):
        expected = torch.from_numpy(history_logits(prompt[: i + 1], V)).double().log_softmax(-1)
        assert value.logprob == pytest.approx(expected[prompt[i + 1]].item(), abs=1e-5)
        assert [t for t, _ in value.top] == expected.topk(2).indices.tolist()
    assert [p.token_id for p in done.logprobs] == done.token_ids == greedy_continuation(prompt, 2, V)


def test_scoring_only():
    [[done]] = run(make(), ([5, 6, 7], greedy(max_new_tokens=0, prompt_logprobs=0)))
    assert done.token_ids == [] and done.finish_reason == "length" and len(done.prompt_logprobs) == 2


def test_abort():
    engine = make()
    engine.add_request([1, 2], greedy(max_new_tokens=50), request_id="a")
    engine.add_request([1, 2], greedy(max_new_tokens=5, n=3), request_id="b")
    engine.add_request([1, 2], greedy(max_new_tokens=5), request_id="c")
    outputs = engine.step()
    engine.abort("a")
    engine.abort("b")
    engine.abort("nobody")
    outputs += collect_outputs(engine)
    done = join_outputs(outputs)
    assert done["a", 0].finish_reason == "abort" and done["a", 0].token_ids == greedy_continuation([1, 2], 1, V)
    assert [done["b", i].finish_reason for i in range(3)] == ["abort"] * 3
    assert done["c", 0].finish_reason == "length"
    assert sum(o.finished for o in outputs) == 5 and engine.scheduler.pool.num_free == 64


def test_abort_before_the_first_step_and_text_held_back():
    engine = make(letters_tokenizer())
    text = text_of(greedy_continuation([1, 2], 3, V))
    engine.add_request([1, 2], greedy(stop=text[2] + "\x7f"), request_id="held")
    outputs = [o for _ in range(3) for o in engine.step()]
    assert "".join(o.new_text for o in outputs) == text[:2]
    engine.abort("held")
    engine.add_request([1, 2], greedy(), request_id="queued")
    engine.abort("queued")
    done = join_outputs(outputs + engine.step())
    assert done["held", 0].text == text and done["held", 0].finish_reason == "abort"
    assert done["queued", 0].finish_reason == "abort" and not engine.has_work


def test_deadlines():
    now = [0.0]
    engine = make(clock=lambda: now[0], max_num_seqs=1)
    engine.add_request([1, 2], greedy(max_new_tokens=50), request_id="running", deadline=5.0, priority=1)
    engine.add_request([1, 2], greedy(max_new_tokens=3), request_id="queued", deadline=2.0)
    engine.add_request([1, 2], greedy(max_new_tokens=3, n=2), request_id="free")
    outputs = []
    while engine.has_work:
        outputs += engine.step()
        now[0] += 1
    done = join_outputs(outputs)
    assert done["running", 0].finish_reason == "deadline" and 0 < len(done["running", 0].token_ids) < 50
    assert done["queued", 0].finish_reason == "deadline" and done["queued", 0].token_ids == []
    assert [done["free", i].finish_reason for i in (0, 1)] == ["length"] * 2


def test_wrong_requests_are_refused_before_queueing():
    engine = make()
    engine.add_request([1], greedy(max_new_tokens=1), request_id="twice")
    for prompt, params, options, message in (
        ([], greedy(), {}, "no tokens"),
        ([64], greedy(), {}, "token 64 is outside the vocabulary"),
        ([-1], greedy(), {}, "token -1 is outside"),
        ([1] * 128, greedy(), {}, "do not fit the model's context of 128"),
        ([1] * 100, greedy(max_new_tokens=29), {}, "max_new_tokens=29 do not fit"),
        ([1], greedy(logit_bias={64: 1.0}), {}, "token id 64 is outside the vocabulary"),
        ([1], greedy(stop_token_ids=[99]), {}, "stop_token_ids"),
        ([1], greedy(stop=["x"]), {}, "need a tokenizer"),
        ([1], greedy(regex="a"), {}, "need a tokenizer"),
        ([1], greedy(), {"request_id": "twice"}, "'twice' is running"),
    ):
        with pytest.raises(UsageError, match=message):
            engine.add_request(prompt, params, **options)
    small = make(num_blocks=4)
    with pytest.raises(UsageError, match="16 tokens of the KV pool"):
        small.add_request([1] * 10, greedy(max_new_tokens=7))
    [[done]] = run(small, ([1] * 10, greedy()))
    assert len(done.token_ids) == 6 and done.finish_reason == "length"
    assert sum(o.finished for o in collect_outputs(engine)) == 1


def test_an_id_is_free_again_after_its_end():
    engine = make()
    for _ in range(2):
        engine.add_request([1], greedy(max_new_tokens=1), request_id="again")
        collect_outputs(engine)


def test_close():
    engine = make()
    engine.add_request([1], greedy(), request_id="a")
    engine.step()
    engine.add_request([1], greedy(), request_id="b")
    ended = engine.close()
    assert [(o.request_id, o.finish_reason) for o in ended] == [("a", "abort"), ("b", "abort")]
    assert engine.close() == [] and engine.runner.closed
    with pytest.raises(RunError, match="closed"):
        engine.add_request([1], greedy())


class Oracle:
    """A drafter that knows the greedy text and errs now and then."""

    def __init__(self, seed=0):
        self.rng, self.seen, self.forgotten = random.Random(seed), [], []

    def propose(self, requests):
        drafts = []
        for request in requests:
            right = greedy_continuation(request.token_ids, self.rng.randrange(0, 6), V)
            drafts.append([t if self.rng.random() < 0.8 else self.rng.randrange(V) for t in right])
        return drafts

    def observe(self, request, num_drafts, num_accepted):
        assert 0 <= num_accepted <= num_drafts
        self.seen.append((num_drafts, num_accepted))

    def forget(self, request):
        self.forgotten.append(request.id)


def test_speculation_changes_the_steps_not_the_text():
    prompts = [[i, 2, 3] for i in range(6)]
    random_one = SamplingParams(seed=4, temperature=0.4, presence_penalty=1, max_new_tokens=25)
    variants = [greedy(max_new_tokens=25), random_one]
    requests = [(p, variants[i % 2]) for i, p in enumerate(prompts)]
    plain, drafter = make(letters_tokenizer()), Oracle()
    fast = make(letters_tokenizer(), drafter=drafter, num_blocks=24)
    expected, got = run(plain, *requests), run(fast, *requests)
    assert [d.token_ids for [d] in got] == [d.token_ids for [d] in expected]
    assert [d.text for [d] in got] == [d.text for [d] in expected]
    metrics = fast.metrics()
    assert metrics.spec_decode_num_accepted_tokens_total > 30
    assert metrics.spec_decode_num_draft_tokens_total == sum(n for n, _ in drafter.seen)
    assert fast.metrics().steps_total < plain.metrics().steps_total
    assert sorted(drafter.forgotten) == list(range(6))


def test_a_stop_inside_accepted_drafts_cuts_there():
    text = greedy_continuation([1, 2], 20, V)
    stop = text_of(text[5:7])

    class Perfect(Oracle):
        def propose(self, requests):
            return [greedy_continuation(r.token_ids, 8, V) for r in requests]

    engine = make(letters_tokenizer(), drafter=Perfect())
    [[done]] = run(engine, ([1, 2], greedy(max_new_tokens=20, stop=stop, logprobs=0)))
    assert done.token_ids == text[:7] and done.text == text_of(text[:5]) and len(done.logprobs) == 7
    [[done]] = run(engine, ([1, 2], greedy(max_new_tokens=20, stop_token_ids=[text[4]])))
    assert done.token_ids == text[:5]
    [[done]] = run(engine, ([1, 2], greedy(max_new_tokens=4)))
    assert done.token_ids == text[:4]


def test_metrics():
    engine = make(max_num_seqs=2)
    for i in range(3):
        engine.add_request([i, i, i, i, i], greedy(max_new_tokens=4))
    engine.step()
    metrics = engine.metrics()
    assert (metrics.num_requests_running, metrics.num_requests_waiting) == (2, 1)
    assert metrics.kv_cache_usage_perc == pytest.approx(4 / 64) and metrics.step_tokens == 10
    collect_outputs(engine)
    metrics = engine.metrics()
    assert metrics.generation_tokens_total == 12 and metrics.prompt_tokens_total == 15
    assert metrics.request_success_total == {"length": 3} and metrics.kv_cache_usage_perc == 0
    assert metrics.generation_tokens_per_second > 0
