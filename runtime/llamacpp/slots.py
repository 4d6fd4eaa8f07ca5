"""llama-server's slots as the engine's places: a thread for each asks for the next tokens of the sequence in it.

The server withholds tokens whose text is half a character, so tokens are asked for in short requests, each going on in
its slot's cache where the last one ended: nothing is computed twice.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from ...optimizer.errors import RunError
from ..engine.logprobs import TokenLogprobs
from ..engine.request import Request
from .parameters import body

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import PreTrainedTokenizerBase

    from ..engine.plan import StepPlan
    from .server import LlamaServer

LONGEST = 16
"""Most tokens of one request; a sequence begins with one and doubles, so that its first text comes at once."""
RANKED = 20
"""Tokens that are ranked at least where logprobs are asked for."""
FORCING = 1e4
"""Added to the logit of a token that is to be chosen whatever its probability."""


@dataclass
class Answer:
    """What a slot's request brought a sequence, or why it brought nothing."""

    request: Request
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    error: Exception | None = None


class LlamaSlots:
    """In the place of a `ModelRunner` behind an engine: a pool of `slots` blocks, each a sequence of `max_model_len`
    tokens. It gives tokens, not logits; `answers` has them, and None where the engine is to look up.

    A request is read by the slot's thread from `ask` until its answer is in `answers`: nobody may change it meanwhile.
    """

    def __init__(
        self,
        server: LlamaServer,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: Iterable[int],
        vocab_size: int,
        max_model_len: int,
        slots: int,
    ) -> None:
        self.server, self.vocab_size = server, vocab_size
        self.max_model_len = self.block_size = max_model_len
        self.num_blocks = slots
        self.answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._eos = frozenset(eos_token_ids)
        self._tokenizer = tokenizer
        self._asked: list[queue.SimpleQueue[Request | None]] = [queue.SimpleQueue() for _ in range(slots)]
        self._threads: list[threading.Thread] = []

    def execute(self, plan: StepPlan) -> NoReturn:
        """Raises RunError: llama-server gives no logits."""
        raise RunError("llama.cpp gives tokens, no logits of whole texts", str(self.server.model), "Use the artifact "
                       "that this GGUF file was made from")  # fmt: skip

    def ask(self, request: Request, slot: int) -> None:
        """Have the slot go on with a sequence, after what it is doing now."""
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._work, args=(number,), name=f"llmopt-slot-{number}", daemon=True)
                for number in range(self.num_blocks)
            ]
            for thread in self._threads:
                thread.start()
        self._asked[slot].put(request)

    def interrupt(self, slot: int) -> None:
        """Break off what the slot is doing; llama-server ends it when it sees the connection closed."""
        self.server.interrupt(self._threads[slot])

    def close(self) -> None:
        """End the server, then the threads. Safe to call twice."""
        self.server.close()
        threads, self._threads = self._threads, []
        for asked in self._asked[: len(threads)]:
            asked.put(None)
        for thread in threads:
            thread.join()

    def _work(self, slot: int) -> None:
        while (request := self._asked[slot].get()) is not None:
            try:
                answer = self._answer(request, slot)
            except Exception as error:  # goes to the caller with the sequence that it concerns
                answer = Answer(request, error=error)
            self.answers.put(answer)

    def _answer(self, request: Request, slot: int) -> Answer:
        """The prompt's log-probabilities where they are still wanted, and the next tokens."""
        scores = self._score_prompt(request, slot) if request.wants_prompt_logprobs else None
        if request.max_total_tokens <= request.num_tokens:
            return Answer(request, prompt_logprobs=scores)
        params = request.params
        asked = body(request, slot, self._count(request), request.stop_ids | self._eos)
        if params.logprobs is not None:
            asked["n_probs"] = max(params.logprobs, RANKED)
        answer = self.server.ask("/completion", asked, wanted=lambda: not request.finished)
        tokens = tuple(answer["tokens"])
        if not tokens:
            raise RunError("llama-server gave no token", str(self.server.model), "Its context may be full")
        logprobs = None
        if params.logprobs is not None:
            logprobs = (self._logprobs(answer, request.token_ids, tokens[0], params.logprobs, slot),)
        return Answer(request, tokens, logprobs, scores)

    def _count(self, request: Request) -> int:
        """How many tokens to ask for."""
        room, params = request.max_total_tokens - request.num_tokens, request.params
        if params.constrained:  # the grammar begins anew with every request
            return room
        if params.logprobs is not None:
            return 1
        count = min(request.num_output_tokens + 1, LONGEST, room)
        if request.num_output_tokens < params.min_tokens:
            count = min(count, params.min_tokens - request.num_output_tokens)
        return count

    def _score_prompt(self, request: Request, slot: int) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the prompt's tokens from the second on: each is forced in turn."""
        prompt, count = request.token_ids[: request.num_prompt_tokens], request.params.prompt_logprobs or 0
        found = []
        for i in range(1, len(prompt)):
            if request.finished:  # ended from outside meanwhile
                raise RunError("the request has ended", str(self.server.model))
            found.append(self.forced(prompt[:i], prompt[i], count, slot))
        return tuple(found)

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
        return int(self._tokenizer.encode("a", add_special_tokens=False)[-1])
