"""The backend `llamacpp` behind an LLM: sequences run on llama-server's slots, a few tokens a request.

The server withholds tokens whose text is half a character, so tokens are asked for in short requests, each going on in
its slot's cache where the last one ended: nothing is computed twice. Stops, detokenization and logprobs' form are the
engine's own; what ends a text is what the model's generation config says.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ...optimizer.errors import RunError, UsageError
from ..completion import Chunk
from ..engine.detokenizer import Vocabulary
from ..engine.logprobs import TokenLogprobs
from ..engine.request import Request
from ..engine.sampler import Sampled
from ..engine.sampling_params import SamplingParams
from ..static_batch import _Sequence, make_request
from .parameters import body, check

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .server import LlamaServer

LONGEST = 16
"""Most tokens of one request; a sequence begins with one and doubles, so that its first text comes at once."""
RANKED = 20
"""Tokens that are ranked at least where logprobs are asked for."""
FORCING = 1e4
"""Added to the logit of a token that is to be chosen whatever its probability."""


class LlamaCppBackend:
    """Implements `Backend`. slots: sequences that run at once; context_length: tokens that each of them may have."""

    name = "llamacpp"
    extra_weight_bytes = 0

    def __init__(
        self,
        server: LlamaServer,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: Iterable[int],
        vocab_size: int,
        context_length: int,
        slots: int,
    ) -> None:
        self.server, self.vocab_size, self.context_length = server, vocab_size, context_length
        self.notes: list[dict[str, str]] = []
        self._vocabulary = Vocabulary(tokenizer)
        self._eos = frozenset(eos_token_ids)
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._num_slots = slots
        for slot in range(slots):
            self._slots.put(slot)

    def close(self) -> None:
        """End the server."""
        self.server.close()

    def stream(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], **options: Any
    ) -> Iterator[Chunk]:
        """See `Backend.stream`. Takes no options. Raises UsageError for a parameter that llama.cpp has not."""
        if options:
            raise UsageError(f"the llamacpp backend has no option {sorted(options)[0]!r}")
        for each in params:
            check(each)
        waiting = deque(
            _Sequence(
                make_request(number, prompt, each, index, self.vocab_size, self.context_length, self._eos),
                number,
                self._vocabulary,
            )
            for number, (prompt, each) in enumerate(zip(prompts, params, strict=True))
            for index in range(each.n)
        )
        return self._run(waiting)

    def _run(self, waiting: deque[_Sequence]) -> Iterator[Chunk]:
        chunks: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
        cancelled = threading.Event()
        left = len(waiting)
        workers = [
            threading.Thread(target=self._work, args=(waiting, chunks, cancelled), daemon=True)
            for _ in range(min(self._num_slots, left))
        ]
        for worker in workers:
            worker.start()
        try:
            while left:
                chunk = chunks.get()
                left -= chunk.finish_reason is not None
                yield chunk
        finally:  # also where a generator that nobody reads is collected: workers are not waited for, in whatever
            cancelled.set()  # thread that happens; each gives its slot back once its request has ended

    def _work(self, waiting: deque[_Sequence], chunks: queue.SimpleQueue[Chunk], cancelled: threading.Event) -> None:
        slot = self._slots.get()
        try:
            with suppress(IndexError):
                while not cancelled.is_set():
                    self._run_one(waiting.popleft(), slot, chunks, cancelled)
        finally:
            self._slots.put(slot)

    def _run_one(self, one: _Sequence, slot: int, chunks: queue.SimpleQueue[Chunk], cancelled: threading.Event) -> None:
        try:
            self._score_prompt(one, slot, chunks)
            if one.request.max_total_tokens <= one.request.num_tokens:
                chunks.put(one.end("length"))
            size = 1
            while not one.finished and not cancelled.is_set():
                chunks.put(one.advance(self._step(one.request, slot, size)))
                size = min(2 * size, LONGEST)
                if one.request.params.constrained and not one.finished:
                    chunks.put(one.end("stop"))  # by an end-of-text token that only llama.cpp takes for one
        except Exception as error:  # goes to the caller with the sequence that it concerns
            chunks.put(one.end("error", error=error))

    def _step(self, request: Request, slot: int, size: int) -> Sampled:
        """The next tokens of a sequence, `size` at most."""
        params = request.params
        count = min(size, request.max_total_tokens - request.num_tokens)
        if request.num_output_tokens < params.min_tokens:
            count = min(count, params.min_tokens - request.num_output_tokens)
        if params.logprobs is not None:
            count = 1
        if params.constrained:  # the grammar begins anew with every request
            count = request.max_total_tokens - request.num_tokens
        asked = body(request, slot, count, request.stop_ids | self._eos)
        if params.logprobs is not None:
            asked["n_probs"] = max(params.logprobs, RANKED)
        answer = self.server.ask("/completion", asked)
        tokens = tuple(answer["tokens"])
        if not tokens:
            raise RunError("llama-server gave no token", str(self.server.model), "Its context may be full")
        if params.logprobs is None:
            return Sampled(tokens)
        found = self._logprobs(answer, request.token_ids, tokens[0], params.logprobs, slot)
        return Sampled(tokens, (found,))

    def _score_prompt(self, one: _Sequence, slot: int, chunks: queue.SimpleQueue[Chunk]) -> None:
        """Log-probabilities of the prompt's tokens, where asked for: each is forced in turn."""
        request = one.request
        count = request.params.prompt_logprobs
        if count is None:
            return
        prompt = request.token_ids
        found = tuple(self.forced(prompt[:i], prompt[i], count, slot) for i in range(1, len(prompt)))
        chunks.put(Chunk(one.number, index=request.index, prompt_logprobs=found))

    def forced(self, prompt: Sequence[int], token: int, count: int = 0, slot: int = -1) -> TokenLogprobs:
        """Log-probability of `token` after `prompt`, and the `count` best tokens there."""
        answer = self._choose(prompt, token, max(count, RANKED), slot)
        return self._logprobs(answer, prompt, token, count, slot)

    def _choose(self, prompt: Sequence[int], token: int, ranked: int, slot: int) -> dict[str, Any]:
        return self.server.ask(
            "/completion",
            {
                "prompt": list(prompt), "n_predict": 1, "id_slot": slot, "cache_prompt": True, "return_tokens": True,
                "temperature": 0.0, "samplers": [], "logit_bias": [[token, FORCING]], "n_probs": ranked,
            },
        )  # fmt: skip

    def _logprobs(
        self, answer: dict[str, Any], prompt: Sequence[int], token: int, count: int, slot: int
    ) -> TokenLogprobs:
        """What the server says of a token; where it says nothing, because the token's text is half a character, it is
        looked up in the ranking of the whole vocabulary."""
        entries = answer.get("completion_probabilities") or []
        if not entries:
            entries = self._choose(prompt, self._whole_token(), self.vocab_size, slot)["completion_probabilities"]
        top = [(entry["id"], float(entry["logprob"])) for entry in entries[0]["top_logprobs"]]
        own = float(entries[0]["logprob"]) if entries[0]["id"] == token else dict(top)[token]
        rank = 1 + sum(value > own for _, value in top)
        return TokenLogprobs(token, own, rank, tuple(top[:count]))

    def _whole_token(self) -> int:
        """A token whose text is whole characters."""
        return int(self._vocabulary.tokenizer.encode("a", add_special_tokens=False)[-1])
