"""What every request passes: an id, a line in the log, the host and key checks, the body limit. Plain ASGI."""

from __future__ import annotations

import asyncio
import hmac
import re
import time
import uuid
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, as_json, from_exception, where
from .settings import LOCAL_NAMES, is_loopback

if TYPE_CHECKING:
    from .app import Services

OPEN_PATHS = frozenset({"/health", "/ready", "/openapi.json", "/", "/page/app.js", "/page/chart.js", "/page/style.css"})
"""Without a key: probes, the page (it asks for the key) and the API's description."""
QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""Not logged while they succeed."""
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
LINGER_SECONDS, LINGER_BYTES = 0.5, 2**16
"""How long, and how far, a body that is too large is read on before it is refused."""
Headers = dict[bytes, bytes]


class Edge:
    """The outermost application. Whatever happens inside, the client gets an answer and the log a line."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app, self._services = app, services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: Headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        record: dict[str, Any] = {}
        scope["llmopt.record"], scope["llmopt.request_id"] = record, request_id
        began, status = time.monotonic(), 0

        async def stamped(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                extra = [(b"x-request-id", request_id.encode()), (b"x-content-type-options", b"nosniff")]
                message = {**message, "headers": [*message.get("headers", ()), *extra]}
            await send(message)

        try:
            self._admit(scope, headers)
            settings = self._services.settings
            limit = BodyLimit(receive, headers, settings.max_body_bytes, settings.body_seconds)
            await self._app(scope, limit, stamped)
        except ClientDisconnect:
            status = status or 499
        except Exception as error:
            if not status:
                code, fields, body = error_reply(self._services, scope, error)
                raw = [(k.lower().encode(), v.encode()) for k, v in fields.items()]
                raw.append((b"content-length", str(len(body)).encode()))
                await stamped({"type": "http.response.start", "status": code, "headers": raw})
                await stamped({"type": "http.response.body", "body": body})
        finally:
            self._log(scope, request_id, status, time.monotonic() - began, record)

    def _admit(self, scope: Scope, headers: Headers) -> None:
        """Raise ApiError 401, 403 or 404; name the client for the fair queue."""
        settings, path = self._services.settings, scope["path"]
        peer = scope.get("client")
        scope["llmopt.client"] = peer[0] if peer else "local"
        if not settings.api_keys and is_loopback(settings.host) and not _local_name(headers.get(b"host", b"")):
            raise ApiError(403, "the Host header names another machine; this server has no API key", reason="host")
        admin = path.startswith("/admin/")
        if admin and not settings.admin_keys:
            raise ApiError(404, "there is no such path", code="not_found", reason="not_found")
        keys = settings.admin_keys if admin else settings.api_keys
        if not keys or path in OPEN_PATHS:
            return
        match = matching_key(headers.get(b"authorization", b""), keys)
        if match is None:
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key", reason="unauthorized")
        if len(keys) > 1:
            scope["llmopt.client"] = f"key-{match}"

    def _log(self, scope: Scope, request_id: str, status: int, seconds: float, record: dict[str, Any]) -> None:
        path = getattr(scope.get("route"), "path", "other")
        self._services.metrics.answered(path, status)
        if scope["path"] in QUIET_PATHS and status < 400:
            return
        self._services.log.event(
            "request",
            request_id=request_id,
            method=scope["method"],
            path=path,
            status=status,
            client=scope.get("llmopt.client"),
            seconds=round(seconds, 4),
            **record,
        )


class BodyLimit:
    """An ASGI `receive` that raises ApiError: 413 once the body is longer than `limit` bytes, 408 where it is not whole
    `seconds` after the head."""

    def __init__(self, receive: Receive, headers: Headers, limit: int, seconds: float) -> None:
        self._receive, self._limit, self._seen = receive, limit, 0
        self._end: float | None = time.monotonic() + seconds
        """None once the body has come: what is received then is the client's leaving, which may take long."""
        declared = headers.get(b"content-length", b"")
        self._declared = (int(declared) if len(declared) < 20 else limit + 1) if declared.isdigit() else 0

    async def __call__(self) -> Message:
        if self._declared > self._limit:
            raise self._too_large()
        if self._end is None:
            return await self._receive()
        try:
            message = await asyncio.wait_for(self._receive(), max(self._end - time.monotonic(), 0.0))
        except asyncio.TimeoutError:
            raise ApiError(408, "the body did not come in time", code="body_timeout", reason="slow_body") from None
        if not message.get("more_body"):
            self._end = None
        if message["type"] == "http.request":
            self._seen += len(message.get("body", b""))
            if self._seen > self._limit:
                await self._linger()
                raise self._too_large()
        return message

    async def _linger(self) -> None:
        """Read on a little, so that a client that is nearly done gets its answer, and no reset while it still sends."""
        end, most = time.monotonic() + LINGER_SECONDS, self._seen + LINGER_BYTES
        while self._end is not None and self._seen < most:
            try:
                message = await asyncio.wait_for(self._receive(), max(end - time.monotonic(), 0.0))
            except asyncio.TimeoutError:
                return
            self._seen += len(message.get("body", b""))
            if not message.get("more_body"):
                self._end = None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._limit} bytes", code="body_too_large", reason="too_large")


def matching_key(header: bytes, keys: tuple[str, ...]) -> int | None:
    """Index of the key that an Authorization header bears. Takes as long for a wrong key as for a right one."""
    scheme, _, given = header.partition(b" ")
    found = None
    for number, key in enumerate(keys):
        if hmac.compare_digest(given.strip(), key.encode()):
            found = number
    return found if scheme.lower() == b"bearer" else None


def error_reply(services: Services, scope: Scope, error: Exception) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an error's answer. Counts it, and logs what was not the client's fault."""
    answer = from_exception(error)
    if answer.status >= 500 and not isinstance(error, ApiError):
        services.log.event(
            "internal_error", request_id=scope["llmopt.request_id"], error=type(error).__name__, where=where(error)
        )
    services.metrics.rejected(answer.reason)
    scope["llmopt.record"]["error"] = answer.code or answer.reason
    headers = {"content-type": "application/json", **answer.headers}
    if answer.status == 401:
        headers["www-authenticate"] = "Bearer"
    if answer.status == 413 or answer.code == "body_timeout":
        headers["connection"] = "close"  # the rest of the body is not read
    return answer.status, headers, as_json(answer.body)


def _local_name(host: bytes) -> bool:
    """Whether a Host header names this machine: a page elsewhere whose name was rebound to 127.0.0.1 does not."""
    name = host.decode("latin-1")
    name = name[: name.index("]") + 1] if name.startswith("[") and "]" in name else name.partition(":")[0]
    return not name or name.lower() in LOCAL_NAMES or is_loopback(name)
