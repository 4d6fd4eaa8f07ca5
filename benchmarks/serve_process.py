"""A server in a process of its own, for attacks and measurements: start, ask, watch, stop."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def tiny_model(folder: Path) -> Path:
    """A random model of two layers, as the tests use it."""
    from llmopt.tests.conftest import save_tiny_model

    return save_tiny_model(folder / "tiny")


class ServerProcess:
    """`llmopt serve MODEL --port 0 …` until the `with` ends. Raises RuntimeError where it does not come up."""

    def __init__(self, model: str | Path, *arguments: str, seconds: float = 300) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [sys.executable, "-m", "llmopt.optimizer.cli", "serve", str(model), "--port", "0", "--log", "json"]
        self.process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=self._log, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if " is served at http://" not in line:
            self.process.kill()
            raise RuntimeError(f"the server did not start: {line}{self.log_text()[-2000:]}")
        self.url = line.rsplit(" ", 1)[-1].strip()
        self.host, _, port = self.url.removeprefix("http://").rpartition(":")
        self.port = int(port)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._log.close()

    def log_text(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def terminate(self, seconds: float = 60) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def connect(self, timeout: float = 120) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout)

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Status and body of one request over a connection of its own."""
        connection = self.connect()
        try:
            raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, raw, {"Content-Type": "application/json"} if headers is None else headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def metrics(self) -> dict[str, float]:
        """Sums over labels by metric name."""
        sums: dict[str, float] = {}
        for line in self.request("GET", "/metrics")[1].decode().splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0].removeprefix("llmopt:")
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def wait_idle(self, seconds: float = 120) -> dict[str, float]:
        """The metrics once nothing runs or waits. Raises TimeoutError."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            now = self.metrics()
            if now["num_requests_running"] == now["num_requests_waiting"] == 0 and (
                now["sequences_accepted_total"] == now["sequences_ended_total"]
            ):
                return now
            time.sleep(0.2)
        raise TimeoutError("requests are still there although nobody asks any more")
