"""`llmopt.diff`: two models of one architecture side by side, layer by layer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..evaluation.difference import Difference, Side, walk
from ..evaluation.layers import holders
from ..evaluation.progress import stage
from ..evaluation.subject import require_same_tokens, try_streamed
from ..evaluation.windows import sliding_windows
from ..runtime.chat import context_length
from .errors import UsageError
from .evaluate import Text, find_text
from .events import Listener, silent
from .model import LoadedModel, SourceIdentity

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SCHEMA_VERSION = 1
KEYS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
"""Entries of a config that two models must share."""
MOVES_WEIGHTS = {"rotate", "fuse"}
"""Passes that change weights and not what the model computes."""


@dataclass(frozen=True)
class ModelDiff:
    """What `llmopt.diff` found; docs/evaluate.md describes the JSON object `data`."""

    data: dict[str, Any]

    @property
    def units(self) -> list[dict[str, Any]]:
        """Blocks and what lies outside them, the most harmful first."""
        return self.data["units"]

    @property
    def flips(self) -> list[dict[str, Any]]:
        """Positions with another most likely token, the worst first."""
        return self.data["flips"]

    def as_dict(self) -> dict[str, Any]:
        return self.data


def diff(
    a: str | Path,
    b: str | Path,
    *,
    text: str | Path | None = None,
    windows: int = 4,
    window_length: int = 256,
    harm_tokens: int = 128,
    flips: int = 100,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    listener: Listener = silent,
) -> ModelDiff:
    """How b differs from a: weights, outputs, size and format of each layer, and which most likely tokens flip.

    a, b: folders, hub ids, .gguf files or short names; all errors are relative to a. text: a UTF-8 file, or "default",
    the text that ships with llmopt; its first `windows` windows of `window_length` tokens are run. harm_tokens: tokens
    on which each unit alone is tried in a. flips: most that are listed.

    Raises UsageError where the models have other architectures or tokenizers or the request is wrong otherwise,
    RunError where a model does not open or cannot run block by block.
    """
    from .sources import resolve

    start = time.perf_counter()
    if harm_tokens < 2 or flips < 0:
        name, value = ("harm_tokens", harm_tokens) if harm_tokens < 2 else ("flips", flips)
        raise UsageError(f"{name} cannot be {value}", "diff")
    found = find_text(text)
    one, other = resolve(a), resolve(b)
    sides, notes = [], []
    with stage(listener, "open"):
        for source in (one, other):
            side, note = open_side(source, dtype, trust_remote_code)
            sides.append(side)
            notes += note
    require_same_architecture(sides[0], sides[1], str(b))
    context = context_length(sides[0].model.config)
    if context is not None and window_length > context:
        what = f"a window of {window_length} tokens is longer than the models' context of {context}"
        raise UsageError(what, "window_length", f"Use {context} or less.")
    tokenizer = sides[0].model.tokenizer
    require_same_tokens(tokenizer, sides[1].model.tokenizer, str(b))
    cut = sliding_windows(
        found.content, tokenizer, length=window_length, stride=window_length, limit=windows, where=found.name
    )
    result = walk(
        sides[0],
        sides[1],
        cut,
        harm_tokens=min(harm_tokens, window_length),
        most_flips=flips,
        listener=listener,
    )
    settings = {"windows": windows, "window_length": window_length, "harm_tokens": harm_tokens, "dtype": dtype}
    data = _data((one, other), sides, result, found, settings, notes)
    data["seconds"] = round(time.perf_counter() - start, 3)
    return ModelDiff(data)


def open_side(source: SourceIdentity, dtype: str, trust_remote_code: bool) -> tuple[Side, list[dict[str, str]]]:
    """A model with its weights left in their files; where that cannot be it is in memory, and a note says why."""
    from ..runtime.open import open_model
    from ..runtime.tensor_files import locate
    from ..runtime.weight_files import weight_files

    stored = locate(weight_files(source.folder))
    opened = try_streamed(source.folder, dtype, trust_remote_code)
    if isinstance(opened, LoadedModel):
        return Side(opened, stored), []
    whole = open_model(source.folder, "cpu", dtype, trust_remote_code=trust_remote_code)
    note = {"stage": "open", "kind": "fallback", "message": f"{source.id} is in memory as a whole: {opened}"}
    return Side(LoadedModel(whole.module, whole.tokenizer, source), stored), [note]


def require_same_architecture(a: Side, b: Side, where: str) -> None:
    """Raise UsageError that names the first thing in which the two models are built differently."""
    one, other = a.model.config, b.model.config
    if one.model_type != other.model_type or type(a.model.module) is not type(b.model.module):
        names = [f"{type(side.model.module).__name__} ({side.model.config.model_type})" for side in (a, b)]
        raise UsageError(f"the models have different architectures: {names[0]} and {names[1]}", where)
    for key in KEYS:
        values = [_entry(config, key) for config in (one, other)]
        if values[0] != values[1]:
            raise UsageError(f"the models differ in {key}: {values[0]} and {values[1]}", where)
    apart = sorted(set(holders(a.model.module)) ^ set(holders(b.model.module)))
    if apart:
        raise UsageError(f"only one of the models has a layer {apart[0]}", where, "Compare models of the same layers.")


def _entry(config: PreTrainedConfig, key: str) -> Any:
    return getattr(config.get_text_config(), key, None)


def _data(
    sources: tuple[SourceIdentity, SourceIdentity],
    sides: list[Side],
    result: Difference,
    text: Text,
    settings: dict[str, Any],
    notes: list[dict[str, str]],
) -> dict[str, Any]:
    from ..evaluation.proof import environment

    units = [unit.as_dict() for unit in result.units]
    total = sum(unit["harm"] for unit in units)
    for order, unit in enumerate(units):
        unit["order"] = order
        unit["share"] = unit["harm"] / total if total else 0.0
    units.sort(key=lambda unit: (-unit["harm"], -(unit["output_error"] or 0.0)))
    sizes = [sum(place.nbytes for place in side.stored.values()) for side in sides]
    models = [
        {"id": source.id, "sha256": source.sha256, "bytes": size, "dtype": str(side.model.dtype).removeprefix("torch.")}
        for source, side, size in zip(sources, sides, sizes)
    ]
    for model, score in zip(models, result.scores):
        model["text"] = score
    moved = sorted({name for source in sources for name in _passes(source.folder)} & MOVES_WEIGHTS)
    if moved:
        said = f"the pass {' and '.join(moved)} moves weights between layers: weight and output errors show that too"
        notes.append({"stage": "diff", "kind": "note", "message": said})
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "difference",
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "a": models[0],
        "b": models[1],
        "divergence": result.divergence,
        "num_flips": result.flips.num_flips,
        "num_positions": result.flips.num_positions,
        "units": units,
        "flips": result.flips.worst(),
        "text": text.record(),
        "settings": settings,
        "notes": notes,
        "environment": environment(),
    }


def _passes(folder: Path) -> list[str]:
    """Names of the passes that made an artifact; none for a plain folder."""
    from ..runtime.artifact import read_manifest

    manifest = read_manifest(folder) or {}
    return [str(item.get("name")) for item in manifest.get("passes") or [] if isinstance(item, dict)]
