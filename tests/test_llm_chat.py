"""Prompts of every form become the right token ids."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from llmopt.optimizer.errors import UsageError
from llmopt.runtime.chat import check_length, encode_prompt, split_prompts
from transformers import AutoTokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path):
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def adding_bos(tiny_model: Path):
    """The same tokenizer, which now starts every text with BOS."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", pair=None, special_tokens=[("<bos>", tokenizer.bos_token_id)]
    )
    return tokenizer


CHAT = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("prompts", "count", "single"),
    [
        ("text", 1, True),
        (["a", "b"], 2, False),
        (["a"], 1, False),
        ([1, 2, 3], 1, True),
        ([[1, 2], [3]], 2, False),
        (CHAT, 1, True),
        ([CHAT, CHAT], 2, False),
        (["text", CHAT, [5]], 3, False),
        (torch.tensor([1, 2]), 1, True),
        (torch.tensor([[1, 2], [3, 4]]), 2, False),
        ([], 0, False),
    ],
)
def test_one_prompt_or_many(prompts, count, single):
    items, one = split_prompts(prompts)
    assert (len(items), one) == (count, single)


def test_text_gets_what_the_tokenizer_adds(tokenizer, adding_bos):
    plain = tokenizer("Hello there")["input_ids"]
    assert encode_prompt(tokenizer, "Hello there") == plain
    assert plain[0] != tokenizer.bos_token_id
    assert encode_prompt(adding_bos, "Hello there") == [adding_bos.bos_token_id, *plain]


def test_bos_is_never_doubled(adding_bos):
    bos = adding_bos.bos_token_id
    written = encode_prompt(adding_bos, "<bos>Hello")
    assert written[0] == bos
    assert written[1] != bos
    assert encode_prompt(adding_bos, "<bos><bos>Hello")[:2] == [bos, bos]
    adding_bos.chat_template = "<bos>" + adding_bos.chat_template
    chat = encode_prompt(adding_bos, CHAT)
    assert chat[0] == bos
    assert chat[1] != bos


def test_chat_ends_where_the_answer_starts(tokenizer):
    ids = encode_prompt(tokenizer, CHAT)
    assert tokenizer.decode(ids).endswith("Hello<eos><|assistant|>")


def test_empty_text_is_bos(tokenizer):
    assert encode_prompt(tokenizer, "") == [tokenizer.bos_token_id]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "empty"),
        (3.5, "float"),
        ([1, "a"], "no prompt"),
        ([{"role": "user"}], "message 0 lacks"),
        ([True, False], "no prompt"),
    ],
)
def test_what_is_no_prompt(tokenizer, prompt, words):
    with pytest.raises(UsageError, match=words):
        encode_prompt(tokenizer, prompt)


def test_one_message_is_no_chat():
    with pytest.raises(UsageError, match="list of messages"):
        split_prompts({"role": "user", "content": "x"})


def test_no_template_is_an_error(tiny_model: Path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = None
    with pytest.raises(UsageError, match="no chat template"):
        encode_prompt(tokenizer, CHAT)


def test_template_that_raises_is_a_usage_error(tiny_model: Path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UsageError, match="roles must alternate"):
        encode_prompt(tokenizer, CHAT)


def test_context_limit():
    check_length(10, 6, 16)
    check_length(15, None, 16)
    check_length(100, 100, None)
    with pytest.raises(UsageError, match="at most 5 new tokens"):
        check_length(11, 6, 16)
    with pytest.raises(UsageError, match="context is 16"):
        check_length(16, None, 16)
