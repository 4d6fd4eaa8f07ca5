"""One trial: an ordinary run of the pipeline that may be given up, its source measured once for all trials."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import LlmoptError
from ..manifest import GateRecord
from ..model import LoadedModel, ModelInfo, SourceIdentity
from ..pipeline import Run, Settings
from ..recipe import LoadedRecipe
from .proxy import Bar, look, prune_by_look


class SourceError(Exception):
    """What is wrong with the source or its evaluation is wrong for every trial; its cause is the error to show."""


@dataclass
class Shared:
    """What all trials of a search share. folder: a scratch folder that lasts as long as the search. before, reference:
    the source's figures and the file of its logits, once a trial has needed them; seconds: the time that took."""

    source: SourceIdentity
    info: ModelInfo
    folder: Path
    before: dict[str, Any] = field(default_factory=dict)
    reference: Path | None = None
    seconds: float = 0.0


class TrialRun(Run):
    """A run that is one trial. Gates are recorded and stop nothing; Pruned is raised after the passes where a look at
    the quality shows that a limit cannot hold.

    looks: whether to take that look. bars: what its figures are held against; they are left in `rough`.
    """

    def __init__(
        self, loaded: LoadedRecipe, shared: Shared, settings: Settings, looks: bool, bars: Sequence[Bar]
    ) -> None:
        super().__init__(loaded, shared.source, settings)
        self.shared, self.looks, self.bars = shared, looks, bars
        self.rough: dict[str, float] = {}

    def _describe(self) -> ModelInfo:
        return self.shared.info

    def _load(self) -> LoadedModel:
        with _of_source():
            return super()._load()

    def _reference(self, model: LoadedModel) -> tuple[dict[str, Any], Path]:
        if self.shared.reference is None:
            start = time.monotonic()
            with _of_source():
                before, path = super()._reference(model)
            kept = self.shared.folder / path.name
            path.replace(kept)
            self.shared.before, self.shared.reference = before, kept
            self.shared.seconds = time.monotonic() - start
        return self.shared.before, self.shared.reference

    def _run_passes(self, model: LoadedModel) -> LoadedModel:
        model = super()._run_passes(model)
        if self.looks and self.shared.reference is not None:
            with self._stage("look"):
                self.rough = look(model, self.shared.reference)
            prune_by_look(self.rough, self.bars)
        return model

    def _gate_error(self, failed: list[GateRecord], folder: Path, kept: Path | None) -> None:
        """A trial that misses a limit is a point of the picture all the same."""


@contextmanager
def _of_source() -> Iterator[None]:
    try:
        yield
    except LlmoptError as error:
        raise SourceError from error
