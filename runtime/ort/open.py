"""Opens a folder with an ONNX decoder for `llmopt.load`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ...optimizer.errors import UsageError, did_you_mean
from .backend import OnnxBackend
from .runner import OnnxRunner
from .session import OnnxSession

if TYPE_CHECKING:
    from ..foreign import ForeignModel

OPTIONS = ("max_num_seqs", "max_model_len", "num_threads")
"""max_num_seqs: sequences that run at once. max_model_len: most tokens of each. num_threads: of one operator."""
SEQUENCES = 32
CONTEXT = 2048
"""Tokens of a sequence, where neither the model nor the graph limits them."""


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
    threads = options.get("num_threads") or int(os.environ.get("OMP_NUM_THREADS") or 0)
    session = OnnxSession(model.folder, device, threads or None)
    held = session.element
    if dtype not in ("auto", held):
        raise UsageError(
            f"the graph computes in {held}, not in {dtype}", str(model.folder), "Export it again with that dtype"
        )
    model.note(f"onnxruntime {session.library.__version__} on {', '.join(session.providers)}")
    graph = int(session.metadata.get("llmopt.context", 0))
    limits = [limit for limit in (options.get("max_model_len"), model.context_length, graph) if limit]
    runner = OnnxRunner(session, min(limits, default=CONTEXT), int(options.get("max_num_seqs") or SEQUENCES))
    return OnnxBackend(runner, model.tokenizer, model.eos_token_ids)
