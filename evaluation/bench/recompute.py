"""Generation without a KV cache: every step runs the whole sequence again. The baseline of the techniques table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...runtime.completion import Chunk

if TYPE_CHECKING:
    import torch


class Recomputing:
    """What `InProcess` needs of an LLM, over a module that is called without a cache; greedy, one prompt at a time."""

    backend = "recompute"
    runner = loop = None

    def __init__(self, opened: Any) -> None:
        from ...runtime.cached_forward import CachedForward

        self._opened, self._forward = opened, CachedForward(opened.module)
        self.tokenizer, self.notes = opened.tokenizer, opened.notes
        self.context_length: int | None = opened.context_length
        self.weight_bytes: int = opened.weight_bytes()

    def stream(self, ids: list[int], params: Any) -> Iterator[Chunk]:
        """Greedy tokens, one a chunk."""
        tokens = list(ids)
        for number in range(params.max_new_tokens):
            token = int(self._logits(tokens, 1)[-1].argmax())
            tokens.append(token)
            done = not params.ignore_eos and token in self._opened.eos_token_ids
            last = done or number + 1 == params.max_new_tokens
            yield Chunk(0, token_ids=(token,), finish_reason=("stop" if done else "length") if last else None)
            if done:
                return

    def score(self, ids: list[int]) -> Any:
        """As `LLM.score`, from the module's own logits."""
        import torch

        from ...runtime.llm import Score

        logprobs = self._logits(ids, len(ids))[:-1].log_softmax(-1)
        targets = torch.tensor(ids[1:], device=logprobs.device)[:, None]
        return Score(list(ids), [None, *logprobs.gather(-1, targets)[:, 0].tolist()])

    def close(self) -> None:
        """Nothing was started."""

    def _logits(self, tokens: list[int], keep: int) -> torch.Tensor:
        """Float32 logits [keep, vocab] of the last positions of the whole sequence."""
        import torch

        return self._forward(torch.empty(0), None, keep, [tokens])[0]


def open_recomputing(folder: str, **options: Any) -> Recomputing:
    """A folder as `open_model` opens it. Raises as that does."""
    from ...runtime.open import open_model

    return Recomputing(open_model(folder, **options))
