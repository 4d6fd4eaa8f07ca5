"""The proof of a written file: a fresh process reads it, by transformers and by llama.cpp.

Every tensor that transformers reads from it is held against the model's: equal, or as near as its type allows. Then
llama.cpp, where there is one, has to make the same tokens of texts, and to give the tokens of the torch model's greedy
continuations the log-probabilities that the torch model, in float32 over the values in the file, gives them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...optimizer.base import Context
from ...optimizer.errors import RunError
from ...runtime.llamacpp.find import find_server
from ...runtime.tensor_files import Spec, write_tensors

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .tensors import Entry


def prove_file(
    module: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    entries: list[Entry],
    llama_server: str | None,
    context: Context,
) -> dict[str, Any]:
    """What the fresh process measured. Raises RunError, naming the first tensor or text that is not the model's."""
    program = find_server(llama_server)
    if program is None:
        context.note(
            "fallback",
            "llama.cpp did not open the file: there is no llama-server here; its answers are not part of the proof",
        )
    reference = context.workdir / "gguf-reference.safetensors"
    write_reference(entries, reference)
    rules = {entry.source: {"kind": entry.kind, "rule": entry.rule, "bound": entry.bound} for entry in entries}
    request = {
        "folder": str(folder.resolve()),
        "reference": str(reference.resolve()),
        "rules": rules,
        "server": None if program is None else str(program),
    }
    try:
        return _run(request, context.workdir)
    finally:
        reference.unlink(missing_ok=True)


def write_reference(entries: list[Entry], path: Path) -> None:
    """The model's tensors under transformers' names, one in memory at a time; quantized ones as float32."""
    import torch

    by_name = {entry.source: entry for entry in entries}

    def spec(entry: Entry) -> Spec:
        if entry.dense:
            return Spec.of(torch.empty(entry.shape, dtype=torch.float32, device="meta"))
        return Spec.of(entry.expected())

    def read(name: str) -> torch.Tensor:
        return by_name[name].expected().contiguous()

    write_tensors(path, {entry.source: spec(entry) for entry in entries}, read)


def _run(request: dict[str, Any], workdir: Path) -> dict[str, Any]:
    asked, out = workdir / "gguf-request.json", workdir / "gguf-findings.json"
    asked.write_text(json.dumps(request), encoding="utf-8")
    command = [sys.executable, "-m", f"{__package__}.check", str(asked), str(out)]
    environment = {**os.environ, "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, cwd=workdir, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not out.is_file():
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        reason = lines[-1] if lines else f"exit code {done.returncode}"
        raise RunError(f"the file is not the model: {reason}", request["folder"], "No artifact was written")
    return json.loads(out.read_text(encoding="utf-8"))
