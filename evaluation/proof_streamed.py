"""The proof of an artifact that does not fit into memory: one block after another, from its files.

Perplexity and divergence are those of the torch modules; of each prompt's continuation only a few tokens are made,
because each takes a walk through all weights; speed is not measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..optimizer.errors import RunError
from ..runtime.memory import available_memory

if TYPE_CHECKING:
    from ..optimizer.model import LoadedModel
    from .proof import ProofSettings

ROOM = 2.0
"""Bytes that opening an artifact and preparing it for the engine take at most, over the bytes of its weights."""
NEW_TOKENS = 4
BACKEND = "streamed"


def too_large(folder: Path, max_memory: int | None) -> bool:
    """Whether opening the folder whole would take more than `max_memory` bytes, or more than the machine has."""
    from ..runtime.weight_files import weight_files

    size = sum(file.stat().st_size for file in weight_files(folder))
    free = available_memory()
    return ROOM * size > (free if max_memory is None else min(free, max_memory))


def examine_streamed(folder: Path, reference: Path | None, settings: ProofSettings) -> dict[str, Any]:
    """What `proof.examine` returns. Raises RunError where the artifact's weights cannot stay in their files."""
    from .memory import peak_rss
    from .proof import environment

    start = time.perf_counter()
    model, files = _open(folder, settings)
    assert model.weights is not None
    load_seconds = time.perf_counter() - start
    perplexity, divergence, histogram = _compare(model, reference) if reference is not None else (None, None, None)
    samples = _speak(model, settings.prompts, min(settings.new_tokens, NEW_TOKENS))
    note = f"the model is larger than memory allows, so it was measured block by block, {NEW_TOKENS} tokens a prompt"
    certificate = {
        "files_verified": files,
        "backend": BACKEND,
        "device": "cpu",
        "dtype": str(model.dtype).removeprefix("torch."),
        "linear": None,
        "notes": [{"stage": "prove", "kind": "fallback", "message": f"{note}; its speed was not measured"}],
        "environment": environment(),
        "samples": samples,
    }
    return {
        "perplexity": perplexity,
        "divergence": divergence,
        "histogram": histogram,
        "speed": None,
        "memory": {"weight_bytes": model.weights.nbytes, "peak_rss": peak_rss()},
        "load_seconds": round(load_seconds, 3),
        "certificate": certificate,
    }


def _open(folder: Path, settings: ProofSettings) -> tuple[LoadedModel, int]:
    """The artifact as a lazy model, and the number of files whose hashes hold."""
    from ..optimizer.model import LoadedModel, SourceIdentity
    from ..runtime.artifact import read_manifest, runtime_spec, verify_files
    from ..runtime.lazy import open_lazy
    from ..runtime.open import open_config, quiet_transformers, resolve_dtype
    from ..runtime.tokenizer_files import open_tokenizer

    manifest = read_manifest(folder)
    files = verify_files(folder, manifest) if manifest is not None else 0
    with quiet_transformers():
        config = open_config(folder, settings.trust_remote_code)
        tokenizer = open_tokenizer(folder, settings.trust_remote_code)
        dtype = resolve_dtype(settings.dtype, runtime_spec(folder, manifest), config)
        opened = open_lazy(folder, config, dtype, str(folder), settings.trust_remote_code, packed=True)
    if isinstance(opened, str):
        raise RunError(f"the artifact does not fit into memory, and cannot be measured in parts: {opened}", str(folder))
    module, weights = opened
    source = SourceIdentity(str(folder), "folder", folder, "")
    return LoadedModel(module, tokenizer, source, weights=weights), files


def _compare(model: LoadedModel, reference: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    from .divergence import DivergenceMeter
    from .perplexity import PerplexityMeter
    from .reference import Reference
    from .streamed import streamed_logits

    file = Reference(reference)
    file.check_tokenizer(model.tokenizer)
    perplexity, divergence = PerplexityMeter(), DivergenceMeter()
    for (ids, logits), expected in zip(streamed_logits(model, list(file.windows)), file.logits(), strict=True):
        perplexity.update(ids, logits)
        divergence.update(expected, logits)
    return perplexity.result().as_dict(), divergence.result().as_dict(), divergence.histogram()


def _speak(model: LoadedModel, prompts: Sequence[str], new_tokens: int) -> list[dict[str, Any]]:
    """Greedy continuations of the prompts, all of them a token longer after each walk through the blocks."""
    import torch

    from .streamed import streamed_logits

    texts = [list(model.tokenizer(prompt)["input_ids"]) for prompt in prompts]
    starts = [len(ids) for ids in texts]
    for _ in range(new_tokens):
        rows = [torch.tensor([*ids, 0]) for ids in texts]  # the last token's logits are not given: it is never read
        for ids, (_, logits) in zip(texts, streamed_logits(model, rows)):
            ids.append(int(logits[-1].argmax()))
    made = [ids[start:] for ids, start in zip(texts, starts)]
    return [_sample(model, prompt, ids) for prompt, ids in zip(prompts, made)]


def _sample(model: LoadedModel, prompt: str, ids: list[int]) -> dict[str, Any]:
    from .token_ends import token_ends

    text = str(model.tokenizer.decode(ids))
    ends = token_ends(model.tokenizer, ids, text)
    return {"prompt": prompt, "text": text, "token_ids": ids, "finish_reason": "length", "token_ends": ends}
