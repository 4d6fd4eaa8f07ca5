"""The cache of completed passes, so that a rerun starts after the last pass that is known.

A pass's key is a hash over everything that its result depends on: the source's contents, the dtype it was loaded in,
every preceding pass and this one (name, options, source code), calibration, seed, and the versions of llmopt, torch
and transformers. An entry holds the state dict, the model's config, the RuntimeSpec and the pass's report; it is
written beside its place and renamed, so that a killed run leaves no half entry.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .base import Context, Pass, PassReport
from .errors import RunError
from .files import folder_bytes, fsync_tree, replace_folder, temporary_sibling
from .registry import code_hash
from .runtime_spec import RuntimeSpec

if TYPE_CHECKING:
    from .model import LoadedModel

STATE, META = "state.safetensors", "meta.json"


@dataclass
class CachedPass:
    """What a completed pass left: its report, its notes, the RuntimeSpec after it and its wall time in seconds."""

    report: PassReport
    runtime: RuntimeSpec
    notes: list[dict[str, str]]
    seconds: float
    weights_key: str | None
    """Key of the entry whose state dict holds the weights after this pass; None where they are the source's."""
    calibrated: bool = False
    """Whether the pass asked for calibration data."""


def pass_keys(passes: list[Pass], base: dict[str, Any]) -> list[str]:
    """One key a pass; each covers `base` and all passes up to it."""
    keys, chain = [], [json.dumps(base, sort_keys=True, default=str)]
    for item in passes:
        chain.append(
            json.dumps([item.name, code_hash(type(item)), item.config.model_dump(mode="json")], sort_keys=True)
        )
        keys.append(hashlib.sha256("\n".join(chain).encode()).hexdigest())
    return keys


def fingerprint(model: LoadedModel) -> dict[str, tuple[int, int, tuple[int, ...]]]:
    """What changes when a weight changes: storage, in-place version and shape of each tensor by name."""
    tensors = model.module.state_dict(keep_vars=True)
    return {name: (t.data_ptr(), t._version, tuple(t.shape)) for name, t in tensors.items()}


class Workspace:
    """The pass cache below one folder. `limit` is its greatest size in bytes; the least recently used go first."""

    def __init__(self, folder: Path, limit: int, enabled: bool = True) -> None:
        self.folder, self.limit, self.enabled = folder / "passes", limit, enabled

    def lookup(self, key: str) -> CachedPass | None:
        """The entry of that key, where it is whole and its weights are still there."""
        if not self.enabled:
            return None
        meta = self._meta(key)
        if meta is None:
            return None
        try:
            cached = CachedPass(
                PassReport(**meta["report"]),
                RuntimeSpec.model_validate(meta["runtime"]),
                meta["notes"],
                meta["seconds"],
                meta["weights_key"],
                meta["calibrated"],
            )
        except (KeyError, TypeError, ValueError):
            return None
        weights = cached.weights_key
        if weights is not None and (not (self.folder / weights / STATE).exists() or self._meta(weights) is None):
            return None
        with suppress(OSError):
            os.utime(self.folder / key)
        return cached

    def _meta(self, key: str) -> dict[str, Any] | None:
        try:
            return json.loads((self.folder / key / META).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def load(self, cached: CachedPass, model: LoadedModel, done: list[tuple[Pass, PassReport]]) -> None:
        """Bring a freshly loaded source to the state after `done`, whose last entry is `cached`.

        Each pass repeats its changes of structure (`Pass.restore`), then the saved tensors take their places.
        Raises RunError where the saved tensors do not fit: the caller then runs the passes again.
        """
        from safetensors.torch import load_file

        model.runtime = cached.runtime.model_copy(deep=True)
        if cached.weights_key is None:
            return
        folder = self.folder / cached.weights_key
        for item, report in done:
            item.restore(model, report)
        try:
            state = load_file(folder / STATE)
            aliases = json.loads((folder / META).read_text(encoding="utf-8"))["aliases"]
            state.update({alias: state[name] for alias, name in aliases.items()})
            model.module.load_state_dict(state, strict=True, assign=True)
            model.module.tie_weights()
        except Exception as error:
            raise RunError(f"a cached result does not fit ({type(error).__name__}: {error})", str(folder)) from None

    def store(
        self, key: str, cached: CachedPass, model: LoadedModel, context: Context, *, changed_weights: bool
    ) -> None:
        """Save a completed pass. A disk that is full or not writable costs the cache, not the run: a note says so."""
        if not self.enabled:
            return
        target = self.folder / key
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary = temporary_sibling(target)
        except OSError as error:
            context.note("note", f"the result was not cached: {error.strerror}")
            return
        try:
            aliases = _save_state(model, temporary / STATE) if changed_weights else {}
            meta = {
                "report": asdict(cached.report),
                "runtime": cached.runtime.model_dump(mode="json"),
                "notes": cached.notes,
                "seconds": cached.seconds,
                "weights_key": key if changed_weights else cached.weights_key,
                "calibrated": cached.calibrated,
                "aliases": aliases,
            }
            (temporary / META).write_text(json.dumps(meta), encoding="utf-8")
            fsync_tree(temporary)
            replace_folder(temporary, target)
        except (OSError, ValueError, TypeError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            context.note("note", f"the result was not cached: {error}")
            return
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._evict(keep={key, cached.weights_key or key})

    def _evict(self, keep: set[str]) -> None:
        entries = [path for path in self.folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
        entries.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        total = 0
        for path in entries:
            total += folder_bytes(path)
            if total > self.limit and path.name not in keep:
                shutil.rmtree(path, ignore_errors=True)


def _save_state(model: LoadedModel, path: Path) -> dict[str, str]:
    """Save the state dict; returns the names that share a tensor with another (tied weights) and which one."""
    from safetensors.torch import save_file

    seen: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    aliases, state = {}, {}
    for name, tensor in model.module.state_dict().items():
        identity = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
        if tensor.numel() and identity in seen:
            aliases[name] = seen[identity]
            continue
        seen[identity] = name
        state[name] = tensor.detach().contiguous()
    save_file(state, path)
    return aliases
