"""Nobody starves: every request ends within the bound that scheduler.py proves, under adversarial arrivals."""

import random

import pytest
from llmopt.runtime.engine.request import Request
from llmopt.runtime.engine.sampling_params import SamplingParams
from llmopt.runtime.engine.scheduler import Scheduler
from llmopt.runtime.engine.scheduler_config import SchedulerConfig

GREEDY = SamplingParams()


def make(aging_steps, mode="continuous", max_num_seqs=2, num_blocks=8, block_size=2):
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=4, mode=mode, aging_steps=aging_steps, prefix_caching=False
    )
    return Scheduler(config, num_blocks, block_size)


def drive(scheduler, arrivals, until, victim_id=None):
    """Run `until` steps; `arrivals(step)` lists (id, priority, prompt length, output length). Returns steps of ends."""
    ended, wanted, arrived = {}, {}, {}
    for step in range(until):
        for number, priority, prompt, output in arrivals(step):
            request = Request(
                id=number,
                token_ids=[1] * prompt,
                params=GREEDY,
                priority=priority,
                max_total_tokens=prompt + output,
            )
            scheduler.add(request)
            arrived[number], wanted[number] = (step, priority), request
        plan = scheduler.schedule()
        scheduler.commit(plan, [(1,) if row.end >= wanted[row.request_id].num_tokens else () for row in plan.rows])
        for row in plan.rows:
            request = wanted[row.request_id]
            if request.num_tokens >= request.max_total_tokens:
                scheduler.finish(request, "length")
                ended[request.id] = step
        if victim_id in ended:
            break
    return ended, arrived


def bound(scheduler, arrived, victim, p_max):
    """(2N + 1) * L of scheduler.py."""
    step, priority = arrived[victim]
    last = step + (p_max - priority) * scheduler.config.aging_steps
    before = sum(1 for when, _ in arrived.values() if when <= last)
    return (2 * (before + scheduler.config.max_num_seqs) + 1) * scheduler.capacity


def flood(step, rate=1, priority=3, prompt=3, output=3):
    """`rate` urgent requests in every step, for ever: more than the engine can serve."""
    return [(1000 + step * rate + i, priority, prompt, output) for i in range(rate)]


@pytest.mark.parametrize("mode", ["continuous", "dynamic"])
def test_low_priority_survives_a_flood_of_high_priority(mode):
    scheduler = make(aging_steps=5, mode=mode)
    ended, arrived = drive(scheduler, lambda s: flood(s) + ([(0, 0, 6, 6)] if s == 10 else []), 3000, victim_id=0)
    assert 0 in ended
    assert ended[0] - arrived[0][0] <= bound(scheduler, arrived, 0, p_max=3)


def test_without_aging_the_same_flood_starves_it():
    """The other side: the test above can fail."""
    scheduler = make(aging_steps=10**9)
    ended, _ = drive(scheduler, lambda s: flood(s) + ([(0, 0, 6, 6)] if s == 10 else []), 3000, victim_id=0)
    assert 0 not in ended and len(ended) > 500


def test_high_priority_is_served_first():
    scheduler = make(aging_steps=1000, max_num_seqs=1)
    ended, _ = drive(scheduler, lambda s: [(1, 0, 2, 4), (2, 0, 2, 4), (3, 5, 2, 4)] if s == 0 else [], 100)
    assert ended[3] < ended[1] < ended[2]


def test_a_request_as_large_as_the_pool_is_not_overtaken_for_ever():
    scheduler = make(aging_steps=5, max_num_seqs=4)
    ended, arrived = drive(
        scheduler, lambda s: flood(s, priority=0, prompt=1, output=2) + ([(0, 0, 15, 1)] if s == 5 else []), 3000, 0
    )
    assert ended[0] - arrived[0][0] <= bound(scheduler, arrived, 0, p_max=0)


def test_preemption_takes_the_lowest_priority_then_the_newest():
    scheduler = make(aging_steps=1000, max_num_seqs=4, num_blocks=6, block_size=2)
    for number, priority in ((1, 1), (2, 0), (3, 0)):
        scheduler.add(Request(id=number, token_ids=[1] * 3, priority=priority, max_total_tokens=12))
    victims = []
    for _ in range(12):
        plan = scheduler.schedule()
        victims += plan.preempted
        for row in plan.rows:
            assert row.request_id not in plan.preempted
        requests = scheduler.requests
        scheduler.commit(plan, [(1,) if row.end >= requests[row.request_id].num_tokens else () for row in plan.rows])
    assert victims[:2] == [3, 2]


def test_random_adversaries():
    """Every request of random mixes ends within its own bound, at over- and underload, with thrashing memory."""
    preempted = 0
    for seed in range(40):
        rng = random.Random(seed)
        mode = rng.choice(["continuous", "dynamic"])
        scheduler = make(
            aging_steps=rng.choice([1, 4]), mode=mode, max_num_seqs=rng.choice([1, 2, 4]), num_blocks=rng.choice([4, 8])
        )
        load, counter = rng.choice([0.05, 0.2, 0.6]), iter(range(10**6))
        p_max = 2

        def arrivals(step, rng=rng, load=load, counter=counter, scheduler=scheduler):
            if step >= 200 or rng.random() > load:
                return []
            longest = scheduler.capacity
            prompt = rng.choice([1, 2, longest // 2, longest - 1])
            return [(next(counter), rng.choice([-2, 0, 2]), prompt, rng.randrange(1, longest - prompt + 1))]

        ended, arrived = drive(scheduler, arrivals, 5000)
        assert ended.keys() == arrived.keys() and arrived
        for number, (step, _) in arrived.items():
            assert ended[number] - step <= bound(scheduler, arrived, number, p_max)
        preempted += scheduler.num_preemptions
    assert preempted > 50
