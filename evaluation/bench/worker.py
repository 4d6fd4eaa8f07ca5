"""The process that holds one artifact while it is measured: `python -m llmopt.evaluation.bench.worker`.

It reads JSON lines from standard input and answers each with one on standard output. The first names the model and
how to load it; then loads (`{"do": "run", …}`), or texts to score (`{"do": "score", …}`). What libraries print goes to
standard error. It ends when its input does, so it does not outlive the process that started it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import IO, Any

from ...optimizer.errors import LlmoptError, RunError


def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    work = None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if message["do"] == "load":
                work = Work(message)
                _say(answers, work.about)
            elif work is None:
                raise RunError("nothing is loaded", "benchmark worker")
            else:
                _say(answers, getattr(work, message["do"])(message))
        except LlmoptError as error:
            _say(answers, {"error": [error.what, error.where, error.what_to_do], "exit_code": error.exit_code})
        except Exception as error:  # whatever a model or a library raises is for the parent to report
            text = f"{type(error).__name__}: {error}"
            _say(answers, {"error": [text, "benchmark worker", ""], "exit_code": 1})
    if work is not None:
        work.close()


def _say(stream: IO[str], answer: dict[str, Any]) -> None:
    stream.write(json.dumps(answer) + "\n")
    stream.flush()


class Work:
    """A model and the loads that run on it. `about` says what was loaded and how."""

    def __init__(self, message: dict[str, Any]) -> None:
        import torch

        from .in_process import InProcess
        from .recompute import open_recomputing

        start = time.perf_counter()
        options = dict(message["options"])
        if (threads := options.get("num_threads")) is not None:
            torch.set_num_threads(threads)
            if options.get("engine") in ("static", "recompute"):
                del options["num_threads"]  # they have no threads but torch's
        if options.get("engine") == "recompute":
            self.llm: Any = open_recomputing(message["model"], **{k: v for k, v in options.items() if k != "engine"})
        else:
            from ...runtime.llm import load

            self.llm = load(message["model"], **options)
        self.about = {
            "load_s": round(time.perf_counter() - start, 3),
            "engine": self.llm.backend,
            "runner": type(self.llm.runner).__name__ if self.llm.runner is not None else None,
            "context_length": self.llm.context_length,
            "weight_bytes": self.llm.weight_bytes,
            "threads": torch.get_num_threads(),
            "notes": self.llm.notes,
        }
        self._target = InProcess(self.llm, **message["sampling"])

    def run(self, message: dict[str, Any]) -> dict[str, Any]:
        """A load's result."""
        from .machine import own_memory
        from .run import Load

        result = self._target.run(Load.from_dict(message["load"]))
        result.memory = own_memory()
        return result.as_dict()

    def score(self, message: dict[str, Any]) -> dict[str, Any]:
        """Mean negative log-likelihood of texts' tokens, by what runs them: `nll` (nats a token), `num_tokens`."""
        scores = [self.llm.score(ids) for ids in message["ids"]]
        count = sum(len(score.token_ids) - 1 for score in scores)
        return {"nll": -sum(score.total for score in scores) / max(count, 1), "num_tokens": count}

    def close(self) -> None:
        self.llm.close()


if __name__ == "__main__":
    main()
