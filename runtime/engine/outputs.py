"""What the engine says about a request: pieces while it runs, and the whole at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .request import FinishReason

if TYPE_CHECKING:
    from .logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Moments in the engine's clock (seconds); None for what has not happened."""

    arrival: float
    first_scheduled: float | None
    first_token: float | None
    finish: float | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One step's news of one sequence. The last one has a `finish_reason`, and there is exactly one such."""

    request_id: str
    index: int = 0
    """Which of the request's `n` sequences."""
    new_token_ids: tuple[int, ...] = ()
    new_text: str = ""
    """Text that became sure. It may lag behind the tokens (incomplete characters, possible stop strings)."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each of `new_token_ids`, where asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """For the next prompt tokens after those already delivered, from the prompt's second token on."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string, or the id of the stop token."""
    error: BaseException | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""
    num_output_tokens: int = 0
    times: RequestTimes | None = None
    """On the last output."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class Completion:
    """One sequence as a whole: its outputs joined."""

    request_id: str
    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: BaseException | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    times: RequestTimes | None = None

    def add(self, output: RequestOutput) -> None:
        self.token_ids.extend(output.new_token_ids)
        self.text += output.new_text
        if output.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *output.logprobs]
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = [*(self.prompt_logprobs or ()), *output.prompt_logprobs]
        self.num_prompt_tokens, self.num_cached_tokens = output.num_prompt_tokens, output.num_cached_tokens
        if output.finished:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
            self.error, self.times = output.error, output.times


def join_outputs(outputs: Sequence[RequestOutput]) -> dict[tuple[str, int], Completion]:
    """Completions by (request id, index), from any number of steps' outputs in order."""
    completions: dict[tuple[str, int], Completion] = {}
    for output in outputs:
        key = (output.request_id, output.index)
        if key not in completions:
            completions[key] = Completion(*key)
        completions[key].add(output)
    return completions
