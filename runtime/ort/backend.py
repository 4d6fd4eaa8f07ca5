"""The backend `onnxruntime` behind an LLM: sampling, stops and streaming are StaticBatch's, the steps are a graph's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..engine.detokenizer import Vocabulary
from ..static_batch import StaticBatch
from .session import OnnxCache, OnnxSession

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from ..static_batch import _Sequence

LOGIT_BYTES = 256 * 2**20
"""Most bytes of logits that one prefill may give; a graph computes them for every token of a prompt."""


class OnnxForward:
    """Calls a session as StaticBatch calls a model."""

    cache_argument = "cache"

    def __init__(self, session: OnnxSession) -> None:
        import torch

        self.session, self.device = session, torch.device("cpu")

    def new_cache(self, rollback: bool = False) -> list[OnnxCache]:
        """A place for the cache, which is made when the number of rows is known."""
        return []

    def select(self, cache: list[OnnxCache], rows: Sequence[int]) -> None:
        """Keep only these rows of the batch."""
        self.session.select(cache[0], rows)

    def prefill(
        self, cache: list[OnnxCache], prompts: Sequence[Sequence[int]], wants: Sequence[bool], chunk: int
    ) -> list[torch.Tensor]:
        """Logits of each prompt, [prompt or 1, vocab]: all positions where wanted, else the last.

        chunk: tokens of a single prompt that run at a time.
        """
        import torch

        cache[:] = [self.session.new_cache(len(prompts))]
        if len(prompts) > 1:
            found = self.session.run(prompts, cache[0])
            return [torch.from_numpy(row if all_ else row[-1:]) for row, all_ in zip(found, wants)]
        parts: list[Any] = []
        for start in range(0, len(prompts[0]), chunk):
            (row,) = self.session.run([prompts[0][start : start + chunk]], cache[0])
            parts = [*parts, row] if wants[0] else [row[-1:]]
        return [torch.cat([torch.from_numpy(part) for part in parts])]

    def __call__(
        self, ids: torch.Tensor, cache: list[OnnxCache], keep: int, history: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """Float32 logits `[rows, keep, vocab]` of the last positions of `ids` (int64 `[rows, new]`)."""
        import torch

        rows = self.session.run(ids.tolist(), cache[0])
        return torch.stack([torch.from_numpy(row[-keep:]) for row in rows])


class OnnxBackend(StaticBatch):
    """Implements `Backend`. Prompts of a call run together, whatever their lengths, up to `max_batch` and to what their
    logits may take; a group runs to its end."""

    name = "onnxruntime"

    def __init__(
        self,
        session: OnnxSession,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: Iterable[int],
        context_length: int | None,
        max_batch: int = 32,
    ) -> None:
        self.context_length, self.max_batch, self.vocab_size = context_length, max_batch, session.vocab_size
        self.notes = []
        self.num_drafted = self.num_accepted = 0
        self._forward: Any = OnnxForward(session)
        self._vocabulary = Vocabulary(tokenizer)
        self._eos = frozenset(eos_token_ids)
        self._drafter, self._num_draft_tokens = None, None
        self.chunk = max(64, LOGIT_BYTES // (4 * self.vocab_size))

    @property
    def session(self) -> OnnxSession:
        return self._forward.session

    def _groups(self, runs: Sequence[_Sequence]) -> list[list[_Sequence]]:
        """Sequences by length, so that little is padded; padded tokens of a group stay below the chunk."""
        groups: list[list[_Sequence]] = []
        for run in sorted(runs, key=lambda one: one.request.num_prompt_tokens):
            length = run.request.num_prompt_tokens
            group = groups[-1] if groups else None
            if group is None or len(group) >= self.max_batch or (len(group) + 1) * length > self.chunk:
                groups.append([run])
            else:
                group.append(run)
        return groups

    def _prompt_logits(self, group: Sequence[_Sequence], cache: Any, wants: Sequence[bool]) -> list[torch.Tensor]:
        return self._forward.prefill(cache, [one.request.token_ids for one in group], wants, self.chunk)
