"""StaticBatch: generation on transformers' own forward, for every causal model, without padding.

Prompts of equal length run together, others by themselves, so that no text depends on how another prompt was padded.
Sampling, stop conditions and detokenization are the engine's own (`engine/sampler.py`, `detokenizer.py`).
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..optimizer.errors import UsageError
from .cached_forward import CachedForward, vocabulary_size
from .completion import Chunk
from .drafting import Drafter, DraftLength
from .engine.detokenizer import TextStream, Vocabulary
from .engine.logprobs import TokenLogprobs, token_logprobs
from .engine.random_numbers import request_key
from .engine.request import Request, stop_at
from .engine.sampler import Sampled, SampleItem, sample
from .engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MAX_BATCH_TOKENS = 8192
"""Prompt tokens of one prefill; a group of more rows is split."""
LOGPROB_ROWS = 64
"""Prompt positions whose float32 logits are ranked at a time."""


def make_request(
    number: int,
    prompt: Sequence[int],
    params: SamplingParams,
    index: int,
    vocab_size: int,
    context_length: int | None,
    eos: frozenset[int],
) -> Request:
    """The request of output `index` of prompt `number`; `eos` ends it unless the parameters say otherwise. Raises
    UsageError for a token that the vocabulary does not have."""
    params.check_vocabulary(vocab_size)
    seed = params.seed if params.seed is not None else random.getrandbits(63)
    limit = context_length or 2**62
    if params.max_new_tokens is not None:
        limit = min(limit, len(prompt) + params.max_new_tokens)
    return Request(
        id=number,
        token_ids=list(prompt),
        params=params,
        index=index,
        max_total_tokens=limit,
        stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos),
        key=request_key(seed, index),
        num_prompt_tokens=len(prompt),
    )


class StaticBatch:
    """Runs prompts in groups of equal length, each group to its end.

    eos_token_ids: tokens that end a sequence unless its parameters say `ignore_eos`.
    max_batch: most rows of a group; by default 32 in float32 and 1 in half precision, where a batch's kernels round
        otherwise than a single row's, so that a text would depend on its neighbours.
    drafter: proposes tokens where a group is a single sequence; the text stays that of plain decoding.
    """

    name = "static"
    extra_weight_bytes = 0

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: Iterable[int] = (),
        *,
        context_length: int | None = None,
        drafter: Drafter | None = None,
        num_draft_tokens: int | None = None,
        max_batch: int | None = None,
    ) -> None:
        import torch

        self.context_length = context_length
        self.max_batch = max_batch or (32 if model.dtype in (torch.float32, torch.float64) else 1)
        self.vocab_size: int = vocabulary_size(model)
        self.notes: list[dict[str, str]] = []
        self.num_drafted = self.num_accepted = 0
        """Draft tokens proposed and accepted so far."""
        self._forward = CachedForward(model)
        self._vocabulary = Vocabulary(tokenizer)
        self._eos = frozenset(eos_token_ids)
        self._drafter, self._num_draft_tokens = drafter, num_draft_tokens
        if self._forward.cache_argument is None:
            self._note(f"{type(model).__name__} takes no cache: every step recomputes the whole sequence", "fallback")
        if drafter is not None and not self._forward.can_roll_back(self._forward.new_cache(rollback=True)):
            self._drafter = None
            self._note("drafts are off: this architecture's cache cannot take rejected tokens back", "fallback")

    def close(self) -> None:
        """Let go of the model."""
        self._drafter = None

    def stream(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], **options: Any
    ) -> Iterator[Chunk]:
        """See `Backend.stream`. Takes no options. Raises UsageError for structured output, which needs the engine."""
        if options:
            raise UsageError(f"the static backend has no option {sorted(options)[0]!r}")
        runs = [
            _Sequence(self._request(number, prompt, each, index), number, self._vocabulary)
            for number, (prompt, each) in enumerate(zip(prompts, params, strict=True))
            for index in range(each.n)
        ]
        for group in self._groups(runs):
            yield from self._run_group(group)

    def _groups(self, runs: Sequence[_Sequence]) -> list[list[_Sequence]]:
        """The sequences that run together."""
        return groups_of_equal_length(runs, self.max_batch)

    def _request(self, number: int, prompt: Sequence[int], params: SamplingParams, index: int) -> Request:
        if params.constrained:
            raise UsageError(
                "structured output (json_schema, regex) needs the native engine",
                "static backend",
                "Load with engine=native.",
            )
        return make_request(number, prompt, params, index, self.vocab_size, self.context_length, self._eos)

    def _run_group(self, group: list[_Sequence]) -> Iterator[Chunk]:
        drafter = self._drafter if len(group) == 1 and group[0].request.params.max_new_tokens != 0 else None
        if drafter is None:
            yield from self._run(group, None)
            return
        self._drafter = None  # one sequence at a time; another thread's runs plainly
        try:
            drafter.reset()
            yield from self._run(group, drafter)
        finally:
            self._drafter = drafter

    def _run(self, group: list[_Sequence], drafter: Drafter | None) -> Iterator[Chunk]:
        cache = self._forward.new_cache(rollback=drafter is not None)
        length = DraftLength(self._num_draft_tokens)
        logits = yield from self._prefill(group, cache)
        drafts: tuple[int, ...] = ()
        while group:
            items = [SampleItem(one.request, drafts, row * (1 + len(drafts))) for row, one in enumerate(group)]
            results = sample(logits.flatten(0, 1), items)
            if drafter is not None:
                accepted = max(len(results[0].tokens) - 1, 0)
                length.update(len(drafts), accepted)
                self.num_drafted, self.num_accepted = self.num_drafted + len(drafts), self.num_accepted + accepted
                self._forward.roll_back(cache, len(drafts) - accepted)
            for one, result in zip(group, results):
                yield one.advance(result)
            running = [row for row, one in enumerate(group) if not one.finished]
            if len(running) < len(group):
                group = [group[row] for row in running]
                if not group:
                    return
                self._forward.select(cache, running)
            drafts = self._propose(drafter, group[0].request, length.now) if drafter is not None else ()
            ids = [[one.request.token_ids[-1], *drafts] for one in group]
            logits = self._forward(
                self._tensor(ids), cache, 1 + len(drafts), [[*one.request.token_ids, *drafts] for one in group]
            )

    def _propose(self, drafter: Drafter, request: Request, count: int) -> tuple[int, ...]:
        count = min(count, request.max_total_tokens - request.num_tokens - 1)
        return drafter.propose(request.token_ids, count) if count > 0 else ()

    def _prefill(self, group: list[_Sequence], cache: Any) -> Generator[Chunk, None, torch.Tensor]:
        """Run the prompts; returns the last position's logits `[rows, 1, vocab]` of those that go on."""
        import torch

        wants = [one.request.params.prompt_logprobs is not None for one in group]
        logits = self._prompt_logits(group, cache, wants)
        for row, one in enumerate(group):
            if wants[row]:
                yield Chunk(one.number, index=one.request.index, prompt_logprobs=_prompt_logprobs(logits[row], one))
        for one in group:
            if one.request.max_total_tokens <= one.request.num_tokens:
                yield one.end("length")
        running = [row for row, one in enumerate(group) if not one.finished]
        if 0 < len(running) < len(group):
            self._forward.select(cache, running)
        group[:] = [group[row] for row in running]
        return torch.stack([logits[row][-1:] for row in running or [0]])

    def _prompt_logits(self, group: Sequence[_Sequence], cache: Any, wants: Sequence[bool]) -> Any:
        """By number, logits `[positions, vocab]` of each prompt: of all positions where wanted, else of the last."""
        prompts = [one.request.token_ids for one in group]
        return self._forward(self._tensor(prompts), cache, len(prompts[0]) if any(wants) else 1, prompts)

    def _tensor(self, ids: Sequence[Sequence[int]]) -> torch.Tensor:
        import torch

        return torch.tensor([list(row) for row in ids], dtype=torch.int64, device=self._forward.device)

    def _note(self, message: str, kind: str = "note") -> None:
        self.notes.append({"stage": "load", "kind": kind, "message": message})


class _Sequence:
    """A request while it runs, with its text."""

    def __init__(self, request: Request, number: int, vocabulary: Vocabulary) -> None:
        params = request.params
        self.request, self.number, self.finished = request, number, False
        self._text = TextStream(
            vocabulary, request.token_ids, params.stop, params.include_stop_in_output, params.skip_special_tokens
        )

    def advance(self, result: Sampled) -> Chunk:
        """Take a step's tokens up to where the sequence ends; the chunk to hand out."""
        if result.error is not None:
            return self.end("error", error=result.error)
        stop_reason: str | int | None
        tokens, reason, stop_reason = stop_at(self.request, result.tokens)
        text, kept = "", 0
        for kept, token in enumerate(tokens, start=1):
            ends = reason == "stop" and kept == len(tokens)
            text += "" if ends else self._text.push(token)
            if self._text.matched is not None:
                reason, stop_reason = "stop", self._text.matched
                break
        tokens = tokens[:kept]
        self.request.token_ids.extend(tokens)
        logprobs = None if result.logprobs is None else result.logprobs[: len(tokens)]
        if reason is None:
            return Chunk(self.number, text, tokens, logprobs, index=self.request.index)
        return self.end(reason, text, tokens, logprobs, stop_reason)

    def end(
        self,
        reason: Any,
        text: str = "",
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] | None = None,
        stop_reason: str | int | None = None,
        error: BaseException | None = None,
    ) -> Chunk:
        """The last chunk; `reason` is a FinishReason."""
        self.finished = True
        text += self._text.finish()
        if self._text.matched is not None and stop_reason is None:
            reason, stop_reason = "stop", self._text.matched
        return Chunk(self.number, text, tokens, logprobs, reason, stop_reason, self.request.index, error=error)


def groups_of_equal_length(runs: Sequence[_Sequence], max_batch: int) -> list[list[_Sequence]]:
    """Sequences by prompt length, in the order of their first member; no group exceeds `max_batch` rows or
    MAX_BATCH_TOKENS tokens (a single row may)."""
    by_length: dict[int, list[_Sequence]] = {}
    for run in runs:
        by_length.setdefault(run.request.num_prompt_tokens, []).append(run)
    groups = []
    for length, members in by_length.items():
        size = max(1, min(max_batch, MAX_BATCH_TOKENS // length))
        groups += [members[i : i + size] for i in range(0, len(members), size)]
    return groups


def _prompt_logprobs(logits: torch.Tensor, one: _Sequence) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of every prompt token but the first, from logits `[prompt, vocab]`."""
    targets = one.request.token_ids[1 : one.request.num_prompt_tokens]
    count = one.request.params.prompt_logprobs or 0
    found: list[TokenLogprobs] = []
    for start in range(0, len(targets), LOGPROB_ROWS):
        part = targets[start : start + LOGPROB_ROWS]
        found += token_logprobs(logits[start : start + len(part)], part, [count] * len(part))
    return tuple(found)
