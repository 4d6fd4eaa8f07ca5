"""What the OpenAPI document says about answers."""

from __future__ import annotations

from typing import Any

_ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_MEANINGS = {
    400: "The request is wrong; `code` is `context_length_exceeded` where it is too long.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    408: "The deadline passed before there was an answer.",
    413: "The body is larger than the server takes.",
    429: "Too many requests wait; see `Retry-After`.",
    500: "The request failed inside the engine.",
    503: "Loading, restarting or shutting down; see `Retry-After`.",
}


def _answer(meaning: str) -> dict[str, Any]:
    return {"description": meaning, "content": {"application/json": {"schema": _ERROR_SCHEMA}}}


ERRORS: dict[int | str, dict[str, Any]] = {status: _answer(text) for status, text in _MEANINGS.items()}
OBJECT: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer.", "content": {"application/json": {"schema": {"type": "object"}}}}
}
GENERATION: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer, or a stream of chunks that ends with `data: [DONE]`.",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
    }
}


def without_422(document: dict[str, Any]) -> dict[str, Any]:
    """FastAPI documents 422 for bodies it refuses; this server answers 400."""
    for path in document.get("paths", {}).values():
        for operation in path.values():
            operation.get("responses", {}).pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document.get("components", {}).get("schemas", {}).pop(name, None)
    return document
