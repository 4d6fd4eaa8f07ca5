"""Prompts whose lengths hold, prefixes that are shared, files that are wrong."""

from __future__ import annotations

import pytest
from llmopt.evaluation.bench.lengths import Lengths
from llmopt.evaluation.bench.loads import LoadSettings, cases_of
from llmopt.evaluation.bench.prompts import RandomPrompts, read_requests
from llmopt.optimizer.errors import RunError, UsageError

from .conftest import build_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def with_bos(tokenizer):
    """The same tokenizer, putting BOS before every text."""
    from copy import deepcopy

    from tokenizers.processors import TemplateProcessing

    other = deepcopy(tokenizer)
    other.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return other


@pytest.mark.parametrize("bos", [False, True])
def test_lengths_hold_and_prefixes_are_shared(tokenizer, bos):
    tokenizer = with_bos(tokenizer) if bos else tokenizer
    assert (tokenizer.encode("x")[0] == 0) is bos
    made = RandomPrompts(tokenizer, seed=1).make(
        12, Lengths(3, 40), Lengths(5, 9), round_number=2, prefix_len=16, num_prefixes=3
    )
    assert all(len(tokenizer.encode(one.prompt)) == one.prompt_len for one in made)
    assert all(19 <= one.prompt_len <= 56 and 5 <= one.output_len <= 9 for one in made)
    assert len({one.prompt for one in made}) == 12 and len({one.prompt_len for one in made}) > 3
    for first, other in zip(made, made[3:]):
        ids, more = tokenizer.encode(first.prompt), tokenizer.encode(other.prompt)
        assert ids[:14] == more[:14]
    assert tokenizer.encode(made[0].prompt)[:14] != tokenizer.encode(made[1].prompt)[:14]


def test_seeds_and_rounds(tokenizer):
    prompts = RandomPrompts(tokenizer, seed=1)
    first = prompts.make(3, Lengths(20, 20), Lengths(4, 4), round_number=0)
    assert first == RandomPrompts(tokenizer, seed=1).make(3, Lengths(20, 20), Lengths(4, 4), round_number=0)
    assert first != prompts.make(3, Lengths(20, 20), Lengths(4, 4), round_number=1)
    assert first != RandomPrompts(tokenizer, seed=2).make(3, Lengths(20, 20), Lengths(4, 4), round_number=0)


def test_a_length_that_no_text_has(tokenizer):
    with pytest.raises(RunError, match="no random text of 1 tokens"):
        RandomPrompts(with_bos(tokenizer)).make(1, Lengths(1, 1), Lengths(1, 1))


def test_files(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "a", "output_len": 3}\n\n{"messages": [{"role": "user", "content": "b"}]}\n{"prompt": "c"}\n'
    )
    made = read_requests(path, Lengths(7, 7))
    assert [one.output_len for one in made] == [3, 7, 7]
    assert made[0].prompt == "a" and made[1].prompt == [{"role": "user", "content": "b"}]
    [case] = cases_of("throughput", LoadSettings(prompts=path, num_prompts=2), None)
    assert [[one.prompt for one in case.make(n).requests] for n in (0, 1)] == [
        ["a", made[1].prompt],
        ["c", "a"],
    ]
    [case] = cases_of("throughput", LoadSettings(prompts=path, num_prompts=None), None)
    assert len(case.make(0).requests) == 3


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", ":1: is not JSON"),
        ("\n[]", ":2: is not a JSON object"),
        ('{"text": "a"}', "neither a `prompt`"),
        ('{"prompt": ""}', "neither a `prompt`"),
        ('{"messages": [{"role": "user"}]}', "neither a `prompt`"),
        ('{"prompt": "a", "output_len": 0}', "output_len is 0"),
        ('{"prompt": "a", "output_len": true}', "output_len is True"),
        ("", "holds no prompt"),
    ],
)
def test_files_that_are_wrong(tmp_path, text, what):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_requests(path, Lengths(7, 7))
    assert what in str(caught.value)
    with pytest.raises(UsageError, match="cannot be read"):
        read_requests(tmp_path / "absent", Lengths(1, 1))
