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
    from ..runtime.llm import load
    from .memory import peak_rss
    from .proof import environment, speak
    from .speed import measure_speed

    if reference is not None:
        raise RunError(
            "an artifact in this format gives no logits of whole texts", str(folder), "Use `llmopt export` for it"
        )
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
