"""Sending an answer: whole or as a stream, and giving the job back in any case."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from fastapi import Request
from starlette.responses import Response

from .errors import ApiError, as_json, where
from .job import Job, or_disconnect
from .schemas import Sampling
from .sse import EventStream


class JsonReply(Response):
    """UTF-8 JSON, also where a text has half characters in it."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return as_json(content)


class Answer(Protocol):
    async def whole(self) -> JsonReply: ...

    def events(self) -> AsyncIterator[bytes]: ...


async def respond(request: Request, job: Job, body: Sampling, answer: Answer) -> Response:
    """The response to an open job. Raises ApiError (before a stream starts)."""
    services = request.app.state.services
    if body.stream:

        def failed(error: ApiError) -> None:
            services.metrics.rejected(error.reason)
            job.record["error"] = error.code or error.reason
            if error.status == 499:
                job.record["finish_reason"] = "abort"
            elif error.__cause__ is not None:
                cause = error.__cause__
                services.log.event("stream_failed", error=type(cause).__name__, where=where(cause))

        return EventStream(answer.events(), job.close, failed, services.settings.send_seconds)
    try:
        return await or_disconnect(request, answer.whole())
    finally:
        job.close()
