"""An artifact proves itself: reopened in a fresh process, hashed, compared with its source, made to speak.

`prove` starts `python -m llmopt.evaluation.proof`, which writes its findings as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..optimizer.base import Options
from ..optimizer.errors import LlmoptError, RunError

if TYPE_CHECKING:
    from ..runtime.llm import LLM

PROMPTS = ("The capital of France is", "Water boils when", "Once upon a time")


class ProofSettings(Options):
    """What the fresh process measures; `text`, `windows` and `window_length` are kept for the record only."""

    text: str = "default"
    windows: int = 8
    window_length: int = 512
    speed: bool = True
    new_tokens: int = 32
    prompts: tuple[str, ...] = PROMPTS
    device: str = "auto"
    dtype: str = "auto"
    engine: str = "auto"
    rounds: int = 3
    trust_remote_code: bool = False
    max_memory: int | None = None


def prove(
    folder: str | Path, reference: str | Path | None, settings: dict[str, Any] | ProofSettings | None = None
) -> dict[str, Any]:
    """Open `folder` (an artifact, or a plain model folder) in a fresh process and return what it measured.

    Keys: `perplexity` and `divergence` (against the file of `write_reference`; both None without one), `cached` (the
    same as read from the KV cache, where that is quantized or sliding; else None, see `cached.py`), `speed` (None where
    the settings say so), `memory` (`weight_bytes`, `peak_rss`: bytes), `load_seconds`, `certificate` (what was
    verified: files, backend, notes, environment, samples), `histogram` (of the KL; None without a reference). Raises
    RunError with the process's last line.
    """
    if not isinstance(settings, ProofSettings):
        settings = ProofSettings(**(settings or {}))
    with tempfile.TemporaryDirectory(prefix="llmopt-proof-") as scratch:
        out = Path(scratch) / "proof.json"
        command = [sys.executable, "-m", __name__, str(Path(folder).resolve()), "--out", str(out)]
        command += ["--settings", settings.model_dump_json()]
        if reference is not None:
            command += ["--reference", str(Path(reference).resolve())]
        environment = {**os.environ, "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0 or not out.is_file():
            raise RunError(f"the proof in a fresh process failed: {_reason(done)}", where=str(folder))
        return json.loads(out.read_text(encoding="utf-8"))


def examine(folder: Path, reference: Path | None, settings: ProofSettings) -> dict[str, Any]:
    """What the fresh process does; see `prove`. Raises LlmoptError where the artifact does not hold."""
    from ..runtime import kv_settings
    from ..runtime.foreign import find_format
    from ..runtime.linear_settings import applied, require_applied
    from ..runtime.llm import LLM
    from ..runtime.open import open_model
    from .cached import measure_cached
    from .memory import peak_rss
    from .proof_foreign import examine_foreign
    from .proof_streamed import examine_streamed, too_large
    from .speed import measure_speed

    if find_format(folder) is not None:
        return examine_foreign(folder, reference, settings)
    if too_large(folder, settings.max_memory):
        return examine_streamed(folder, reference, settings)
    start = time.perf_counter()
    device = proof_device(folder, settings.device)
    opened = open_model(folder, device, settings.dtype, trust_remote_code=settings.trust_remote_code)
    load_seconds = time.perf_counter() - start
    with LLM.from_opened(opened, engine=settings.engine, release=True) as llm:  # type: ignore[arg-type]
        if reference is not None:
            require_applied(opened.runtime.linear, llm.runner, str(folder))
            kv_settings.require_applied(opened.runtime.kv_cache, llm.runner, str(folder))
        perplexity, divergence, histogram = compare(llm, reference) if reference is not None else (None, None, None)
        by_cache = reference is not None and llm.runner is not None and kv_settings.changes_logits(llm.runner)
        cached = measure_cached(llm.runner, reference) if by_cache else None  # type: ignore[arg-type]
        samples = speak(llm, settings.prompts, settings.new_tokens)
        speed = measure_speed(llm, new_tokens=settings.new_tokens, rounds=settings.rounds) if settings.speed else None
        certificate = {
            "files_verified": len(opened.manifest["files"]) if opened.manifest else 0,
            "backend": llm.backend,
            "device": str(llm.module.device),
            "dtype": str(llm.module.dtype).removeprefix("torch."),
            "linear": applied(llm.runner).model_dump(),
            "kv_cache": kv_settings.applied(llm.runner),
            "notes": llm.notes,
            "environment": environment(),
            "samples": samples,
        }
        memory = {"weight_bytes": llm.weight_bytes, "peak_rss": peak_rss()}
    return {
        "perplexity": perplexity,
        "divergence": divergence,
        "histogram": histogram,
        "cached": cached,
        "speed": speed.as_dict() if speed else None,
        "memory": memory,
        "load_seconds": round(load_seconds, 3),
        "certificate": certificate,
    }


def proof_device(folder: Path, wanted: str) -> str:
    """Where an artifact is measured: `wanted`, but the CPU for `auto` where the RuntimeSpec asks for arithmetic that
    only the native CPU engine has, so that what is judged is what was asked for."""
    from ..runtime.artifact import read_manifest, runtime_spec

    if wanted == "auto" and runtime_spec(folder, read_manifest(folder)).linear.asked():
        return "cpu"
    return wanted


def compare(llm: LLM, reference: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Perplexity over the reference's windows, divergence from its logits and the divergence's histogram, of what
    answers prompts: the engine's runner where there is one, else the torch module. `llm` must not have answered any.
    """
    from .divergence import DivergenceMeter
    from .logits import runner_logits, window_logits
    from .perplexity import PerplexityMeter
    from .reference import Reference

    file = Reference(reference)
    file.check_tokenizer(llm.tokenizer)
    perplexity, divergence = PerplexityMeter(), DivergenceMeter()
    scored = window_logits(llm.module, file.windows) if llm.runner is None else runner_logits(llm.runner, file.windows)
    for (ids, logits), expected in zip(scored, file.logits(), strict=True):
        perplexity.update(ids, logits)
        divergence.update(expected.to(logits.device), logits)
    return perplexity.result().as_dict(), divergence.result().as_dict(), divergence.histogram()


def speak(llm: Any, prompts: Sequence[str], new_tokens: int) -> list[dict[str, Any]]:
    """Greedy continuations of the prompts. Raises RunError where the logits are not numbers."""
    from .token_ends import token_ends

    return [
        {
            "prompt": prompt,
            "text": done.text,
            "token_ids": done.token_ids,
            "finish_reason": done.finish_reason,
            "token_ends": token_ends(llm.tokenizer, done.token_ids, done.text),
        }
        for done, prompt in zip(llm.generate(prompts, max_new_tokens=new_tokens), prompts)
    ]


def environment() -> dict[str, Any]:
    """What may change the roundings of a forward pass, and so a text: libraries, processor, threads."""
    import platform
    from importlib.metadata import version

    import torch

    return {
        "python": platform.python_version(),
        **{name: version(name) for name in ("llmopt", "torch", "transformers")},
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
    }


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        hint = " (out of memory?)" if done.returncode == -9 else ""
        return f"it was killed by signal {-done.returncode}{hint}"
    lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {done.returncode} and no message"


def main(arguments: list[str] | None = None) -> int:
    """The fresh process: writes the findings to --out; on failure one line to standard error and exit code 1."""
    parser = argparse.ArgumentParser(prog="llmopt.evaluation.proof", description=examine.__doc__)
    parser.add_argument("folder", type=Path, help="artifact or model folder")
    parser.add_argument("--reference", type=Path, help="file that write_reference made")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--settings", default="{}", help="JSON object of ProofSettings")
    options = parser.parse_args(arguments)
    try:
        settings = ProofSettings.model_validate_json(options.settings)
        findings = examine(options.folder, options.reference, settings)
        options.out.write_text(json.dumps(findings, indent=1), encoding="utf-8")
    except LlmoptError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
