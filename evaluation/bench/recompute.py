"""Generation without a KV cache: every step runs the whole sequence again. The baseline of the techniques table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...runtime.completion import Chunk


class Recomputing:
    """What `InProcess` needs of an LLM, over a module that is called without a cache; greedy, one prompt at a time."""

    backend = "recompute"
    runner = loop = None

    def __init__(self, opened: Any) -> None:
        self._opened, self._module = opened, opened.module
        self.tokenizer, self.notes = opened.tokenizer, opened.notes
        self.context_length: int | None = opened.context_length
        self.weight_bytes: int = opened.weight_bytes()

    def stream(self, ids: list[int], params: Any) -> Iterator[Chunk]:
        """Greedy tokens, one a chunk."""
        import torch

        tokens = list(ids)
        for number in range(params.max_new_tokens):
            with torch.inference_mode():
                given = torch.tensor([tokens], device=self._module.device)
                logits = self._module(input_ids=given, use_cache=False, logits_to_keep=1).logits
            token = int(logits[0, -1].argmax())
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

        with torch.inference_mode():
            logits = self._module(input_ids=torch.tensor([ids], device=self._module.device), use_cache=False).logits
        logprobs = logits[0, :-1].float().log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None].to(logits.device))
        return Score(list(ids), [None, *logprobs[:, 0].tolist()])

    def close(self) -> None:
        """Nothing was started."""


def open_recomputing(folder: str, **options: Any) -> Recomputing:
    """A folder as `open_model` opens it. Raises as that does."""
    from ...runtime.open import open_model

    return Recomputing(open_model(folder, **options))
