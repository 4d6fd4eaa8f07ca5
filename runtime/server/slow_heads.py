"""Connections that do not finish a request's head are closed: uvicorn itself would wait for ever."""

from __future__ import annotations

import asyncio
from typing import Any


def timed_protocol(seconds: float) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol with a limit on the time from the first byte (or from the connection) to a whole head.

    However slowly the bytes trickle, the clock is not set back. Between two requests uvicorn's keep-alive timer counts.
    """
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    base: Any = AutoHTTPProtocol

    class Timed(base):  # type: ignore[misc]
        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _watch(self) -> None:
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_timer()
            elif self._head_timer is None and not self.transport.is_closing():
                self._head_timer = asyncio.get_running_loop().call_later(seconds, self._give_up)

        def _give_up(self) -> None:
            self._head_timer = None
            if self.cycle is None or self.cycle.response_complete:
                self.transport.abort()

        def _stop_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return Timed
