"""The adaptive number of drafts over simulated steps: bounded losses where drafts are hopeless, near the best fixed
number where they are good. Time is what a cost model says, so that every run is the same."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from llmopt.runtime.engine.draft_account import CAP, INITIAL, SHARE, Account
from llmopt.runtime.engine.draft_costs import LearntCosts, StepCosts
from llmopt.runtime.engine.draft_lookup import LookupSource
from llmopt.runtime.engine.draft_model import Drafting
from llmopt.runtime.engine.draft_speculator import Speculator
from llmopt.runtime.engine.plan import Row, StepPlan
from llmopt.runtime.engine.request import Request

TRUE = StepCosts((1, 5, 8, 12, 24, 48), (9e-3, 10e-3, 11e-3, 13e-3, 22e-3, 42e-3))
"""Of SmolLM2 on two cores, by and large."""
FREE = StepCosts((1, 48), (9e-3, 9.5e-3))
"""What a measurement might say that was disturbed: drafts seem to cost nothing."""


class Copies(LookupSource):
    """Finds drafts of class `kind` in each step."""

    def __init__(self, kind=2):
        super().__init__("ngram")
        self.match = kind

    def find(self, request, count):
        return (0,) * count, self.match


class Nothing(LookupSource):
    """Finds no drafts, and counts how often it is asked."""

    looks = 0

    def find(self, request, count):
        self.looks += 1
        return (), 0


class Model(Drafting):
    """A draft model of which a pass costs 1 ms, and that has the prompts to compute."""

    def __init__(self, prompt=0):
        super().__init__(lambda plan: None, 10, 10**6, 10**6)
        self.prompt, self.seen = prompt, set()

    def behind(self, request):
        return 0 if request.id in self.seen else self.prompt

    def draft(self, requests, lengths):
        self.seen |= {r.id for r, n in zip(requests, lengths) if n}
        return [(0,) * n for n in lengths]


class World:
    """`rows` requests that decode together, steps that cost what `costs` says, with noise and hiccups."""

    def __init__(self, speculator, rows, costs=TRUE, noise=0.0, seed=0, new=10**6):
        self.speculator, self.costs, self.noise, self.new = speculator, costs, noise, new
        self.rng, self.count = random.Random(seed), 0
        self.seconds = self.plain = 0.0
        self.steps = self.tokens = self.drafted = 0
        self.requests = [self.newcomer() for _ in range(rows)]

    def newcomer(self):
        request = Request(id=self.count, token_ids=[0] * 100, max_total_tokens=100 + self.new)
        request.table = SimpleNamespace(
            missing=lambda tokens: 0, grow=lambda count: None, trim=lambda tokens: None,
            pool=SimpleNamespace(block_size=16, tail_blocks=0),
        )  # fmt: skip
        self.count += 1
        return request

    def run(self, steps, acceptance):
        """Speed over plain decoding in these steps. acceptance: of each draft that follows accepted ones."""
        rows, before = len(self.requests), (self.seconds, self.tokens)
        each = self.costs.of(rows) / rows
        scheduler = SimpleNamespace(
            pool=SimpleNamespace(num_free=10**6), watermark=0, running=self.requests,
            config=SimpleNamespace(max_num_batched_tokens=10**6),
        )  # fmt: skip
        for _ in range(steps):
            self.speculator.begin(scheduler, self.requests, 0)
            source = self.speculator.source
            behind = sum(map(source.behind, self.requests)) if isinstance(source, Drafting) else 0
            drafts = self.speculator.propose(self.requests)
            own = 1e-3 * max(map(len, drafts)) + (2e-4 * behind if any(drafts) else 0) if behind is not None else 0
            own = own if isinstance(source, Drafting) else 0.0
            plan = StepPlan(tuple(Row(r.id, 0, (0, *d), (), 1 + len(d), len(d)) for r, d in zip(self.requests, drafts)))
            spread = self.rng.lognormvariate(0, self.noise) * (5 if self.noise and self.rng.random() < 0.01 else 1)
            seconds = self.costs.of(plan.total_tokens) * spread + own
            for i, (request, found) in enumerate(zip(list(self.requests), drafts)):
                accepted = 0
                while accepted < len(found) and self.rng.random() < acceptance:
                    accepted += 1
                if found:
                    self.speculator.observe(request, len(found), accepted)
                request.token_ids += [0] * (1 + accepted)
                self.tokens += 1 + accepted
                self.drafted += len(found)
                if request.num_output_tokens >= self.new:
                    self.speculator.forget(request)
                    self.requests[i] = self.newcomer()
            self.speculator.timed(plan, seconds, own)
            self.seconds += self.costs.of(plan.total_tokens) + own  # noise would have struck plain decoding, too
            self.steps += 1
        return (self.tokens - before[1]) * each / (self.seconds - before[0])


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("believed", [TRUE, FREE])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_hopeless_drafts_cost_a_bounded_share(rows, believed, noise):
    for acceptance in (0.0, 0.1, 0.3):
        world = World(Speculator(Copies(), None, believed), rows, noise=noise, new=64)
        speed = world.run(400, acceptance)
        assert speed > 1 / (1 + SHARE + 2 * INITIAL / 400) > 0.95
        assert world.run(600, acceptance) > 1 - 3 * SHARE  # what was lent at the beginning is spent


@pytest.mark.parametrize("rows", [1, 8])
def test_a_draft_model_that_is_never_right_costs_a_bounded_share(rows):
    costs = StepCosts((1, 300), (1e-3, 61e-3))
    world = World(Speculator(Model(prompt=60), None, TRUE, costs, acceptance=0.9), rows, new=128)
    assert world.run(1000, 0.0) > 0.95
    assert world.run(3000, 0.0) > 1 - 2 * SHARE
    assert world.drafted > 0


def best_fixed(rows, acceptance, costs=TRUE, own=0.0):
    """The best speed over plain decoding of any fixed number of drafts."""
    return max(
        sum(acceptance**j for j in range(k + 1)) * costs.of(rows) / (costs.of(rows * (1 + k)) + k * own)
        for k in range(25)
    )


@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("acceptance", [0.6, 0.8, 0.95])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_good_drafts_reach_nearly_the_best_fixed_number(rows, acceptance, noise):
    world = World(Speculator(Copies(), None, TRUE), rows, noise=noise, new=128)
    world.run(200, acceptance)
    assert world.run(700, acceptance) > (0.8 if noise else 0.93) * best_fixed(rows, acceptance)


def test_a_good_draft_model_is_worth_its_prompts():
    costs = StepCosts((1, 300), (1e-3, 61e-3))
    world = World(Speculator(Model(prompt=60), None, TRUE, costs, acceptance=0.85), 1, new=256)
    assert world.run(1000, 0.85) > 0.9 * best_fixed(1, 0.85, own=1e-3)


def test_texts_change():
    world = World(Speculator(Copies(), None, TRUE), 1, new=128)
    good = world.run(400, 0.9)
    bad = world.run(400, 0.0)
    assert good > 0.9 * best_fixed(1, 0.9)
    assert bad > 1 / (1 + SHARE + (CAP + 1) / 400)
    world.run(500, 0.9)  # it takes a while until they are believed again
    assert world.run(400, 0.9) > 0.9 * best_fixed(1, 0.9)


def test_without_an_account_and_with_priors_that_lie_drafts_would_cost_more(monkeypatch):
    monkeypatch.setattr(Account, "allows", lambda *_: True)
    world = World(Speculator(Copies(5), None, FREE), 32, new=8)
    monkeypatch.setattr(LearntCosts, "learn", lambda *_: None)
    monkeypatch.setattr(LearntCosts, "known", lambda *_: True)
    monkeypatch.setattr("llmopt.runtime.engine.draft_policy.AcceptanceBook.add", lambda *_: None)
    assert world.run(400, 0.0) < 0.6  # the bounds above are not met by chance


def test_looking_rests_where_nothing_is_found_and_until_a_request_ends():
    source = Nothing("ngram")
    world, looks = World(Speculator(source, None, TRUE), 1), []
    for steps in (8, 16, 24, 400):
        world.run(steps, 0.0)
        looks.append(source.looks)
    assert looks[:3] == [8, 16, 24] and looks[3] == 124
    world.speculator.forget(world.requests[0])
    world.run(8, 0.0)
    assert source.looks == looks[3] + 8
    always = Nothing("ngram")
    World(Speculator(always, 4, TRUE), 1).run(100, 0.0)
    assert always.looks == 100  # a fixed number of drafts is asked for in every step


def test_costs_follow_the_steps():
    learnt = LearntCosts(FREE)
    for _ in range(300):
        for tokens in (1, 12, 24, 80):
            learnt.learn(tokens, TRUE.of(tokens))
    for tokens in (1, 12, 24, 80):
        assert learnt.now.of(tokens) == pytest.approx(TRUE.of(tokens), rel=0.35)
    assert learnt.now.of(80) == pytest.approx(TRUE.of(80), rel=0.05)
    assert list(learnt.now.seconds) == sorted(learnt.now.seconds)
    before = learnt.now.of(48)
    for _ in range(100):
        learnt.learn(1, 2 * TRUE.of(1))  # the machine is slower now: so will larger steps be
    assert learnt.now.of(1) == pytest.approx(2 * TRUE.of(1), rel=0.05)
    assert learnt.now.of(48) > 1.3 * before
