"""What generation returns: pieces while it runs, a Completion at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..optimizer.errors import RunError

if TYPE_CHECKING:
    from .engine.logprobs import TokenLogprobs
    from .engine.sampling_params import SamplingParams


@dataclass(slots=True)
class Chunk:
    """What one step added to one sequence. `text` may be empty while a character or a stop string is incomplete."""

    prompt: int
    """Which of the call's prompts."""
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    """Set in the last chunk: `stop`, `length`, `abort`, `deadline` or `error`."""
    stop_reason: str | int | None = None
    index: int = 0
    """Which of the prompt's `n` sequences."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Of the next prompt tokens, from the second on, where asked for."""
    error: BaseException | None = None


@dataclass
class Completion:
    """One generated continuation."""

    text: str
    """The new text: without the prompt and, unless asked for, without the stop string."""
    token_ids: list[int]
    """The new tokens, the end-of-text or stop token included."""
    finish_reason: str
    """`stop` (end of text, stop token or stop string), `length`, `abort`, `deadline` or `error`."""
    prompt_token_ids: list[int]
    stop_reason: str | int | None = None
    """The stop string or token id that ended it; None for a length limit."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each new token, where asked for."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One for each prompt token, None for the first, where asked for."""
    index: int = 0
    """Which of the prompt's `n` sequences."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """New tokens."""
        return len(self.token_ids)

    def __str__(self) -> str:
        return self.text


class Backend(Protocol):
    """Runs prompts: `StaticBatch`, or the continuous-batching engine."""

    name: str
    notes: list[dict[str, str]]
    context_length: int | None
    vocab_size: int
    extra_weight_bytes: int
    """Bytes of weights that the backend holds beside the module's."""

    def stream(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], **options: Any
    ) -> Iterator[Chunk]:
        """Chunks of all prompts as they come; each sequence ends with exactly one chunk that has a finish_reason."""
        ...

    def close(self) -> None: ...


@dataclass
class _Growing:
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None


def collect(chunks: Iterable[Chunk], prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[Completion]]:
    """Completions of every prompt, `counts[i]` for prompt i. Raises the error of the first sequence that failed,
    RunError where one never ended."""
    growing: dict[tuple[int, int], _Growing] = {}
    done: dict[tuple[int, int], Completion] = {}
    for chunk in chunks:
        if chunk.error is not None:
            raise chunk.error
        key = (chunk.prompt, chunk.index)
        now = growing.setdefault(key, _Growing())
        now.text.append(chunk.text)
        now.token_ids.extend(chunk.token_ids)
        now.logprobs.extend(chunk.logprobs or ())
        if chunk.prompt_logprobs is not None:
            now.prompt_logprobs = [*(now.prompt_logprobs or [None]), *chunk.prompt_logprobs]
        if chunk.finish_reason is not None:
            done[key] = Completion(
                text="".join(now.text),
                token_ids=now.token_ids,
                finish_reason=chunk.finish_reason,
                prompt_token_ids=list(prompts[chunk.prompt]),
                stop_reason=chunk.stop_reason,
                logprobs=now.logprobs if now.logprobs or chunk.logprobs is not None else None,
                prompt_logprobs=now.prompt_logprobs,
                index=chunk.index,
            )
    expected = [(i, j) for i, count in enumerate(counts) for j in range(count)]
    if missing := [key for key in expected if key not in done]:
        raise RunError(f"the backend stopped before sequence {missing[0][1]} of prompt {missing[0][0]} ended")
    return [[done[i, j] for j in range(count)] for i, count in enumerate(counts)]
