"""The sampler against transformers' processors, float64 references and statistics; rows independent of neighbours."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from llmopt.runtime.engine.distribution import (
    Processing,
    Sparse,
    draw,
    nucleus_floor,
    process_logits,
    processed_distribution,
    truncate_logits,
)
from llmopt.runtime.engine.history import History
from llmopt.runtime.engine.logprobs import token_logprobs
from llmopt.runtime.engine.random_numbers import ACCEPT, SAMPLE, request_key, uniforms
from llmopt.runtime.engine.request import Request
from llmopt.runtime.engine.sampler import SampleItem, adjustments, sample, truncations
from llmopt.runtime.engine.sampling_params import SamplingParams

V = 50


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors this small gain nothing from more, and threads that wait for busy neighbours cost milliseconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def logits_of(rows, vocab=V, seed=0, scale=3.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def request(number=0, prompt=(1, 2, 3), output=(), key=None, **params):
    values = SamplingParams(**params)
    made = Request(id=number, token_ids=list(prompt), params=values, key=request_key(number, 0) if key is None else key)
    made.token_ids += output
    return made


# -- the processed distribution


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 0.7},
        {"temperature": 1.7, "top_k": 20, "top_p": 0.6, "min_p": 0.05, "repetition_penalty": 1.2},
        {"temperature": 0.5, "top_p": 0.95, "min_p": 0.02, "logit_bias": {4: 3.0, 7: -100.0}},
    ],
)
def test_equals_transformers_processors(settings):
    from transformers.generation import logits_process as hf

    seen, output = [3, 4, 5, 6, 3], [9, 9, 11]
    raw = logits_of(4, seed=3)
    params = SamplingParams(**settings)
    processors = hf.LogitsProcessorList()
    if params.logit_bias:
        processors.append(hf.SequenceBiasLogitsProcessor({(t,): v for t, v in params.logit_bias.items()}))
    if params.repetition_penalty != 1.0:
        processors.append(hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature != 1.0:
        processors.append(hf.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(hf.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(hf.TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(hf.MinPLogitsWarper(params.min_p))
    expected = processors(torch.tensor([seen + output] * 4), raw.double()).softmax(-1)

    positions = [SampleItem(request(i, seen, output, **settings), (), i) for i in range(4)]
    ours = adjust_and_truncate(raw, positions).softmax(-1)
    assert torch.equal(ours > 0, expected > 0)
    torch.testing.assert_close(ours.double(), expected, atol=1e-6, rtol=1e-5)


def adjust_and_truncate(raw, items):
    class Position:
        def __init__(self, item):
            self.request, self.drafts = item.request, item.drafts
            self.num_output_tokens = item.request.num_output_tokens

    positions = [Position(item) for item in items]
    one, two = adjustments(positions, raw), truncations(positions, raw)
    merged = Processing(
        *(getattr(one, n) for n in ("bias", "repetition", "penalties", "banned", "allowed")),
        *(getattr(two, n) for n in ("temperature", "top_k", "top_p", "min_p")),
    )
    return process_logits(raw.clone(), merged)


def test_presence_and_frequency_penalties():
    raw = logits_of(1)
    item = SampleItem(request(prompt=[1, 2], output=[5, 6, 5, 5], presence_penalty=0.5, frequency_penalty=0.25), (), 0)
    changed = adjust_and_truncate(raw, [item])
    expected = raw.clone()
    expected[0, 5] -= 0.5 + 3 * 0.25
    expected[0, 6] -= 0.5 + 1 * 0.25
    torch.testing.assert_close(changed, expected)  # the prompt's tokens are not in the output


def nucleus_reference(row, top_p):
    """The smallest set of best tokens that reaches top_p, in float64, ties with the last one included."""
    probabilities = row.double().softmax(-1).tolist()
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
    mass, kept = 0.0, []
    for i in order:
        kept.append(i)
        mass += probabilities[i]
        if mass >= top_p:
            break
    return {i for i in range(len(probabilities)) if probabilities[i] >= probabilities[kept[-1]]}


@pytest.mark.parametrize("vocab,scale", [(50, 3.0), (5000, 0.1), (5000, 4.0), (5000, 0.0)])
def test_nucleus_is_exact_beyond_the_first_candidates(vocab, scale):
    """A flat distribution needs more candidates than the first guess; an even one needs all."""
    raw = logits_of(5, vocab, seed=1, scale=scale)
    top_p = torch.tensor([0.1, 0.5, 0.9, 0.999, 1.0])
    floor = nucleus_floor(raw, top_p)
    assert floor[4].item() == -math.inf
    for row, p, low in zip(raw[:4], top_p.tolist(), floor):
        assert {i for i in range(vocab) if row[i] >= low} == nucleus_reference(row, p)


def test_ties_are_kept_whatever_their_order():
    """bf16 logits tie often: which of the equals survives must not hang on a sort."""
    row = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    kept = truncate_logits(row.clone(), Processing(top_k=torch.tensor([2]))) > -math.inf
    assert kept.tolist() == [[False, True, True, True, True, False]]
    kept = truncate_logits(row.clone(), Processing(top_p=torch.tensor([0.6]))) > -math.inf
    assert kept.tolist() == [[False, True, True, True, True, False]]


def test_processed_distribution_leaves_its_argument_and_masks():
    raw = logits_of(2)
    before = raw.clone()
    allowed = torch.zeros(2, V, dtype=torch.bool)
    allowed[:, 10:20] = True
    banned = Sparse(torch.tensor([1]), torch.tensor([12]), torch.zeros(1))
    result = processed_distribution(raw, Processing(allowed=allowed, banned=banned))
    assert torch.equal(raw, before)
    assert (result[:, :10] == 0).all() and (result[:, 20:] == 0).all() and result[1, 12] == 0 and result[0, 12] > 0
    torch.testing.assert_close(result.sum(-1), torch.ones(2))


# -- random numbers and drawing


def test_uniforms_are_uniform_independent_and_reproducible():
    keys = [request_key(seed, index) for seed in range(200) for index in range(5)]
    assert len(set(keys)) == 1000
    grid = np.concatenate([uniforms(keys, [p] * 1000) for p in range(100)])
    assert grid.min() >= 0 and grid.max() < 1
    counts = np.histogram(grid, bins=100, range=(0, 1))[0]
    assert ((counts - 1000.0) ** 2 / 1000.0).sum() < 148.2  # chi-square, 99 degrees of freedom, p = 0.001
    one, next_one = uniforms(keys, [7] * 1000), uniforms(keys, [8] * 1000)
    assert abs(np.corrcoef(one, next_one)[0, 1]) < 0.1
    assert abs(np.corrcoef(one, uniforms(keys, [7] * 1000, ACCEPT))[0, 1]) < 0.1
    assert np.array_equal(one, uniforms(keys, [7] * 1000, SAMPLE))


def test_draw_inverts_the_cumulative_distribution():
    probabilities = torch.tensor([[0.25, 0.0, 0.5, 0.25]]).expand(6, 4)
    uniform = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-52], dtype=torch.float64)
    assert draw(probabilities, uniform).tolist() == [0, 0, 2, 2, 3, 3]


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.6, "top_p": 0.9}, {"top_k": 3}, {"min_p": 0.2, "repetition_penalty": 1.3}]
)
def test_samples_follow_the_processed_distribution(settings):
    """Chi-square over 20,000 draws (one request at many positions would do as well; here: many requests)."""
    vocab, draws = 8, 20_000
    raw = logits_of(1, vocab, seed=5, scale=0.7)
    items = [SampleItem(request(i, prompt=[1, 2], **settings), (), i) for i in range(draws)]
    counts = Counter(result.tokens[0] for result in sample(raw.expand(draws, vocab), items))
    expected = adjust_and_truncate(raw, items[:1]).softmax(-1)[0] * draws
    assert all(expected[token] > 0 for token in counts)
    support = [i for i in range(vocab) if expected[i] > 0]
    statistic = sum((counts[i] - expected[i].item()) ** 2 / expected[i].item() for i in support)
    limit = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32}[len(support) - 1]  # p = 0.001
    assert statistic < limit


# -- whole batches

MIXED = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.8, "top_k": 10},
    {"temperature": 1.2, "top_p": 0.7},
    {"min_p": 0.1, "presence_penalty": 1.0},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 0.0, "logit_bias": {17: 50.0}},
    {"frequency_penalty": 0.5, "top_k": 4, "top_p": 0.9, "logprobs": 3},
    {"temperature": 0.0, "logprobs": 0},
    {"top_k": 1},
]


def test_a_row_does_not_depend_on_its_neighbours():
    raw = logits_of(len(MIXED))
    items = [SampleItem(request(i, output=(4, 4, 9), **MIXED[i]), (), i) for i in range(len(MIXED))]
    together = sample(raw, items)
    for item, result in zip(items, together):
        alone = sample(raw[item.first : item.first + 1], [item._replace(first=0)])[0]
        assert alone.tokens == result.tokens
        if result.logprobs is not None:
            assert [p.token_id for p in alone.logprobs] == [p.token_id for p in result.logprobs]
    backwards = sample(raw.flip(0), [item._replace(first=len(MIXED) - 1 - item.first) for item in reversed(items)])
    assert [r.tokens for r in reversed(backwards)] == [r.tokens for r in together]
    assert together[6].tokens == (17,)
    assert together[9].tokens == (int(raw[9].argmax()),)


def test_logits_are_left_as_they_are():
    raw = logits_of(len(MIXED))
    before = raw.clone()
    sample(raw, [SampleItem(request(i, output=(4,), **MIXED[i]), (), i) for i in range(len(MIXED))])
    assert torch.equal(raw, before)


def test_min_tokens_bans_the_end():
    raw = torch.zeros(2, V)
    raw[:, 9] = 10.0
    rows = [request(i, output=[1] * i, temperature=0.0, min_tokens=1) for i in range(2)]
    for row in rows:
        row.stop_ids = frozenset([9])
    results = sample(raw, [SampleItem(row, (), i) for i, row in enumerate(rows)])
    assert results[0].tokens != (9,) and results[1].tokens == (9,)


def test_drafts_are_accepted_exactly_as_far_as_plain_decoding_agrees():
    raw = logits_of(4)
    best = raw.argmax(-1).tolist()
    greedy = request(temperature=0.0)
    right = sample(raw, [SampleItem(greedy, tuple(best[:3]), 0)])[0]
    assert right.tokens == tuple(best)
    wrong = sample(raw, [SampleItem(greedy, (best[0], (best[1] + 1) % V, best[2]), 0)])[0]
    assert wrong.tokens == tuple(best[:2])


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.9, "top_p": 0.9},
        {"presence_penalty": 2.0, "temperature": 0.2},
        {"frequency_penalty": 2.0, "temperature": 0.0},
        {"repetition_penalty": 3.0, "temperature": 0.0},
        {"logit_bias": {9: 1.0}, "top_k": 8},
    ],
)
def test_sampled_tokens_are_the_same_with_any_drafts(settings):
    """Verification draws each position with that position's own number and the history that leads there."""
    raw = logits_of(1, scale=1.0).expand(4, V)  # the same favourites everywhere: only a penalty moves on from them
    plain, row = [], request(output=[5], **settings)
    for i in range(4):
        step = request(output=[5, *plain], **settings)
        plain.append(sample(raw[i : i + 1], [SampleItem(step, (), 0)])[0].tokens[0])
    assert sample(raw, [SampleItem(row, tuple(plain[:3]), 0)])[0].tokens == tuple(plain)
    if "penalty" in next(iter(settings)):
        assert len(set(plain)) > 1
    row = request(output=[5], **settings)
    other = (plain[0], (plain[1] + 1) % V, plain[2])
    assert sample(raw, [SampleItem(row, other, 0)])[0].tokens == tuple(plain[:2])


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}, {"top_p": 0.5, "top_k": 5}, {"logit_bias": {3: 1.0}}])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_non_finite_logits_fail_their_own_row_only(settings, poison):
    raw = logits_of(3)
    raw[1, 7] = poison
    results = sample(raw, [SampleItem(request(i, **settings), (), i) for i in range(3)])
    assert results[1].error is not None and "not finite" in str(results[1].error)
    assert results[0].tokens and results[2].tokens and not results[0].error and not results[2].error


def test_logprobs_are_the_models_own():
    raw = logits_of(3)
    expected = raw.double().log_softmax(-1)
    values = token_logprobs(raw, [4, int(raw[1].argmax()), 6], [2, 0, 5])
    for i, value in enumerate(values):
        assert value.logprob == pytest.approx(expected[i, value.token_id].item(), abs=1e-5)
        assert value.rank == 1 + int((raw[i] > raw[i, value.token_id]).sum())
        assert len(value.top) == [2, 0, 5][i]
        best = expected[i].topk(len(value.top)) if value.top else None
        assert [t for t, _ in value.top] == (best.indices.tolist() if best else [])
    hot = sample(raw, [SampleItem(request(0, temperature=5.0, logit_bias={3: 90.0}, logprobs=1), (), 0)])[0]
    assert hot.tokens == (3,)
    assert hot.logprobs[0].logprob == pytest.approx(expected[0, 3].item(), abs=1e-5)  # not of the biased distribution


def test_history_counts_incrementally_and_with_drafts():
    tokens = [1, 2, 2]
    history = History(tokens)
    tokens += [5, 6, 5]
    history.update(tokens)
    history.update(tokens)
    assert sorted(history.seen().tolist()) == [1, 2, 5, 6]
    assert dict(zip(*(a.tolist() for a in history.counts()))) == {5: 2, 6: 1}
    assert sorted(history.seen((6, 7, 7)).tolist()) == [1, 2, 5, 6, 7]
    assert dict(zip(*(a.tolist() for a in history.counts((6, 7, 7))))) == {5: 2, 6: 2, 7: 2}
    assert dict(zip(*(a.tolist() for a in history.counts()))) == {5: 2, 6: 1}
