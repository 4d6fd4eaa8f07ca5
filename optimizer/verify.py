"""Verifies a finished artifact: manifest, hashes, a fresh process that opens it and answers as it did when made."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ..evaluation.proof import prove
from ..evaluation.proof_streamed import BACKEND
from ..runtime.artifact import verify_files
from .environment import environment
from .errors import RunError
from .events import Event, Listener, silent
from .manifest import hash_files, read_manifest


def verify(folder: str | Path, listener: Listener = silent, trust_remote_code: bool = False) -> dict[str, Any]:
    """Raises RunError that says what does not hold: a missing, changed or unknown file, an artifact that does not
    open, an empty answer, or answers other than those recorded (compared where the libraries are the same).
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    listener(Event("stage_started", "hashes"))
    start = time.perf_counter()
    count = verify_files(folder, manifest.model_dump(mode="json"))
    unknown = sorted(set(hash_files(folder)) - set(manifest.files))
    if unknown:
        raise RunError(
            f"{unknown[0]} is not named by the manifest", str(folder), "Remove it, or make the artifact again"
        )
    listener(Event("stage_finished", "hashes", data={"seconds": round(time.perf_counter() - start, 3)}))
    listener(Event("stage_started", "prove"))
    start = time.perf_counter()
    recorded = manifest.certificate.get("samples") or []
    options = dict(manifest.recipe["evaluate"])
    options.update(
        speed=False,
        trust_remote_code=trust_remote_code,
        prompts=[text["prompt"] for text in recorded] or options["prompts"],
    )
    answers = prove(folder, None, options)["certificate"]["samples"]
    listener(Event("stage_finished", "prove", data={"seconds": round(time.perf_counter() - start, 3)}))
    comparable = manifest.environment == environment() and manifest.certificate.get("backend") != BACKEND
    for old, new in zip(recorded, answers):
        where = f"{folder}: the prompt {old['prompt']!r}"
        if not new["token_ids"]:
            raise RunError("it gets no answer", where)
        if comparable and old["token_ids"] != new["token_ids"]:
            raise RunError("it is answered otherwise than when the artifact was made", where)
    return {"files": count, "prompts": len(answers), "compared": comparable}
