"""Load on any server that speaks OpenAI's completions or chat API, streamed."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from ...optimizer.errors import MissingDependency, RunError, UsageError
from .machine import is_local, listening_pids, process_memory
from .metrics import acceptance
from .prompts import Request
from .records import RequestRecord
from .run import Load, Result
from .sse import EventStream

ENDPOINTS = {"completions": "completions", "chat": "chat/completions"}
COUNTERS = ("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
CONNECT_SECONDS = 30.0


class Server:
    """A target behind a URL: its root, `…/v1`, or the endpoint itself.

    model: the name to ask for; None asks the server. count: tokens of a text, for servers that send no usage.
    extra: further fields of every request's body. timeout: seconds that a stream may be silent.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "",
        endpoint: str = "completions",
        model: str | None = None,
        count: Callable[[str], int] | None = None,
        temperature: float = 0.0,
        ignore_eos: bool = True,
        keep: bool = False,
        extra: dict[str, Any] | None = None,
        timeout: float = 600.0,
    ) -> None:
        self.base, self.name = base_url(url), name or url
        self.endpoint, self.model = endpoint, model
        self._count, self._keep, self._extra, self._timeout = count, keep, extra or {}, timeout
        self._temperature, self._ignore_eos = temperature, ignore_eos
        require_aiohttp()

    def open(self) -> None:
        """Find the server and the model's name. Raises RunError where there is no such server."""
        asyncio.run(self._open())

    def run(self, load: Load) -> Result:
        return asyncio.run(self._run(load))

    def pids(self) -> list[int]:
        return listening_pids(self.base)

    def about(self) -> dict[str, Any]:
        return {"kind": "server", "url": self.base, "endpoint": self.endpoint, "model": self.model}

    def close(self) -> None:
        """Nothing is held between runs."""

    def _session(self) -> Any:
        import aiohttp

        key = os.environ.get("OPENAI_API_KEY")
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=self._timeout)
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers={"Authorization": f"Bearer {key}"} if key else None,
            timeout=timeout,
            trust_env=True,
        )

    async def _open(self) -> None:
        import aiohttp

        async with self._session() as session:
            try:
                async with session.get(f"{self.base}/v1/models") as response:
                    found = await response.json(content_type=None) if response.status == 200 else {}
            except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
                raise RunError(f"the server cannot be reached ({_said(error)})", self.base, "Start it first.") from None
        names = [one.get("id") for one in (found or {}).get("data") or []]
        if self.model is None and not names:
            raise UsageError("the server lists no model", f"{self.base}/v1/models", "Name one by --model.")
        self.model = self.model or names[0]

    async def _run(self, load: Load) -> Result:
        records = [RequestRecord(number, planned=due) for number, due in enumerate(load.arrivals)]
        slots = asyncio.Semaphore(load.max_concurrency or max(len(records), 1))
        async with self._session() as session:
            before = await self._counters(session)
            start = time.perf_counter()
            tasks = []
            for record, request in zip(records, load.requests, strict=True):
                if (left := start + record.planned - time.perf_counter()) > 0:
                    await asyncio.sleep(left)
                tasks.append(asyncio.create_task(self._limited(slots, session, request, record, start)))
            await asyncio.gather(*tasks)
            duration = time.perf_counter() - start
            gained = [b - a for a, b in zip(before, await self._counters(session))]
        for record, request in zip(records, load.requests):
            self._complete(record, request)
        why = "" if is_local(self.base) else "the server is on another machine"
        memory = process_memory(self.pids(), why or "the server's process is not visible")
        return Result(records, duration, acceptance(*gained), memory)

    async def _limited(self, slots: Any, session: Any, request: Request, record: RequestRecord, start: float) -> None:
        import aiohttp

        async with slots:
            record.sent = time.perf_counter() - start
            try:
                await self._one(session, self._body(request, record.index), record, start)
            except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
                record.fail(_said(error))

    def _body(self, request: Request, number: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "temperature": self._temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._temperature > 0:
            body["seed"] = number
        if self._ignore_eos:
            body["ignore_eos"] = True
        prompt: Any = request.prompt
        messages = isinstance(prompt, list) and isinstance(prompt[0], dict)
        if self.endpoint == "chat":
            chat = prompt if messages else [{"role": "user", "content": prompt}]
            return {**body, "messages": chat, "max_completion_tokens": request.output_len, **self._extra}
        if messages:
            raise UsageError("a chat is no prompt for completions", f"request {number}", "Use --endpoint chat.")
        return {**body, "prompt": prompt, "max_tokens": request.output_len, **self._extra}

    async def _one(self, session: Any, body: dict[str, Any], record: RequestRecord, start: float) -> None:
        """Send one request and note what comes. Raises what aiohttp raises, ValueError where it is not the protocol."""
        async with session.post(f"{self.base}/v1/{ENDPOINTS[self.endpoint]}", json=body) as response:
            if response.status != 200:
                text = (await response.text())[:300]
                record.fail(f"HTTP {response.status} {response.reason or ''}: {text}")
                return
            events = EventStream()
            done = False
            async for received in response.content.iter_any():
                now = time.perf_counter() - start
                for data in events.feed(received):
                    done = done or data == "[DONE]" or _note(record, data, now)
            for data in events.close():
                done = done or data == "[DONE]" or _note(record, data, time.perf_counter() - start)
        if record.error is None and not done and record.finish_reason is None:
            record.fail("the stream ended before the answer did")

    def _complete(self, record: RequestRecord, request: Request) -> None:
        """Count what the server did not, and fail an answer in which nothing came."""
        if record.error is None and not record.chunk_times:
            record.fail("no content came")
        if not record.prompt_tokens:
            record.prompt_tokens = request.prompt_len or 0
        if not record.output_tokens:
            record.output_tokens = len(record.chunk_times)
            if self._count is not None and record.text:
                record.output_tokens, record.counted_by = self._count(record.text), "tokenizer"
        if not self._keep:
            record.text = None

    async def _counters(self, session: Any) -> list[int]:
        """Speculation's counters from the server's Prometheus metrics; zeros where it has none."""
        import aiohttp

        try:
            async with session.get(f"{self.base}/metrics") as response:
                text = await response.text() if response.status == 200 else ""
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError):
            text = ""
        return [prometheus_sum(text, f"{name}_total") for name in COUNTERS]


def _note(record: RequestRecord, data: str, now: float) -> bool:
    """Put one event into the record; True where the server says that the request failed.

    A chunk with neither text nor a token (a chat's opening role, a closing finish_reason) is no content.
    """
    event = json.loads(data)
    if not isinstance(event, dict):
        raise ValueError("an event is not a JSON object")
    if event.get("error"):
        error = event["error"]
        record.fail(error.get("message", error) if isinstance(error, dict) else error)
        return True
    if usage := event.get("usage"):
        record.prompt_tokens = usage.get("prompt_tokens") or record.prompt_tokens
        if usage.get("completion_tokens"):
            record.output_tokens, record.counted_by = usage["completion_tokens"], "usage"
    for choice in (event.get("choices") or [])[:1]:
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
        reason = choice.get("finish_reason")
        if text or delta.get("tool_calls") or (reason is None and "role" not in delta):
            record.chunk_times.append(now)
            ids = choice.get("token_ids")
            record.chunk_tokens.append(len(ids) if isinstance(ids, list) else None)
            record.text = (record.text or "") + (text or "")
        record.end = now
        record.finish_reason = reason or record.finish_reason
    return False


def base_url(url: str) -> str:
    """The server's root: without a trailing `/v1`, `/v1/completions` or `/v1/chat/completions`. Raises UsageError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError("is no http or https URL", url)
    base = url.rstrip("/")
    for ending in ("/chat/completions", "/completions", "/v1"):
        base = base.removesuffix(ending)
    return base.rstrip("/")


def prometheus_sum(text: str, name: str) -> int:
    """Sum over the labels of the metrics whose name, after a prefix such as `vllm:`, is `name`."""
    total = 0.0
    for line in text.splitlines():
        head = line.split("{")[0].split()
        if head and not line.startswith("#") and head[0].split(":")[-1] == name:
            total += float(line.rsplit(None, 1)[1])
    return int(total)


def require_aiohttp() -> None:
    try:
        import aiohttp  # noqa: F401
    except ImportError:
        raise MissingDependency("aiohttp", "bench", "a benchmark of a server") from None


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
