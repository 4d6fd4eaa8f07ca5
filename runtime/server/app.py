"""The ASGI application: routes, error answers, the page."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ...optimizer.errors import LlmoptError
from . import chat, completions, utilities
from .documents import without_422
from .errors import ApiError
from .host import Host
from .logs import Log
from .metrics import ServerMetrics
from .middleware import Edge, error_reply
from .settings import ServerSettings

PAGE = Path(__file__).resolve().parent / "page"
PAGE_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/page/chart.js": ("chart.js", "text/javascript; charset=utf-8"),
    "/page/style.css": ("style.css", "text/css; charset=utf-8"),
}
CONTENT_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
CONTENT_POLICY += "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


@dataclass(frozen=True)
class Services:
    """What the routes work with."""

    host: Host
    settings: ServerSettings
    metrics: ServerMetrics
    log: Log
    names: tuple[str, ...]
    """The model's names; the first one is the default."""

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 for a model that is not served."""
        if name is not None and name not in self.names:
            raise ApiError(
                404,
                f"The model {name[:200]!r} does not exist; this server has {', '.join(self.names)}.",
                code="model_not_found",
                param="model",
                reason="model_not_found",
            )

    def model_name(self, name: str | None) -> str:
        return self.names[0] if name is None else name


def make_app(host: Host, settings: ServerSettings, log: Log, default_name: str) -> Edge:
    """The application over a host that is (or is going to be) started."""
    names = settings.served_names or (default_name,)
    services = Services(host, settings, ServerMetrics(host, names[0]), log, names)
    app = FastAPI(
        title="llmopt", description="OpenAI-compatible server over the llmopt engine.", docs_url=None, redoc_url=None,
        **_telemetry(settings),
    )  # fmt: skip
    app.state.services = services
    for router in (completions.router, chat.router, utilities.router):
        app.include_router(router)
    if settings.page:
        _add_page(app)
    for kind in (ApiError, LlmoptError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer_error)
    document = app.openapi
    app.openapi = lambda: without_422(document())  # type: ignore[method-assign]
    return Edge(app, services)


def _telemetry(settings: ServerSettings) -> dict[str, Any]:
    """FastAPI's own OpenTelemetry support, where it has any: spans of requests, nothing of their bodies."""
    if "telemetry" not in inspect.signature(FastAPI).parameters:
        return {}
    on = settings.tracing
    return {
        "telemetry": {"tracing": on, "metrics": False, "logs": False, "operation_spans": False, "auto_configure": on}
    }


async def _answer_error(request: Request, error: Exception) -> Response:
    services = request.app.state.services
    status, headers, body = error_reply(services, request.scope, _as_api_error(error))
    return Response(body, status, headers)


def _as_api_error(error: Exception) -> Exception:
    if isinstance(error, RequestValidationError):
        return _explain(error)
    if not isinstance(error, HTTPException):
        return error
    if isinstance(error.__cause__, ApiError):  # FastAPI wraps what reading the body raised
        return error.__cause__
    if error.status_code == 404:
        return ApiError(404, "there is no such path", code="not_found", reason="not_found")
    return ApiError(error.status_code, str(error.detail), reason="http")


def _explain(error: RequestValidationError) -> ApiError:
    """The first fault, with the field that it is about."""
    faults = [fault for fault in error.errors() if fault["loc"][:1] == ("body",)] or list(error.errors())
    fault = faults[0]
    path = [str(part) for part in fault["loc"][1:] if not _is_branch(part)]
    param = ".".join(path) or None
    if fault["type"] == "json_invalid":
        return ApiError(400, "the body is not valid JSON", code="invalid_json")
    if fault["type"] == "unknown_parameter":
        param = ".".join([*path, fault["ctx"]["name"]])
        return ApiError(400, f"unknown parameter: {param}", code="unknown_parameter", param=param)
    if fault["type"] == "model_attributes_type" or (fault["type"] == "missing" and not path):
        return ApiError(400, "the body must be a JSON object, sent as application/json")
    if len(fault["loc"]) > 1:  # the forms that a field may have are tried one by one, and each says why it does not fit
        faults = [other for other in faults if other["loc"][:2] == fault["loc"][:2]]
    reasons = dict.fromkeys(str(other["msg"]).removeprefix("Value error, ") for other in faults)
    message = "; or: ".join(list(reasons)[:4])
    return ApiError(400, f"{param}: {message}" if param else message, param=param)


def _is_branch(part: Any) -> bool:
    """Whether a part of pydantic's location names a branch of a union, not a field."""
    return isinstance(part, str) and (part in ("str", "int") or any(mark in part for mark in ("[", "constrained")))


def _add_page(app: FastAPI) -> None:
    headers = {"Content-Security-Policy": CONTENT_POLICY, "Cache-Control": "no-cache", "Referrer-Policy": "no-referrer"}
    for path, (name, media_type) in PAGE_FILES.items():
        content = (PAGE / name).read_bytes()

        def send(content: bytes = content, media_type: str = media_type) -> Response:
            return Response(content, media_type=media_type, headers=headers)

        app.add_api_route(path, _async(send), include_in_schema=False)


def _async(send: Any) -> Any:
    async def route() -> Response:
        response: Response = send()
        return response

    return route
