"""Whole engines under random load (aborts, deadlines, faults, drafts, tight memory): every text is as if alone."""

import os
import random
from collections import Counter

import pytest
import torch
from llmopt.runtime.engine.engine import Engine
from llmopt.runtime.engine.fake_runner import FakeRunner, greedy_continuation
from llmopt.runtime.engine.outputs import join_outputs
from llmopt.runtime.engine.sampling_params import SamplingParams
from llmopt.runtime.engine.scheduler_config import SchedulerConfig

V = 32
SCHEDULES = int(os.environ.get("LLMOPT_ENGINE_SCHEDULES", "10"))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors this small gain nothing from more, and threads that wait for busy neighbours cost milliseconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Fault(Exception):
    pass


class Guesser:
    def __init__(self, rng):
        self.rng = rng

    def propose(self, requests):
        return [
            greedy_continuation(r.token_ids, 2, V) if self.rng.random() < 0.5 else [self.rng.randrange(V)]
            for r in requests
        ]

    def observe(self, request, num_drafts, num_accepted): ...

    def forget(self, request): ...


def random_params(rng, seed):
    kind = rng.randrange(4)
    common = {"seed": seed, "max_new_tokens": rng.randrange(1, 20), "logprobs": rng.choice([None, None, 1])}
    if kind == 0:
        return SamplingParams(temperature=0.0, prompt_logprobs=rng.choice([None, 1]), **common)
    if kind == 1:
        return SamplingParams(temperature=0.7, top_p=0.9, n=rng.choice([1, 3]), **common)
    if kind == 2:
        return SamplingParams(top_k=5, min_p=0.01, repetition_penalty=1.2, stop_token_ids=[3], **common)
    return SamplingParams(presence_penalty=0.5, frequency_penalty=0.2, logit_bias={1: 2.0}, **common)


def alone(prompt, params):
    engine = Engine(FakeRunner(vocab_size=V), eos_token_ids=[0])
    engine.add_request(prompt, params, request_id="x")
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return join_outputs(outputs)


def schedule(seed):
    """One random schedule; returns counts of how its sequences ended."""
    rng, now = random.Random(seed), [0.0]
    runner = FakeRunner(rng.randrange(12, 40), rng.choice([2, 4]), vocab_size=V, max_model_len=40)
    seqs = rng.randrange(1, 6)
    config = SchedulerConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs + rng.randrange(12),
        mode=rng.choice(["continuous", "dynamic"]),
        prefix_caching=rng.random() < 0.8,
        aging_steps=rng.choice([2, 50]),
        max_prompt_logprob_tokens=rng.choice([2, 64]),
    )
    drafter = Guesser(rng) if rng.random() < 0.5 else None
    engine = Engine(runner, scheduler=config, eos_token_ids=[0], drafter=drafter, clock=lambda: now[0])
    faulty = set()
    runner.fault = lambda row: Fault() if row.request_id in faulty else None
    wanted, outputs, rude = {}, [], set()

    def choke(output):
        if output.num_output_tokens > 2 and not output.finished:
            rude.add(output.request_id)
            raise Fault

    for step in range(60):
        now[0] += 1
        if rng.random() < 0.5:
            name = f"r{step}"
            params = random_params(rng, step)
            room = min(40, engine.scheduler.capacity) - params.max_new_tokens
            prompt = [rng.randrange(1, 5) for _ in range(rng.randrange(1, min(18, room)))]
            deadline = now[0] + rng.randrange(1, 30) if rng.random() < 0.1 else None
            callback = choke if rng.random() < 0.05 else None
            engine.add_request(
                prompt, params, request_id=name, priority=rng.randrange(3), deadline=deadline, on_output=callback
            )
            wanted[name] = (prompt, params)
        if wanted and rng.random() < 0.1:
            engine.abort(rng.choice(list(wanted)))
        if rng.random() < 0.03 and engine.scheduler.running:
            faulty.add(rng.choice(engine.scheduler.running).id)
        outputs += engine.step()
    while engine.has_work:
        now[0] += 1
        outputs += engine.step()

    ends = Counter((o.request_id, o.index) for o in outputs if o.finished)
    assert ends == Counter((name, i) for name, (_, params) in wanted.items() for i in range(params.n))
    assert engine.scheduler.pool.num_free == runner.num_blocks and not engine._groups
    reasons = Counter()
    for (name, index), done in join_outputs(outputs).items():
        prompt, params = wanted[name]
        expected = alone(prompt, params)["x", index]
        reasons[done.finish_reason] += 1
        if done.finish_reason in ("stop", "length"):
            assert (done.token_ids, done.finish_reason) == (expected.token_ids, expected.finish_reason)
            if params.prompt_logprobs is not None and index == 0:
                assert [p.token_id for p in done.prompt_logprobs or ()] == prompt[1:]
        else:
            assert done.token_ids == expected.token_ids[: len(done.token_ids)]
            assert (done.error is not None) == (done.finish_reason == "error")
            if done.error is not None:
                assert isinstance(done.error, Fault), done.error
        if params.logprobs is not None:
            assert [p.token_id for p in done.logprobs or ()] == done.token_ids
    reasons["preempted"] = engine.scheduler.num_preemptions
    return reasons


def test_random_load():
    total = Counter()
    for seed in range(SCHEDULES):
        try:
            total += schedule(seed)
        except Exception as error:
            raise AssertionError(f"schedule {seed}: {error!r}") from error
    for reason in ("stop", "length", "abort", "deadline", "error", "preempted"):
        assert total[reason] > 0, f"no schedule shows {reason}"
