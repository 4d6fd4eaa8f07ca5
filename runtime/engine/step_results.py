"""Between logits and commit: which logits rows belong to what, and what each request gains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .outputs import RequestOutput, RequestTimes
from .plan import Row, StepPlan
from .request import FinishReason, Request, stop_at
from .sampler import Sampled, SampleItem, sample

if TYPE_CHECKING:
    import torch

    from .logprobs import TokenLogprobs


@dataclass(slots=True)
class RowResult:
    """What one row of a step brings its request."""

    request: Request
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_drafts: int = 0
    num_accepted: int = 0
    """Accepted drafts, before the output was cut at its end."""
    error: Exception | None = None


def collect(plan: StepPlan, logits: torch.Tensor, requests: dict[int, Request]) -> list[RowResult]:
    """Results of every row, in plan order. A request whose own data makes its part raise has `error` set."""
    results: list[RowResult] = []
    items: list[tuple[RowResult, SampleItem]] = []
    offset = 0
    for row in plan.rows:
        request = requests[row.request_id]
        result = RowResult(request)
        results.append(result)
        base = request.num_tokens
        if row.end >= base and request.max_total_tokens > base:
            drafts = row.token_ids[base - row.start :]
            result.num_drafts = len(drafts)
            items.append((result, SampleItem(request, drafts, offset + row.num_logits - 1 - len(drafts))))
        elif row.end >= base:
            result.finish_reason = "length"  # max_new_tokens = 0: only the prompt was to be scored
        if row.num_logits and request.wants_prompt_logprobs:
            try:
                _prompt_logprobs(result, row, offset, logits)
            except Exception as error:
                result.error = error
        offset += row.num_logits
    sampling = [item for item in items if item[0].error is None]
    _isolate([result for result, _ in sampling], lambda part: _sample(part, sampling, logits))
    return results


def _isolate(results: list[RowResult], work: Callable[[list[RowResult]], None]) -> None:
    """Do the work for all; if it raises, for one at a time, and note the error where it raises again."""
    if not results:
        return
    try:
        work(results)
    except Exception as error:
        if len(results) == 1:
            results[0].error = error
            return
        for result in results:
            _isolate([result], work)


def _sample(part: list[RowResult], items: list[tuple[RowResult, SampleItem]], logits: torch.Tensor) -> None:
    chosen = [item for result, item in items if any(result is one for one in part)] if len(part) < len(items) else None
    sampled = sample(logits, [item for _, item in items] if chosen is None else chosen)
    for result, gained in zip(part, sampled):
        result.tokens, result.logprobs, result.error = gained.tokens, gained.logprobs, gained.error
        result.num_accepted = _accepted(gained)


def _accepted(gained: Sampled) -> int:
    return max(0, len(gained.tokens) - 1)


def _prompt_logprobs(result: RowResult, row: Row, offset: int, logits: torch.Tensor) -> None:
    from .logprobs import token_logprobs

    request = result.request
    first = row.end - row.num_logits
    last = min(row.end, request.num_prompt_tokens - 1)
    targets = request.token_ids[first + 1 : last + 1]
    values, counts = logits[offset : offset + len(targets)], [request.params.prompt_logprobs or 0] * len(targets)
    result.prompt_logprobs = tuple(token_logprobs(values, targets, counts))


def cut_and_read(result: RowResult) -> None:
    """Cut the tokens where the request ends, turn them into text, advance the grammar. Sets `error` if that raises."""
    if result.error is not None or not result.tokens:
        return
    request = result.request
    try:
        tokens, reason, stop_token = stop_at(request, result.tokens)
        text, used = "", len(tokens)
        stream = request.detokenizer
        if stream is not None:
            for i, token in enumerate(tokens):
                if reason == "stop" and i == len(tokens) - 1 and not request.params.include_stop_in_output:
                    break  # the stop token itself is not text
                text += stream.push(token)
                if stream.matched is not None:
                    used, reason, stop_token = i + 1, "stop", None
                    break
        tokens = tokens[:used]
        if request.grammar is not None:
            request.grammar.advance(tokens)
            if reason is None and request.grammar.finished:
                reason = "stop"
        if reason is not None and stream is not None:
            text += stream.finish()
            if stream.matched is not None:
                reason = "stop"
        result.tokens, result.text, result.finish_reason = tokens, text, reason
        result.stop_reason = stop_token if stream is None or stream.matched is None else stream.matched
        if result.logprobs is not None:
            result.logprobs = result.logprobs[: len(tokens)]
    except Exception as error:
        result.error = error


def rest_of_text(request: Request) -> str:
    """Text held back so far, for a request that ends from outside."""
    try:
        return request.detokenizer.finish() if request.detokenizer is not None else ""
    except Exception:  # the detokenizer may be what has failed; the request's error says so
        return ""


def make_output(request: Request, result: RowResult) -> RequestOutput:
    """The caller's view of a result, after the commit."""
    times = None
    if request.finished:
        times = RequestTimes(
            request.arrival_time, request.first_scheduled_time, request.first_token_time, request.finish_time
        )
    return RequestOutput(
        request_id=request.request_id,
        index=request.index,
        new_token_ids=result.tokens,
        new_text=result.text,
        logprobs=result.logprobs,
        prompt_logprobs=result.prompt_logprobs,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason if request.finished else None,
        error=request.error,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_output_tokens=request.num_output_tokens,
        times=times,
    )
