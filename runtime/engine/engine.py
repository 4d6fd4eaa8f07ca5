"""The engine: requests in, pieces of text out, one step at a time.

One owner. Whoever calls `step` owns all state; `add_request` and `abort` may be called from any thread and only queue a
command. A step plans and reserves, runs, samples, reads, commits, reports. What fails before the commit ends only the
requests it belongs to; whatever happens, every accepted sequence ends exactly once, through `_finish`, which frees its
blocks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...optimizer.errors import RunError, UsageError
from .drafting import forget, observe, propose, timed
from .intake import Intake
from .metrics import EngineMetrics, RateWindow
from .offload import OffloadScheduler, run_swaps
from .outputs import RequestOutput
from .plan import Row, StepPlan
from .protocols import Drafter, ModelRunner
from .recovery import execute_surviving
from .request import FinishReason, Request, Status
from .sampling_params import SamplingParams
from .scheduler_config import SchedulerConfig
from .scheduler_select import make_scheduler
from .step_results import RowResult, collect, cut_and_read, make_output, rest_of_text


@dataclass(slots=True)
class _Group:
    """The sequences of one accepted request that have not ended."""

    live: dict[int, Request]
    siblings: list[Request] = field(default_factory=list)
    """Those that wait until the first one's prompt is in the cache."""


class Engine:
    """Continuous batching over a `ModelRunner`.

    runner: the model side. tokenizer: transformers' tokenizer, or None for ids only (then no text, stop strings or
        grammars). scheduler: see `SchedulerConfig`. eos_token_ids: the model's end-of-text tokens. seed: of requests
        that bring none. drafter: proposes tokens for speculation. clock: seconds; deadlines are compared with it.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Any = None,
        *,
        scheduler: SchedulerConfig | None = None,
        eos_token_ids: Sequence[int] = (),
        seed: int = 0,
        drafter: Drafter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner, self.clock = runner, clock
        self._config = scheduler or SchedulerConfig()
        self.scheduler = make_scheduler(self._config, runner)
        self._drafter = drafter
        self._intake = Intake(
            tokenizer, runner.vocab_size, runner.max_model_len, self.scheduler.capacity, eos_token_ids, seed
        )
        self._commands: deque[tuple[str, Any]] = deque()
        self._groups: dict[str, _Group] = {}
        self._lock = threading.Lock()
        """Guards `_groups` and the command queue's order."""
        self._closed = False
        self._counters = EngineMetrics(request_success_total={})
        self._rate = RateWindow()

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> str:
        """Queue a request and return its id. Thread-safe.

        priority: higher first. deadline: absolute, in the engine's clock (`time.monotonic` by default); past it the
        request ends with `deadline`. on_output: called from the step loop with every `RequestOutput`; if it raises,
        the sequence ends with `error`.

        Raises `UsageError`, and accepts nothing, where the request could only fail later: an empty prompt, token ids
        outside the vocabulary, prompt and output beyond the context or the KV pool, a schema or expression that is not
        valid, an id that is in use; `MissingDependency` for a grammar without llguidance; `RunError` once closed.
        """
        params = params or SamplingParams()
        requests = self._intake.build(prompt_token_ids, params, request_id, priority, deadline, self.clock(), on_output)
        name = requests[0].request_id
        with self._lock:
            if self._closed:
                raise RunError("the engine is closed", what_to_do="Create a new one.")
            if name in self._groups:
                raise UsageError(f"a request with the id {name!r} is running", what_to_do="Choose another id.")
            self._groups[name] = _Group({r.id: r for r in requests}, requests[1:])
            self._commands.append(("add", requests[0]))
        return name

    def abort(self, request_id: str) -> None:
        """End a request with `abort` before the next step; nothing happens if it has ended. Thread-safe."""
        with self._lock:
            self._commands.append(("abort", request_id))

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._commands) or self.scheduler.has_work

    def step(self) -> list[RequestOutput]:
        """Run one step and return its news (also given to the requests' callbacks). Owner only; never raises for a
        request's fault. A fault of the engine itself ends every request with `error` and leaves it empty and usable.
        """
        outputs: list[RequestOutput] = []
        try:
            self._step(outputs)
        except Exception as error:
            self._fail_all(error, outputs)
        return outputs

    def metrics(self) -> EngineMetrics:
        """A snapshot; reading it from another thread is safe and at most one step old."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        host = scheduler.host if isinstance(scheduler, OffloadScheduler) else None
        return replace(
            self._counters,
            request_success_total=dict(self._counters.request_success_total),
            spec_decode_num_draft_tokens_per_pos_total=[*self._counters.spec_decode_num_draft_tokens_per_pos_total],
            spec_decode_num_accepted_tokens_per_pos_total=[
                *self._counters.spec_decode_num_accepted_tokens_per_pos_total
            ],
            num_requests_waiting=scheduler.num_waiting,
            num_requests_running=len(scheduler.running),
            kv_cache_usage_perc=1 - pool.num_free / pool.num_blocks,
            kv_host_usage_perc=0.0 if host is None else 1 - len(host.free) / host.num_blocks,
            prefix_cache_queries_total=scheduler.prefix_queries,
            prefix_cache_hits_total=scheduler.prefix_hits,
            num_preemptions_total=scheduler.num_preemptions,
            generation_tokens_per_second=self._rate.recent(self.clock()),
        )

    def close(self) -> list[RequestOutput]:
        """End every request with `abort`, close the runner, accept nothing more. Owner only; safe to call twice."""
        outputs: list[RequestOutput] = []
        with self._lock:
            already, self._closed = self._closed, True
        if not already:
            self._drain(outputs)
            for name in list(self._groups):
                self._end_group(name, "abort", None, outputs)
            self.runner.close()
            close = getattr(self._drafter, "close", None)
            if close is not None:
                close()
        return outputs

    # -- the step ------------------------------------------------------------------------------------------------

    def _step(self, outputs: list[RequestOutput]) -> None:
        self._drain(outputs)
        scheduler, counters = self.scheduler, self._counters
        for request in scheduler.expired(self.clock()):
            self._finish(request, "deadline", outputs)
        began = self.clock()
        if self._drafter is not None:
            for request, error in propose(self._drafter, scheduler):
                self._finish(request, "error", outputs, error)
        started = self.clock()
        plan = scheduler.schedule()
        planned = self.clock()
        self._scheduled(plan, planned)
        if not plan.rows:
            if scheduler.has_work:
                raise RunError("nothing can run although requests are there", where="scheduler")
            return
        offloaded = scheduler if isinstance(scheduler, OffloadScheduler) else None
        if offloaded is not None and (plan.swap_out or plan.swap_in):
            if not run_swaps(self.runner, offloaded, plan, counters, self.clock):
                return
            planned = self.clock()
        survived, logits, culprits = execute_surviving(self.runner, plan)
        executed = self.clock()
        if offloaded is not None:
            offloaded.costs.saw_step(plan, executed - planned)
        for row, error in culprits:
            self._finish(scheduler.requests[row.request_id], "error", outputs, error)
        if logits is None:
            return
        results = self._collect(survived, logits)
        sampled = self.clock()
        self._conclude(survived, results, outputs)
        timed(self._drafter, survived, self.clock() - began, started - began)
        counters.steps_total += 1
        counters.step_tokens = plan.total_tokens
        counters.draft_seconds = started - began
        counters.schedule_seconds, counters.execute_seconds = planned - started, executed - planned
        counters.sample_seconds, counters.output_seconds = sampled - executed, self.clock() - sampled

    def _scheduled(self, plan: StepPlan, now: float) -> None:
        """Note when each request was first in a plan."""
        for row in plan.rows:
            request = self.scheduler.requests[row.request_id]
            if request.first_scheduled_time is None:
                request.first_scheduled_time = now
                self._counters.prompt_tokens_total += request.num_prompt_tokens

    def _conclude(self, plan: StepPlan, results: Sequence[RowResult], outputs: list[RequestOutput]) -> None:
        """Cut what each row of the plan brings, commit it, report it."""
        for result in results:
            cut_and_read(result)
            if result.num_drafts and result.error is None:
                observe(self._drafter, result, self._counters)
            if result.error is not None:
                self._finish(result.request, "error", outputs, result.error)
        self.scheduler.commit(plan, [result.tokens for result in results])
        now = self.clock()
        for row, result in zip(plan.rows, results):
            if not result.request.finished:
                self._report(row, result, now, outputs)
        self._rate.close_step(now)

    def _collect(self, plan: StepPlan, logits: Any) -> list[RowResult]:
        import torch

        if tuple(logits.shape) != (plan.num_logits, self.runner.vocab_size):
            raise RunError(
                f"the runner returned logits of shape {tuple(logits.shape)} for a plan that needs "
                f"{(plan.num_logits, self.runner.vocab_size)}",
                where=type(self.runner).__name__,
            )
        with torch.inference_mode():
            return collect(plan, logits, self.scheduler.requests)

    def _report(self, row: Row, result: RowResult, now: float, outputs: list[RequestOutput]) -> None:
        """After the commit: count, start siblings, deliver, finish."""
        request = result.request
        if request.first_token_time is None and row.end >= request.num_prompt_tokens:
            self._start_siblings(request, outputs)
        if result.tokens:
            if request.first_token_time is None:
                request.first_token_time = now
            self._counters.generation_tokens_total += len(result.tokens)
            self._rate.add(len(result.tokens))
        request.stop_reason = result.stop_reason
        if result.finish_reason is not None:
            self._finish(request, result.finish_reason, outputs, None, result)
        elif result.tokens or result.prompt_logprobs:
            self._deliver(request, make_output(request, result), outputs)

    def _start_siblings(self, leader: Request, outputs: list[RequestOutput]) -> None:
        group = self._groups[leader.request_id]
        siblings, group.siblings = group.siblings, []
        for sibling in siblings:
            try:
                self.scheduler.fork(leader, sibling)
            except Exception as error:
                self._finish(sibling, "error", outputs, error)

    def _deliver(self, request: Request, output: RequestOutput, outputs: list[RequestOutput]) -> None:
        outputs.append(output)
        if request.on_output is None:
            return
        try:
            request.on_output(output)
        except Exception as error:
            self._finish(request, "error", outputs, error)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        outputs: list[RequestOutput],
        error: BaseException | None = None,
        result: RowResult | None = None,
    ) -> None:
        """The one way out: frees the blocks, reports the end. Does nothing for a sequence that has ended."""
        if not self.scheduler.finish(request, reason):
            return
        request.error, request.finish_time = error, self.clock()
        counts = self._counters.request_success_total
        counts[reason] = counts.get(reason, 0) + 1
        if result is None:
            result = RowResult(request, text=rest_of_text(request))
        if self._drafter is not None:
            forget(self._drafter, request)
        with self._lock:
            group = self._groups.get(request.request_id)
            siblings = []
            if group is not None:
                siblings, group.siblings = group.siblings, []
                group.live.pop(request.id, None)
                if not group.live:
                    del self._groups[request.request_id]
        self._deliver(request, make_output(request, result), outputs)
        for sibling in siblings:  # the first sequence ended before its prompt was through: so do those that wait for it
            if not sibling.finished:
                self._finish(sibling, reason, outputs, error)

    # -- commands ------------------------------------------------------------------------------------------------

    def _drain(self, outputs: list[RequestOutput]) -> None:
        while self._commands:
            verb, subject = self._commands.popleft()
            if verb == "abort":
                self._end_group(subject, "abort", None, outputs)
                continue
            try:
                self.scheduler.add(subject)
            except Exception as error:
                self._finish(subject, "error", outputs, error)

    def _end_group(
        self, name: str, reason: FinishReason, error: BaseException | None, outputs: list[RequestOutput]
    ) -> None:
        group = self._groups.get(name)
        for request in list(group.live.values()) if group is not None else ():
            self._finish(request, reason, outputs, error)

    def _fail_all(self, error: Exception, outputs: list[RequestOutput]) -> None:
        """The engine's own state is in doubt: end all that it holds, and go on with an empty pool."""
        old = self.scheduler
        self.scheduler = make_scheduler(self._config, self.runner)
        self.scheduler.num_preemptions = old.num_preemptions
        self.scheduler.prefix_queries, self.scheduler.prefix_hits = old.prefix_queries, old.prefix_hits
        with self._lock:
            queued = {subject.request_id for verb, subject in self._commands if verb == "add"}
            held = [group for name, group in self._groups.items() if name not in queued]
        for request in [request for group in held for request in group.live.values()]:
            if not request.finished:
                request.status = Status.WAITING  # its blocks went with the old scheduler
                self._finish(request, "error", outputs, error)
