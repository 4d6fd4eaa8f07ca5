"""The continuous-batching engine behind LLM: its thread starts with the first prompt and ends with `close`."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ..optimizer.errors import RunError, UsageError, did_you_mean
from .draft_setup import checked_draft_folder, make_speculator
from .engine_backend import EngineBackend

if TYPE_CHECKING:
    from .open import OpenedModel


class NativeBackend(EngineBackend):
    """Implements `Backend` over `Engine`.

    release: the runner may take the module's weights over, so that they are in memory once; the module can then no
        longer run by itself.
    options: `runner` ("auto", or a kind of `build_runner`), and those of the runner and of `SchedulerConfig`.

    Raises UsageError for an unknown option, RunError where the engine cannot run the model.
    """

    name = "native"

    def __init__(self, opened: OpenedModel, draft: bool, release: bool, options: dict[str, Any]) -> None:
        from .engine.engine import Engine
        from .engine.loop import EngineLoop
        from .engine.runner_sliding import UnsupportedSliding
        from .engine.scheduler_config import SchedulerConfig
        from .fused_linears import apply_around
        from .kernels.kv_format import UnsupportedFormat
        from .kv_settings import drop_refused, kv_notes, kv_options
        from .linear_settings import linear_notes, linear_options

        spec = opened.runtime
        kind, given, limits = sort_options(options)
        for_runner = kv_options(spec.kv_cache, linear_options(spec.linear, given))
        scheduler = SchedulerConfig(**{"prefix_caching": spec.kv_cache.prefix_caching, **limits})
        for_runner.update(max_num_batched_tokens=scheduler.max_num_batched_tokens, max_num_seqs=scheduler.max_num_seqs)
        if spec.kv_cache.block_size is not None:
            for_runner.setdefault("block_size", spec.kv_cache.block_size)
        folder = checked_draft_folder(opened) if draft else None
        why: dict[str, str] = {}
        while True:
            try:
                runner = apply_around(opened, lambda: make_runner(opened, kind, release, for_runner))
                break
            except (UnsupportedFormat, UnsupportedSliding) as error:
                why[drop_refused(error, for_runner, given)] = error.what
        self.notes = [{"stage": "load", "kind": "note", "message": note} for note in runner.notes]
        self.notes += linear_notes(spec.linear, runner, given) + kv_notes(
            spec.kv_cache, runner, given, why.get("kv_dtype", ""), why.get("kv_window", "")
        )
        self.context_length = runner.max_model_len
        self.vocab_size = runner.vocab_size
        self.extra_weight_bytes = getattr(getattr(runner, "decoder", None), "weight_bytes", 0)
        drafter = make_speculator(spec.draft, runner, scheduler, folder, self._note) if draft else None
        self.engine = Engine(
            runner,
            opened.tokenizer,
            scheduler=scheduler,
            eos_token_ids=opened.eos_token_ids,
            drafter=drafter,
        )
        self.loop = EngineLoop(self.engine)

    def _note(self, message: str, kind: str = "note") -> None:
        self.notes.append({"stage": "load", "kind": kind, "message": message})


def sort_options(options: dict[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The runner's kind, the runner's options and the scheduler's. Raises UsageError for one that nobody has."""
    from .engine.runner_select import options_of
    from .engine.scheduler_config import SchedulerConfig

    kind = options.get("runner", "auto")
    limits = {f.name for f in fields(SchedulerConfig)}
    of_runner = options_of(kind) - {"release"}
    known = limits | of_runner | {"runner"}
    unknown = sorted(set(options) - known)
    if unknown:
        raise UsageError(f"the native engine has no option {unknown[0]!r}", "load", did_you_mean(unknown[0], known))
    return (
        kind,
        {name: value for name, value in options.items() if name in of_runner - limits},
        {name: value for name, value in options.items() if name in limits},
    )


def make_runner(opened: OpenedModel, kind: str, release: bool, options: dict[str, Any]) -> Any:
    """`build_runner`, with the module's weights handed over to the fused decoder where `release` is set.

    Options that only another kind has are left out. Where the decoder proves wrong after the weights are gone, the
    model is opened again for the eager runner, and a note says so.
    """
    from .engine.runner_native import DecoderSource
    from .engine.runner_select import build_runner, options_of
    from .kernels.build import NativeUnavailable
    from .kernels.recognize import UnsupportedModel
    from .load_record import records_wanted
    from .recorded_model import KEPT, RECORD_FAULTS, FirstLoad, keep_record

    def build(name: str, model: Any = None, **more: Any) -> Any:
        known = options_of(name)
        chosen = {k: v for k, v in {**options, **more}.items() if k in known}
        return build_runner(model or opened.module, name, **chosen)

    if isinstance(opened, DecoderSource):
        return build("native", opened)
    fused = kind in ("auto", "native") and opened.device.type == "cpu"
    if not fused or not release or (kind == "auto" and options.get("attention", "auto") != "auto"):
        return build(kind)
    if opened.as_stored and records_wanted() and not opened.remote_code:
        try:
            runner = build("native", FirstLoad(opened))
            runner.notes.append(KEPT)
            return runner
        except RECORD_FAULTS:  # what is wrong with the model itself shows again below
            _reopen(opened)
    try:
        runner = build("native", release=True)
        runner.notes += keep_record(opened, runner.decoder)
        return runner
    except (UnsupportedModel, NativeUnavailable, UsageError) as error:
        reason = error
    _reopen(opened)
    if kind == "native":
        raise RunError(f"the native runner was refused: {reason}", str(opened.folder), "Use runner='eager' or 'auto'.")
    runner = build("eager")
    runner.notes.insert(0, f"eager runner; the native one was refused: {reason}")
    return runner


def _reopen(opened: OpenedModel) -> None:
    """Read the module's weights again if a runner took them over."""
    from .open import open_model

    if any(p.numel() == 0 for p in opened.module.parameters()):
        dtype = str(opened.module.dtype).removeprefix("torch.")
        opened.module = open_model(opened.folder, "cpu", dtype, verify=False).module
