"""How one request's tokens are chosen and when it ends."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ...optimizer.errors import UsageError, did_you_mean

MAX_LOGPROBS = 128
COLDEST = 1e-20
"""Temperatures below are greedy: float32 logits divided by them differ by more than exp can tell, or overflow."""


def _strings(value: Any) -> Any:
    return (value,) if isinstance(value, str) else () if value is None else value


class SamplingParams(BaseModel):
    """Immutable; raises `UsageError` that names the field, the value given and what is allowed.

    Processing order of the logits: logit_bias, repetition, presence and frequency penalties, min_tokens, grammar mask,
    temperature, top_k, top_p, min_p (the order of transformers' `generate`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    temperature: float = Field(1.0, ge=0, description="0 is greedy; the logits are divided by it otherwise.")
    top_k: int = Field(0, ge=-1, lt=2**31, description="Keep the k most probable tokens (ties kept); 0, -1: all.")
    top_p: float = Field(1.0, gt=0, le=1, description="Keep the smallest set of tokens whose probability reaches p.")
    min_p: float = Field(0.0, ge=0, le=1, description="Drop tokens below this share of the best one's probability.")
    repetition_penalty: float = Field(
        1.0, gt=0, description="CTRL's penalty on tokens of prompt and output: logit / r if > 0, else logit * r."
    )
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="Subtracted once from tokens already in the output.")
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="Subtracted as often as the output has the token.")
    logit_bias: dict[int, float] = Field(default_factory=dict, description="Added to the logits of these token ids.")
    seed: int | None = Field(None, description="Same seed, prompt and settings: same text, whatever runs beside.")
    n: int = Field(1, ge=1, le=128, description="Independent continuations of the prompt; they share its KV blocks.")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Log-probabilities of the sampled and of this many best tokens."
    )
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="The same for each prompt token after the first."
    )
    stop: Annotated[tuple[str, ...], BeforeValidator(_strings)] = Field(
        (), description="The text ends before the first of these strings."
    )
    include_stop_in_output: bool = Field(False, description="Keep the stop string at the end of the text.")
    stop_token_ids: tuple[int, ...] = Field((), description="The output ends with the first of these tokens.")
    max_new_tokens: int | None = Field(None, ge=0, description="Null: until the context is full. 0: score the prompt.")
    min_tokens: int = Field(0, ge=0, description="End-of-text and stop tokens are impossible before this many tokens.")
    ignore_eos: bool = Field(False, description="Treat the model's end-of-text tokens as ordinary tokens.")
    skip_special_tokens: bool = Field(True, description="Leave special tokens out of the text.")
    json_schema: dict[str, Any] | str | None = Field(None, description="The text is JSON of this schema (llguidance).")
    regex: str | None = Field(None, description="The text matches this regular expression (llguidance).")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise UsageError(*_explain(error)) from None

    @model_validator(mode="after")
    def _consistent(self) -> SamplingParams:
        if self.max_new_tokens is not None and self.min_tokens > self.max_new_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is above max_new_tokens={self.max_new_tokens}")
        if any(not s for s in self.stop):
            raise ValueError("stop holds an empty string")
        if self.json_schema is not None and self.regex is not None:
            raise ValueError("json_schema and regex exclude each other")
        return self

    @property
    def greedy(self) -> bool:
        return self.temperature < COLDEST or self.top_k == 1

    @property
    def constrained(self) -> bool:
        return self.json_schema is not None or self.regex is not None

    @property
    def plain_greedy(self) -> bool:
        """True where the next token is the argmax of the raw logits, whatever came before."""
        return (
            self.greedy
            and self.repetition_penalty == 1.0
            and self.presence_penalty == 0.0
            and self.frequency_penalty == 0.0
            and not self.logit_bias
            and self.min_tokens == 0
            and not self.constrained
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `UsageError` for a token id that the model does not have: it would fail inside the step."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            wrong = [i for i in ids if not 0 <= i < vocab_size]
            if wrong:
                raise UsageError(
                    f"token id {wrong[0]} is outside the vocabulary (0 … {vocab_size - 1})",
                    where=f"sampling parameter {name}",
                    what_to_do="Leave it out.",
                )


def _explain(error: ValidationError) -> tuple[str, str, str]:
    faults, hint = [], ""
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            faults.append(f"there is no {name!r}")
            hint = did_you_mean(name, SamplingParams.model_fields)
        elif name:
            faults.append(f"{name}={item['input']!r}: {item['msg'][:1].lower()}{item['msg'][1:]}")
        else:
            faults.append(item["msg"].removeprefix("Value error, "))
    return "; ".join(faults), "sampling parameters", hint
