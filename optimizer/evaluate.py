"""`llmopt.evaluate`: names resolved, texts read, results kept under a hash of model, data and settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..evaluation.quality import QualitySettings, measure
from ..evaluation.texts import read_text
from .errors import RunError, UsageError
from .events import Listener, silent
from .files import cache_dir, write_atomic
from .model import SourceIdentity

SCHEMA_VERSION = 1
MOST_KEPT = 2000
"""Results in the cache; the oldest go first."""


@dataclass(frozen=True)
class Evaluation:
    """What `llmopt.evaluate` measured; docs/evaluate.md describes the JSON object `data`."""

    data: dict[str, Any]

    @property
    def perplexity(self) -> float | None:
        """Of the text; None where none was scored."""
        return (self.data["model"].get("text") or {}).get("perplexity")

    @property
    def bits_per_byte(self) -> float | None:
        return (self.data["model"].get("text") or {}).get("bits_per_byte")

    @property
    def divergence(self) -> dict[str, Any] | None:
        """KL from the other model in nats (mean, median, p99, max) and top-1 agreement; None without another model."""
        return self.data.get("divergence")

    @property
    def generation(self) -> dict[str, Any] | None:
        """Where the two models' greedy texts part; None without another model."""
        return self.data.get("generation")

    @property
    def tasks(self) -> dict[str, Any]:
        """Results of tasks by name."""
        return self.data["model"].get("tasks") or {}

    @property
    def cached(self) -> bool:
        """Whether the figures were measured by an earlier call."""
        return bool(self.data["cached"])

    def as_dict(self) -> dict[str, Any]:
        return self.data


@dataclass(frozen=True)
class Text:
    """A text to score, and how it is called."""

    name: str
    content: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content.encode()).hexdigest()

    def record(self) -> dict[str, Any]:
        return {"name": self.name, "sha256": self.sha256, "bytes": len(self.content.encode())}


def evaluate(
    model: str | Path,
    against: str | Path | None = None,
    *,
    text: str | Path | None = None,
    dataset: str | None = None,
    dataset_config: str | None = None,
    split: str = "test",
    column: str | None = None,
    tasks: Sequence[str] = (),
    revision: str | None = None,
    cache: bool = True,
    cache_folder: str | Path | None = None,
    listener: Listener = silent,
    **settings: Any,
) -> Evaluation:
    """Measure a model or an artifact: perplexity and bits per byte of a text, divergence from another model, tasks.

    model, against: a folder, hub id, .gguf file or short name. text: a UTF-8 file, or "default", the text that ships
    with llmopt; dataset: a hub id, local folder or file in its place (rows of `column`, an empty line between). With
    tasks alone no text is scored. settings: fields of `evaluation.quality.QualitySettings`. cache: look the result up,
    and keep it, under a hash of the models' files, the data, the settings and the libraries.

    Raises UsageError where the request is wrong, RunError where a model does not open or answer.
    """
    from .sources import resolve

    chosen = _settings(tasks, settings)
    found = _text(text, dataset, dataset_config, split, column, bool(tasks))
    source = resolve(model, revision)
    other = resolve(against) if against is not None else None
    key = _key(source, other, found, chosen)
    place = (Path(cache_folder) if cache_folder else cache_dir()) / "evaluations" / f"{key}.json"
    if cache and (known := _kept(place)) is not None:
        return Evaluation({**known, "cached": True})
    measured = measure(
        source.folder,
        other.folder if other else None,
        found.content if found else None,
        chosen,
        listener,
        found.name if found else "text",
    )
    data = _data(measured, source, other, found, chosen)
    if cache:
        _keep(place, data)
    return Evaluation({**data, "cached": False})


def _settings(tasks: Sequence[str], settings: dict[str, Any]) -> QualitySettings:
    try:
        return QualitySettings(tasks=tuple([tasks] if isinstance(tasks, str) else tasks), **settings)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{name}: {first['msg']}", "evaluate") from None


def _text(
    text: str | Path | None, dataset: str | None, config: str | None, split: str, column: str | None, tasks_alone: bool
) -> Text | None:
    """The text to score; None where only tasks were asked for."""
    if text is not None and dataset is not None:
        raise UsageError("a text and a data set are both named", "eval", "Name one of the two.")
    if dataset is not None:
        name = Path(dataset).name if Path(dataset).exists() else dataset
        return Text(name, dataset_text(dataset, config, split, column))
    return None if text is None and tasks_alone else find_text(text)


def find_text(text: str | Path | None) -> Text:
    """A text file; the text that ships with llmopt for None and "default". Raises UsageError."""
    if text is None or str(text) == "default":
        from .calibration import read_text as shipped

        return Text("default", shipped("default", "evaluation"))
    return Text(Path(text).name, read_text(text))


def dataset_text(name: str, config: str | None = None, split: str = "test", column: str | None = None) -> str:
    """The rows of a data set in their order, an empty line between.

    Raises UsageError where it is not there, cannot be read or holds no text.
    """
    from .calibration_sources import DatasetSource

    if name.startswith((".", "/", "~")) and not Path(name).expanduser().exists():
        raise UsageError("there is no such data set", name)
    try:
        rows = DatasetSource(name, 0, column=column, config=config, split=split, revision=None).values()
    except RunError as error:
        where, mend = (part.replace("calibration.", "--") for part in (error.where, error.what_to_do))
        raise UsageError(error.what, where, mend) from None
    if not all(isinstance(row, str) for row in rows):
        raise UsageError("the column does not hold texts", name, "Name another by --column.")
    text = "\n\n".join(rows)
    if not text.strip():
        raise UsageError("the data set's text is empty", name)
    return text


def _data(
    measured: dict[str, Any],
    source: SourceIdentity,
    other: SourceIdentity | None,
    text: Text | None,
    settings: QualitySettings,
) -> dict[str, Any]:
    from ..evaluation.proof import environment

    names = {"model": source, **({"against": other} if other else {})}
    parts = {key: {"id": who.id, "sha256": who.sha256, **measured[key]} for key, who in names.items()}
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "evaluation",
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **parts,
        **{key: measured[key] for key in ("divergence", "generation") if measured.get(key) is not None},
        **({"text": text.record()} if text else {}),
        "settings": settings.model_dump(mode="json", exclude={"prompts"}),
        "environment": environment(),
        "seconds": measured["seconds"],
    }


def _key(source: SourceIdentity, other: SourceIdentity | None, text: Text | None, settings: QualitySettings) -> str:
    """Covers all that the figures depend on: the models' files, the data, the settings, the libraries, the code."""
    from ..evaluation.proof import environment

    parts = [
        SCHEMA_VERSION,
        [source.sha256, source.id],
        [other.sha256, other.id] if other else None,
        text.record() if text else None,
        settings.model_dump(mode="json"),
        _folder_hash(settings.task_path),
        environment(),
        _code_hash(),
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _folder_hash(folder: str | None) -> str | None:
    if folder is None or not Path(folder).is_dir():
        return None
    digest = hashlib.sha256()
    for file in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
        digest.update(file.relative_to(folder).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()


def _code_hash() -> str:
    """SHA-256 over the sources that measure and run: those of evaluation and runtime."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for folder in ("evaluation", "runtime"):
        for file in sorted((root / folder).rglob("*")):
            if file.suffix in (".py", ".cpp", ".h"):
                digest.update(file.relative_to(root).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()


def _kept(place: Path) -> dict[str, Any] | None:
    with suppress(OSError, ValueError):
        known = json.loads(place.read_text(encoding="utf-8"))
        if isinstance(known, dict) and known.get("schema_version") == SCHEMA_VERSION:
            return known
    return None


def _keep(place: Path, data: dict[str, Any]) -> None:
    """Write a result to the cache; where that fails the figures are none the worse."""
    with suppress(OSError):
        write_atomic(place, json.dumps(data, ensure_ascii=False))
        kept = sorted(place.parent.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        for old in kept[MOST_KEPT:]:
            old.unlink(missing_ok=True)


def write_json(path: str | Path, data: dict[str, Any]) -> None:
    """Write a result as JSON. Raises RunError where that cannot be."""
    try:
        write_atomic(Path(path), json.dumps(data, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise RunError(f"cannot be written ({error.strerror})", str(path)) from None
