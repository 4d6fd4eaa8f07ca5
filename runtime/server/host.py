"""The model that is being served: loading, swapping, restarting after a crash, draining."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from ...optimizer.errors import LlmoptError
from .admission import FairQueue
from .bridge import Mailbox, TokenStream
from .errors import ApiError, from_exception, unavailable
from .logs import Log
from .model import ServedModel
from .settings import ServerSettings
from .totals import Totals

State = Literal["loading", "ready", "restarting", "failed", "draining", "stopped"]
WATCH_SECONDS = 0.2
RETRY_LOADING = 10
MAX_RESTARTS = 1
LEAST_TURNS = 64
"""Requests that may wait to be tokenized, however few may wait for the engine."""


class Host:
    """Lives in one event loop; all methods are for it. loader: opens a model (None: the one the server was started
    with); runs in a thread and may raise LlmoptError."""

    def __init__(self, loader: Callable[[str | None], ServedModel], settings: ServerSettings, log: Log) -> None:
        self._load, self.settings, self.log = loader, settings, log
        self.state: State = "loading"
        self.model: ServedModel | None = None
        self.queue = FairQueue(1, settings.max_queue)
        self.turns = FairQueue(1, max(settings.max_queue, LEAST_TURNS))
        """Whose text the worker thread handles next: a long one must not be followed by another of the same client."""
        self.totals = Totals()
        """Counters of engines that are gone."""
        self.models: list[ServedModel] = []
        """Those that are not closed: the current one first, retired ones that still have requests."""
        self.restarts = 0
        self.stalled = False
        self.accepted = self.ended = 0
        """Sequences that the engine took, and their ends that it reported: equal when nothing runs."""
        self.workers = ThreadPoolExecutor(1, thread_name_prefix="llmopt-text")
        """Tokenizes and compiles grammars; one thread, because tokenizers are not made for more."""
        self._loaders = ThreadPoolExecutor(1, thread_name_prefix="llmopt-load")
        self._mailbox: Mailbox | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._source: str | None = None
        self._changing = asyncio.Lock()
        self._beat = (time.monotonic(), (-1, -1))

    @property
    def healthy(self) -> bool:
        return self.state not in ("failed", "restarting") and not self.stalled

    @property
    def ready(self) -> bool:
        return self.state == "ready" and not self.stalled

    async def start(self) -> None:
        """Load the model. Raises what the loader raises."""
        self._mailbox = Mailbox(asyncio.get_running_loop())
        async with self._changing:
            self._install(await self._run_loader(None))
        self._watcher = asyncio.create_task(self._watch(), name="llmopt-watch")

    async def reload(self, source: str | None) -> ServedModel:
        """Load a model beside the current one and put it in its place; requests that run finish where they are.

        Raises ApiError 409 while another change is going on, 400 where the source cannot be loaded (nothing changes).
        """
        if self._changing.locked():
            raise ApiError(409, "the model is being loaded already", code="busy", reason="busy")
        if self.state not in ("ready", "failed"):
            raise self.refusal()
        async with self._changing:
            try:
                model = await self._run_loader(source or self._source)
            except LlmoptError as error:
                raise ApiError(400, f"the model was not replaced: {error}", code="reload_failed") from error
            self._source = source or self._source
            self.restarts = 0
            self._install(model)
            self.log.event("reloaded", model=model.source)
        return model

    def lease(self) -> ServedModel:
        """The current model, kept open until `give_back`. Raises ApiError 503 where there is none to use."""
        if self.state != "ready" or self.model is None:
            raise self.refusal()
        if self.stalled:
            raise unavailable("the engine makes no progress", "engine_stalled", RETRY_LOADING)
        if self.model.crashed is not None:
            raise engine_crashed()
        self.model.users += 1
        return self.model

    def give_back(self, model: ServedModel) -> None:
        model.users -= 1
        self._close_unused()

    def refusal(self) -> ApiError:
        """Why nothing can be generated now."""
        if self.state == "draining" or self.state == "stopped":
            return unavailable("the server is shutting down", "shutting_down", RETRY_LOADING)
        if self.state == "failed":
            return unavailable("the engine crashed repeatedly and was given up", "engine_failed", None)
        if self.state == "restarting":
            return engine_crashed()
        return unavailable("the model is being loaded", "loading", RETRY_LOADING)

    async def submit(
        self, model: ServedModel, prompt: list[int], params: Any, request_id: str, deadline: float | None
    ) -> TokenStream:
        """Give a request to the engine. deadline: absolute, by the engine's clock. Raises ApiError."""
        assert self._mailbox is not None
        stream = TokenStream(
            self._mailbox, model.loop, request_id, params.n, self.settings.max_unread, self._sequence_ended
        )

        def enqueue() -> None:
            model.loop.enqueue(prompt, params, request_id=request_id, deadline=deadline, on_output=stream.put)
            self.accepted += params.n  # only this one thread writes it

        try:
            await self.in_worker(enqueue)
        except asyncio.CancelledError:  # the thread goes on: what it submits must not run unread
            self.workers.submit(model.loop.abort, request_id)
            raise
        except Exception as error:
            if model.crashed is not None:
                raise engine_crashed() from None
            raise from_exception(error) from error
        return stream

    def _sequence_ended(self) -> None:
        self.ended += 1

    async def in_worker(self, work: Callable[[], Any]) -> Any:
        """Run what is too slow for the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.workers, work)

    async def in_turn(self, client: str, work: Callable[[], Any]) -> Any:
        """`in_worker`, clients taking turns. Raises ApiError 429 where too many wait."""
        ticket = await self.turns.acquire(client)
        try:
            return await self.in_worker(work)
        finally:
            self.turns.release(ticket)

    def why_aborted(self, model: ServedModel) -> ApiError:
        """The error of a request that the engine ended though nobody asked it to."""
        if model.crashed is not None:
            return unavailable("the engine crashed while the request ran", "engine_crashed", RETRY_LOADING)
        return unavailable("the server stopped the request", "shutting_down", RETRY_LOADING)

    async def drain(self, seconds: float) -> None:
        """Take nothing new, wait for what runs, at most so long, then end it."""
        self.state = "draining"
        end = time.monotonic() + seconds
        while any(model.users for model in self.models) and time.monotonic() < end and self.state == "draining":
            await asyncio.sleep(0.05)
        await self.stop()

    async def stop(self) -> None:
        """End every request, close every engine and thread. Safe to call twice."""
        self.state = "stopped"
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None
        loop = asyncio.get_running_loop()
        for model in self.models:
            model.retired = True
            await loop.run_in_executor(None, model.close)
        end = time.monotonic() + 5
        while any(model.users for model in self.models) and time.monotonic() < end:
            await asyncio.sleep(0.02)  # their requests have ended; let the answers go out
        for model in self.models:
            self.totals.add(model.loop.engine.metrics())
        self.models, self.model = [], None
        self.workers.shutdown(wait=False, cancel_futures=True)
        self._loaders.shutdown(wait=False, cancel_futures=True)

    # -- changes of the model ------------------------------------------------------------------------------------

    async def _run_loader(self, source: str | None) -> ServedModel:
        return await asyncio.get_running_loop().run_in_executor(self._loaders, self._load, source)

    def _install(self, model: ServedModel) -> None:
        if self.state in ("draining", "stopped"):
            model.close()
            return
        if self.model is not None:
            self.model.retired = True
        self.model = model
        self.models.insert(0, model)
        self.queue.resize(model.max_num_seqs + max(2, model.max_num_seqs // 8))  # so that a free place finds a request
        self.state, self.stalled = "ready", False
        self._beat = (time.monotonic(), (-1, -1))
        self._close_unused()

    def _close_unused(self) -> None:
        for model in [model for model in self.models if model.retired and not model.users]:
            self.models.remove(model)
            self.totals.add(model.loop.engine.metrics())
            asyncio.get_running_loop().run_in_executor(None, model.close)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            model = self.model
            if model is None:
                continue
            if model.crashed is not None and self.state == "ready":
                await self._restart(model)
            else:
                self._heartbeat(model)

    def _heartbeat(self, model: ServedModel) -> None:
        now, progress = time.monotonic(), model.progress()
        if progress != self._beat[1] or not model.loop.engine.has_work:
            self._beat = (now, progress)
        stalled = now - self._beat[0] > self.settings.stall_seconds
        if stalled != self.stalled:
            self.log.event("stalled" if stalled else "moving_again", seconds=round(now - self._beat[0], 1))
        self.stalled = stalled

    async def _restart(self, model: ServedModel) -> None:
        self.log.event("engine_crashed", error=type(model.crashed).__name__, detail=str(model.crashed)[:300])
        model.retired = True
        self.model = None
        self.state = "restarting" if self.restarts < MAX_RESTARTS else "failed"
        self._close_unused()
        if self.state == "failed":
            return
        self.restarts += 1
        async with self._changing:
            try:
                self._install(await self._run_loader(self._source))
            except Exception as error:
                self.state = "failed"
                self.log.event("restart_failed", error=type(error).__name__, detail=str(error)[:300])
            else:
                self.log.event("restarted")


def engine_crashed() -> ApiError:
    return unavailable("the engine crashed and is being restarted", "engine_crashed", RETRY_LOADING)
