"""The manifest `llmopt.json`: what an artifact is, how it was made and what it measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..runtime import artifact
from ..runtime.artifact import MANIFEST, REPORT
from .errors import RunError
from .recipe import EvaluateOptions
from .runtime_spec import RuntimeSpec


class Part(BaseModel):
    """Base of the manifest's parts."""

    model_config = ConfigDict(extra="forbid")


class SourceRecord(Part):
    id: str = Field(description="What the user named: path, hub id or short name.")
    kind: Literal["folder", "hub", "gguf"]
    sha256: str = Field(description="SHA-256 over the names and contents of the source's model files.")
    revision: str | None = None
    gguf_file: str | None = None
    license: str | None = Field(None, description="License that the source's model card names.")


class PassRecord(Part):
    name: str
    config: dict[str, Any] = Field(description="Every option with the value it ran with.")
    code_sha256: str = Field(description="SHA-256 of the pass's source code.")
    seconds: float = Field(description="Wall time of the run that made the result, in seconds.")
    cached: bool = Field(description="Whether the result came from the cache.")
    summary: str
    details: dict[str, Any] = Field(default_factory=dict)
    layers: list[dict[str, Any]] = Field(default_factory=list, description="One record a module that was changed.")


class GateRecord(Part):
    name: str
    limit: float
    value: float | None = Field(description="What was measured; None where it was not.")
    passed: bool


class Note(Part):
    stage: str
    kind: Literal["fallback", "note"]
    message: str


class StageTime(Part):
    """When a stage of the run began and ended, seconds since the run began."""

    name: str
    start: float
    end: float


class Timeline(Part):
    """Physical memory over the run, bytes a sample; at most some hundred samples."""

    interval: float = Field(description="Seconds between samples.")
    times: list[float] = Field(description="Seconds since the run began.")
    rss: list[int] = Field(description="Of the run's own process.")
    children: list[int] = Field(description="Of the processes that it started.")
    device: list[int] = Field(description="That torch had allocated on CUDA devices.")
    stages: list[StageTime]


class Manifest(Part):
    """The whole manifest. Sizes are bytes, speeds tokens a second, divergence nats a token."""

    schema_version: Literal[1] = 1
    llmopt_version: str
    created: str = Field(description="UTC time, ISO 8601.")
    source: SourceRecord
    seed: int
    recipe: dict[str, Any] = Field(description="The recipe as run, every option spelled out.")
    calibration: dict[str, Any] | None = Field(None, description="Tokens, hash and BOS of the calibration data.")
    passes: list[PassRecord]
    exporter: dict[str, Any]
    runtime: RuntimeSpec
    measured: dict[str, Any] = Field(description="Figures of the source, of the artifact and of their divergence.")
    certificate: dict[str, Any] = Field(description="What a fresh process saw when it reopened the artifact.")
    gates: list[GateRecord] = Field(default_factory=list)
    notes: list[Note] = Field(default_factory=list, description="Fallbacks and remarks of the run.")
    timeline: Timeline | None = Field(
        default=None, description="Memory over the run; null in artifacts of earlier versions."
    )
    environment: dict[str, str] = Field(description="Versions of the libraries and the machine's kind.")
    files: dict[str, str] = Field(description="Relative path → SHA-256 of every other file of the folder.")

    def write(self, folder: Path) -> None:
        """Write `llmopt.json` into the folder."""
        text = json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False, allow_nan=False)
        (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


class Sample(BaseModel):
    prompt: str
    text: str
    token_ids: list[int]


class Certificate(BaseModel):
    samples: list[Sample]


class RecipeRecord(BaseModel):
    name: str
    evaluate: EvaluateOptions


class Measured(BaseModel):
    before: dict[str, float | None]
    after: dict[str, float | None]
    divergence: dict[str, float]


class Finished(BaseModel):
    """What a finished manifest holds inside its free-form parts; they are empty while an artifact is being made."""

    recipe: RecipeRecord
    measured: Measured
    certificate: Certificate


def read_manifest(folder: Path) -> Manifest:
    """Read and validate a folder's manifest. Raises RunError where it is absent or not valid."""
    path = folder / MANIFEST
    if not folder.exists():
        raise RunError("no such folder", str(folder))
    data = artifact.read_manifest(folder)
    if data is None:
        raise RunError(f"has no {MANIFEST}, so it is not an llmopt artifact", str(folder))
    version = data.get("schema_version")
    if version != 1:
        raise RunError(f"has schema version {version!r}, and this llmopt reads 1", str(path), "Update llmopt")
    damaged = "The manifest was changed by hand or is damaged"
    try:
        manifest = Manifest.model_validate(data)
        Finished.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise RunError(f"{key}: {first['msg']}", str(path), damaged) from None
    return manifest


def hash_files(folder: Path) -> dict[str, str]:
    """Relative path → SHA-256 of every file below the folder, the manifest and the report drawn from it left out."""
    names = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: artifact.sha256_file(path) for name, path in names.items() if name not in (MANIFEST, REPORT)}


def json_schema() -> dict[str, Any]:
    """JSON schema of the manifest, as published in `docs/manifest.schema.json`."""
    schema = Manifest.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "llmopt artifact manifest (llmopt.json), schema version 1"
    return schema
