"""Which runner a model gets: chosen at load, stated in the runner's notes."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Literal

from ...optimizer.errors import UsageError

if TYPE_CHECKING:
    from .protocols import ModelRunner

RunnerKind = Literal["auto", "native", "eager", "compile", "cudagraph"]
KINDS = ("auto", "native", "eager", "compile", "cudagraph")


def runner_class(kind: str) -> type:
    """The class of a runner by its name. Raises UsageError for an unknown one."""
    cls: type
    if kind == "native":
        from .runner_native import NativeRunner as cls
    elif kind == "eager":
        from .runner import EagerRunner as cls
    elif kind == "compile":
        from .runner_compile import CompileRunner as cls
    elif kind == "cudagraph":
        from .runner_cudagraph import CudaGraphRunner as cls
    else:
        raise UsageError(f"unknown runner {kind!r}", what_to_do=f"Use one of: {', '.join(KINDS)}")
    return cls


def options_of(kind: str) -> set[str]:
    """Names of the options that a runner takes, those of the runner it builds on included."""
    kinds = ("native", "eager", "cudagraph") if kind == "auto" else (kind,)
    classes: list[Any] = [c for k in kinds for c in runner_class(k).__mro__ if c is not object]
    parameters = [p for c in classes for p in inspect.signature(c.__init__).parameters.values()]
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}


def _made(kind: str, model: Any, options: dict[str, Any]) -> Any:
    known = options_of(kind)
    return runner_class(kind)(model, **{k: v for k, v in options.items() if k in known})


def _sized(options: dict[str, Any]) -> dict[str, Any]:
    """The options with `kv_cache_memory` in bytes where it was written as a size, such as `64 MiB`."""
    from ..memory import parse_size

    size = options.get("kv_cache_memory")
    if not isinstance(size, str):
        return options
    try:
        return {**options, "kv_cache_memory": parse_size(size)}
    except ValueError as error:
        raise UsageError(str(error), "kv_cache_memory") from None


def build_runner(model: Any, kind: str = "auto", *, batch_invariant: bool = False, **options: Any) -> ModelRunner:
    """A runner over a loaded model.

    kind: `auto` takes the native runner on the CPU where the kernels know the model and an attention backend was not
        asked for by name, CUDA graphs on CUDA, and else the eager runner; what was passed over, and why, is the
        first of its notes. Any other kind is taken or raises.
    batch_invariant: logits do not depend on the batch (`runner_invariant.py` states the cost); `auto` or `eager`.
    options: those of the runner's class. With `auto`, options that only another candidate has are left out.
    Raises UsageError for an unknown kind or option, and what the runner's class raises.
    """
    unknown = sorted(set(options) - options_of(kind))
    if unknown:
        raise UsageError(f"runner {kind!r} has no option {', '.join(unknown)}", what_to_do=_known(kind))
    options = _sized(options)
    if batch_invariant:
        from .runner_invariant import BatchInvariantRunner

        if kind not in ("auto", "eager"):
            raise UsageError(f"runner {kind!r} is not batch-invariant", what_to_do="Use kind='eager' or 'auto'")
        return BatchInvariantRunner(model, **{k: v for k, v in options.items() if k in options_of("eager")})
    if kind != "auto":
        return _made(kind, model, options)
    device = next(model.parameters()).device
    if device.type == "cuda":
        return _made("cudagraph", model, options)
    wanted = options.get("attention", "auto")
    if wanted != "auto":
        runner = _made("eager", model, options)
        runner.notes.insert(0, f"eager runner: attention backend {wanted!r} was asked for")
        return runner
    from ..kernels.build import NativeUnavailable
    from ..kernels.recognize import UnsupportedModel

    try:
        return _made("native", model, options)
    except (UnsupportedModel, NativeUnavailable, UsageError) as error:
        reason = str(error)
    runner = _made("eager", model, options)
    idle = sorted(set(options) - options_of("eager"))
    left_out = f"; without {', '.join(idle)}, which only the native one has" if idle else ""
    runner.notes.insert(0, f"eager runner; the native one was refused: {reason}{left_out}")
    return runner


def _known(kind: str) -> str:
    return f"Options: {', '.join(sorted(options_of(kind)))}"
