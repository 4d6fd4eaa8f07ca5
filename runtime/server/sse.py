"""Server-sent events: one writer, an eye on the connection, and a limit for readers that do not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import ApiError, as_json, from_exception
from .job import disconnected

LOOK_SECONDS = 1.0
DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    return b"data: " + as_json(value) + b"\n\n"


class EventStream(Response):
    """Sends the events of an iterator, then `[DONE]`.

    An error after the start becomes an event with an `error` object. `finish` runs at the end, whatever it is: the
    last event, a client that went away, one that took nothing for `send_seconds`, or the server's shutdown.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        finish: Callable[[], Any],
        failed: Callable[[ApiError], Any],
        send_seconds: float,
    ) -> None:
        self.status_code, self.background, self.body = 200, None, b""
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._finish, self._failed, self._limit = events, finish, failed, send_seconds
        self._sending_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.create_task(self._write(send))
        gone = asyncio.create_task(disconnected(receive))
        try:
            while not writer.done():
                await asyncio.wait({writer, gone}, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if gone.done() and not writer.done():
                    self._failed(ApiError(499, "the client closed the connection", reason="disconnected"))
                    return
                if not writer.done() and self._stuck():
                    self._failed(ApiError(499, "the client does not read", reason="slow_reader"))
                    return  # without an end: the server closes the connection
            await writer
        finally:
            self._finish()
            for task in (writer, gone):
                task.cancel()
            await asyncio.gather(writer, gone, return_exceptions=True)

    def _stuck(self) -> bool:
        since = self._sending_since
        return since is not None and asyncio.get_running_loop().time() - since > self._limit

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for data in self._events:
                await self._send(send, data)
        except Exception as error:
            answer = from_exception(error)
            if answer is not error:
                answer.__cause__ = error
            self._failed(answer)
            await self._send(send, event(answer.body))
        await self._send(send, DONE, more=False)

    async def _send(self, send: Callable[[dict[str, Any]], Awaitable[None]], data: bytes, more: bool = True) -> None:
        self._sending_since = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": data, "more_body": more})
        self._sending_since = None
