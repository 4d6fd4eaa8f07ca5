"""A loaded model as the server sees it, with a count of those who use it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...optimizer.errors import RunError
from ..engine.detokenizer import Vocabulary

if TYPE_CHECKING:
    from ..engine.loop import EngineLoop
    from ..llm import LLM


@dataclass(eq=False)
class ServedModel:
    """One engine and what is needed to talk to it. It is closed when it is retired and the last user has left."""

    loop: EngineLoop
    tokenizer: Any
    context_length: int
    """Most tokens of prompt and output that a request may have: the least of model, KV pool and operator's limit."""
    close: Callable[[], None]
    source: str = ""
    """What it was loaded from."""
    created: int = field(default_factory=lambda: int(time.time()))
    users: int = 0
    retired: bool = False

    def __post_init__(self) -> None:
        self.vocabulary = Vocabulary(self.tokenizer)
        self.vocab_size: int = self.loop.engine.runner.vocab_size
        self.tool_template = _mentions(self.tokenizer, "tools")

    @property
    def crashed(self) -> BaseException | None:
        """What ended the engine's thread."""
        return self.loop.error

    @property
    def max_num_seqs(self) -> int:
        return self.loop.engine.scheduler.config.max_num_seqs

    def progress(self) -> tuple[int, int]:
        """Changes whenever the engine gets anything done."""
        metrics = self.loop.engine.metrics()
        return metrics.steps_total, sum(metrics.request_success_total.values())


def serve_llm(llm: LLM, source: str, max_model_len: int | None) -> ServedModel:
    """The server's view of an `LLM`, its engine started. Raises RunError where it has no engine."""
    loop = llm.loop
    if loop is None:
        why = "; ".join(note["message"] for note in llm.notes if note["kind"] == "fallback")
        llm.close()
        raise RunError(f"a server needs the native engine ({why or llm.backend})", source)
    limits = (max_model_len, llm.context_length, loop.engine.runner.max_model_len, loop.engine.scheduler.capacity)
    context_length = min(limit for limit in limits if limit)
    loop.start()
    return ServedModel(loop, llm.tokenizer, context_length, llm.close, source)


def _mentions(tokenizer: Any, name: str) -> bool:
    """Whether the chat template reads a variable."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("tool_use") or template.get("default")
    if not isinstance(template, str):
        return False
    from jinja2 import Environment, TemplateError, meta

    extensions = ["jinja2.ext.loopcontrols", "jinja2.ext.do"]
    try:
        return name in meta.find_undeclared_variables(Environment(extensions=extensions).parse(template))
    except TemplateError:  # transformers knows blocks of its own, such as generation
        return name in template
