"""The engine over llama-server: queue, deadlines, stops, texts and ends are ours, batches and sampling the server's."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..engine.engine import Engine
from ..engine.intake import Intake
from ..engine.plan import Row, StepPlan
from ..engine.sampling_params import SamplingParams
from ..engine.scheduler_config import SchedulerConfig
from ..engine.step_results import RowResult
from .parameters import check
from .slots import Answer, LlamaSlots

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..engine.outputs import RequestOutput

LONGEST_WAIT = 0.1
"""Seconds that a step waits for an answer: deadlines and a stop of the loop are seen that often."""


class ServerEnded(BaseException):
    """llama-server is gone. Ends the engine's thread, as no fault of a request does: a server then loads it anew."""


class LlamaEngine(Engine):
    """An `Engine` whose step is: hand every sequence that has a slot and no question open to its slot, wait for
    answers, take them over. Structured output is the server's own, so that no grammar is followed here."""

    runner: LlamaSlots

    def __init__(self, slots: LlamaSlots, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Sequence[int]) -> None:
        tokens = slots.num_blocks * slots.max_model_len
        limits = SchedulerConfig(
            max_num_seqs=slots.num_blocks, max_num_batched_tokens=tokens, max_prompt_logprob_tokens=tokens,
            watermark=0.0, prefix_caching=False,
        )  # fmt: skip
        super().__init__(slots, tokenizer, scheduler=limits, eos_token_ids=eos_token_ids)
        longest = slots.max_model_len
        self._intake = Intake(
            tokenizer, slots.vocab_size, longest, longest, eos_token_ids, seed=0, follow_grammars=False
        )
        self._open: dict[int, int] = {}
        """Request → slot that is asked for its next tokens."""

    def add_request(self, prompt_token_ids: Sequence[int], params: SamplingParams | None = None, **options: Any) -> str:
        """See `Engine.add_request`. Raises UsageError too for a parameter that llama-server has no equivalent of."""
        check(params or SamplingParams())
        name = super().add_request(prompt_token_ids, params, **options)
        self.runner.answers.put(None)
        return name

    def abort(self, request_id: str) -> None:
        super().abort(request_id)
        self.runner.answers.put(None)

    def _step(self, outputs: list[RequestOutput]) -> None:
        self._drain(outputs)
        for request in self.scheduler.expired(self.clock()):
            self._finish(request, "deadline", outputs)
        for number in [number for number in self._open if number not in self.scheduler.requests]:
            self.runner.interrupt(self._open.pop(number))
        plan = self.scheduler.schedule()
        self._scheduled(plan, self.clock())
        for row in plan.rows:
            if row.request_id not in self._open:
                self._open[row.request_id] = row.block_table[0]
                self.runner.ask(self.scheduler.requests[row.request_id], row.block_table[0])
        answers = [answer for answer in self._wait() if self._open.get(answer.request.id) is not None]
        if not answers:
            return
        slots = [self._open.pop(answer.request.id) for answer in answers]
        rows = tuple(_row(answer, slot) for answer, slot in zip(answers, slots))
        self._conclude(StepPlan(rows), [_result(answer) for answer in answers], outputs)
        self._counters.steps_total += 1
        self._counters.step_tokens = sum(len(row.token_ids) for row in rows)
        if not self.runner.server.running:
            raise ServerEnded("llama-server has ended")

    def _wait(self) -> list[Answer]:
        """The answers that are there, after waiting for one, or for a command."""
        found: list[Answer | None] = []
        try:
            found.append(self.runner.answers.get(timeout=LONGEST_WAIT))
            while True:
                found.append(self.runner.answers.get_nowait())
        except queue.Empty:
            return [answer for answer in found if answer is not None]


class _ServersGrammar:
    """Stands for the grammar that llama-server follows: it is at its end with the one answer that it gives, be it by
    an end-of-text token that only llama.cpp takes for one."""

    finished = True

    def advance(self, tokens: Sequence[int]) -> None:
        """Nothing is left to do."""


def _row(answer: Answer, slot: int) -> Row:
    """What the server did for a sequence, as a step's row: tokens after the first count like accepted drafts."""
    request, more = answer.request, max(len(answer.tokens) - 1, 0)
    tokens = (*request.token_ids[request.num_computed :], *answer.tokens[:more])
    return Row(request.id, request.num_computed, tokens, (slot,), 1 + more)


def _result(answer: Answer) -> RowResult:
    result = RowResult(
        answer.request, answer.tokens, logprobs=answer.logprobs, prompt_logprobs=answer.prompt_logprobs,
        error=answer.error,
    )  # fmt: skip
    if answer.request.params.constrained:
        answer.request.grammar = _ServersGrammar()
    if not answer.tokens and answer.error is None:
        result.finish_reason = "length"  # only the prompt was to be scored
    return result
