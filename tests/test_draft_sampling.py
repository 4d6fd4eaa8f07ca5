"""Sampling with drafts: the joint distribution of the first three tokens is the model's, and a verifier that cheats is
found out by the same test."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from llmopt.runtime.engine import sampler
from llmopt.runtime.engine.draft_model import SecondModel
from llmopt.runtime.engine.draft_speculator import Speculator
from llmopt.runtime.engine.engine import Engine
from llmopt.runtime.engine.sampling_params import SamplingParams
from llmopt.runtime.engine.scheduler_config import SchedulerConfig

V, DRAWS, LENGTH, PROMPT = 4, 20_000, 3, (1, 2)
FEW = 6_000
"""Draws that suffice to catch a cheat."""
SETTINGS = {
    "plain": {},
    "temperature and top-p": {"temperature": 0.7, "top_p": 0.85},
    "penalties": {"presence_penalty": 0.8, "frequency_penalty": 0.4, "temperature": 1.2},
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors this small gain nothing from more, and threads that wait for busy neighbours cost milliseconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Bigrams:
    """A runner whose logits depend on the last token; `seed` makes another model."""

    block_size, num_blocks, vocab_size, max_model_len = 8, 4096, V, 8

    def __init__(self, seed=0):
        self.table = torch.randn(V, V, generator=torch.Generator().manual_seed(seed)) * 1.2

    def execute(self, plan):
        last = [token for row in plan.rows for token in row.token_ids[len(row.token_ids) - row.num_logits :]]
        return self.table[torch.tensor(last, dtype=torch.int64)]

    def close(self): ...


class Fixed:
    """Drafts that do not hang on chance: the same two tokens whatever came before."""

    def propose(self, requests):
        return [(3, 1)[: LENGTH - 1 - r.num_output_tokens] for r in requests]

    def observe(self, request, num_drafts, num_accepted): ...

    def forget(self, request): ...


def draw(settings, drafter, draws=DRAWS):
    """Counts of the three tokens over all draws, and how many drafts were accepted."""
    runner, counts = Bigrams(), Counter()
    config = SchedulerConfig(max_num_seqs=2000, max_num_batched_tokens=10**6, prefix_caching=False)
    engine = Engine(runner, scheduler=config, drafter=drafter)
    params = SamplingParams(max_new_tokens=LENGTH, n=100, **settings)
    for seed in range(draws // 100):
        engine.add_request(PROMPT, params.model_copy(update={"seed": seed}))
    texts = {}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            texts.setdefault((output.request_id, output.index), []).extend(output.new_token_ids)
    counts.update(tuple(text) for text in texts.values())
    return counts, engine.metrics().spec_decode_num_accepted_tokens_total


def probabilities(logits, output, settings):
    """The distribution after `output` in float64, straight from the definitions."""
    logits = logits.double().numpy().copy()
    for token in set(output):
        logits[token] -= settings.get("presence_penalty", 0.0) + settings.get("frequency_penalty", 0.0) * output.count(
            token
        )
    weights = np.exp(logits / settings.get("temperature", 1.0))
    weights /= weights.sum()
    order, kept, mass = np.argsort(-weights), [], 0.0
    for token in order:
        kept.append(token)
        mass += weights[token]
        if mass >= settings.get("top_p", 1.0):
            break
    out = np.zeros(V)
    out[kept] = weights[kept]
    return out / out.sum()


def p_value(counts, settings):
    """Chi-square over all triples that can be."""
    table, expected = Bigrams().table, {}
    for text in product(range(V), repeat=LENGTH):
        chance = 1.0
        for i, token in enumerate(text):
            chance *= probabilities(table[(*PROMPT, *text)[i + 1]], text[:i], settings)[token]
        expected[text] = chance * counts.total()
    assert all(expected[text] > 0 for text in counts)
    cells = [(counts[text], value) for text, value in expected.items() if value >= 5]
    rest = [sum(counts[t] for t, v in expected.items() if v < 5), sum(v for v in expected.values() if v < 5)]
    if rest[1] >= 5:
        cells.append(tuple(rest))
    statistic = sum((seen - value) ** 2 / value for seen, value in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item()


@pytest.mark.parametrize("name", SETTINGS)
def test_the_joint_distribution_is_the_models(name):
    counts, accepted = draw(SETTINGS[name], Fixed())
    assert accepted > DRAWS / 10
    assert p_value(counts, SETTINGS[name]) > 0.01


def test_the_same_with_drafts_of_a_model():
    """It draws with the position's own random numbers; and has more accepted than the certain drafts above."""
    settings = SETTINGS["temperature and top-p"]
    drafter = Speculator(SecondModel(Bigrams(seed=1), V, 10**6), num_tokens=2)
    counts, accepted = draw(settings, drafter)
    assert accepted > DRAWS / 4
    assert p_value(counts, settings) > 0.01


def lenient(item, tokens):
    """Lets one rejected draft in twelve through."""
    chosen = list(tokens)
    for i, draft in enumerate(item.drafts):
        if chosen[i] != draft and (item.request.key >> (3 * i)) % 12 == 0:
            chosen[i] = draft
    return ORIGINAL(item, chosen)


def hasty(item, tokens):
    """Draws anew from the whole distribution where a draft is rejected, in the place of what is left without it."""
    result = ORIGINAL(item, tokens)
    place = len(result.tokens) - 1
    if place < len(item.drafts):
        table = Bigrams().table
        before = (*item.request.token_ids, *result.tokens)[-2]
        chances = table[before].softmax(-1).cumsum(-1)
        fresh = int(torch.searchsorted(chances, torch.rand(1, generator=NUMBERS)).clamp(max=V - 1))
        result.tokens = (*result.tokens[:-1], fresh)
    return result


ORIGINAL = sampler._accept
NUMBERS = torch.Generator().manual_seed(0)


@pytest.mark.parametrize("broken", [lenient, hasty])
def test_a_broken_verifier_is_caught(monkeypatch, broken):
    monkeypatch.setattr(sampler, "_accept", broken)
    counts, _ = draw({}, Fixed(), FEW)
    assert p_value(counts, {}) < 1e-6


def test_penalties_that_forget_the_drafts_are_caught(monkeypatch):
    """A verifier that penalizes by the accepted text alone, without the drafts before the position."""
    settings = SETTINGS["penalties"]
    penalties = sampler._penalties
    monkeypatch.setattr(sampler, "_penalties", lambda position: penalties(position._replace(drafts=())))
    counts, _ = draw(settings, Fixed(), FEW)
    assert p_value(counts, settings) < 1e-6
