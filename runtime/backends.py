"""Chooses what runs an opened model: the native engine, or StaticBatch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..optimizer.errors import RunError, UsageError
from .completion import Backend

if TYPE_CHECKING:
    from .open import OpenedModel

ENGINES = ("auto", "static", "native")
STATIC_OPTIONS = ("max_batch", "emulate")


def make_backend(opened: OpenedModel, engine: str, draft: bool, release: bool, options: dict[str, Any]) -> Backend:
    """The backend named `engine`; for "auto" the native one where it supports the model, else static with a note.

    release: the engine may take the module's weights over, see `NativeBackend`.
    Raises UsageError for an unknown name or option, RunError where the RuntimeSpec asks for what no backend has.
    """
    if engine not in ENGINES:
        raise UsageError(f"there is no engine {engine!r}", what_to_do=f"Use one of {', '.join(ENGINES)}.")
    check_kv_cache(opened)
    if engine == "static":
        return static_backend(opened, draft, options)
    reason = why_not_native(opened) if engine == "auto" else None
    if reason is None:
        from .native_backend import NativeBackend

        try:
            return NativeBackend(opened, draft, release, options)
        except RunError as error:
            if engine == "native":
                raise
            reason = str(error)
    opened.note(f"engine: static, not native: {reason}", "fallback")
    return static_backend(opened, draft, {k: v for k, v in options.items() if k in STATIC_OPTIONS})


def why_not_native(opened: OpenedModel) -> str | None:
    """Why `auto` does not even try the native engine for this model, or None."""
    backend = opened.runtime.attention.backend
    if backend != "auto":
        return f"the attention backend {backend} is asked for by name, and the engine has its own"
    return None


def check_kv_cache(opened: OpenedModel) -> None:
    """Raise RunError where the RuntimeSpec asks for a KV cache that this version does not have."""
    spec = opened.runtime.kv_cache
    if spec.kind == "static" or (spec.kind == "dynamic" and spec.dtype != "auto"):
        raise RunError(
            f"the artifact asks for a KV cache of kind {spec.kind} and dtype {spec.dtype}, which this version does not "
            "have",
            where=str(opened.folder),
            what_to_do="Upgrade llmopt, or make the artifact with kind paged, or with kind dynamic and dtype auto.",
        )


def emulate_inputs(opened: OpenedModel) -> None:
    """Let layers that quantize their inputs compute as compressed-tensors' emulation does in transformers. Raises
    UsageError where the model has none."""
    from .experts import Experts
    from .kernels.scaled import ScaledLinear

    def layers_of(module: Any) -> list[ScaledLinear]:
        return [layer for layer in module.modules() if isinstance(layer, ScaledLinear)]

    layers = layers_of(opened.module)
    if not layers:
        raise UsageError(
            "the model has no layers with int8 or e4m3 inputs to emulate",
            str(opened.folder),
            "Leave `emulate` out: it is for compressed-tensors' W8A8 formats.",
        )
    for layer in layers:
        layer.emulates = True
    for experts in opened.module.modules():
        if isinstance(experts, Experts):
            for layer in layers_of(experts):
                layer.inputs_kept = True
    opened.note(f"linears: {len(layers)} layers compute as compressed-tensors' emulation does")


def static_backend(opened: OpenedModel, draft: bool, options: dict[str, Any]) -> Backend:
    """StaticBatch over the model, with the RuntimeSpec's drafts unless `draft` is False."""
    from .drafting import make_drafter
    from .fused_linears import apply_fusion
    from .kv_settings import kv_notes
    from .linear_settings import linear_notes
    from .static_batch import StaticBatch

    unknown = sorted(set(options) - set(STATIC_OPTIONS))
    if unknown:
        hint = f"Its options are {' and '.join(STATIC_OPTIONS)}."
        raise UsageError(f"the static engine has no option {unknown[0]!r}", what_to_do=hint)
    options = dict(options)
    emulate = options.pop("emulate", False)
    opened.notes += linear_notes(opened.runtime.linear, None, {})
    opened.notes += kv_notes(opened.runtime.kv_cache, None, {})
    apply_fusion(opened)
    if emulate:
        emulate_inputs(opened)
    spec = opened.runtime.draft
    drafter = make_drafter(opened) if draft else None
    if opened.runtime.kv_cache.kind != "dynamic":
        opened.note("KV cache: dynamic, not paged (the static engine has no blocks)", "fallback")
    if drafter is not None:
        opened.note(f"drafts: {spec.kind}, for one sequence at a time")
    return StaticBatch(
        opened.module,
        opened.tokenizer,
        opened.eos_token_ids,
        context_length=opened.context_length,
        drafter=drafter,
        num_draft_tokens=spec.num_tokens,
        **options,
    )
