"""Errors as OpenAI's API shapes them."""

from __future__ import annotations

import json
from typing import Any

from ...optimizer.errors import LlmoptError, UsageError

MAX_MESSAGE = 1000
"""Characters of a message or a parameter's name: what a client sends can come back in it."""


class ApiError(Exception):
    """An answer other than success.

    status: HTTP status. code: OpenAI's machine-readable name. param: the request field it is about. reason: the label
    of the metric `request_rejected_total`. retry_after: seconds, sent as `Retry-After`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        reason: str = "invalid",
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.reason, self.retry_after = status, code, reason, retry_after
        self.param = None if param is None else _shortened(param)
        self.message = _shortened(message)

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Clients of OpenAI's API try again on some statuses unless told otherwise."""
        if self.retry_after is not None:
            return {"Retry-After": str(self.retry_after)}
        return {"X-Should-Retry": "false"} if self.status == 408 or self.status >= 500 else {}


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 1] + "…"


def from_exception(error: BaseException | None) -> ApiError:
    """The answer for what the engine or the library raised: 400 where the request was at fault, else 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UsageError):
        return ApiError(400, str(error))
    if isinstance(error, LlmoptError):
        return ApiError(500, str(error), code="engine_error", reason="error")
    kind = type(error).__name__
    return ApiError(500, f"the request failed inside the server ({kind})", code="internal_error", reason="error")


def unavailable(message: str, code: str, retry_after: int | None) -> ApiError:
    return ApiError(503, message, code=code, reason=code, retry_after=retry_after)


def as_json(value: Any) -> bytes:
    """UTF-8 JSON without spaces. Half characters, which clients can send, become question marks."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def where(error: BaseException | None) -> str | None:
    """File and line of an exception, without its message: that could hold text of the request."""
    trace = getattr(error, "__traceback__", None)
    if trace is None:
        return None
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}"
