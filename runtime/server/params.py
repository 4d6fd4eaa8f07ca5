"""Request bodies → `SamplingParams`."""

from __future__ import annotations

from typing import Any

from ..engine.sampling_params import SamplingParams
from .schemas import ChatRequest, CompletionRequest, GenerateRequest, NamedToolChoice, Sampling, Tool

ANY_OBJECT: dict[str, Any] = {"type": "object"}
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
STANDARD = ("temperature", "top_p", "n", "seed", "stop", "presence_penalty", "frequency_penalty", "logit_bias")
BEYOND = ("top_k", "min_p", "repetition_penalty", "stop_token_ids", "min_tokens", "ignore_eos", "skip_special_tokens")
SAME_NAME = (*STANDARD, *BEYOND, "regex")


def completion_params(body: CompletionRequest) -> SamplingParams:
    """Raises UsageError for values that contradict each other."""
    values = _shared(body)
    values["max_new_tokens"] = 16 if body.max_tokens is None else body.max_tokens
    values["logprobs"] = body.logprobs
    if body.echo and body.logprobs is not None:
        values["prompt_logprobs"] = body.logprobs
    return SamplingParams(**values)


def chat_params(body: ChatRequest) -> SamplingParams:
    """Raises UsageError for values that contradict each other. Without a limit the answer may fill the context."""
    values = _shared(body)
    values["max_new_tokens"] = body.max_completion_tokens or body.max_tokens
    if body.logprobs:
        values["logprobs"] = body.top_logprobs or 0
    forced = forced_tools(body)
    if forced:
        values["json_schema"] = call_schema(forced)
    return SamplingParams(**values)


def generate_params(body: GenerateRequest) -> SamplingParams:
    return SamplingParams(**body.model_dump(exclude={"prompt"}))


def forced_tools(body: ChatRequest) -> list[Tool]:
    """The tools of which the answer must call one; none where it may be text."""
    if isinstance(body.tool_choice, NamedToolChoice):
        name = body.tool_choice.function.name
        return [tool for tool in body.tools or () if tool.function.name == name]
    return list(body.tools or ()) if body.tool_choice == "required" else []


def call_schema(tools: list[Tool]) -> dict[str, Any]:
    """JSON schema of a call of one of the tools: `{"name": …, "arguments": {…}}`."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": tool.function.parameters or NO_ARGUMENTS,
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _shared(body: Sampling) -> dict[str, Any]:
    values = {name: value for name in SAME_NAME if (value := getattr(body, name)) is not None}
    if body.include_stop_str_in_output is not None:
        values["include_stop_in_output"] = body.include_stop_str_in_output
    form = body.response_format
    if form is not None and form.type == "json_object":
        values["json_schema"] = ANY_OBJECT
    elif form is not None and form.json_schema is not None:
        values["json_schema"] = form.json_schema.schema_
    return values
