"""From a caller's arguments to `Request`s: everything that can be wrong with them is said here, before queueing."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ...optimizer.errors import UsageError
from .detokenizer import TextStream, Vocabulary
from .grammar import GrammarCompiler
from .outputs import RequestOutput
from .random_numbers import mix, request_key
from .request import Request
from .sampling_params import SamplingParams


class Intake:
    """Validates and builds requests. Thread-safe: callers' threads run it, the step loop does not."""

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        max_model_len: int,
        capacity: int,
        eos_token_ids: Sequence[int],
        seed: int,
        follow_grammars: bool = True,
    ) -> None:
        """follow_grammars: compile structured output into matchers; without it, what samples has to follow them."""
        self.vocab_size, self.max_model_len, self.capacity = vocab_size, max_model_len, capacity
        self._eos = frozenset(eos_token_ids)
        self._seed = seed
        self._numbers = itertools.count()
        self._vocabulary = Vocabulary(tokenizer) if tokenizer is not None else None
        follow_grammars = follow_grammars and tokenizer is not None
        self._grammars = GrammarCompiler(tokenizer, vocab_size, eos_token_ids) if follow_grammars else None
        self._lock = threading.Lock()
        """llguidance's compiler and its cache are used by one thread at a time."""

    def build(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None,
        priority: int,
        deadline: float | None,
        arrival_time: float,
        on_output: Callable[[RequestOutput], None] | None,
    ) -> list[Request]:
        """The request's `n` sequences. Raises `UsageError` (see `Engine.add_request`)."""
        numbers = [next(self._numbers) for _ in range(params.n)]
        name = f"request-{numbers[0]}" if request_id is None else request_id
        prompt = [int(token) for token in prompt_token_ids]
        longest = self._check(prompt, params, name)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        seed = mix(mix(self._seed) ^ numbers[0]) if params.seed is None else params.seed
        sibling_params = params.model_copy(update={"prompt_logprobs": None})
        requests = []
        for index, number in enumerate(numbers):
            request = Request(
                id=number,
                token_ids=list(prompt),
                params=sibling_params if index else params,
                request_id=name,
                index=index,
                priority=priority,
                deadline=deadline,
                max_total_tokens=longest,
                stop_ids=stop_ids,
                key=request_key(seed, index),
                arrival_time=arrival_time,
                on_output=on_output,
            )
            if self._vocabulary is not None:
                request.detokenizer = TextStream(
                    self._vocabulary, prompt, params.stop, params.include_stop_in_output, params.skip_special_tokens
                )
            if params.constrained and self._grammars is not None:
                with self._lock:
                    request.grammar = self._grammars.compile(params)
            requests.append(request)
        return requests

    def _check(self, prompt: list[int], params: SamplingParams, name: str) -> int:
        """The most tokens that prompt and output may have together."""
        where = f"request {name}"
        if not prompt:
            raise UsageError("the prompt has no tokens", where, "Give at least one token.")
        wrong = next((token for token in prompt if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise UsageError(f"prompt token {wrong} is outside the vocabulary (0 … {self.vocab_size - 1})", where)
        params.check_vocabulary(self.vocab_size)
        limit = min(self.max_model_len, self.capacity)
        what = (
            f"the model's context of {self.max_model_len} tokens"
            if limit == self.max_model_len
            else f"the {self.capacity} tokens of the KV pool"
        )
        wanted = params.max_new_tokens
        if len(prompt) + (1 if wanted is None else wanted) > limit:
            asked = "" if wanted is None else f" and max_new_tokens={wanted}"
            raise UsageError(
                f"{len(prompt)} prompt tokens{asked} do not fit {what}", where, "Shorten the prompt or the output."
            )
        if self._vocabulary is None and (params.stop or params.constrained):
            raise UsageError("stop strings and structured output need a tokenizer", where)
        return limit if wanted is None else len(prompt) + wanted
