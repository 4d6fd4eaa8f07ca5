"""`llmopt bench --techniques`: makes the artifacts that the rows need, measures, and writes the document."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import __version__
from ..evaluation.bench.lengths import Lengths
from ..evaluation.bench.machine import NOISY
from ..evaluation.bench.techniques import SOURCE, Job, flash_backend, measure, techniques, text_requests, windows
from .bench import document
from .errors import LlmoptError
from .events import Listener, silent
from .files import cache_dir
from .model import SourceIdentity

UNJUDGED = ("gates={}", "evaluate.speed=false")
"""What the rows change of a recipe: the table itself shows quality and speed, so no gate decides what is in it."""


@dataclass(frozen=True)
class TechniqueSettings:
    """What the rows run. Prompts are passages of the evaluation text that ships; answers have drawn lengths, so that
    batches end unevenly, as they do in service."""

    num_prompts: int = 16
    input_len: Lengths = field(default_factory=lambda: Lengths(32, 256))
    output_len: Lengths = field(default_factory=lambda: Lengths(16, 96))
    batch: int = 8
    rounds: int = 2
    seed: int = 0
    num_threads: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False
    scored_windows: int = 8
    window_length: int = 512

    def as_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "input_len": str(self.input_len), "output_len": str(self.output_len)}


def compare_techniques(
    model: str, settings: TechniqueSettings | None = None, listener: Listener = silent
) -> dict[str, Any]:
    """Measure every technique on one model; docs/bench.md describes the JSON object, docs/techniques.md the rows.

    Artifacts come from runs of the shipped recipes, without their gates, and are kept in the cache folder. A row that
    cannot be measured here says why. Raises UsageError where the model or a setting is wrong, RunError
    where the baseline does not run.
    """
    from ..runtime.tokenizer_files import open_tokenizer
    from .calibration import read_text
    from .sources import resolve

    settings = settings or TechniqueSettings()
    source = resolve(model)
    tokenizer = open_tokenizer(source.folder, settings.trust_remote_code)
    text = read_text("default", "evaluation")
    lengths = (settings.input_len, settings.output_len)
    job = Job(
        requests=text_requests(tokenizer, text, settings.num_prompts, *lengths, settings.seed),
        warmup=text_requests(tokenizer, text, 2, settings.input_len, Lengths(4, 4), settings.seed + 1),
        scored=windows(tokenizer, text, settings.scored_windows, settings.window_length),
        options=_options(settings),
        threads=settings.num_threads,
    )
    table = techniques(settings.batch, *flash_backend(settings.device))
    made = _artifacts(source, [row.model for row in table], settings, listener)

    def folder(name: str) -> Path:
        found = made[name]
        if isinstance(found, LlmoptError):
            raise found
        return found

    rows = measure(table, folder, job, settings.rounds, listener)
    for row in rows:
        row["divergence"] = None if row["absent"] or row["model"] == SOURCE else _divergence(folder(row["model"]))
    about = {"id": source.id, "sha256": source.sha256}
    tokens = {"input": sum(len(r.prompt) for r in job.requests), "output": sum(r.output_len for r in job.requests)}
    shown = {**settings.as_dict(), "tokens": tokens}
    return document("techniques", shown, {"model": about, "rows": rows, "warnings": _warnings(rows)})


def _artifacts(
    source: SourceIdentity, names: list[str], settings: TechniqueSettings, listener: Listener
) -> dict[str, Path | LlmoptError]:
    """The folder of every model that rows name; in its place the error of a recipe that failed on this one."""
    made: dict[str, Path | LlmoptError] = {SOURCE: source.folder}
    for name in names:
        if name not in made:
            try:
                made[name] = artifact(source, name, settings, listener)
            except LlmoptError as error:
                made[name] = error
    return made


def artifact(source: SourceIdentity, recipe: str, settings: TechniqueSettings, listener: Listener = silent) -> Path:
    """The artifact of a shipped recipe, made at the first call and kept in the cache. Raises what `optimize` raises."""
    from .api import load_recipe, optimize

    recipe_as_run = load_recipe(recipe, overrides=UNJUDGED).recipe.model_dump(mode="json")
    parts = [__version__, source.sha256, recipe_as_run, settings.dtype]
    key = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]
    place = cache_dir() / "techniques" / f"{recipe}-{key}"
    if not (place / "llmopt.json").is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        more: dict[str, Any] = {} if settings.dtype == "auto" else {"dtype": settings.dtype}
        named = str(source.folder)
        trust = settings.trust_remote_code
        optimize(
            named,
            recipe,
            out=place,
            overrides=UNJUDGED,
            force=True,
            trust_remote_code=trust,
            listener=listener,
            **more,
        )
    return place


def _options(settings: TechniqueSettings) -> dict[str, Any]:
    found: dict[str, Any] = {"device": settings.device, "dtype": settings.dtype}
    return {**found, "trust_remote_code": True} if settings.trust_remote_code else found


def _divergence(folder: Path) -> dict[str, Any]:
    """What the artifact's own proof measured against the source: `mean_kl` (nats a token), `top1_agreement`."""
    found = json.loads((folder / "llmopt.json").read_text(encoding="utf-8"))["measured"]["divergence"]
    return {name: found[name] for name in ("mean_kl", "top1_agreement")}


def _warnings(rows: list[dict[str, Any]]) -> list[str]:
    shares = [row["foreign_cpu"] for row in rows if row.get("foreign_cpu") is not None]
    if shares and max(shares) > NOISY:
        return [
            f"other processes used up to {max(shares):.0%} of this machine's CPU time while rows were taken: they are "
            "too slow, and their ratios may be off; measure again on a quiet machine"
        ]
    return []
