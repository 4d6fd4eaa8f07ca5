"""Prompts of every form → token ids: text, chat messages or token ids, one or many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..optimizer.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

Message = dict[str, Any]
"""One chat message: at least `role` and `content`."""


def split_prompts(prompts: Any) -> tuple[list[Any], bool]:
    """The prompts as a list, and whether the caller gave just one.

    A str, a list of ints and a list of dicts are one prompt; any other list holds prompts.
    """
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if isinstance(prompts, str):
        return [prompts], True
    if isinstance(prompts, dict):
        raise UsageError("a chat is a list of messages, not one message", "prompt", "Wrap it: [{'role': …}].")
    if not isinstance(prompts, Iterable):
        raise UsageError(f"a prompt cannot be a {type(prompts).__name__}", "prompt", "Give text, a chat or token ids.")
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items], True
    if items and all(isinstance(item, dict) for item in items):
        return [items], True
    return items, False


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Any, where: str = "prompt") -> list[int]:
    """Token ids of one prompt (text, token ids or a chat); never empty.

    Text gets the special tokens that the tokenizer itself adds; a BOS that the text already spells is not doubled. A
    chat goes through the chat template, which writes its own special tokens, and ends where the answer starts. An empty
    text becomes BOS alone. Raises UsageError for what is none of the three, or has no tokens.
    """
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if isinstance(prompt, str):
        ids = encode_text(tokenizer, prompt)
    elif isinstance(prompt, Sequence) and prompt and all(isinstance(item, dict) for item in prompt):
        ids = encode_text(tokenizer, render_chat(tokenizer, prompt, where), add_special_tokens=False)
    elif isinstance(prompt, Sequence) and all(isinstance(i, int) and not isinstance(i, bool) for i in prompt):
        ids = list(prompt)
    else:
        kind = type(prompt).__name__
        raise UsageError(f"a {kind} of this content is no prompt", where, "Give text, a list of messages or token ids.")
    if not ids:
        raise UsageError("the prompt is empty", where, "Give at least one token.")
    return ids


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text. An empty one is BOS alone where the tokenizer has BOS.

    Raises UsageError where the text has lone surrogates, as bytes that are not UTF-8 leave them.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError("the text is not valid Unicode (bytes that are not UTF-8?)", "prompt") from None
    ids = list(tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])
    bos, bos_id = tokenizer.bos_token, tokenizer.bos_token_id
    if bos and text.startswith(bos) and len(ids) > 1 and ids[0] == ids[1] == bos_id and not text.startswith(bos + bos):
        ids = ids[1:]
    if not ids and bos_id is not None:
        ids = [bos_id]
    return ids


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], where: str = "prompt") -> str:
    """The chat template's text for `messages`, ending where the answer starts. Raises UsageError on a bad chat."""
    for position, message in enumerate(messages):
        if "role" not in message or "content" not in message:
            raise UsageError(f"message {position} lacks 'role' or 'content'", where)
    if not tokenizer.chat_template:
        raise UsageError(
            "the tokenizer has no chat template",
            where,
            "Give the prompt as text in the format the model was trained on.",
        )
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))
    except Exception as error:  # templates raise whatever they like
        raise UsageError(f"the chat template refuses these messages ({error})", where) from error


def context_length(config: PreTrainedConfig) -> int | None:
    """Most tokens (prompt and output together) of one sequence, from the model's config; None where it names none."""
    text = config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def check_length(num_prompt: int, max_new_tokens: int | None, limit: int | None, where: str = "prompt") -> None:
    """Raise UsageError where prompt and output together do not fit the context."""
    if limit is None:
        return
    room = limit - num_prompt
    if room < (1 if max_new_tokens is None else max_new_tokens):
        raise UsageError(
            f"the prompt has {num_prompt:,} tokens and {max_new_tokens or 'some'} new ones are asked for, "
            f"the model's context is {limit:,}",
            where,
            f"Shorten the prompt or ask for at most {max(room, 0):,} new tokens.",
        )


def check_ids(ids: Sequence[int], vocab_size: int, where: str = "prompt") -> None:
    """Raise UsageError for a token id that the model does not have."""
    wrong = next((i for i in ids if not 0 <= i < vocab_size), None)
    if wrong is not None:
        raise UsageError(f"token id {wrong} is outside the vocabulary (0 … {vocab_size - 1})", where)
