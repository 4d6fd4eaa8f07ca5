"""One sequence in the engine: its tokens, its place in the cache, and how it ends. Pure Python, no tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal

from .blocks import BlockTable
from .sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "deadline", "error"]
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "deadline", "error")


class Status(IntEnum):
    WAITING = 0
    RUNNING = 1
    FINISHED = 2


@dataclass(slots=True, eq=False)
class Request:
    """State of one sequence. Only the step loop touches it (the one-owner law).

    `token_ids[:num_computed]` have their keys and values in the cache; a step catches `num_computed` up to
    `num_tokens + len(drafts)`.
    """

    id: int
    """Engine-internal, unique, ascending with arrival."""
    token_ids: list[int]
    """Prompt, then output."""
    params: SamplingParams = field(default_factory=SamplingParams)
    request_id: str = ""
    """The caller's name for the request; shared by the `n` sequences of one request."""
    index: int = 0
    """Which of the request's `n` sequences this is."""
    priority: int = 0
    """Higher runs first."""
    deadline: float | None = None
    """Absolute, in the engine's clock (seconds); past it the request ends with `deadline`."""
    max_total_tokens: int = 2**62
    """Prompt and output together; reaching it ends the request with `length`."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the output: the model's end-of-text (unless ignored) and the request's own."""
    key: int = 0
    """64-bit key of the request's random numbers."""

    num_prompt_tokens: int = 0
    num_computed: int = 0
    drafts: tuple[int, ...] = ()
    """Proposed next tokens, to be verified in the next step."""
    table: BlockTable = field(init=False, repr=False)
    """Its blocks; the scheduler makes it when the request is added."""
    status: Status = Status.WAITING
    rank: tuple[float, float, int] = (0.0, 0.0, 0)
    """Scheduling order, smaller first; fixed at arrival."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token that ended the output."""
    error: BaseException | None = None

    num_cached_tokens: int = 0
    """Tokens of the prompt that the first admission found in the prefix cache."""
    num_preemptions: int = 0
    swapped: Any = None
    """What a preempted request has in host memory (`offload.Swapped`)."""
    num_prompt_logprobs: int = 0
    """Prompt positions whose logprobs have been delivered (position 0 has none)."""

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finish_time: float | None = None

    detokenizer: Any = None
    grammar: Any = None
    history: Any = None
    """Token counts for penalties (sampler.py), made at the first need."""
    on_output: Callable[[Any], None] | None = None

    def __post_init__(self) -> None:
        if not self.num_prompt_tokens:
            self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs is not None and self.num_prompt_logprobs < self.num_prompt_tokens - 1


def stop_at(request: Request, tokens: Sequence[int]) -> tuple[tuple[int, ...], FinishReason | None, int | None]:
    """Cut new tokens where the request ends by token id or length.

    Returns the tokens to keep, the finish reason if they end the request, and the token id that did (`stop` only). A
    stop token is kept: it is part of the output's ids, not of its text. (`min_tokens` is the sampler's business: it
    makes stop tokens impossible until then.)
    """
    room = request.max_total_tokens - len(request.token_ids)
    stop_ids = request.stop_ids
    for i, token in enumerate(tokens):
        if i >= room:
            return tuple(tokens[:room]), "length", None
        if token in stop_ids:
            return tuple(tokens[: i + 1]), "stop", token
    return tuple(tokens), "length" if len(tokens) >= room else None, None
