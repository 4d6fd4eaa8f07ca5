"""Exports a finished artifact (or a plain model folder) in another format, without repeating any pass.

The exporter writes and proves; what it returns goes into the new artifact's manifest, beside the figures that the
artifact was measured with.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..evaluation.proof import prove
from ..runtime.artifact import verify_files
from ..runtime.foreign import WEIGHTS
from ..runtime.weight_files import weight_files
from .artifact import Artifact
from .base import Context, Exporter
from .calibration import Calibration
from .environment import environment, library_version
from .errors import LlmoptError, RunError, UsageError
from .events import Event, Listener, silent
from .files import cache_dir, folder_bytes, fsync_tree, replace_folder, require_space, scratch_folder, temporary_sibling
from .manifest import Manifest, Note, SourceRecord, hash_files, read_manifest
from .model import LoadedModel, ModelInfo, SourceIdentity
from .model_card import CARD, model_card
from .recipe import EvaluateOptions
from .runtime_spec import RuntimeSpec
from .sources import describe, resolve

if TYPE_CHECKING:
    from transformers import GenerationConfig

SPEEDS = ("decode_tokens_per_second", "prefill_tokens_per_second", "foreign_cpu", "peak_rss_bytes", "load_seconds")
"""Figures of one runtime, which say nothing of another format's."""


def export_artifact(
    artifact: str | Path,
    exporter: Exporter,
    out: str | Path,
    *,
    force: bool = False,
    trust_remote_code: bool = False,
    listener: Listener = silent,
) -> Artifact:
    """Write `artifact` in the exporter's format to the folder `out`, which is then whole, or absent on any error.

    artifact: an artifact, whose hashes are checked, or a model by any name that `optimize` takes. force: replace an
    artifact at `out`. Raises UsageError for a bad request, RunError where the export or its proof fails.
    """
    out = Path(out)
    source = resolve(artifact)
    manifest = read_manifest(source.folder) if (source.folder / "llmopt.json").is_file() else None
    check_out(out, source.folder, force)
    listener(Event("run_started", data={"model": source.id, "exporter": exporter.name}))
    try:
        made = _export(source, manifest, exporter, out, force, trust_remote_code, listener)
    except LlmoptError as error:
        listener(Event("run_failed", message=str(error)))
        raise
    listener(Event("run_finished", message=str(made.path)))
    return made


def check_out(out: Path, source: Path, force: bool) -> None:
    """Raise UsageError where an artifact cannot be put at `out`."""
    if out.exists() and not force:
        raise UsageError("exists already", str(out), "Choose another --out, or pass --force to replace it")
    if out.exists() and not (out.is_dir() and ((out / "llmopt.json").exists() or not any(out.iterdir()))):
        raise UsageError("is not an llmopt artifact, so it is not replaced", str(out), "Choose another --out")
    if out.resolve() == source.resolve():
        raise UsageError("is the model that is exported", str(out), "Choose another --out")
    out.parent.mkdir(parents=True, exist_ok=True)


def _export(
    source: SourceIdentity,
    old: Manifest | None,
    exporter: Exporter,
    out: Path,
    force: bool,
    trust_remote_code: bool,
    listener: Listener,
) -> Artifact:
    if old is not None:
        verify_files(source.folder, old.model_dump(mode="json"))
    info = describe(source, trust_remote_code)
    require_space(out.parent, info.weight_bytes, "The artifact")
    temporary = temporary_sibling(out)
    try:
        with scratch_folder(cache_dir()) as workdir:
            listener(Event("stage_started", "load", data={"total_bytes": info.weight_bytes}))
            start = time.perf_counter()
            model, generation = open_finished(source, trust_remote_code)
            listener(Event("stage_finished", "load", data=_seconds(start)))
            context = export_context(info, model, exporter.name, workdir, listener)
            listener(Event("stage_started", exporter.name))
            start = time.perf_counter()
            details = exporter.export(model, temporary, context)
            listener(Event("stage_finished", exporter.name, data=_seconds(start)))
        if not (temporary / "generation_config.json").is_file():
            generation.save_pretrained(temporary)
        manifest = make_manifest(source, old, details, temporary, model.runtime)
        manifest.notes += [Note(**note) for note in context.notes]  # type: ignore[arg-type]
        manifest.measured["after"].update(folder_bytes=folder_bytes(temporary))
        (temporary / CARD).write_text(model_card(manifest, out.name), encoding="utf-8")
        manifest.files = hash_files(temporary)
        manifest.write(temporary)
        del model
        _prove(temporary, manifest, trust_remote_code, listener)
        manifest.write(temporary)
        fsync_tree(temporary)
        replace_folder(temporary, out, force=force)
    except LlmoptError as error:
        error.where = error.where.replace(str(temporary), str(out))
        raise
    except OSError as error:
        raise RunError(f"the system refused: {error.strerror or error}", str(error.filename or out)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Artifact(out, manifest)


def _prove(folder: Path, manifest: Manifest, trust_remote_code: bool, listener: Listener) -> None:
    """Reopen the export in a fresh process and have it answer; the answers go into the manifest's certificate."""
    listener(Event("stage_started", "prove"))
    start = time.perf_counter()
    options = {**manifest.recipe["evaluate"], "speed": False, "trust_remote_code": trust_remote_code}
    proof = prove(folder, None, options)
    manifest.certificate = proof["certificate"]
    manifest.measured["after"].update(
        memory_bytes=proof["memory"]["weight_bytes"], peak_rss_bytes=proof["memory"]["peak_rss"]
    )
    listener(Event("stage_finished", "prove", data=_seconds(start)))


def _seconds(start: float) -> dict[str, float]:
    return {"seconds": round(time.perf_counter() - start, 3)}


def open_finished(source: SourceIdentity, trust_remote_code: bool = False) -> tuple[LoadedModel, GenerationConfig]:
    """The model as it is stored, quantized layers packed, on the CPU. Raises as `open_model` does."""
    from ..runtime.open import open_model

    opened = open_model(source.folder, "cpu", "auto", trust_remote_code=trust_remote_code, verify=False)
    opened.module.generation_config = opened.generation_config
    model = LoadedModel(opened.module, opened.tokenizer, source, opened.runtime, trust_remote_code)
    return model, opened.generation_config


def export_context(
    info: ModelInfo, model: LoadedModel, stage: str, workdir: Path, listener: Listener = silent
) -> Context:
    """The Context of an exporter that runs over a finished model: the shipped calibration text, seed 0."""
    return Context(info, Calibration(model.tokenizer, "default", 1, 2), 0, workdir, stage, listener)


def make_manifest(
    source: SourceIdentity, old: Manifest | None, details: dict[str, Any], folder: Path, runtime: RuntimeSpec
) -> Manifest:
    """The manifest of an exported folder: the old one's history and quality figures, the new exporter's record."""
    weights = sum(file.stat().st_size for file in data_files(folder))
    common: dict[str, Any] = {
        "llmopt_version": library_version("llmopt") or "unknown",
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "exporter": details,
        "environment": environment(),
        "files": {},
    }
    if old is not None:
        made = old.model_copy(update=common, deep=True)
        for key in SPEEDS:
            made.measured["after"].pop(key, None)
        made.measured["divergence"].pop("decode_speedup", None)
        made.measured["after"]["disk_bytes"] = weights
        if made.measured["before"].get("disk_bytes"):
            made.measured["divergence"]["compression"] = made.measured["before"]["disk_bytes"] / weights
        made.timeline = None
        made.gates = []
        made.notes.append(_quality_note(details))
    else:
        disk = sum(file.stat().st_size for file in weight_files(source.folder))
        made = Manifest(
            source=SourceRecord(**source.as_dict()),
            seed=0,
            recipe={"name": "export", "evaluate": EvaluateOptions().model_dump(mode="json")},  # type: ignore[call-arg]
            passes=[],
            runtime=runtime,
            measured={"before": {"disk_bytes": disk}, "after": {"disk_bytes": weights}, "divergence": {}},
            certificate={"samples": []},
            **common,
        )
    return made


def _quality_note(details: dict[str, Any]) -> Note:
    """What the figures that are kept stand for; a fallback where the exporter says `exact: False`."""
    what = "quality was measured before this export"
    if details.get("exact", True):
        return Note(
            stage=details["name"], kind="note", message=f"{what}; how near its answers are: see exporter.parity"
        )
    rounding = f"{what}, which rounds further: perplexity and divergence are not those of this folder"
    return Note(stage=details["name"], kind="fallback", message=f"{rounding}, only exporter.parity is")


def data_files(folder: Path) -> list[Path]:
    """The files that hold weights, in whatever format."""
    suffixes = {".safetensors", *WEIGHTS}
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix in suffixes)
