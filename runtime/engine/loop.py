"""A thread that steps the engine, and handles through which any thread or event loop waits for its requests."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from ...optimizer.errors import RunError
from .engine import Engine
from .outputs import Completion, RequestOutput
from .sampling_params import SamplingParams


class RequestHandle:
    """One submitted request. Iterate it (`for` or `async for`) for its outputs, or ask for its `result`.

    Outputs are kept until they are read, by one reader. Leaving an `async for` early (cancellation, disconnect) aborts
    the request; leaving a plain `for` early does the same when its iterator is closed.
    """

    def __init__(self, loop: EngineLoop, num_sequences: int) -> None:
        self._loop, self._remaining = loop, num_sequences
        self._condition = threading.Condition()
        self._outputs: deque[RequestOutput] = deque()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._completions: dict[int, Completion] = {}
        self.request_id = ""

    @property
    def done(self) -> bool:
        """Whether every sequence has ended (their outputs may not have been read yet)."""
        return self._remaining == 0

    def abort(self) -> None:
        """End the request with `abort`; nothing happens if it has ended."""
        self._loop.abort(self.request_id)

    def result(self, timeout: float | None = None) -> list[Completion]:
        """Wait for the end; the `n` completions by index. Raises `TimeoutError` (the request goes on).

        A sequence that failed has `finish_reason == "error"` and its `error`; nothing is raised for it.
        """
        with self._condition:
            if not self._condition.wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"request {self.request_id} has not ended after {timeout} s")
        return self._sorted()

    async def aresult(self) -> list[Completion]:
        """`result` for asyncio; cancelling it aborts the request."""
        async for _ in self:
            pass
        return self._sorted()

    def __iter__(self) -> Iterator[RequestOutput]:
        try:
            while True:
                with self._condition:
                    self._condition.wait_for(lambda: self._outputs or self.done)
                    if not self._outputs:
                        return
                    output = self._outputs.popleft()
                yield output
        finally:
            if not self.done:
                self.abort()

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        try:
            while True:
                with self._condition:
                    output = self._outputs.popleft() if self._outputs else None
                    if output is None:
                        if self.done:
                            return
                        loop = asyncio.get_running_loop()
                        waiter = loop.create_future()
                        self._waiters.append((loop, waiter))
                if output is None:
                    await waiter
                else:
                    yield output
        finally:
            if not self.done:
                self.abort()

    def _sorted(self) -> list[Completion]:
        return [self._completions[index] for index in sorted(self._completions)]

    def _put(self, output: RequestOutput) -> None:
        """From the step loop. Does not raise."""
        with self._condition:
            completion = self._completions.get(output.index)
            if completion is None:
                completion = self._completions[output.index] = Completion(output.request_id, output.index)
            completion.add(output)
            self._outputs.append(output)
            if output.finished:
                self._remaining -= 1
            self._condition.notify_all()
            waiters, self._waiters = self._waiters, []
        for loop, waiter in waiters:
            try:
                loop.call_soon_threadsafe(_wake, waiter)
            except RuntimeError:  # its event loop is closed: nobody waits there any more
                continue


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _both(first: Callable[[RequestOutput], None], then: Callable[[RequestOutput], None]) -> Callable[..., None]:
    def call(output: RequestOutput) -> None:
        first(output)
        then(output)

    return call


class EngineLoop:
    """Owns an `Engine` and steps it in one thread while there is work. A context manager; `close` leaves no thread.

    Works in a notebook and under asyncio: nothing blocks but `result`, plain iteration, `stop` and `close`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._work = threading.Condition()
        self._thread: threading.Thread | None = None
        self._running = False
        self._closed = False
        self.error: BaseException | None = None
        """What ended the thread, if it was not `stop` or `close`."""

    def __enter__(self) -> EngineLoop:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def healthy(self) -> bool:
        """Whether submitted requests are being worked on."""
        return self._thread is not None and self._thread.is_alive() and self.error is None

    def start(self) -> None:
        """Start stepping, or go on after `stop`. Raises `RunError` once closed."""
        with self._work:
            if self._closed:
                raise RunError("the engine loop is closed", what_to_do="Create a new one.")
            if self._running:
                return
            self._running, self.error = True, None
            self._thread = threading.Thread(target=self._run, name="llmopt-engine", daemon=True)
            self._thread.start()
            atexit.register(self.close)  # a forgotten loop must not be in the middle of a step when Python goes down

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> RequestHandle:
        """`Engine.add_request` with a handle; raises what that raises, and `RunError` if the loop has failed.

        on_output: also called with every output, from the step loop, before the handle has it.
        """
        params = params or SamplingParams()
        handle = RequestHandle(self, params.n)
        put = handle._put if on_output is None else _both(on_output, handle._put)
        handle.request_id = self.enqueue(
            prompt_token_ids,
            params,
            request_id=request_id,
            priority=priority,
            deadline=deadline,
            on_output=put,
        )
        return handle

    def enqueue(self, prompt_token_ids: Sequence[int], params: SamplingParams, **options: Any) -> str:
        """`submit` for a caller that keeps the outputs itself: no handle, `on_output` has them. Returns the id."""
        if self.error is not None:
            raise RunError(f"the engine loop has failed: {self.error!r}", what_to_do="Create a new one.")
        name = self.engine.add_request(prompt_token_ids, params, **options)
        self._notify()
        return name

    def abort(self, request_id: str) -> None:
        """End a request with `abort` before the next step; nothing happens if it has ended."""
        self.engine.abort(request_id)
        self._notify()

    def stop(self) -> None:
        """Finish the step in progress and park; requests stay. Returns when the thread is gone."""
        with self._work:
            self._running = False
            self._work.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._thread = None

    def close(self) -> None:
        """Stop, end every request with `abort`, close the engine and its runner. Safe to call twice."""
        with self._work:
            already, self._closed = self._closed, True
        if already:
            return
        atexit.unregister(self.close)
        self.stop()
        self.engine.close()

    def _notify(self) -> None:
        with self._work:
            self._work.notify_all()

    def _run(self) -> None:
        try:
            while True:
                with self._work:
                    self._work.wait_for(lambda: not self._running or self.engine.has_work)
                    if not self._running:
                        return
                self.engine.step()
        except BaseException as error:  # not an ordinary exception: `step` contains those
            self.error = error
            with self._work:
                self._running = False
            self.engine.close()


def collect_outputs(engine: Engine, max_steps: int | None = None) -> list[RequestOutput]:
    """Step an engine until it has no work (or `max_steps` times) in the calling thread; all outputs in order."""
    outputs: list[RequestOutput] = []
    steps = 0
    while engine.has_work and (max_steps is None or steps < max_steps):
        outputs.extend(engine.step())
        steps += 1
    return outputs
