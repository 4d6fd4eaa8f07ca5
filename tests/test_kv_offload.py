"""The offloaded KV cache: random schedules with a fake model, whole engines, and the copies of real runners."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from llmopt.optimizer.errors import RunError, UsageError
from llmopt.runtime.engine.engine import Engine
from llmopt.runtime.engine.fake_runner import FakeRunner, greedy_continuation
from llmopt.runtime.engine.offload import HostPool, OffloadScheduler, SwapCosts
from llmopt.runtime.engine.outputs import join_outputs
from llmopt.runtime.engine.plan import Row, StepPlan
from llmopt.runtime.engine.request import Status
from llmopt.runtime.engine.runner_offload import HostBlocks
from llmopt.runtime.engine.runner_select import build_runner
from llmopt.runtime.engine.sampling_params import SamplingParams
from llmopt.runtime.engine.scheduler_config import SchedulerConfig
from llmopt.runtime.kernels.build import unavailable_reason
from llmopt.tests.test_kv_sliding import answers, model_of, text
from llmopt.tests.test_scheduler_simulation import Simulation

SCHEDULES = int(os.environ.get("LLMOPT_SCHEDULES", "150"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- schedules


class OffloadSimulation(Simulation):
    """Copies move the store's contents; some of them fail, and some are said not to be worth it."""

    def make_scheduler(self, config):
        rng, seen = self.rng, self.seen = self.rng, Counter()
        count = rng.choice([1, 4, 30])
        self.memory = [None] * (count * self.block_size)
        scheduler = OffloadScheduler(config, self.num_blocks, self.block_size, count, SwapCosts(0.0))
        if rng.random() < 0.3:
            scheduler.costs.worth = lambda blocks, tokens: rng.random() < 0.5
        self.failing = rng.random() < 0.15
        seen["failing"] += self.failing
        return scheduler

    def prepare(self, plan):
        """The copies; where they fail the plan is void, as in the engine."""
        if not plan.swap_out and not plan.swap_in:
            return True
        if self.failing and self.rng.random() < 0.3:
            self.scheduler.swaps_failed()
            self.seen["failed"] += 1
            self.check_state()
            return False
        size = self.block_size
        for block, host in plan.swap_out:
            self.memory[host * size : (host + 1) * size] = self.store[block * size : (block + 1) * size]
        for block, host in plan.swap_in:
            self.store[block * size : (block + 1) * size] = self.memory[host * size : (host + 1) * size]
        self.scheduler.commit_swaps()
        self.seen["out"] += len(plan.swap_out)
        self.seen["in"] += len(plan.swap_in)
        self.check_state()
        return True

    def check_state(self):
        super().check_state()
        host, owners = self.scheduler.host, Counter()
        for request in self.everyone:
            if request.swapped is not None:
                assert request.status is Status.WAITING and request.num_computed == 0
                owners.update(request.swapped.blocks)
        for swapped, _ in self.scheduler._arriving.values():
            owners.update(swapped.blocks)
        assert all(count == 1 for count in owners.values()) and len(set(host.free)) == len(host.free)
        assert set(owners) == set(range(host.num_blocks)) - set(host.free)


def test_random_schedules():
    """Seeded, so that a failure names the schedule: `OffloadSimulation(seed).run(40)`."""
    seen: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        try:
            simulation = OffloadSimulation(seed).run(40)
        except Exception as error:
            raise AssertionError(f"schedule {seed}: {error!r}") from error
        assert len(simulation.scheduler.host.free) == simulation.scheduler.host.num_blocks
        seen += simulation.seen
    assert seen["out"] > seen["in"] > SCHEDULES and seen["failed"] > 0


# -- the estimate


def test_what_is_worth_a_copy():
    costs = SwapCosts(0.01)
    assert costs.worth(1000, 1)  # nothing is known of what a token costs
    costs.saw_step(StepPlan((Row(0, 0, (1,) * 3, (0,), 1),) * 8), 1.0)  # no prompts to speak of
    assert costs.seconds_per_token is None
    costs.saw_step(StepPlan((Row(0, 0, (1,) * 100, (0,), 1),)), 0.5)
    assert costs.seconds_per_token == pytest.approx(0.005)
    assert costs.worth(1, 4) and not costs.worth(1, 3)
    costs.saw_swap(10, 1.1)
    assert costs.seconds_per_block == pytest.approx(0.8 * 0.01 + 0.2 * 0.11)


def test_the_host_pool_refuses_what_it_does_not_have():
    host = HostPool(3)
    blocks = host.allocate(2)
    with pytest.raises(RunError, match="1 are free"):
        host.allocate(2)
    host.release(blocks)
    with pytest.raises(RunError, match="freed twice"):
        host.release(blocks)


# -- engines over the fake model

PROMPTS = [[1 + (i * j) % 9 for j in range(1, 10 + i)] for i in range(6)]


def crowd(runner: FakeRunner) -> Engine:
    """Little memory for six requests."""
    engine = Engine(runner, scheduler=SchedulerConfig(max_num_seqs=6, prefix_caching=False), clock=lambda: 0.0)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, SamplingParams(temperature=0.0, max_new_tokens=25), request_id=str(i))
    return engine


def drain(engine: Engine) -> dict[str, list[int]]:
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return {name: done.token_ids for (name, _), done in join_outputs(outputs).items()}


WANTED = {str(i): greedy_continuation(prompt, 25, 64) for i, prompt in enumerate(PROMPTS)}


def test_texts_are_the_same_and_nothing_is_computed_twice():
    plain, offloaded = FakeRunner(20, 4), FakeRunner(20, 4, num_host_blocks=100)
    assert drain(crowd(plain)) == WANTED
    engine = crowd(offloaded)
    assert drain(engine) == WANTED
    metrics = engine.metrics()
    assert metrics.kv_blocks_swapped_out_total == metrics.kv_blocks_swapped_in_total > 0
    assert metrics.num_preemptions_total > 0 and metrics.kv_host_usage_perc == 0
    once = sum(len(prompt) + 24 for prompt in PROMPTS)
    assert offloaded.num_tokens_run == once < plain.num_tokens_run


def test_a_host_pool_that_is_full_leaves_the_rest_to_be_computed():
    runner = FakeRunner(20, 4, num_host_blocks=6)
    engine = crowd(runner)
    assert drain(engine) == WANTED
    assert engine.metrics().kv_blocks_swapped_out_total > 0
    assert runner.num_tokens_run > sum(len(prompt) + 24 for prompt in PROMPTS)


def test_copies_that_fail_cost_time_only():
    runner = FakeRunner(20, 4, num_host_blocks=100)
    good, calls = runner.swap, []

    def swap(out, back):
        calls.append((out, back))
        if back:
            raise OSError("no")
        good(out, back)

    runner.swap = swap
    engine = crowd(runner)
    assert drain(engine) == WANTED
    metrics = engine.metrics()
    assert metrics.kv_swap_failures_total == 1 and metrics.kv_host_usage_perc == 0
    assert sum(1 for _, back in calls if back) == 1 and not calls[-1][0]  # none was tried again


def test_requests_that_end_while_they_wait_free_their_host_blocks():
    engine = crowd(FakeRunner(20, 4, num_host_blocks=100))
    outputs = []
    while not any(r.swapped for r in engine.scheduler.requests.values()):
        outputs += engine.step()
    (gone, *_) = [r for r in engine.scheduler.requests.values() if r.swapped]
    assert engine.metrics().kv_host_usage_perc > 0
    engine.abort(gone.request_id)
    outputs += engine.step()
    while engine.has_work:
        outputs += engine.step()
    ends = Counter(o.request_id for o in outputs if o.finished)
    assert ends == dict.fromkeys(WANTED, 1)
    done = join_outputs(outputs)
    assert done[gone.request_id, 0].finish_reason == "abort"
    assert all(done[name, 0].token_ids == WANTED[name] for name in WANTED if name != gone.request_id)
    assert engine.metrics().kv_host_usage_perc == 0 and engine.scheduler.pool.num_free == 20


def test_a_second_scheduler_starts_with_an_empty_host_pool():
    """A fault of the engine itself ends all; host blocks are not lost with them."""
    engine = crowd(FakeRunner(20, 4, num_host_blocks=100))
    while not any(r.swapped for r in engine.scheduler.requests.values()):
        engine.step()
    engine.scheduler.schedule = lambda: 1 / 0
    engine.step()
    assert not engine.has_work and engine.metrics().kv_host_usage_perc == 0


# -- real runners


@pytest.mark.parametrize("name", ["native", "torch", "int8"])
def test_runners_give_the_same_texts_with_and_without(name):
    if name != "torch" and unavailable_reason():
        pytest.skip(unavailable_reason())
    model = model_of()
    options = {
        "native": {"kind": "native", "num_blocks": 5},
        "int8": {"kind": "native", "num_blocks": 5, "kv_dtype": "int8"},
        "torch": {"kind": "eager", "attention": "torch", "block_size": 8, "num_blocks": 17},
    }[name]
    prompts = [text(length, length) for length in (20, 25, 15, 40, 30)]
    config = SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=64, prefix_caching=False)
    found = []
    for gib in (0.0, 0.01):
        runner = build_runner(model, **options, max_model_len=128, offload_gib=gib)
        engine = Engine(runner, scheduler=config)
        if gib:
            engine.scheduler.costs.worth = lambda blocks, tokens: True
        found.append(answers(engine, prompts, 30))
        metrics = engine.metrics()
        assert metrics.num_preemptions_total > 0
        assert (metrics.kv_blocks_swapped_in_total > 0) == (gib > 0)
        engine.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_copies_are_exact(dtype):
    pool = [torch.randn(2, 7, 3, 4, generator=torch.Generator().manual_seed(n)).to(dtype) for n in range(2)]
    host = HostBlocks(pool, 0.001)
    before = [tensor.clone() for tensor in pool]
    host.swap([(2, 0), (5, 1)], [])
    for tensor in pool:
        tensor.view(torch.uint8)[:] = 3
    host.swap([], [(6, 0), (1, 1)])
    for tensor, old in zip(pool, before):
        for new, from_ in ((6, 2), (1, 5)):
            assert torch.equal(tensor[:, new].view(torch.uint8), old[:, from_].view(torch.uint8))
        assert bool((tensor[:, 2].view(torch.uint8) == 3).all())
    assert host.seconds_per_block > 0


def test_impossible_settings_are_one_clear_error():
    model, options = model_of(), {"attention": "torch", "num_blocks": 8, "block_size": 8}
    with pytest.raises(RunError, match="holds no block"):
        build_runner(model, "eager", offload_gib=1e-9, **options)
    with pytest.raises(UsageError, match="not both"):
        build_runner(model, "eager", offload_gib=1.0, kv_window=8, **options)
    with pytest.raises(UsageError, match="below 0"):
        build_runner(model, "eager", offload_gib=-1.0, **options)


# -- the pass


def test_the_recipe_reaches_the_engine(tiny_model, tmp_path):
    import llmopt
    from llmopt.passes.kv_cache import KVCache
    from llmopt.tests.runs import run

    assert KVCache(kind="offloaded", offload_gib=0.5).config.offload_gib == 0.5
    made = run(tiny_model, [{"kv_cache": {"kind": "offloaded", "offload_gib": 0.01}}], tmp_path / "out")
    with llmopt.load(made.path) as llm:
        assert llm.runner.num_host_blocks > 0
        assert any("offloaded" in n["message"] and n["kind"] == "note" for n in llm.notes)
        expected = llm.generate("Once upon a time", max_new_tokens=8).token_ids
    with llmopt.load(made.path, offload_gib=0) as llm:
        assert llm.runner.num_host_blocks == 0
        assert llm.generate("Once upon a time", max_new_tokens=8).token_ids == expected
