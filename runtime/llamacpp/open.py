"""Opens a folder with a GGUF file for `llmopt.load`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ...optimizer.errors import RunError, UsageError, did_you_mean
from .backend import LlamaCppBackend
from .find import require_server
from .server import LlamaServer
from .slots import LlamaSlots

if TYPE_CHECKING:
    from ..foreign import ForeignModel

OPTIONS = ("max_num_seqs", "max_model_len", "num_threads", "gpu_layers", "llama_server")
"""max_num_seqs: sequences that run at once, each in a slot of its own. max_model_len: tokens that each may have.
num_threads: of the CPU. gpu_layers: layers that go to a GPU, where llama.cpp has one. llama_server: the program."""
SLOTS = 4
CONTEXT = 4096
"""Tokens of a slot by default, where the model takes as many: the server reserves the cache of all slots."""


def open_backend(model: ForeignModel, device: str, dtype: str, options: dict[str, Any]) -> LlamaCppBackend:
    """The backend of a folder's GGUF file, with a server of its own.

    Raises UsageError for an unknown option, device or dtype, RunError where llama.cpp does not open the file,
    MissingDependency where there is no llama-server.
    """
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise UsageError(f"the engine llamacpp has no option {unknown[0]!r}", "load", did_you_mean(unknown[0], OPTIONS))
    if dtype != "auto":
        raise UsageError("llama.cpp chooses its own element types", "load: dtype", "Leave it at auto")
    if device != "auto" and device.partition(":")[0] not in ("cpu", "cuda"):
        raise UsageError(f"llama.cpp has no device {device!r} here", "load: device", "Use auto, cpu or cuda")
    files = sorted(model.folder.glob("*.gguf"))
    if len(files) != 1:
        raise RunError(f"the folder has {len(files)} GGUF files, and one is run", str(model.folder))
    limit = min(n for n in (options.get("max_model_len") or CONTEXT, model.context_length) if n)
    slots = int(options.get("max_num_seqs") or SLOTS)
    arguments = ["-c", str(limit * slots), "-np", str(slots), "--no-webui", *placement(device, options)]
    program = require_server(options.get("llama_server"))
    server = LlamaServer(program, files[0], arguments)
    model.note(f"llama.cpp: {program}, {slots} slots of {limit} tokens")
    tokenizer, ends, vocab_size = model.tokenizer, model.eos_token_ids, model.config.get_text_config().vocab_size
    return LlamaCppBackend(LlamaSlots(server, tokenizer, ends, vocab_size, limit, slots), tokenizer, ends)


def placement(device: str, options: dict[str, Any]) -> list[str]:
    """The server's arguments for threads and devices."""
    threads = options.get("num_threads") or int(os.environ.get("OMP_NUM_THREADS") or 0)
    found = ["-t", str(threads), "-tb", str(threads)] if threads else []
    layers = 0 if device == "cpu" else options.get("gpu_layers")
    return found if layers is None else [*found, "-ngl", str(layers)]
