"""Opens a folder with an ONNX decoder for `llmopt.load`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ...optimizer.errors import UsageError, did_you_mean
from .backend import OnnxBackend
from .session import OnnxSession

if TYPE_CHECKING:
    from ..foreign import ForeignModel

OPTIONS = ("max_batch", "threads")
"""max_batch: most prompts that run together. threads: of one operator."""


def open_backend(model: ForeignModel, device: str, dtype: str, options: dict[str, Any]) -> OnnxBackend:
    """The backend of a folder's model.onnx.

    Raises UsageError for an unknown option, another dtype than the graph's, or a device that onnxruntime does not have
    here; RunError for a graph that does not open; MissingDependency.
    """
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise UsageError(
            f"the engine onnxruntime has no option {unknown[0]!r}", "load", did_you_mean(unknown[0], OPTIONS)
        )
    threads = options.get("threads") or int(os.environ.get("OMP_NUM_THREADS") or 0)
    session = OnnxSession(model.folder, device, threads or None)
    held = session.element
    if dtype not in ("auto", held):
        raise UsageError(
            f"the graph computes in {held}, not in {dtype}", str(model.folder), "Export it again with that dtype"
        )
    model.note(f"onnxruntime {session.library.__version__} on {', '.join(session.providers)}")
    limits = [model.context_length, int(session.metadata.get("llmopt.context", 0)) or None]
    context = min((limit for limit in limits if limit), default=None)
    return OnnxBackend(session, model.tokenizer, model.eos_token_ids, context, options.get("max_batch") or 32)
