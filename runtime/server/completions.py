"""`POST /v1/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from .choices import Piece, TokenTexts, collect, merge
from .documents import ERRORS, GENERATION
from .job import Job, open_job
from .params import completion_params
from .prompts import completion_prompts, prompt_items
from .replies import JsonReply, respond
from .schemas import CompletionRequest
from .sse import event

router = APIRouter()


@router.post("/v1/completions", responses={**GENERATION, **ERRORS}, response_class=Response, tags=["openai"])
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue texts or token ids."""
    services = request.app.state.services
    special = body.add_special_tokens is not False
    job = await open_job(
        request,
        body.model,
        body.deadline,
        len(prompt_items(body.prompt)) * (body.n or 1),
        lambda model: (completion_prompts(model, body.prompt, special), completion_params(body)),
    )
    return await respond(request, job, body, CompletionAnswer(job, body, services.model_name(body.model)))


class CompletionAnswer:
    """Builds the answer of one job."""

    def __init__(self, job: Job, body: CompletionRequest, model_name: str) -> None:
        self._job, self._body = job, body
        self._texts = TokenTexts(job.model)
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model_name,
        }
        self._offsets: dict[int, int] = {}

    async def whole(self) -> JsonReply:
        """Raises ApiError where the deadline left nothing."""
        pieces = await collect(self._job)
        choices = [self._choice(index, piece, whole=True) for index, piece in pieces.items()]
        return JsonReply({**self._head, "choices": choices, "usage": self._job.usage()})

    async def events(self) -> AsyncIterator[bytes]:
        options = self._body.stream_options
        usage = options is not None and options.include_usage
        extra: dict[str, Any] = {"usage": None} if usage else {}
        if self._body.echo:
            for index in range(self._job.num_sequences):
                choice = {"index": index, "text": self._prompt_text(index), "logprobs": None, "finish_reason": None}
                yield event({**self._head, "choices": [choice], **extra})
        async for batch in self._job.outputs():
            for index, piece in merge(batch).items():
                if piece.text or piece.finish_reason or piece.logprobs or self._body.return_token_ids:
                    yield event({**self._head, "choices": [self._choice(index, piece)], **extra})
        if usage:
            yield event({**self._head, "choices": [], "usage": self._job.usage()})

    def _choice(self, index: int, piece: Piece, whole: bool = False) -> dict[str, Any]:
        text, echo = piece.text, self._body.echo and whole
        if echo:
            text = self._prompt_text(index) + text
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self._body.logprobs is not None:
            entries: list[Any] = list(piece.logprobs)
            if echo:
                entries = [self._prompt(index)[0], *piece.prompt_logprobs, *entries]
            choice["logprobs"] = self._texts.completion(entries, self._offsets.get(index, 0))
        self._offsets[index] = self._offsets.get(index, 0) + len(text)
        if self._body.return_token_ids:
            choice["token_ids"] = piece.token_ids
        return choice

    def _prompt(self, index: int) -> list[int]:
        return self._job.prompts[index // self._job.params.n]

    def _prompt_text(self, index: int) -> str:
        prompt = self._body.prompt
        number = index // self._job.params.n
        if isinstance(prompt, str):
            return prompt
        if prompt and isinstance(prompt[0], str):
            return str(prompt[number])
        return str(self._job.model.tokenizer.decode(self._prompt(index), clean_up_tokenization_spaces=False))
