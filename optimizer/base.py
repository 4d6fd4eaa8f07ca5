"""The base classes that plugins implement: Pass, Exporter and what they are given and return.

This is the ground floor: every other folder may import it, it imports no other folder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from .errors import UsageError
from .events import Event, Listener, silent

if TYPE_CHECKING:
    from .calibration import Calibration
    from .checkpoint import Checkpoint
    from .model import LoadedModel, ModelInfo


class Options(BaseModel):
    """Base of every Config class: unknown keys are errors, field descriptions are the documentation."""

    model_config = ConfigDict(extra="forbid", validate_default=True)


class NoOptions(Options):
    """No options."""


@dataclass
class ModulePlan:
    """What a pass will do to one module. Sizes are bytes of its weights."""

    name: str
    action: str
    bytes_before: int
    bytes_after: int
    scheme: Any = None
    """The grid that it is going to have (a `QuantScheme`), which exporters look at; None where it stays as it is."""
    candidates: tuple[Any, ...] = ()
    """The grids of which it gets one, or none, where that is chosen as the pass runs."""
    unit: int = 0
    """Modules with candidates and the same number get the same."""


@dataclass
class PlanItem:
    """What a pass will do, known from the configuration and the weight files' headers alone.

    refusals: sentences that say why the run would fail; a plan with any is not run.
    peak_memory: bytes the pass needs on top of the loaded model; seconds: rough time on this machine.
    """

    summary: str
    modules: list[ModulePlan] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    runtime: dict[str, Any] = field(default_factory=dict)
    peak_memory: int = 0
    seconds: float = 0.0


@dataclass
class PassReport:
    """What a pass did. `summary` is one line; `details` and `layers` (one dict a module) are JSON-serializable."""

    summary: str
    details: dict[str, Any] = field(default_factory=dict)
    layers: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Context:
    """What a pass or exporter is given besides the model.

    info: the model's description as loaded from its headers.
    calibration: token batches, made at first use; raises where the recipe's text is empty.
    seed: seeds every random number of the stage; workdir: a scratch folder that is removed after the run.
    notes: what `note` recorded; fallbacks end in the manifest. checkpoint: where a pass that works in steps commits
    them, so that a run that was killed goes on there; None where nothing is kept. max_memory: bytes that the process
    may have; None for what the machine has.
    """

    info: ModelInfo
    calibration: Calibration
    seed: int
    workdir: Path
    stage: str = ""
    listener: Listener = silent
    notes: list[dict[str, str]] = field(default_factory=list)
    cancelled: Callable[[], bool] = lambda: False
    checkpoint: Checkpoint | None = None
    max_memory: int | None = None

    def progress(self, step: int, total: int, message: str = "", **data: Any) -> None:
        """Report that step `step` of `total` is done (1-based); `data` goes to the JSON log."""
        self.listener(Event("progress", self.stage, message, step, total, data))

    def note(self, kind: str, message: str) -> None:
        """Record a fallback or a remark (`kind`: "fallback" or "note"): printed, and kept in the manifest."""
        self.notes.append({"stage": self.stage, "kind": kind, "message": message})
        self.listener(Event("note", self.stage, message, data={"note": kind}))


class Plugin(ABC):
    """What passes and exporters share: a name, a Config class and the instance's validated `config`."""

    name: ClassVar[str]
    version: ClassVar[str] = "1"
    """Part of the cache key beside the source code's hash: raise it when results change for another reason."""

    streams: ClassVar[bool] = False
    """Whether a pass's `run` or an exporter's `export` takes a lazy model, whose weights stay in their files: it has
    modules read one at a time (`LoadedModel.loaded`) and, where it changes weights, commits the changed tensors to
    `context.checkpoint` and overlays them. For a plugin that says False the whole model is read into memory."""

    Config: ClassVar[type[Options]] = NoOptions
    config: Any

    def __init__(self, config: Options | None = None, **options: Any) -> None:
        """Take a Config instance, or its fields as keywords. Raises UsageError on a bad value or unknown key."""
        if config is not None:
            self.config = config
            return
        try:
            self.config = self.Config(**options)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            raise UsageError(
                first["msg"],
                where=f"{self.name}.{key}" if key else self.name,
                what_to_do=f"Valid options: {', '.join(self.Config.model_fields)}.",
            ) from None


class Pass(Plugin):
    """One step of a recipe: rewrites weights, the RuntimeSpec, or both.

    `provides` are the tags a pass leaves behind; `requires` are tags that an earlier pass must have provided;
    `conflicts` are tags that no earlier pass may have provided.
    """

    changes_weights: ClassVar[bool] = True
    """Whether `run` may change tensors. A pass that only writes the RuntimeSpec says False: its result is then cached
    without a copy of the weights."""
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()
    conflicts: ClassVar[frozenset[str]] = frozenset()

    def calibrates(self) -> bool:
        """Whether weights come to depend on the calibration data: a recipe that names none then lets the model write
        its own, where a pass that only tries something out takes the shipped text."""
        return False

    @abstractmethod
    def plan(self, info: ModelInfo) -> PlanItem:
        """What `run` would do to the model that `info` describes; loads no weights."""

    @abstractmethod
    def run(self, model: LoadedModel, context: Context) -> PassReport:
        """Change `model` in place and say what was done. Raises RunError where the result cannot be trusted."""

    def restore(self, model: LoadedModel, report: PassReport) -> None:
        """Repeat on a model without weights (meta device) the changes of structure that `run` made.

        Called when a cached result is opened, before its state dict is loaded. A pass that replaces modules must
        implement it; one that only changes values or the RuntimeSpec need not.
        """


class Exporter(Plugin):
    """Writes a model as a folder."""

    def refusals(self, info: ModelInfo, plans: Sequence[PlanItem], dtype: str) -> list[str]:
        """Why the model cannot be written as the passes are going to leave it, in sentences.

        plans: the passes', in order. dtype: the recipe's, `auto` for as stored.
        """
        return []

    def added_bytes(self, info: ModelInfo, plans: Sequence[PlanItem]) -> int:
        """By how many bytes the weights are larger in the files than the passes' plans say."""
        return 0

    @abstractmethod
    def export(self, model: LoadedModel, directory: Path, context: Context) -> dict[str, Any]:
        """Write everything but the manifest into the empty `directory`; returns details for the manifest."""
