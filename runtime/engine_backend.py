"""What every backend over an engine has: prompts go to its loop, chunks come back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .completion import Chunk

if TYPE_CHECKING:
    from .engine.engine import Engine
    from .engine.loop import EngineLoop, RequestHandle
    from .engine.outputs import RequestOutput
    from .engine.sampling_params import SamplingParams


class EngineBackend:
    """The part of `Backend` that does not depend on what runs the engine's steps. The engine's thread starts with the
    first prompt and ends with `close`."""

    name: str
    engine: Engine
    loop: EngineLoop
    notes: list[dict[str, str]]
    context_length: int | None
    vocab_size: int
    extra_weight_bytes = 0

    def stream(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], **options: Any
    ) -> Iterator[Chunk]:
        """See `Backend.stream`. Options: `priority`, `deadline` (see `Engine.add_request`).

        All prompts run together; chunks come prompt by prompt. Leaving early aborts what still runs.
        """
        self.loop.start()
        handles: list[RequestHandle] = []
        try:
            for prompt, each in zip(prompts, params, strict=True):
                handles.append(self.loop.submit(prompt, each, **options))
            for number, handle in enumerate(handles):
                for output in handle:
                    yield _chunk(number, output)
        finally:
            for handle in handles:
                if not handle.done:
                    handle.abort()

    def close(self) -> None:
        """End every request, stop the thread, close what ran the steps."""
        self.loop.close()


def _chunk(number: int, output: RequestOutput) -> Chunk:
    return Chunk(
        prompt=number,
        text=output.new_text,
        token_ids=output.new_token_ids,
        logprobs=output.logprobs,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        index=output.index,
        prompt_logprobs=output.prompt_logprobs,
        error=output.error,
    )
