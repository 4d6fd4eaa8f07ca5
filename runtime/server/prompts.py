"""Request bodies → token ids. Runs in the worker thread: a long prompt takes longer than an event loop may."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from typing import Any

from ...optimizer.errors import UsageError
from ..chat import check_ids, encode_text
from ..engine.sampling_params import SamplingParams
from .errors import ApiError
from .model import ServedModel
from .schemas import ChatMessage, ChatRequest, Tool

LONGEST_TOKEN = 512
"""Characters: a text of more than this many times the context cannot fit, and is not even tokenized."""


def completion_prompts(model: ServedModel, prompt: Any, add_special_tokens: bool = True) -> list[list[int]]:
    """Token ids of one prompt or many (text or ids). Raises UsageError, ApiError."""
    return [text_or_ids(model, item, add_special_tokens) for item in prompt_items(prompt)]


def prompt_items(prompt: Any) -> list[Any]:
    """The prompts of a body's `prompt`, each a text or token ids."""
    many = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    return prompt if many else [prompt]


def text_or_ids(model: ServedModel, item: Any, add_special_tokens: bool = True) -> list[int]:
    if isinstance(item, str):
        _check_characters(model, len(item))
        item = encode_text(model.tokenizer, item, add_special_tokens)
    else:
        check_ids(item, model.vocab_size)
    if not item:
        raise UsageError("the prompt has no tokens", "prompt")
    return list(item)


def chat_prompt(model: ServedModel, body: ChatRequest) -> list[int]:
    """Token ids of a chat, by the tokenizer's template."""
    tools = None if body.tool_choice == "none" else body.tools
    ids = render_messages(
        model, body.messages, tools, body.add_generation_prompt is not False, body.chat_template_kwargs
    )
    if not ids:
        raise UsageError("the prompt has no tokens", "messages")
    return ids


def render_messages(
    model: ServedModel,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] | None = None,
    add_generation_prompt: bool = True,
    variables: dict[str, Any] | None = None,
) -> list[int]:
    """Raises UsageError where the template is absent, refuses the messages, or has no place for tools."""
    tokenizer = model.tokenizer
    if not tokenizer.chat_template:
        raise UsageError("the model has no chat template", "messages", "Use /v1/completions.")
    if tools and not model.tool_template:
        raise UsageError("the model's chat template has no place for tools", "tools", "Leave them out.")
    reserved = {*inspect.signature(tokenizer.apply_chat_template).parameters, "messages"}
    if wrong := sorted(reserved & set(variables or ())):
        raise UsageError(f"{wrong[0]!r} is no variable to set", "chat_template_kwargs")
    plain = [_plain(message) for message in messages]
    _check_characters(model, sum(len(str(message["content"])) for message in plain))
    try:
        text = tokenizer.apply_chat_template(
            plain,
            tools=[tool.model_dump(exclude_none=True) for tool in tools] if tools else None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **(variables or {}),
        )
    except Exception as error:  # templates raise whatever they like
        raise UsageError(f"the chat template refuses these messages ({error})", "messages") from error
    return encode_text(tokenizer, str(text), add_special_tokens=False)


def fit(model: ServedModel, prompt: Sequence[int], params: SamplingParams) -> SamplingParams:
    """The params with a limit that keeps prompt and answer inside the context.

    Raises ApiError `context_length_exceeded` where they ask for more than fits.
    """
    limit, wanted = model.context_length, params.max_new_tokens
    if len(prompt) + (1 if wanted is None else wanted) > limit:
        asked = "" if wanted is None else f" and {wanted} in the completion"
        raise ApiError(
            400,
            f"This model's maximum context length is {limit} tokens. You requested {len(prompt)} tokens in the prompt"
            f"{asked}. Shorten the prompt or the completion.",
            code="context_length_exceeded",
            param="messages" if wanted is None else "max_tokens",
            reason="context_length_exceeded",
        )
    if wanted is None:
        if params.min_tokens > limit - len(prompt):
            raise UsageError(f"min_tokens={params.min_tokens} does not fit the context of {limit} tokens", "min_tokens")
        return params.model_copy(update={"max_new_tokens": limit - len(prompt)})
    return params


def _check_characters(model: ServedModel, length: int) -> None:
    if length > LONGEST_TOKEN * model.context_length:
        raise ApiError(
            400,
            f"This model's maximum context length is {model.context_length} tokens; a prompt of {length} characters is "
            "longer. Shorten it.",
            code="context_length_exceeded",
            param="prompt",
            reason="context_length_exceeded",
        )


def _plain(message: ChatMessage) -> dict[str, Any]:
    """The message as templates expect it: content as one text, arguments of calls as objects."""
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    plain: dict[str, Any] = {"role": message.role, "content": content or ""}
    plain.update({k: v for k in ("name", "tool_call_id") if (v := getattr(message, k)) is not None})
    if message.tool_calls:
        plain["tool_calls"] = [
            _call(call.function.name, call.function.arguments, call.id) for call in message.tool_calls
        ]
    return plain


def _call(name: str, arguments: str, call_id: str | None) -> dict[str, Any]:
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        parsed = arguments
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": parsed}}
