"""Everything that `llmopt eval` measures of one model, or of one beside another."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pydantic import Field

from ..optimizer.base import Options
from ..optimizer.errors import RunError, UsageError
from ..optimizer.events import Event, Listener, silent
from .generation import PROMPTS, generation_divergence
from .harness import run_tasks, task_manager
from .progress import stage
from .scoring import compare, score
from .slices import slice_rows
from .subject import Subject, open_subject, require_same_tokens
from .windows import Bos, TextWindows, sliding_windows

WINDOW_LENGTH = 1024
"""Tokens of a window where none are named, and the model's context holds them."""


class QualitySettings(Options):
    """How quality is measured."""

    windows: int | None = Field(16, ge=1, description="Windows of the text that are scored; null: the whole text.")
    window_length: int | None = Field(None, description="Tokens a window; null: 1024, or the context where shorter.")
    stride: int | None = Field(None, description="Tokens from one window to the next; null: half a window.")
    bos: Bos = Field("text", description="`text`: as the tokenizer does it; `each`: BOS before each window; `none`.")
    engine: str = Field("auto", description="What runs the models: auto, native or static (transformers' modules).")
    device: str = Field("auto", description="auto, cpu, cuda …")
    dtype: str = Field("auto", description="auto (as stored), float32, bfloat16 or float16.")
    kv_dtype: str | None = Field(None, description="The evaluated model's KV cache in the place of its own setting.")
    new_tokens: int = Field(32, ge=0, description="Tokens of each prompt's continuation; 0: none are compared.")
    prompts: tuple[str, ...] = Field(PROMPTS, description="Prompts whose continuations are compared.")
    tasks: tuple[str, ...] = Field((), description="Tasks of lm-evaluation-harness.")
    task_path: str | None = Field(None, description="Folder of local tasks.")
    limit: int | None = Field(None, ge=1, description="Items of each task; null: all.")
    num_fewshot: int | None = Field(None, ge=0, description="Examples before each item; null: as the task says.")
    chat: bool = Field(False, description="Put the tasks' prompts through the chat template.")
    trust_remote_code: bool = Field(False, description="Run Python code that the model's folder carries.")
    max_memory: int | None = Field(None, ge=1, description="Bytes beyond which a model is read block by block.")


def measure(
    folder: Path,
    against: Path | None,
    text: str | None,
    settings: QualitySettings,
    listener: Listener = silent,
    where: str = "text",
) -> dict[str, Any]:
    """Open `folder` (and the folder it is compared with), measure, close.

    text: None measures no perplexity. Keys, each there where it was asked for: `model` and `against` (what ran, see
    `Subject.facts`, with `text` (TextScore) and `tasks`), `divergence` (KL(against || model) in nats, top-1 agreement,
    `perplexity_increase`, and a `histogram` of the divergences), `generation` (see `generation_divergence`), `seconds`.
    Raises UsageError where the request is wrong, RunError where a model does not open or answer.
    """
    if text is None and not settings.tasks and (against is None or not settings.new_tokens):
        raise UsageError("there is nothing to measure", "eval", "Name a text, a data set or tasks.")
    # Before any model is opened: an unknown task is told at once.
    manager = task_manager(settings.tasks, settings.task_path) if settings.tasks else None
    start = time.perf_counter()
    out: dict[str, Any] = {}
    with ExitStack() as stack:
        with stage(listener, "open"):
            common = settings.model_dump(include={"engine", "device", "dtype", "trust_remote_code", "max_memory"})
            model = stack.enter_context(open_subject(folder, kv_dtype=settings.kv_dtype, **common))
            other = stack.enter_context(open_subject(against, **common)) if against is not None else None
        if other is not None:
            _require_comparable(model, other, str(against))
        out["model"] = model.facts()
        if other is not None:
            out["against"] = other.facts()
        if text is not None:
            out.update(_text(out, model, other, text, settings, listener, where))
        if other is not None and settings.new_tokens:
            with stage(listener, "generate"):
                out["generation"] = _generation(model, other, settings)
        for key, subject in (("model", model), ("against", other)):
            if settings.tasks and subject is not None:
                with stage(listener, "tasks"):
                    out[key]["tasks"] = _tasks(subject, settings, manager)
    return {**out, "seconds": round(time.perf_counter() - start, 3)}


def _text(
    out: dict[str, Any],
    model: Subject,
    other: Subject | None,
    text: str,
    settings: QualitySettings,
    listener: Listener,
    where: str,
) -> dict[str, Any]:
    """Put both scores into `out`; returns what compares the two."""
    windows = _windows(model, other, text, settings, where)
    rows = slice_rows(model.vocab_size)

    def progress(done: int, total: int) -> None:
        listener(Event("progress", "text", step=done, total=total))

    with stage(listener, "text"):
        slices = model.slices(windows.windows, rows)
        if other is None:
            out["model"]["text"] = score(windows, rows, slices, progress).as_dict()
            return {}
        own, theirs, meter = compare(windows, rows, slices, other.slices(windows.windows, rows), progress)
    out["model"]["text"], out["against"]["text"] = own.as_dict(), theirs.as_dict()
    divergence = {
        **meter.result().as_dict(),
        "perplexity_increase": own.perplexity / theirs.perplexity - 1,
        "histogram": meter.histogram(),
    }
    return {"divergence": divergence}


def _windows(model: Subject, other: Subject | None, text: str, settings: QualitySettings, where: str) -> TextWindows:
    limits = [s.context_length for s in (model, other) if s is not None and s.context_length]
    context = min(limits, default=None)
    length = settings.window_length
    if length is None:
        length = min(WINDOW_LENGTH, context or WINDOW_LENGTH)
    elif context is not None and length > context:
        raise UsageError(
            f"a window of {length} tokens is longer than the model's context of {context}",
            "window_length",
            f"Use {context} or less.",
        )
    return sliding_windows(
        text,
        model.tokenizer,
        length=length,
        stride=settings.stride,
        limit=settings.windows,
        bos=settings.bos,
        where=where,
    )


def _require_comparable(model: Subject, other: Subject, where: str) -> None:
    require_same_tokens(model.tokenizer, other.tokenizer, where)
    if model.vocab_size != other.vocab_size:
        raise UsageError(
            f"the models have vocabularies of {model.vocab_size} and {other.vocab_size} tokens, so their distributions "
            "cannot be compared",
            where,
            "Evaluate each by itself and compare bits per byte.",
        )


def _generation(model: Subject, other: Subject, settings: QualitySettings) -> dict[str, Any] | None:
    if model.llm is None or other.llm is None:
        return None  # its facts say that it is streamed: each token would be a walk through all weights
    return generation_divergence(model.llm, other.llm, settings.prompts, settings.new_tokens)


def _tasks(subject: Subject, settings: QualitySettings, manager: Any) -> dict[str, Any]:
    if subject.llm is None:
        raise RunError("tasks need a model that fits into memory", str(subject.folder), "Leave --tasks out.")
    return run_tasks(
        subject.llm,
        settings.tasks,
        manager=manager,
        limit=settings.limit,
        num_fewshot=settings.num_fewshot,
        chat=settings.chat,
    )
