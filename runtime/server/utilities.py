"""The routes beside OpenAI's: models, tokens, plain generation, probes, metrics, reload."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from .choices import collect
from .documents import ERRORS, OBJECT
from .job import Job, open_job, or_disconnect
from .model import ServedModel
from .params import generate_params
from .prompts import render_messages, text_or_ids
from .replies import JsonReply
from .schemas import DetokenizeRequest, GenerateRequest, ReloadRequest, TokenizeRequest

router = APIRouter()
TEXT = "text/plain; version=0.0.4; charset=utf-8"


@router.get("/v1/models", responses={**OBJECT, **ERRORS}, response_class=JsonReply, tags=["openai"])
async def models(request: Request) -> JsonReply:
    """The names under which the model answers."""
    services = request.app.state.services
    model = services.host.model
    limit, created = (None, 0) if model is None else (model.context_length, model.created)
    data = [
        {"id": name, "object": "model", "created": created, "owned_by": "llmopt", "max_model_len": limit}
        for name in services.names
    ]
    return JsonReply({"object": "list", "data": data})


@router.get("/v1/models/{name:path}", responses={**OBJECT, **ERRORS}, response_class=JsonReply, tags=["openai"])
async def one_model(name: str, request: Request) -> JsonReply:
    services = request.app.state.services
    services.check_model(name)
    model = services.host.model
    entry = {"id": name, "object": "model", "created": 0 if model is None else model.created, "owned_by": "llmopt"}
    return JsonReply({**entry, "max_model_len": None if model is None else model.context_length})


@router.post("/tokenize", responses={**OBJECT, **ERRORS}, response_class=JsonReply, tags=["tokens"])
async def tokenize(body: TokenizeRequest, request: Request) -> JsonReply:
    """Token ids of a text or of a chat."""

    def work(model: ServedModel) -> dict[str, Any]:
        if body.messages is not None:
            ids = render_messages(model, body.messages, add_generation_prompt=body.add_generation_prompt)
        else:
            ids = text_or_ids(model, body.prompt or "", body.add_special_tokens)
        found: dict[str, Any] = {"count": len(ids), "max_model_len": model.context_length, "tokens": ids}
        if body.return_token_strs:
            found["token_strs"] = model.tokenizer.convert_ids_to_tokens(ids)
        return found

    return JsonReply(await _with_model(request, body.model, work))


@router.post("/detokenize", responses={**OBJECT, **ERRORS}, response_class=JsonReply, tags=["tokens"])
async def detokenize(body: DetokenizeRequest, request: Request) -> JsonReply:
    """The text of token ids."""

    def work(model: ServedModel) -> dict[str, Any]:
        ids = text_or_ids(model, body.tokens) if body.tokens else []
        return {"prompt": model.tokenizer.decode(ids, clean_up_tokenization_spaces=False)}

    return JsonReply(await _with_model(request, body.model, work))


@router.post("/generate", responses={**OBJECT, **ERRORS}, response_class=JsonReply, tags=["tokens"])
async def generate(body: GenerateRequest, request: Request) -> JsonReply:
    """Continue one prompt, with the library's own parameter names; greedy by default."""
    job = await open_job(
        request, None, None, 1, lambda model: ([text_or_ids(model, body.prompt)], generate_params(body))
    )
    try:
        return await or_disconnect(request, _collect(job))
    finally:
        job.close()


async def _collect(job: Job) -> JsonReply:
    piece = (await collect(job))[0]
    return JsonReply(
        {
            "text": piece.text,
            "token_ids": piece.token_ids,
            "finish_reason": piece.finish_reason,
            "num_prompt_tokens": job.prompt_tokens,
        }
    )


@router.get("/health", responses={**OBJECT, 503: OBJECT[200]}, response_class=JsonReply, tags=["operation"])
async def health(request: Request) -> JsonReply:
    """503 where the engine has crashed or finishes no step though it has work. 200 while the model loads."""
    host = request.app.state.services.host
    status = host.state if host.healthy else "stalled" if host.stalled else host.state
    if not host.healthy:
        request.scope["llmopt.record"]["error"] = status
    return JsonReply({"status": status}, status_code=200 if host.healthy else 503)


@router.get("/ready", responses={**OBJECT, 503: OBJECT[200]}, response_class=JsonReply, tags=["operation"])
async def ready(request: Request) -> JsonReply:
    """200 while new requests are taken: not while loading, restarting or shutting down."""
    host = request.app.state.services.host
    return JsonReply({"status": host.state}, status_code=200 if host.ready else 503)


@router.get("/metrics", responses=ERRORS, response_class=PlainTextResponse, tags=["operation"])
async def metrics(request: Request) -> Response:
    """Prometheus' exposition format."""
    return Response(request.app.state.services.metrics.text(), media_type=TEXT)


@router.post("/admin/reload", responses={**OBJECT, **ERRORS}, response_class=JsonReply, tags=["operation"])
async def reload(body: ReloadRequest, request: Request) -> JsonReply:
    """Load a model beside the one in use and put it in its place. Running requests finish where they are."""
    model = await request.app.state.services.host.reload(body.model)
    return JsonReply({"status": "ready", "model": model.source})


async def _with_model(request: Request, name: str | None, work: Any) -> dict[str, Any]:
    services = request.app.state.services
    services.check_model(name)
    model = services.host.lease()
    try:
        found: dict[str, Any] = await services.host.in_turn(request.scope["llmopt.client"], lambda: work(model))
        return found
    finally:
        services.host.give_back(model)
