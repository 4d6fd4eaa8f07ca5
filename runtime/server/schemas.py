"""Request bodies. A field that is not listed, or that cannot be honoured, is refused: nothing is silently ignored.

Accepted without effect, because they ask for nothing that changes an answer here: `user`, `safety_identifier`,
`prompt_cache_key`, `metadata`, `store` (false), `service_tier` (auto, default), `parallel_tool_calls` (true).
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, model_validator
from pydantic_core import PydanticCustomError

from ..engine.sampling_params import MAX_LOGPROBS

MAX_STOPS, MAX_STOP_LENGTH = 16, 1024
MAX_METADATA = 16
"""Entries, as in OpenAI's API."""
MAX_BIAS = 2**19
"""Entries: more than any vocabulary has tokens, fewer than a body can hold."""
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


Whole = Annotated[int, Strict()]
"""JSON's true and "1" are no numbers, though pydantic would make them such."""
Real = Annotated[float, Strict()]
Flag = Annotated[bool, Strict()]
TokenIds = Annotated[list[Whole], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
"""Lists end at their first fault, here and below: a body of a million faults would cost gigabytes of reports."""


def _bias(value: Any) -> Any:
    """Token ids (JSON has them as text) and numbers, up to the first fault."""
    if not isinstance(value, dict):
        return value
    _at_most(value, MAX_BIAS)
    found: dict[int, float] = {}
    for key, number in value.items():
        if not (isinstance(key, str) and len(key) <= 20 and key.removeprefix("-").isdecimal() and key.isascii()):
            raise ValueError(f"{str(key)[:50]!r} is no token id")
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not -100 <= number <= 100:
            raise ValueError(f"the bias of token {key} is not a number from -100 to 100")
        found[int(key)] = float(number)
    return found


def _metadata(value: Any) -> Any:
    return _at_most(value, MAX_METADATA) if isinstance(value, dict) else value


def _at_most(value: Collection[Any], limit: int) -> Any:
    if len(value) > limit:
        raise ValueError(f"it has {len(value)} entries, the limit is {limit}")
    return value


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        """Refuse the first unknown key alone: pydantic would report each of them."""
        for key in value if isinstance(value, dict) else ():
            if key not in _names(cls):
                name = str(key)[:200].encode("utf-8", "replace").decode()  # half characters are none to pydantic
                raise PydanticCustomError("unknown_parameter", "unknown parameter: {name}", {"name": name})
        return value


@cache
def _names(kind: type[Body]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


class StreamOptions(Body):
    include_usage: Flag = Field(False, description="A last chunk without choices carries the usage.")


class JsonSchema(Body):
    name: str = Field("schema", max_length=256)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: Flag | None = Field(None, description="The schema is enforced, whatever this says.")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is given with type json_schema, and only then")
        return self


class Sampling(Body):
    """What OpenAI's two endpoints share, and extensions (`top_k` … `deadline`)."""

    model: str | None = Field(None, max_length=512, description="One of /v1/models; may be left out.")
    temperature: Real | None = Field(None, ge=0, le=2, description="0 is greedy. Default 1.")
    top_p: Real | None = Field(None, gt=0, le=1)
    n: Whole | None = Field(None, ge=1, le=128)
    seed: Whole | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    presence_penalty: Real | None = Field(None, ge=-2, le=2)
    frequency_penalty: Real | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[int, Annotated[Real, Field(ge=-100, le=100)]] | None, BeforeValidator(_bias)] = Field(
        None, description="Token id → added to its logit."
    )
    stream: Flag | None = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    top_k: Whole | None = Field(None, ge=-1, lt=2**31)
    min_p: Real | None = Field(None, ge=0, le=1)
    repetition_penalty: Real | None = Field(None, ge=0.01, le=10)
    stop_token_ids: Annotated[list[Whole], Field(max_length=128, fail_fast=True)] | None = None
    min_tokens: Whole | None = Field(None, ge=0)
    ignore_eos: Flag | None = None
    skip_special_tokens: Flag | None = None
    include_stop_str_in_output: Flag | None = None
    regex: str | None = Field(None, max_length=10_000, description="The text matches this regular expression.")
    return_token_ids: Flag | None = Field(None, description="Choices carry `token_ids`.")
    deadline: Real | None = Field(
        None, gt=0, le=86_400, description="Seconds from arrival; then the answer ends with finish_reason deadline."
    )

    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: Annotated[dict[str, str] | None, BeforeValidator(_metadata)] = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is given without stream")
        if self.regex is not None and self.response_format is not None and self.response_format.type != "text":
            raise ValueError("regex and response_format exclude each other")
        return self


class CompletionRequest(Sampling):
    """Body of `POST /v1/completions`."""

    prompt: str | TokenIds | Texts | Annotated[list[TokenIds], Field(fail_fast=True)] = Field(
        description="Text or token ids, one or many."
    )
    max_tokens: Whole | None = Field(None, ge=0, description="Default 16; 0 with `echo` scores the prompt.")
    logprobs: Whole | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: Flag | None = False
    best_of: Whole | None = Field(None, ge=1, description="Only as many as `n`.")
    suffix: Literal[""] | None = Field(None, description="Not supported.")
    add_special_tokens: Flag | None = Field(None, description="Of a text prompt. Default true.")

    @model_validator(mode="after")
    def _possible(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of other than n is not supported")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens=0 is possible with echo only")
        if self.echo and self.logprobs is not None and self.stream:
            raise ValueError("echo with logprobs cannot be streamed")
        return self


class TextPart(Body):
    type: Literal["text"]
    text: str


class ToolCallFunction(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: ToolCallFunction


class ChatMessage(Body):
    role: str = Field(min_length=1, max_length=64)
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    audio: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: None = None
    """The last three as clients send them back in an answer of ours: empty."""

    @model_validator(mode="after")
    def _says_something(self) -> ChatMessage:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message needs content or tool_calls")
        return self


class ToolFunction(Body):
    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None


class Tool(Body):
    type: Literal["function"]
    function: ToolFunction


class NamedFunction(Body):
    name: str


class NamedToolChoice(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Sampling):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(min_length=1, max_length=4096)
    max_tokens: Whole | None = Field(None, ge=1, description="Default: until the context is full.")
    max_completion_tokens: Whole | None = Field(None, ge=1)
    logprobs: Flag | None = False
    top_logprobs: Whole | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Annotated[list[Tool], Field(min_length=1, max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: Literal[True] | None = None
    add_generation_prompt: Flag | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables of the template.")

    @model_validator(mode="after")
    def _possible(self) -> ChatRequest:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ValueError("max_tokens and max_completion_tokens contradict each other")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is given without logprobs")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise ValueError("tool_choice is given without tools")
        forced = self.tool_choice == "required" or isinstance(self.tool_choice, NamedToolChoice)
        constrained = self.regex is not None or (self.response_format and self.response_format.type != "text")
        if forced and constrained:
            raise ValueError("tool_choice and response_format exclude each other")
        if isinstance(self.tool_choice, NamedToolChoice):
            known = [tool.function.name for tool in self.tools or ()]
            if self.tool_choice.function.name not in known:
                raise ValueError("tool_choice names a function that is not among the tools")
        return self


class TokenizeRequest(Body):
    """Body of `POST /tokenize`: a text, or messages that go through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] | None = Field(None, min_length=1, max_length=4096)
    add_special_tokens: Flag = True
    add_generation_prompt: Flag = True
    return_token_strs: Flag = False

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Body):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: TokenIds


class GenerateRequest(Body):
    """Body of `POST /generate`: the library's own names (see `SamplingParams`)."""

    prompt: str | TokenIds
    max_new_tokens: Whole = Field(128, ge=1)
    temperature: Real = Field(0.0, ge=0, le=2)
    top_k: Whole = Field(0, ge=-1, lt=2**31)
    top_p: Real = Field(1.0, gt=0, le=1)
    min_p: Real = Field(0.0, ge=0, le=1)
    repetition_penalty: Real = Field(1.0, ge=0.01, le=10)
    seed: Whole | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    ignore_eos: Flag = False
    json_schema: dict[str, Any] | None = None
    regex: str | None = Field(None, max_length=10_000)


class ReloadRequest(Body):
    """Body of `POST /admin/reload`."""

    model: str | None = Field(None, description="A folder or artifact; the one in use where left out.")
