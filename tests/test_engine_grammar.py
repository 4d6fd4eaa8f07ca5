"""Structured output through llguidance: the text always fits, also with drafts, n and preemption."""

import builtins
import json
import re

import pytest
from llmopt.optimizer.errors import MissingDependency, UsageError
from llmopt.runtime.engine.engine import Engine
from llmopt.runtime.engine.fake_runner import FakeRunner
from llmopt.runtime.engine.grammar import GrammarCompiler
from llmopt.runtime.engine.loop import collect_outputs
from llmopt.runtime.engine.outputs import join_outputs
from llmopt.runtime.engine.sampling_params import SamplingParams
from llmopt.runtime.engine.scheduler_config import SchedulerConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EOS = 256
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer():
    """One byte a token, and an end of text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({**{c: i for i, c in enumerate(letters)}, "<eos>": EOS}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", clean_up_tokenization_spaces=False)


@pytest.fixture(scope="module", autouse=True)
def library():
    pytest.importorskip("llguidance")


def make(tokenizer, num_blocks=64, drafter=None):
    runner = FakeRunner(num_blocks=num_blocks, vocab_size=260, max_model_len=128)
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
    return Engine(runner, tokenizer, scheduler=scheduler, eos_token_ids=[EOS], drafter=drafter)


def run(engine, *params):
    names = [engine.add_request([1, 2, 3], p) for p in params]
    done = join_outputs(collect_outputs(engine, 2000))
    return [done[name, i] for name, p in zip(names, params) for i in range(p.n)]


def test_json_schema(tokenizer):
    """Random logits and the mask alone: without it the text would be noise."""
    params = [SamplingParams(json_schema=SCHEMA, seed=i, max_new_tokens=120) for i in range(6)]
    ended = [d for d in run(make(tokenizer), *params) if d.finish_reason == "stop"]
    assert len(ended) >= 3  # others ran into the length inside white space
    for done in ended:
        value = json.loads(done.text)
        assert set(value) == {"name", "age"} and 0 <= value["age"] <= 99 and len(value["name"]) <= 5


def test_regex_in_a_mixed_batch(tokenizer):
    free, bound, greedy = run(
        make(tokenizer),
        SamplingParams(seed=1, max_new_tokens=20),
        SamplingParams(seed=1, regex=r"[a-f]{3}-[0-9]{2}", n=1),
        SamplingParams(temperature=0, regex=r"(yes|no), 日本"),
    )
    assert re.fullmatch(r"[a-f]{3}-[0-9]{2}", bound.text) and bound.finish_reason == "stop"
    assert greedy.text in ("yes, 日本", "no, 日本") and len(greedy.token_ids) > len(greedy.text)
    [alone] = run(make(tokenizer), SamplingParams(seed=1, max_new_tokens=20))
    assert free.token_ids == alone.token_ids


def test_each_of_n_sequences_has_its_own_place(tokenizer):
    sequences = run(make(tokenizer), SamplingParams(seed=2, regex="[a-z]{6}", n=5))
    assert all(re.fullmatch("[a-z]{6}", s.text) for s in sequences) and len({s.text for s in sequences}) == 5


def test_preemption_keeps_the_place(tokenizer):
    engine = make(tokenizer, num_blocks=11)
    params = [SamplingParams(seed=i, regex="[a-z]{20}") for i in range(4)]
    results = run(engine, *params)
    assert engine.metrics().num_preemptions_total > 0
    assert [d.text for d in results] == [d.text for p in params for d in run(make(tokenizer), p)]


class Guesser:
    """Drafts that follow the grammar, break it, and end it early."""

    def propose(self, requests):
        return [[[97, 98, 99][r.num_output_tokens % 3]] * 2 + [EOS, 5] for r in requests]

    def observe(self, request, num_drafts, num_accepted): ...

    def forget(self, request): ...


def test_drafts_change_nothing(tokenizer):
    params = [SamplingParams(seed=i, regex="[a-d]{2,12}", temperature=0.7) for i in range(12)]
    plain, fast = make(tokenizer), make(tokenizer, drafter=Guesser())
    expected, got = run(plain, *params), run(fast, *params)
    assert [d.text for d in got] == [d.text for d in expected]
    assert [d.finish_reason for d in got] == ["stop"] * 12
    assert fast.metrics().spec_decode_num_draft_tokens_total > 20


def test_place_can_be_rolled_back(tokenizer):
    grammar = GrammarCompiler(tokenizer, 260, [EOS]).compile(SamplingParams(regex="ab|cd"))
    a, b, c, d = (tokenizer.encode(letter)[0] for letter in "abcd")

    def allowed(*drafts):
        return set(grammar.allowed_tokens(drafts, 260).nonzero().squeeze(1).tolist())

    assert allowed() == {a, c} and allowed(a) == {b} and allowed(c) == {d} and allowed() == {a, c}
    assert len(allowed(b)) == 260  # unreachable, hence open
    grammar.advance([a])
    assert allowed() == {b}
    grammar.rollback(1)
    grammar.advance([c, d])
    assert grammar.finished
    grammar.rollback(2)
    assert allowed() == {a, c} and not grammar.finished


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"regex": "(["}, "sampling parameter regex"),
        ({"json_schema": {"type": "nonsense"}}, "sampling parameter json_schema"),
        ({"json_schema": "{"}, "sampling parameter json_schema"),
    ],
)
def test_what_is_not_valid_is_refused_at_once(tokenizer, settings, message):
    engine = make(tokenizer)
    with pytest.raises(UsageError, match=message):
        engine.add_request([1], SamplingParams(**settings))
    assert not engine.has_work


def test_without_the_library_the_extra_is_named(tokenizer, monkeypatch):
    original = builtins.__import__

    def absent(name, *args, **kwargs):
        if name.startswith("llguidance"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(MissingDependency, match=r"llmopt\[grammar\]"):
        make(tokenizer).add_request([1], SamplingParams(regex="a"))
