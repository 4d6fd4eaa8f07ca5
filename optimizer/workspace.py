"""The cache of completed passes, so that a rerun starts after the last pass that is known.

A pass's key is a hash over everything that its result depends on: the source's contents, the dtype it was loaded in,
every preceding pass and this one (name, options, source code), calibration, seed, and the versions of llmopt, torch
and transformers. An entry holds the state dict, the model's config, the RuntimeSpec and the pass's report; it is
written beside its place and renamed, so that a killed run leaves no half entry. The entry of a lazy model holds only
the tensors that the pass changed, and names the entry that holds the rest. While a pass works in steps, what it has
finished lies in a hidden folder, its checkpoint.
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
from .checkpoint import Checkpoint
from .errors import RunError
from .files import alive, folder_bytes, fsync_tree, replace_folder, temporary_sibling
from .registry import code_hash
from .runtime_spec import RuntimeSpec
from .state_files import check_complete, files, load_state, save_state

if TYPE_CHECKING:
    from .model import LoadedModel

STATE, META = "state.safetensors", "meta.json"
PARTIAL, OWNER = ".partial-", ".owner-"


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
        try:
            self._chain(cached.weights_key)
        except (OSError, ValueError, KeyError):
            return None
        with suppress(OSError):
            os.utime(self.folder / key)
        return cached

    def _meta(self, key: str) -> dict[str, Any] | None:
        try:
            return json.loads((self.folder / key / META).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def _chain(self, key: str | None) -> list[tuple[Path, dict[str, str]]]:
        """Folder and aliases of the entries that hold a model's weights after a pass, those of earlier passes first.

        Raises OSError, ValueError or KeyError where one is gone or damaged.
        """
        chain = []
        while key is not None:
            folder = self.folder / key
            meta = json.loads((folder / META).read_text(encoding="utf-8"))
            if not any(folder.glob("*.safetensors")):
                raise FileNotFoundError(str(folder))
            chain.append((folder, meta["aliases"]))
            key = meta["base"]
        return chain[::-1]

    def load(self, cached: CachedPass, model: LoadedModel, done: list[tuple[Pass, PassReport]]) -> None:
        """Bring a freshly opened source to the state after `done`, whose last entry is `cached`.

        Each pass repeats its changes of structure (`Pass.restore`), then the saved tensors take their places.
        Raises RunError where the saved tensors do not fit: the caller then runs the passes again.
        """
        model.runtime = cached.runtime.model_copy(deep=True)
        if cached.weights_key is None:
            return
        before = set(model.module.state_dict())
        for item, report in done:
            item.restore(model, report)
        try:
            for folder, aliases in self._chain(cached.weights_key):
                if model.weights is not None:
                    model.weights.overlay(files(folder), aliases)
                else:
                    before |= load_state(model, folder, aliases)
            check_complete(model, before)
        except Exception as error:
            where = str(self.folder / cached.weights_key)
            raise RunError(f"a cached result does not fit ({type(error).__name__}: {error})", where) from None

    def checkpoint(self, key: str, identity: dict[str, Any]) -> Checkpoint | None:
        """Where a pass commits its steps; None without a cache, and where another live process has that place."""
        if not self.enabled:
            return None
        owner = self.folder / f"{OWNER}{key}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with suppress(OSError, ValueError):
                if (number := int(owner.read_text())) != os.getpid() and alive(number):
                    return None
            owner.write_text(str(os.getpid()))
            return Checkpoint(self.folder / f"{PARTIAL}{key}", identity)
        except OSError:
            return None

    def drop_checkpoint(self, key: str) -> None:
        """Remove a pass's checkpoint."""
        shutil.rmtree(self.folder / f"{PARTIAL}{key}", ignore_errors=True)
        (self.folder / f"{OWNER}{key}").unlink(missing_ok=True)

    def keep(self, key: str, cached: CachedPass, model: LoadedModel, checkpoint: Checkpoint, context: Context) -> None:
        """Make the checkpoint of a completed pass over a lazy model its entry. Where that fails a note says so."""
        target, folder = self.folder / key, checkpoint.folder
        if not self.enabled or folder.parent != self.folder or model.weights is None:
            return
        try:
            checkpoint.finish()
            self._write_meta(folder, key, cached, {}, changed=True, base=cached.weights_key)
            fsync_tree(folder)
            replace_folder(folder, target)
        except (OSError, ValueError, TypeError) as error:
            context.note("note", f"the result was not cached: {error}")
            return
        model.weights.overlay(files(target))
        (self.folder / f"{OWNER}{key}").unlink(missing_ok=True)
        self._evict(keep={key, *self._names(cached.weights_key)})

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
            aliases = save_state(model, temporary / STATE) if changed_weights else {}
            self._write_meta(temporary, key, cached, aliases, changed=changed_weights)
            fsync_tree(temporary)
            replace_folder(temporary, target)
        except (OSError, ValueError, TypeError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            context.note("note", f"the result was not cached: {error}")
            return
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._evict(keep={key, *self._names(cached.weights_key)})

    def _write_meta(
        self,
        folder: Path,
        key: str,
        cached: CachedPass,
        aliases: dict[str, str],
        changed: bool,
        base: str | None = None,
    ) -> None:
        meta = {
            "report": asdict(cached.report),
            "runtime": cached.runtime.model_dump(mode="json"),
            "notes": cached.notes,
            "seconds": cached.seconds,
            "weights_key": key if changed else cached.weights_key,
            "base": base,
            "calibrated": cached.calibrated,
            "aliases": aliases,
        }
        (folder / META).write_text(json.dumps(meta), encoding="utf-8")

    def _names(self, key: str | None) -> set[str]:
        """Keys of the entries that a chain of weights rests on."""
        with suppress(OSError, ValueError, KeyError):
            return {folder.name for folder, _ in self._chain(key)}
        return set()

    def _evict(self, keep: set[str]) -> None:
        """Remove the least recently used entries and abandoned checkpoints beyond the limit."""
        busy = {name.name.removeprefix(OWNER) for name in self.folder.glob(f"{OWNER}*") if _owned(name)}
        entries = [
            path
            for path in self.folder.iterdir()
            if path.is_dir() and path.name.removeprefix(PARTIAL) not in busy and ".tmp-" not in path.name
        ]
        entries.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        total = 0
        for path in entries:
            total += folder_bytes(path)
            if total > self.limit and path.name not in keep:
                shutil.rmtree(path, ignore_errors=True)
                if path.name.startswith(PARTIAL):
                    (self.folder / f"{OWNER}{path.name.removeprefix(PARTIAL)}").unlink(missing_ok=True)


def _owned(owner: Path) -> bool:
    """Whether the process that an owner file names is alive."""
    with suppress(OSError, ValueError):
        return alive(int(owner.read_text()))
    return False
