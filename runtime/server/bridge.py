"""From the engine's thread to asyncio: outputs travel in batches, each stream has one reader."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..engine.loop import EngineLoop
    from ..engine.outputs import RequestOutput


class Mailbox:
    """Carries outputs into one event loop. However many come in a step, the loop is woken once for them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[tuple[TokenStream, RequestOutput, float]] = deque()
        self._called = False

    def put(self, stream: TokenStream, output: RequestOutput) -> None:
        """From the engine's thread; never blocks, never raises."""
        self._items.append((stream, output, time.monotonic()))
        if not self._called:
            self._called = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the event loop is closed: nobody reads any more
                self._items.clear()

    def _deliver(self) -> None:
        self._called = False  # before the reading: what comes meanwhile calls again
        while self._items:
            stream, output, when = self._items.popleft()
            stream.receive(output, when)


class TokenStream:
    """The outputs of one engine request, read by one coroutine. Everything but `put` runs in the event loop.

    max_unread: outputs that may wait; one more aborts the request and sets `overflowed`. on_end: called at the end of
        each sequence.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        engine: EngineLoop,
        request_id: str,
        num_sequences: int,
        max_unread: int,
        on_end: Callable[[], None],
    ) -> None:
        self._mailbox, self._engine, self._max_unread, self._on_end = mailbox, engine, max_unread, on_end
        self.request_id = request_id
        self.remaining = num_sequences
        """Sequences whose end has not been received."""
        self.aborted = self.overflowed = False
        self.gaps: list[float] = []
        """Seconds between outputs of a sequence since the last `read`."""
        self._last: dict[int, float] = {}
        self._pending: list[RequestOutput] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        """The engine's `on_output`."""
        self._mailbox.put(self, output)

    def receive(self, output: RequestOutput, when: float) -> None:
        if output.index in self._last and output.new_token_ids:
            self.gaps.append(when - self._last[output.index])
        self._last[output.index] = when
        if output.finished:
            self.remaining -= 1
            self._on_end()
        if len(self._pending) < self._max_unread or output.finished:
            self._pending.append(output)
        elif not self.overflowed:
            self.overflowed = True
            self.abort()
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def read(self) -> list[RequestOutput]:
        """All outputs that have come since the last call, in order; waits for one. Empty after the end."""
        while not self._pending and self.remaining:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        pending, self._pending = self._pending, []
        return pending

    def abort(self) -> None:
        """End the request before the engine's next step and free its blocks; nothing happens once it has ended."""
        if self.remaining and not self.aborted:
            self.aborted = True
            self._engine.abort(self.request_id)
