"""A server in this process for tests: a thread with an event loop, a fake or a real model, and a small HTTP client."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import threading
import time
from dataclasses import replace
from functools import cache
from typing import Any

from llmopt.runtime.engine.engine import Engine
from llmopt.runtime.engine.fake_runner import FakeRunner
from llmopt.runtime.engine.loop import EngineLoop
from llmopt.runtime.engine.scheduler_config import SchedulerConfig
from llmopt.runtime.server.app import make_app
from llmopt.runtime.server.host import Host
from llmopt.runtime.server.logs import Log
from llmopt.runtime.server.model import ServedModel
from llmopt.runtime.server.serve import bind, quiet_server
from llmopt.runtime.server.settings import ServerSettings
from llmopt.tests.conftest import build_tokenizer

VOCAB = 400
WAIT = 120.0


class Gated(FakeRunner):
    """Executes only while its gate is open."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"vocab_size": VOCAB, "num_blocks": 256, "block_size": 8, "max_model_len": 512, **options})
        self.gate = threading.Event()
        self.gate.set()

    def execute(self, plan):
        assert self.gate.wait(WAIT)
        return super().execute(plan)


@cache
def tokenizer():
    return build_tokenizer(VOCAB)


def fake_model(max_num_seqs: int = 8, context_length: int = 512, **runner: Any) -> ServedModel:
    engine = Engine(
        Gated(**runner),
        tokenizer(),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=512),
        eos_token_ids=[1],
    )
    loop = EngineLoop(engine)
    loop.start()
    return ServedModel(loop, tokenizer(), context_length, loop.close, source="fake")


class Server:
    """`with Server(…) as server`. `server.post(path, body)` and `get` return (status, parsed JSON, headers)."""

    def __init__(self, loader=None, **settings: Any) -> None:
        self.loader = loader or (lambda source: fake_model())
        self.settings = replace(ServerSettings(port=0), **settings).check()
        self.log = io.StringIO()
        self._started = threading.Event()

    def __enter__(self) -> Server:
        self.socket = bind(self.settings.host, 0)
        self.port = self.socket.getsockname()[1]
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="test-server")
        self._thread.start()
        assert self._started.wait(WAIT)
        return self

    async def _run(self) -> None:
        log = Log("json", self.log)
        self.loop = asyncio.get_running_loop()
        self.host = Host(self.loader, self.settings, log)
        self.stop = asyncio.Event()
        self.server = quiet_server(make_app(self.host, self.settings, log, "tiny"), self.settings.head_seconds)
        serving = asyncio.create_task(self.server.serve(sockets=[self.socket]))
        await self.host.start()
        while not self.server.started:
            await asyncio.sleep(0.001)
        self._started.set()
        await self.stop.wait()
        await self.host.drain(0)
        self.server.should_exit = True
        await serving
        self.left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    def __exit__(self, *exc: object) -> None:
        self.loop.call_soon_threadsafe(self.stop.set)
        self._thread.join(WAIT)
        self.socket.close()
        assert not self._thread.is_alive()
        assert not self.left, self.left
        assert self.host.accepted == self.host.ended

    def call(self, coroutine) -> Any:
        """Run a coroutine in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(WAIT)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.settings.host, self.port, timeout=WAIT)

    def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None):
        connection = self.connect()
        try:
            raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, raw, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            data = answer.read()
            kind = answer.headers.get("content-type", "")
            return answer.status, json.loads(data) if "json" in kind else data.decode(), answer.headers
        finally:
            connection.close()

    def post(self, path: str, body: Any, **headers: str):
        return self.request("POST", path, body, headers)

    def get(self, path: str, **headers: str):
        return self.request("GET", path, None, headers)

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The stream's events, parsed; the last is the string [DONE]."""
        status, text, headers = self.post(path, {**body, "stream": True})
        assert status == 200 and headers["content-type"].startswith("text/event-stream"), text
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        return [event if event == "[DONE]" else json.loads(event) for event in events]

    def metrics(self) -> dict[str, float]:
        """Values of `/metrics` by name and labels."""
        lines = self.get("/metrics")[1].splitlines()
        return {k: float(v) for k, _, v in (line.rpartition(" ") for line in lines if not line.startswith("#"))}

    def events(self) -> list[dict[str, Any]]:
        """The log's lines."""
        return [json.loads(line) for line in self.log.getvalue().splitlines()]

    @property
    def engine(self) -> Engine:
        return self.host.model.loop.engine

    @property
    def gate(self) -> threading.Event:
        runner: Any = self.engine.runner
        return runner.gate


def until(condition) -> None:
    """Wait for what must come."""
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.002)
