"""Runs a recipe's passes over a model: what is cached is taken from the cache, what is run is put there.

A lazy model goes through the passes that stream as it is; before another pass it is read into memory, with a note.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..runtime.memory import available_memory, resident_memory
from .base import Context, Pass, PassReport
from .checkpoint import Checkpoint
from .errors import RunError
from .manifest import PassRecord
from .model import LoadedModel
from .registry import code_hash
from .workspace import CachedPass, Workspace, fingerprint, pass_keys


class PassRunner:
    """Runs `passes` in order. `records` tell of each that is done; `calibrated` whether one asked for calibration.

    load: opens the source anew. context: makes the context of a stage, all with the same list of notes. stage: marks a
    stage for the listener. cached: tells it of a pass that is taken from the cache.
    """

    def __init__(
        self,
        passes: list[Pass],
        workspace: Workspace,
        load: Callable[[], LoadedModel],
        context: Callable[[LoadedModel, str], Context],
        stage: Callable[[str], AbstractContextManager[None]],
        cached: Callable[[str], None],
    ) -> None:
        self.passes, self.workspace, self.load = passes, workspace, load
        self.context, self.stage, self.cached = context, stage, cached
        self.records: list[PassRecord] = []
        self.calibrated = False

    def run(self, model: LoadedModel, key_base: dict[str, Any]) -> LoadedModel:
        """The model after all passes. Raises what a pass raises."""
        keys = pass_keys(self.passes, key_base)
        model, done, weights_key = self._from_cache(model, keys)
        for index in range(done, len(self.passes)):
            weights_key = self._run_pass(model, self.passes[index], keys[index], weights_key)
        return model

    def _from_cache(self, model: LoadedModel, keys: list[str]) -> tuple[LoadedModel, int, str | None]:
        """The model after the last pass up to which every result is known, the number of those passes, and the key of
        the weights."""
        known: list[CachedPass] = []
        for key in keys:
            entry = self.workspace.lookup(key)
            if entry is None:
                break
            known.append(entry)
        if not known:
            return model, 0, None
        done: list[tuple[Pass, PassReport]] = [(item, entry.report) for item, entry in zip(self.passes, known)]
        try:
            self.workspace.load(known[-1], model, done)
        except RunError as error:
            self.context(model, done[-1][0].name).note("note", f"{error}; the passes run again")
            return self.load(), 0, None
        for (item, _), entry in zip(done, known):
            self.context(model, item.name).notes.extend(entry.notes)
            self.cached(item.name)
            self._record(item, entry, cached=True)
        return model, len(known), known[-1].weights_key

    def _run_pass(self, model: LoadedModel, item: Pass, key: str, weights_key: str | None) -> str | None:
        """Run and cache one pass; returns the key of the entry that holds the weights after it."""
        import torch

        context = self.context(model, item.name)
        if model.weights is not None and not item.streams:
            materialize(model, context)
        before, noted, start = fingerprint(model), len(context.notes), time.perf_counter()
        torch.manual_seed(context.seed)
        with self.stage(item.name):
            context.checkpoint = self._checkpoint(model, item, key, context.workdir)
            report = item.run(model, context)
            changed = item.changes_weights or fingerprint(model) != before
            runtime = model.runtime.model_copy(deep=True)
            seconds = time.perf_counter() - start
            used = context.calibration.used
            entry = CachedPass(report, runtime, context.notes[noted:], seconds, weights_key, used)
            if model.weights is not None and context.checkpoint is not None:
                self.workspace.keep(key, entry, model, context.checkpoint, context)
            else:
                self.workspace.store(key, entry, model, context, changed_weights=changed)
                self.workspace.drop_checkpoint(key)
        self._record(item, entry, cached=False)
        return key if changed else weights_key

    def _checkpoint(self, model: LoadedModel, item: Pass, key: str, workdir: Path) -> Checkpoint | None:
        """Where the pass commits its steps: in the cache, or, for a lazy model without a cache, in the work folder."""
        import torch

        if not (item.streams and item.changes_weights):
            return None
        from ..runtime.kernels.wide_products import slow_dtypes

        identity = {"threads": torch.get_num_threads(), "cpu": torch.backends.cpu.get_cpu_capability()}
        identity["wide"] = ", ".join(sorted(map(str, slow_dtypes())))
        if item.calibrates():
            from ..runtime.kernels.calibration import backend

            identity["products"] = backend()
        checkpoint = self.workspace.checkpoint(key, identity)
        if checkpoint is None and model.weights is not None:
            checkpoint = Checkpoint(workdir / key)
        return checkpoint

    def _record(self, item: Pass, entry: CachedPass, cached: bool) -> None:
        config = item.config.model_dump(mode="json")
        code, report = code_hash(type(item)), asdict(entry.report)
        record = PassRecord(
            name=item.name, config=config, code_sha256=code, seconds=round(entry.seconds, 3), cached=cached, **report
        )
        self.records.append(record)
        self.calibrated |= entry.calibrated


def materialize(model: LoadedModel, context: Context) -> None:
    """Read a lazy model into memory for a stage that needs all of it, and note that.

    Raises RunError with the figures where it does not fit.
    """
    assert model.weights is not None
    size = model.weights.nbytes
    free = available_memory()
    if context.max_memory is not None:
        free = min(free, context.max_memory - resident_memory())
    if size > free:
        raise RunError(
            f"works on the whole model, which takes {size / 2**20:,.0f} MiB, and {max(0, free) / 2**20:,.0f} MiB are "
            "available",
            where=context.stage,
            what_to_do="Allow more memory, or leave this stage out.",
        )
    context.note("note", f"works on the whole model, so that {size / 2**20:,.0f} MiB were read into memory")
    model.materialize()
