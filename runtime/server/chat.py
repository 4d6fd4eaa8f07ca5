"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from .choices import Piece, TokenTexts, collect, merge, tool_call
from .documents import ERRORS, GENERATION
from .job import Job, open_job
from .params import chat_params, forced_tools
from .prompts import chat_prompt
from .replies import JsonReply, respond
from .schemas import ChatRequest
from .sse import event

router = APIRouter()


@router.post("/v1/chat/completions", responses={**GENERATION, **ERRORS}, response_class=Response, tags=["openai"])
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    services = request.app.state.services
    job = await open_job(
        request, body.model, body.deadline, body.n or 1, lambda model: ([chat_prompt(model, body)], chat_params(body))
    )
    return await respond(request, job, body, ChatAnswer(job, body, services.model_name(body.model)))


class ChatAnswer:
    """Builds the answer of one job."""

    def __init__(self, job: Job, body: ChatRequest, model_name: str) -> None:
        self._job, self._body = job, body
        self._texts = TokenTexts(job.model)
        self._forced = bool(forced_tools(body))
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": model_name,
        }

    async def whole(self) -> JsonReply:
        """Raises ApiError where the deadline left nothing."""
        pieces = await collect(self._job)
        choices = [self._choice(index, piece) for index, piece in pieces.items()]
        return JsonReply({**self._head, "choices": choices, "usage": self._job.usage()})

    async def events(self) -> AsyncIterator[bytes]:
        options = self._body.stream_options
        usage = options is not None and options.include_usage
        extra: dict[str, Any] = {"usage": None} if usage else {}
        for index in range(self._job.num_sequences):
            choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            yield event({**self._head, "choices": [{**choice, "logprobs": None}], **extra})
        wholes = {index: Piece() for index in range(self._job.num_sequences)}
        async for batch in self._job.outputs():
            if self._forced:  # a call is only a call when it is complete
                for index, output in batch:
                    wholes[index].add(output)
                    if output.finished:
                        for choice in self._call_events(index, wholes[index]):
                            yield event({**self._head, "choices": [choice], **extra})
                continue
            for index, piece in merge(batch).items():
                if piece.text or piece.finish_reason or piece.logprobs or self._body.return_token_ids:
                    yield event({**self._head, "choices": [self._delta(index, piece)], **extra})
        if usage:
            yield event({**self._head, "choices": [], "usage": self._job.usage()})

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        calls = tool_call(piece.text) if self._forced else None
        message: dict[str, Any] = {"role": "assistant", "content": None if calls else piece.text, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        reason = "tool_calls" if calls and piece.finish_reason == "stop" else piece.finish_reason
        return self._with_details({"index": index, "message": message, "finish_reason": reason}, piece)

    def _delta(self, index: int, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text else {}
        return self._with_details({"index": index, "delta": delta, "finish_reason": piece.finish_reason}, piece)

    def _call_events(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        calls = tool_call(piece.text)
        if calls is None:
            return [self._delta(index, piece)]
        delta = {"tool_calls": [{"index": number, **call} for number, call in enumerate(calls)]}
        first = self._with_details({"index": index, "delta": delta, "finish_reason": None}, piece)
        reason = "tool_calls" if piece.finish_reason == "stop" else piece.finish_reason
        return [first, {"index": index, "delta": {}, "logprobs": None, "finish_reason": reason}]

    def _with_details(self, choice: dict[str, Any], piece: Piece) -> dict[str, Any]:
        choice["logprobs"] = self._texts.chat(piece.logprobs) if self._body.logprobs else None
        if piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = piece.token_ids
        return choice
