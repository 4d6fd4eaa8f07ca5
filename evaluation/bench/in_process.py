"""Load on an `LLM` of this process. A token's time is taken in the step that made it, so measuring costs the engine
next to nothing: no thread and no event loop is woken for it."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from ...optimizer.errors import LlmoptError, UsageError
from .metrics import acceptance
from .records import RequestRecord
from .run import Load, Result

if TYPE_CHECKING:
    from ...runtime.engine.outputs import RequestOutput
    from ...runtime.llm import LLM

COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


class InProcess:
    """Runs loads on an LLM: on its engine's loop, or one request after another where it has none.

    keep: the records keep the token ids of the answers.
    """

    def __init__(self, llm: LLM, *, temperature: float = 0.0, ignore_eos: bool = True, keep: bool = False) -> None:
        self._llm, self._keep = llm, keep
        self._temperature, self._ignore_eos = temperature, ignore_eos

    def run(self, load: Load) -> Result:
        """Send the load's requests when they are due, and wait for all. Raises UsageError for a prompt that is wrong
        or too long, before anything is sent."""
        prompts = [self._encode(number, one.prompt, one.output_len) for number, one in enumerate(load.requests)]
        records = [
            RequestRecord(number, planned=due, prompt_tokens=len(ids), counted_by="engine")
            for number, (ids, due) in enumerate(zip(prompts, load.arrivals, strict=True))
        ]
        before = self._counters()
        start = time.perf_counter()
        if self._llm.loop is not None:
            self._on_loop(load, prompts, records, start)
        else:
            self._one_by_one(load, prompts, records, start)
        duration = time.perf_counter() - start
        gained = [b - a for a, b in zip(before, self._counters())]
        return Result(records, duration, acceptance(*gained))

    def _encode(self, number: int, prompt: Any, output_len: int) -> list[int]:
        from ...runtime.chat import check_length, encode_prompt

        where = f"prompt {number}"
        ids = encode_prompt(self._llm.tokenizer, prompt, where)
        check_length(len(ids), output_len, self._llm.context_length, where)
        return ids

    def _params(self, output_len: int, number: int) -> Any:
        from ...runtime.engine.sampling_params import SamplingParams

        return SamplingParams(
            max_new_tokens=output_len, temperature=self._temperature, ignore_eos=self._ignore_eos, seed=number
        )

    def _on_loop(self, load: Load, prompts: list[list[int]], records: list[RequestRecord], start: float) -> None:
        loop = self._llm.loop
        assert loop is not None
        loop.start()
        limit = load.max_concurrency
        slots = threading.Semaphore(limit) if limit else None
        handles = []
        try:
            for record, ids, request in zip(records, prompts, load.requests):
                _wait(start + record.planned)
                if slots is not None:
                    slots.acquire()
                note = _Note(record, start, slots, self._keep)
                record.sent = time.perf_counter() - start
                try:
                    params = self._params(request.output_len, record.index)
                    handles.append(loop.submit(ids, params, on_output=note))
                except UsageError:
                    raise
                except LlmoptError as error:
                    note.end(str(error))
            for handle in handles:
                handle.result()
        finally:
            for handle in handles:
                if not handle.done:
                    handle.abort()

    def _one_by_one(self, load: Load, prompts: list[list[int]], records: list[RequestRecord], start: float) -> None:
        """A server that takes one request at a time, its queue first in, first out."""
        for number, (record, ids, request) in enumerate(zip(records, prompts, load.requests)):
            _wait(start + record.planned)
            behind = number - load.max_concurrency if load.max_concurrency else -1
            freed = (records[behind].end or 0.0) if behind >= 0 else 0.0
            record.sent = max(record.planned, freed)
            try:
                for chunk in self._llm.stream(ids, self._params(request.output_len, record.index)):
                    _add(record, chunk.token_ids, chunk.finish_reason, time.perf_counter() - start, self._keep)
            except LlmoptError as error:
                record.fail(error)

    def _counters(self) -> list[int]:
        if self._llm.loop is None:
            return [0, 0, 0]
        metrics = self._llm.loop.engine.metrics()
        return [getattr(metrics, f"spec_decode_{name}_total") for name in COUNTERS]


class _Note:
    """Called from the engine's step with what a request gained."""

    def __init__(self, record: RequestRecord, start: float, slots: threading.Semaphore | None, keep: bool) -> None:
        self._record, self._start, self._slots, self._keep = record, start, slots, keep

    def __call__(self, output: RequestOutput) -> None:
        now = time.perf_counter() - self._start
        _add(self._record, output.new_token_ids, output.finish_reason, now, self._keep)
        if output.finished:
            self.end(output.error)

    def end(self, error: object) -> None:
        if error is not None:
            self._record.fail(error)
        if self._slots is not None:
            self._slots.release()


def _add(record: RequestRecord, tokens: tuple[int, ...], reason: str | None, now: float, keep: bool) -> None:
    if tokens:
        record.chunk_times.append(now)
        record.chunk_tokens.append(len(tokens))
        record.output_tokens += len(tokens)
        if keep:
            record.token_ids = [*(record.token_ids or ()), *tokens]
    if reason in ("stop", "length"):
        record.end, record.finish_reason = now, reason
    elif reason is not None:
        record.fail(f"ended with {reason}")


def _wait(until: float) -> None:
    if (left := until - time.perf_counter()) > 0:
        time.sleep(left)
