"""How many tokens are drafted: the best number by the costs, nothing under load, and what is learnt on the way."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmopt.runtime.engine.draft_costs import StepCosts, measure
from llmopt.runtime.engine.draft_policy import LONGEST, Acceptance, AcceptanceBook, Load, best_lengths, least_rate
from llmopt.runtime.engine.fake_runner import FakeRunner

MEMORY_BOUND = StepCosts((1, 8, 64), (1.0, 1.1, 9.0))
"""Eight tokens cost little more than one; from there on each costs as much."""


def test_costs_are_straight_between_the_points_and_beyond():
    costs = StepCosts((1, 3, 5), (1.0, 2.0, 4.0), row_context=0.1, token_context=0.01)
    assert [costs.of(n) for n in (0, 1, 2, 3, 4, 5, 7)] == [1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert costs.attention(10) == pytest.approx(1.0)
    assert costs.attention(10, 3) == pytest.approx(1.2)
    assert costs.least_slope == 0.5
    assert StepCosts((1,), (2.0,)).of(3) == 6.0


def test_measuring_a_runner_gives_an_ascending_curve():
    runner = FakeRunner(num_blocks=64, block_size=4, max_model_len=60)
    costs = measure(runner, seconds=0.05)
    assert costs.sizes[0] == 1 and list(costs.seconds) == sorted(costs.seconds) and costs.seconds[0] > 0
    assert measure(FakeRunner(num_blocks=1, block_size=2), seconds=0.01).sizes == (1, 2)


def by_trial(rates, limits, load, costs):
    """The best expected tokens a second over all choices of lengths."""
    best = 0.0
    for lengths in itertools.product(*(range(limit + 1) for limit in limits)):
        gained = sum(sum(rate**j for j in range(1, n + 1)) for rate, n in zip(rates, lengths))
        seconds = costs.of(load.decoding + load.others + sum(lengths))
        best = max(best, (load.decoding + gained) / seconds)
    return best


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.05, 0.99), st.integers(0, 4)), min_size=1, max_size=3),
    st.floats(0.01, 1.0),
    st.integers(0, 20),
)
def test_lengths_are_nearly_the_best_there_are(requests, slope, others):
    rates, limits = zip(*requests)
    costs = StepCosts((1, 65), (1.0, 1.0 + 64 * slope))
    load = Load(len(rates), others=others)
    lengths = best_lengths(rates, limits, load, costs)
    assert all(0 <= n <= limit for n, limit in zip(lengths, limits))
    gained = sum(sum(rate**j for j in range(1, n + 1)) for rate, n in zip(rates, lengths))
    speed = (len(rates) + gained) / costs.of(len(rates) + others + sum(lengths))
    plain = len(rates) / costs.of(len(rates) + others)
    assert speed >= plain
    assert speed >= 0.9 * by_trial(rates, limits, load, costs)


def test_drafts_vanish_as_the_load_grows():
    lengths = [
        best_lengths([0.9] * n, [8] * n, Load(n), MEMORY_BOUND)[0] if least_rate(MEMORY_BOUND, Load(n)) < 1 else 0
        for n in (1, 2, 4, 8, 16, 64)
    ]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] >= 5 and lengths[-1] == 0
    assert least_rate(MEMORY_BOUND, Load(32)) > 1 > least_rate(MEMORY_BOUND, Load(2))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(0.001, 1.0), min_size=1, max_size=6),
    st.integers(1, 12),
    st.integers(0, 20),
    st.floats(0, 100.0),
)
def test_below_the_least_rate_no_drafts_pay(rises, rows, others, context):
    seconds = tuple(itertools.accumulate([1.0, *rises]))
    costs = StepCosts(tuple(2**i for i in range(len(seconds))), seconds, 1e-4, 1e-5)
    load = Load(rows, context, others)
    rate = min(least_rate(costs, load), 0.99)
    assert not any(best_lengths([0.999 * rate] * rows, [LONGEST] * rows, load, costs))


def test_the_least_rise_looks_beyond_a_dear_token():
    costs = StepCosts((8, 9, 12, 24), (1.0, 2.0, 2.1, 4.5))  # a ninth token costs as much as eight, ten more little
    assert costs.least_rise(8) == pytest.approx(0.2)
    assert costs.least_rise(9) == pytest.approx(0.1 / 3)
    assert costs.least_rise(30) == pytest.approx(0.2)
    assert StepCosts((4,), (2.0,)).least_rise(7) == 0.5


def test_bad_drafts_are_not_made_and_good_ones_are_longer():
    assert best_lengths([0.02], [8], Load(1), StepCosts((1, 9), (1.0, 2.0))) == [0]
    good, fair = (best_lengths([rate], [LONGEST], Load(1), StepCosts((1, 33), (1.0, 3.0)))[0] for rate in (0.95, 0.6))
    assert good > fair > 0
    assert best_lengths([0.99, 0.01], [8, 8], Load(2), MEMORY_BOUND)[1] == 0
    assert best_lengths([0.9], [0], Load(1), MEMORY_BOUND) == [0]


def test_drafts_that_cost_time_of_their_own_are_shorter():
    free = best_lengths([0.8], [16], Load(1), MEMORY_BOUND)
    cheap = best_lengths([0.8], [16], Load(1), MEMORY_BOUND, lambda count: 0.2)
    dear = best_lengths([0.8], [16], Load(1), MEMORY_BOUND, lambda count: 0.9)
    assert free[0] > cheap[0] > 0 and dear == [0]


def test_acceptance_learns_forgets_and_is_shared():
    own = Acceptance(0.5, 2.0, 0.9)
    for _ in range(30):
        own.add(4, 4)
    assert own.mean > 0.95
    for _ in range(30):
        own.add(4, 0)
    assert own.mean < 0.25
    book = AcceptanceBook((0.8, 0.5))
    for _ in range(40):
        book.add(1, 0, 3, 0)
    assert book.rate(1, 0) < 0.1 and book.rate(2, 0) < 0.3  # a newcomer begins with what others saw
    assert book.rate(1, 1) == 0.5  # of another class nothing is known
    before = book.rate(3, 0)
    book.add(3, 0, 2, 0)
    low = book.rate(3, 0)
    for _ in range(400):
        book.passed_over(3, 0)
    assert low < before and low < book.rate(3, 0)  # what was long ago does not keep drafts off for ever
    book.forget(1)
    assert 1 not in book._requests
