"""The proof of an artifact in a format that another library runs: it opens and answers.

How far its logits are from the model it was exported from is for its exporter to prove, which knows the format.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..optimizer.errors import RunError

if TYPE_CHECKING:
    from .proof import ProofSettings


def examine_foreign(folder: Path, reference: Path | None, settings: ProofSettings) -> dict[str, Any]:
    """What `proof.examine` returns, without divergence. Raises RunError where logits are asked for."""
    from ..runtime.foreign import why_not_runnable
    from ..runtime.llm import load
    from .memory import peak_rss
    from .proof import environment, speak
    from .speed import measure_speed

    if reference is not None:
        raise RunError(
            "an artifact in this format gives no logits of whole texts", str(folder), "Use `llmopt export` for it"
        )
    reason = why_not_runnable(folder)
    if reason:
        return _unanswered(folder, reason)
    start = time.perf_counter()
    with load(folder, device=settings.device, dtype=settings.dtype) as llm:
        load_seconds = time.perf_counter() - start
        samples = speak(llm, settings.prompts, settings.new_tokens)
        speed = measure_speed(llm, new_tokens=settings.new_tokens, rounds=settings.rounds) if settings.speed else None
        certificate = {
            "files_verified": len(llm.manifest["files"]) if llm.manifest else 0,
            "backend": llm.backend,
            "notes": llm.notes,
            "environment": environment(),
            "samples": samples,
        }
        memory = {"weight_bytes": llm.weight_bytes, "peak_rss": peak_rss()}
    return {
        "perplexity": None,
        "divergence": None,
        "histogram": None,
        "cached": None,
        "speed": speed.as_dict() if speed else None,
        "memory": memory,
        "load_seconds": round(load_seconds, 3),
        "certificate": certificate,
    }


def _unanswered(folder: Path, reason: str) -> dict[str, Any]:
    """What is returned of an artifact that nothing here runs: its files are sound, and it is said why it gave no
    answer. Raises RunError where a file is not sound."""
    from ..runtime.foreign import weight_bytes
    from ..runtime.open import check_folder
    from .memory import peak_rss
    from .proof import environment

    checked = check_folder(folder)
    note = {"stage": "prove", "kind": "fallback", "message": f"the artifact was not run: {reason}"}
    certificate = {
        "files_verified": len(checked.hashes),
        "backend": None,
        "notes": [note],
        "environment": environment(),
        "samples": [],
    }
    nothing = dict.fromkeys(("perplexity", "divergence", "histogram", "cached", "speed"))
    memory = {"weight_bytes": weight_bytes(folder), "peak_rss": peak_rss()}
    return {**nothing, "memory": memory, "load_seconds": 0.0, "certificate": certificate}
