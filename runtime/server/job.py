"""One HTTP request's way through the server: model, tokens, a place in the engine, outputs, and the clean end."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request

from ..engine.sampling_params import SamplingParams
from .admission import Ticket
from .errors import ApiError, from_exception, where
from .model import ServedModel
from .prompts import fit

if TYPE_CHECKING:
    from ..engine.outputs import RequestOutput
    from .app import Services
    from .bridge import TokenStream

T = TypeVar("T")
Prepare = Callable[[ServedModel], tuple[list[list[int]], SamplingParams]]
CLIENT_CLOSED = 499
"""Status in the log of a request whose client went away; nobody receives it."""


@dataclass(eq=False)
class Job:
    """An admitted request: a stream for each of its prompts. `close` gives everything back; call it in any case.

    Sequence i of prompt p has the index `p * n + i` in the answer.
    """

    services: Services
    model: ServedModel
    prompts: list[list[int]]
    params: SamplingParams
    record: dict[str, Any]
    """What the access log says about the request."""
    ticket: Ticket | None = None
    streams: list[TokenStream] = field(default_factory=list)
    cached_tokens: int = 0
    output_tokens: int = 0
    started: float = field(default_factory=time.monotonic)
    _closed: bool = False
    _cached: dict[int, int] = field(default_factory=dict)
    _texts: list[str] = field(default_factory=list)
    _readers: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.params.n

    async def outputs(self) -> AsyncIterator[list[tuple[int, RequestOutput]]]:
        """What has come since the last item, as (index in the answer, output), until every sequence has ended.

        Raises ApiError where a sequence failed, or the engine ended it unasked.
        """
        if len(self.streams) == 1:
            while batch := await self.streams[0].read():
                yield self._seen(0, batch)
            return
        queue: asyncio.Queue[list[tuple[int, RequestOutput]] | BaseException | None] = asyncio.Queue()
        self._readers = [asyncio.create_task(self._read(number, queue)) for number in range(len(self.streams))]
        running = len(self._readers)
        while running:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item

    async def _read(self, number: int, queue: asyncio.Queue[Any]) -> None:
        try:
            while batch := await self.streams[number].read():
                queue.put_nowait(self._seen(number, batch))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    def _seen(self, number: int, batch: list[RequestOutput]) -> list[tuple[int, RequestOutput]]:
        stream = self.streams[number]
        self.services.metrics.observe_gaps(stream)
        if self.services.settings.log_text:
            self._texts += [output.new_text for output in batch]
        for output in batch:
            self.output_tokens += len(output.new_token_ids)
            self._cached[number] = max(self._cached.get(number, 0), output.num_cached_tokens)
            if output.finished:
                self.services.metrics.observe_end(output)
                self._check_end(stream, output)
                self.record["finish_reason"] = output.finish_reason
        self.cached_tokens = sum(self._cached.values())
        return [(number * self.params.n + output.index, output) for output in batch]

    def _check_end(self, stream: TokenStream, output: RequestOutput) -> None:
        if stream.overflowed:
            raise ApiError(503, "the answer was not read fast enough", code="slow_reader", reason="slow_reader")
        if output.finish_reason == "abort":
            raise self.services.host.why_aborted(self.model)
        if output.finish_reason == "error":
            error = output.error
            self.services.log.event(
                "request_failed", request_id=stream.request_id, error=type(error).__name__, where=where(error)
            )
            raise from_exception(error)

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": self.prompt_tokens + self.output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def close(self) -> None:
        """Abort what still runs, give the place and the model back, fill the log's record. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for reader in self._readers:
            reader.cancel()
        for stream in self.streams:
            stream.abort()
        if self.ticket is not None:
            self.services.host.queue.release(self.ticket)
        self.services.host.give_back(self.model)
        self.record.update(prompt_tokens=self.prompt_tokens, completion_tokens=self.output_tokens)
        if self.services.settings.log_text:
            self.record["prompt"] = [self.model.tokenizer.decode(prompt) for prompt in self.prompts]
            self.record["text"] = "".join(self._texts)


async def open_job(request: Request, name: str | None, deadline: float | None, sequences: int, prepare: Prepare) -> Job:
    """Check, tokenize, wait for a place, submit. Raises ApiError (also where the client goes away meanwhile),
    UsageError; then nothing is left behind.

    name: the model asked for. deadline: seconds from now. sequences: prompts times n. prepare: runs in the worker
    thread, in the client's turn.
    """
    return await or_disconnect(request, _open(request, name, deadline, sequences, prepare))


async def _open(request: Request, name: str | None, deadline: float | None, sequences: int, prepare: Prepare) -> Job:
    services: Services = request.app.state.services
    services.check_model(name)
    _check_number(services, sequences)  # before anything is tokenized: a body holds a million prompts
    arrival = time.monotonic()
    seconds = deadline or services.settings.request_seconds
    client = request.scope["llmopt.client"]
    model = services.host.lease()
    job = Job(services, model, [], SamplingParams(), request.scope["llmopt.record"])
    try:
        prompts, params = await _before(seconds, services.host.in_turn(client, lambda: prepare(model)))
        each = [fit(model, prompt, params) for prompt in prompts]
        job.prompts, job.params = prompts, params
        left = None if seconds is None else max(0.0, arrival + seconds - time.monotonic())
        job.ticket = await _before(left, services.host.queue.acquire(client, job.num_sequences))
        limit = None
        if seconds is not None:
            limit = model.loop.engine.clock() + arrival + seconds - time.monotonic()
        group = uuid.uuid4().hex
        for number, (prompt, own) in enumerate(zip(prompts, each)):
            job.streams.append(await services.host.submit(model, prompt, own, f"{group}-{number}", limit))
        return job
    except BaseException:
        job.close()
        raise


async def or_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Wait for the work; where the client goes away first, cancel it and raise ApiError 499."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(disconnected(request.receive))
    returned = False
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            returned = True
            return task.result()
        raise ApiError(CLIENT_CLOSED, "the client closed the connection", code="client_closed", reason="disconnected")
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
        left, _ = await asyncio.gather(task, gone, return_exceptions=True)
        if isinstance(left, Job) and not returned:  # it came in spite of the cancellation
            left.close()


async def disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    """Return when the client has closed the connection (the body has been read before)."""
    while (await receive())["type"] != "http.disconnect":
        continue


async def _before(seconds: float | None, work: Awaitable[T]) -> T:
    try:
        return await (work if seconds is None else asyncio.wait_for(work, seconds))
    except asyncio.TimeoutError:
        raise deadline_passed() from None


def deadline_passed() -> ApiError:
    return ApiError(408, "the deadline passed before there was an answer", code="deadline_exceeded", reason="deadline")


def _check_number(services: Services, count: int) -> None:
    limit = services.settings.max_sequences
    if count > limit:
        raise ApiError(400, f"{count} sequences (prompts times n) are asked for, the limit is {limit}", param="n")
