"""From a RuntimeSpec's `draft` to what drafts in the engine: the source, its runner, and what steps cost here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ..optimizer.errors import RunError, UsageError
from ..optimizer.runtime_spec import DraftSpec

if TYPE_CHECKING:
    import torch

    from .engine.draft_speculator import Speculator
    from .engine.plan import StepPlan
    from .engine.scheduler_config import SchedulerConfig
    from .open import OpenedModel


def make_speculator(
    spec: DraftSpec,
    runner: Any,
    config: SchedulerConfig,
    folder: Path | None = None,
    note: Callable[..., None] = lambda *_: None,
) -> Speculator | None:
    """What the spec asks for over the target's runner, whose pool must be unused; None for kind `none`.

    folder: of the draft model, see `checked_draft_folder`. note: told what a user should know.
    Raises RunError where the runner cannot draft that way.
    """
    from .engine.draft_costs import measure
    from .engine.draft_lookup import LookupSource
    from .engine.draft_model import OwnLayers, SecondModel
    from .engine.draft_speculator import Speculator

    if spec.kind == "none":
        return None
    costs = measure(runner)
    if spec.kind in ("ngram", "suffix"):
        note(f"drafts: {spec.kind}")
        return Speculator(LookupSource(spec.kind, spec.max_ngram, spec.history or 0), spec.num_tokens, costs)
    limit = config.max_num_batched_tokens
    if spec.kind == "layer_skip":
        if not runs_parts(runner):
            note(f"drafts are off: {type(runner).__name__} cannot run a part of the model's layers", "fallback")
            return None
        layers = spec.layers or []
        execute = own_layers(runner, layers)
        note(f"drafts: {len(layers)} of the model's own layers")
        source = OwnLayers(execute, runner.vocab_size, runner.max_model_len, limit)
        return Speculator(source, spec.num_tokens, costs, measure(runner, execute=execute), spec.acceptance)
    if folder is None:
        raise RunError("the draft model's folder is missing", "draft", "Load with draft=False.")
    second = second_runner(runner, config, folder)
    for message in second.notes:
        note(f"draft model: {message}")
    model = SecondModel(second, runner.vocab_size, limit)
    return Speculator(model, spec.num_tokens, costs, measure(second), spec.acceptance)


def second_runner(runner: Any, config: SchedulerConfig, folder: Path) -> Any:
    """A runner of the model in `folder` with the blocks of the target's runner, on its device and in its dtype."""
    from .native_backend import make_runner
    from .open import open_model

    opened = open_model(folder, str(runner.device), str(runner.dtype).removeprefix("torch."))
    options = {
        "num_blocks": runner.num_blocks,
        "block_size": runner.block_size,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
    }
    sliding = getattr(runner, "sliding", None)
    if sliding is not None:  # it shares the block tables, so it must not read what they have let go of
        options.update(kv_sinks=sliding.sinks, kv_window=sliding.window)
    return make_runner(opened, "auto", True, options)


def runs_parts(runner: Any) -> bool:
    """Whether `own_layers` works with this runner: the native one, and those that call the module as it is."""
    from .engine.runner_native import NativeRunner

    return isinstance(runner, NativeRunner) or _layer_stack(runner) is not None


def num_layers(runner: Any) -> int:
    """Layers of a model that `runs_parts`."""
    decoder = getattr(runner, "decoder", None)
    return len(_layer_stack(runner)) if decoder is None else int(decoder.num_layers)


def own_layers(runner: Any, layers: Sequence[int]) -> Callable[[StepPlan], torch.Tensor]:
    """`execute` of a runner that `runs_parts`, with some of its layers only.

    Raises RunError for layers that do not ascend or that the model does not have.
    """
    import torch

    from .engine.runner import EagerRunner
    from .engine.runner_native import NativeRunner

    count = num_layers(runner)
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= count:
        raise RunError(f"layers {list(layers)} of a model of {count}", "draft.layers", "Name some of them, ascending.")
    if isinstance(runner, NativeRunner):
        return partial(runner.execute, layers=torch.tensor(list(layers), dtype=torch.int32))

    def execute(plan: StepPlan) -> torch.Tensor:
        base, whole = runner.model.base_model, runner.model.base_model.layers
        base.layers = torch.nn.ModuleList([whole[i] for i in layers])
        try:
            return EagerRunner.execute(runner, plan)
        finally:
            base.layers = whole

    return execute


def _layer_stack(runner: Any) -> Any:
    """The decoder layers of a module that is called as it is; None where there is no such thing."""
    model = getattr(runner, "model", None)
    if model is None or getattr(runner, "_run", None) is not model:
        return None
    return getattr(getattr(model, "base_model", None), "layers", None)


def with_draft(opened: OpenedModel, given: Mapping[str, Any]) -> None:
    """Put a user's own draft settings in the place of the RuntimeSpec's. Raises UsageError where they are not right."""
    try:
        spec = DraftSpec(**given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(first["msg"], f"draft.{where}", f"Keys: {', '.join(DraftSpec.model_fields)}.") from None
    if spec.kind == "model" and spec.sha256 is None and spec.model and Path(spec.model).is_dir():
        from ..optimizer.sources import folder_sha256

        spec.sha256 = folder_sha256(Path(spec.model))  # the caller names it: it is the one that is meant
    opened.runtime = opened.runtime.model_copy(update={"draft": spec})


def checked_draft_folder(target: OpenedModel) -> Path | None:
    """The draft model's folder for kind `model`, else None.

    It lies inside the artifact, elsewhere on this machine, or in the hub's local cache. Raises RunError where it is not
    there, or lies outside the artifact and is not the one that was paired with it.
    """
    spec, folder = target.runtime.draft, target.folder
    if spec.kind != "model":
        return None
    where = draft_folder(spec, folder)
    if spec.sha256 is not None and not where.is_relative_to(folder):
        from ..optimizer.sources import folder_sha256

        if folder_sha256(where) != spec.sha256:
            raise RunError(
                "the draft model is not the one that was paired with this artifact",
                where=str(where),
                what_to_do="Fetch that one, or load with draft=False.",
            )
    return where


def draft_folder(spec: DraftSpec, folder: Path) -> Path:
    """Where the draft model lies. Raises RunError where it is not on this machine."""
    name = spec.model or ""
    inside = folder / name
    if name and inside.is_dir() and inside.resolve().is_relative_to(folder.resolve()):
        return inside
    if name and spec.sha256 is not None and Path(name).is_dir():  # outside: only what its hash vouches for
        return Path(name)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=spec.revision, local_files_only=True))
    except Exception as error:  # huggingface_hub raises many kinds: not an id, not cached, not readable
        raise RunError(
            f"the draft model {name!r} is not on this machine",
            where=str(folder),
            what_to_do="Fetch it into the hub cache, or load with draft=False.",
        ) from error
