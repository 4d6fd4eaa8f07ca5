"""The peers of `speculation.py`: transformers' generate in this process, and llama.cpp's servers."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

Texts = list[list[int]]
Row = Callable[[Texts, int], "tuple[Texts, dict[str, float]]"]
NGRAMS = ("ngram-simple", "ngram-mod")
"""llama.cpp's n-gram drafts that are tried."""


def transformers_rows(folder: Path, draft: Path | None) -> dict[str, Row]:
    """`generate` plain, with prompt lookup, and with the draft model as assistant."""
    import torch
    from llmopt.runtime.open import open_model

    model: Any = open_model(folder, "cpu", "bfloat16").module
    options: dict[str, dict[str, Any]] = {
        "transformers plain": {},
        "transformers prompt_lookup_num_tokens=10": {"prompt_lookup_num_tokens": 10},
    }
    if draft is not None:
        options["transformers assistant_model"] = {"assistant_model": open_model(draft, "cpu", "bfloat16").module}

    def row(more: dict[str, Any]) -> Row:
        def run(given: Texts, new: int) -> tuple[Texts, dict[str, float]]:
            texts = []
            for prompt in given:
                ids = torch.tensor([prompt])
                with torch.inference_mode():
                    out = model.generate(
                        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
                        do_sample=False, pad_token_id=0, **more,
                    )  # fmt: skip
                texts.append(out[0, len(prompt) :].tolist())
            return texts, {}

        return run

    return {name: row(more) for name, more in options.items()}


class LlamaServers:
    """A llama-server without drafts and one for each kind of n-gram draft; a context manager."""

    def __init__(self, server: Path, model: Path, batch: int, threads: int) -> None:
        self.rows: dict[str, Row] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        kinds = {"llama.cpp plain": [], **{f"llama.cpp {kind}": ["--spec-type", kind] for kind in NGRAMS}}
        try:
            for number, (name, more) in enumerate(kinds.items()):
                port = 8471 + number
                command = [str(server), "-m", str(model), "-t", str(threads), "-tb", str(threads), "-np", str(batch),
                           "-c", str(1024 * batch), "-cb", "--port", str(port), *more]  # fmt: skip
                quiet = subprocess.DEVNULL
                self._processes.append(subprocess.Popen(command, stdout=quiet, stderr=quiet))
                self._wait(port)
                self.rows[name] = self._row(port)
        except BaseException:
            self.close()
            raise

    def _wait(self, port: int) -> None:
        for _ in range(1200):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    return
            except OSError:
                if self._processes[-1].poll() is not None:
                    raise RuntimeError("llama-server ended at start") from None
                time.sleep(0.05)
        raise RuntimeError("llama-server did not become healthy")

    def _row(self, port: int) -> Row:
        def ask(prompt: list[int], new: int) -> dict[str, Any]:
            body = {"prompt": prompt, "n_predict": new, "temperature": 0, "ignore_eos": True, "return_tokens": True,
                    "cache_prompt": False}  # fmt: skip
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=600) as reply:
                return json.load(reply)

        def run(given: Texts, new: int) -> tuple[Texts, dict[str, float]]:
            with ThreadPoolExecutor(len(given)) as pool:
                answers = list(pool.map(ask, given, [new] * len(given)))
            timings = [answer.get("timings", {}) for answer in answers]
            counts = {
                "drafted": sum(t.get("draft_n", 0) for t in timings),
                "accepted": sum(t.get("draft_n_accepted", 0) for t in timings),
            }
            return [answer["tokens"] for answer in answers], counts

        return run

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
            process.wait()

    def __enter__(self) -> LlamaServers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
