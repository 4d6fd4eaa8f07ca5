"""A target that is a folder: it lives in a process of its own, so that its memory and its CPU time are its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...optimizer.errors import LlmoptError, RunError, UsageError
from .run import Load, Result

CLOSE_SECONDS = 5.0
"""For the process to end by itself; it has nothing to save."""


class ArtifactProcess:
    """Starts `worker.py` over a folder. options: keywords of `llmopt.load`, or `engine="recompute"` (no KV cache).

    Raises what loading raises. Close it, or use `with`.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        name: str = "",
        options: dict[str, Any] | None = None,
        temperature: float = 0.0,
        ignore_eos: bool = True,
        keep: bool = False,
    ) -> None:
        self.folder, self.options = str(folder), options or {}
        self.name = name or Path(folder).name
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (lives as long)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "llmopt.evaluation.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C is the parent's to answer
        )
        sampling = {"temperature": temperature, "ignore_eos": ignore_eos, "keep": keep}
        try:
            self.loaded = self._ask({"do": "load", "model": self.folder, "options": self.options, "sampling": sampling})
        except BaseException:
            self.close()
            raise

    def run(self, load: Load) -> Result:
        return Result.from_dict(self._ask({"do": "run", "load": load.as_dict()}))

    def score(self, ids: list[list[int]]) -> dict[str, Any]:
        """See `worker.Work.score`."""
        return self._ask({"do": "score", "ids": ids})

    def pids(self) -> list[int]:
        return [self._process.pid]

    def about(self) -> dict[str, Any]:
        return {"kind": "artifact", "folder": Path(self.folder).name, "options": self.options, **self.loaded}

    def close(self) -> None:
        """End the process. Safe to call twice."""
        process = self._process
        with suppress(OSError, subprocess.TimeoutExpired):
            if process.stdin is not None:
                process.stdin.close()
            process.wait(CLOSE_SECONDS if process.returncode is None and hasattr(self, "loaded") else 1)
        with suppress(OSError):
            process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        self._errors.close()

    def __enter__(self) -> ArtifactProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # that it is gone shows at the next read
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RunError(f"the process that runs it ended: {self._last_words()}", self.name)
        answer = json.loads(line)
        if "error" in answer:
            kind: type[LlmoptError] = UsageError if answer["exit_code"] == 2 else RunError
            what, where, what_to_do = answer["error"]
            raise kind(what, where or self.name, what_to_do)
        return answer

    def _last_words(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_SECONDS)
        self._errors.seek(0, os.SEEK_SET)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        return f"{lines[-1][-300:] if lines else 'no word'} (exit code {self._process.returncode})"
