"""The engine's side of speculation: asking the drafter, and telling it how its drafts fared."""

from __future__ import annotations

from .metrics import EngineMetrics
from .plan import StepPlan
from .protocols import Drafter
from .request import Request
from .scheduler import Scheduler
from .step_results import RowResult


def propose(drafter: Drafter, scheduler: Scheduler) -> list[tuple[Request, Exception]]:
    """Set `drafts` of the requests that decode next. Returns those for which the drafter raises, asked one by one."""
    ready: list[Request] = []
    others = 0
    for request in scheduler.running:
        missing = len(request.token_ids) - request.num_computed
        if missing == 1:
            ready.append(request)
        else:
            others += missing
    if not ready:
        return []
    begin = getattr(drafter, "begin", None)
    if begin is not None:
        begin(scheduler, ready, others)
    failed: list[tuple[Request, Exception]] = []
    try:
        proposals = [tuple(drafts) for drafts in drafter.propose(ready)]
    except Exception:
        proposals = []
        for request in ready:
            try:
                proposals.append(tuple(drafter.propose([request])[0]))
            except Exception as error:
                proposals.append(())
                failed.append((request, error))
    for request, drafts in zip(ready, proposals):
        request.drafts = drafts
    return failed


def timed(drafter: Drafter | None, plan: StepPlan, seconds: float, draft_seconds: float) -> None:
    """Tell a drafter that wants to know it how long the step took, `draft_seconds` of it for drafts."""
    tell = getattr(drafter, "timed", None)
    if tell is not None:
        tell(plan, seconds, draft_seconds)


def observe(drafter: Drafter | None, result: RowResult, counters: EngineMetrics) -> None:
    """Count a verified row and report it; the result's `error` is set if the drafter raises."""
    counters.spec_decode_num_drafts_total += 1
    counters.spec_decode_num_draft_tokens_total += result.num_drafts
    counters.spec_decode_num_accepted_tokens_total += result.num_accepted
    count_positions(counters.spec_decode_num_draft_tokens_per_pos_total, result.num_drafts)
    count_positions(counters.spec_decode_num_accepted_tokens_per_pos_total, result.num_accepted)
    if drafter is None:
        return
    try:
        drafter.observe(result.request, result.num_drafts, result.num_accepted)
    except Exception as error:
        result.error = error


def count_positions(counts: list[int], number: int) -> None:
    """One more at each of the first `number` positions."""
    counts.extend([0] * (number - len(counts)))
    for position in range(number):
        counts[position] += 1


def forget(drafter: Drafter, request: Request) -> None:
    """The request has ended; what the drafter raises becomes its error where it has none."""
    try:
        drafter.forget(request)
    except Exception as error:
        request.error = request.error or error
