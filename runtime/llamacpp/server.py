"""A llama-server process of our own: started on a free loopback port behind a random key, asked over HTTP, ended."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...optimizer.errors import RunError

START_SECONDS = 600.0
"""Longest wait for a model to load."""
ATTEMPTS = 3
"""Ports that are tried: another process may take a free one before the server does."""
GUARD = Path(__file__).with_name("guard.py")


class LlamaServer:
    """One running server. `ask` may be called from several threads at once; `close` ends the process.

    The process also ends when this object is collected, and when this process ends in whatever way (see guard.py).
    """

    def __init__(self, program: Path, model: Path, arguments: list[str]) -> None:
        """Start and wait until the model is loaded. Raises RunError with the server's last words."""
        self.model = model
        self._key = secrets.token_hex(16)
        self._connections: dict[int, http.client.HTTPConnection] = {}
        """One for each thread that asks."""
        self._asking: dict[int, bool] = {}
        """Threads that wait for an answer → whether they are interrupted."""
        self._lock = threading.Lock()
        for attempt in range(ATTEMPTS):
            self._start(program, arguments)
            try:
                self._wait_until_ready()
                return
            except RunError:
                busy = "couldn't bind" in self.log() or "bind" in self._last_line()
                self.close()
                if not busy or attempt == ATTEMPTS - 1:
                    raise

    def _start(self, program: Path, arguments: list[str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="llmopt-llama-")
        self._log = Path(self._folder.name) / "log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        command = [str(program), "-m", str(self.model), "--host", "127.0.0.1", "--port", str(self.port), *arguments]
        libraries = [str(program.parent), os.environ.get("LD_LIBRARY_PATH", "")]
        environment = {
            **os.environ,
            "LLAMA_API_KEY": self._key,
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-E", str(GUARD), *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        self._end = weakref.finalize(self, _end, self._process, self._folder)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RunError(f"llama-server does not open it: {self._last_line()}", str(self.model))
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._request("GET", "/health", None)[0] == 200:
                    return
            self._disconnect()
            time.sleep(0.02)
        raise RunError(f"llama-server is not ready after {START_SECONDS:.0f} seconds", str(self.model))

    def ask(self, path: str, body: dict[str, Any] | None = None, wanted: Callable[[], bool] | None = None) -> Any:
        """The JSON answer of a path; POST where there is a body. Raises RunError where there is none.

        wanted: whether the answer is, asked when `interrupt` has begun to have an effect: who no longer wants it says
        so there first, then interrupts.
        """
        me = threading.get_ident()
        try:
            with self._lock:
                self._asking[me] = wanted is not None and not wanted()
            status, answer = self._request("GET" if body is None else "POST", path, body)
        except (OSError, http.client.HTTPException) as error:
            self._disconnect()
            if self._asking[me]:
                raise RunError("the request was broken off", str(self.model)) from None
            code = self._exit_code()
            if code is None:
                raise RunError(f"llama-server does not answer ({error})", str(self.model)) from error
            raise RunError(
                f"llama-server has ended (exit code {code}): {self._last_line()}", str(self.model)
            ) from error
        finally:
            with self._lock:
                interrupted = self._asking.pop(me)
            if interrupted:
                self._disconnect()
        found = json.loads(answer) if answer else {}
        if status != 200:
            message = found.get("error", {}).get("message", found) if isinstance(found, dict) else found
            raise RunError(f"llama-server answers {status}: {message}", str(self.model))
        return found

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        connection = self._connections.get(threading.get_ident())
        if connection is None:
            connection = http.client.HTTPConnection("127.0.0.1", self.port)
            self._connections[threading.get_ident()] = connection
        if connection.sock is None:
            connection.connect()
        with self._lock:
            if self._asking.get(threading.get_ident()):
                raise ConnectionAbortedError
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.read()

    def interrupt(self, thread: threading.Thread) -> None:
        """Break off what another thread waits for in `ask`, which then raises RunError; llama-server ends its work
        when it sees the connection closed. Nothing happens where the thread does not wait."""
        with self._lock:
            if self._asking.get(thread.ident or 0, True):
                return
            self._asking[thread.ident or 0] = True
            connection = self._connections.get(thread.ident or 0)
            if connection is not None and connection.sock is not None:
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _disconnect(self) -> None:
        connection = self._connections.pop(threading.get_ident(), None)
        if connection is not None:
            connection.close()

    def _exit_code(self) -> int | None:
        """Of the process, which may be just about to end; None where it runs on."""
        try:
            return self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return None

    def log(self) -> str:
        """What the server has printed."""
        return self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""

    def _last_line(self) -> str:
        lines = [line for line in self.log().splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower() or "failed" in line.lower()]
        return (errors or lines or ["no message"])[-1].strip()[:300]

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of the guard, whose child the server is."""
        return self._process.pid

    def close(self) -> None:
        """End the process and wait for it. Safe to call twice."""
        self._disconnect()
        self._end()


def _end(process: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str]) -> None:
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    folder.cleanup()
