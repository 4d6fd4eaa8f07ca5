"""The RuntimeSpec's KV cache dtype: handed to the runner, and told apart from what the runner keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..optimizer.errors import RunError
from ..optimizer.runtime_spec import KVCacheSpec

Note = dict[str, str]


def kv_options(spec: KVCacheSpec, given: Mapping[str, Any]) -> dict[str, Any]:
    """The runner's options: `given`, and the spec's dtype where none was given to load."""
    return dict(given) if spec.dtype == "auto" else {"kv_dtype": spec.dtype, **given}


def applied(runner: Any) -> str:
    """Name of the dtype in which a runner keeps keys and values; `auto`, the model's own, for None."""
    return getattr(runner, "kv_dtype", "auto")


def quantized(runner: Any) -> bool:
    """Whether a runner keeps codes."""
    from .kernels.kv_format import FORMATS

    return applied(runner) in FORMATS


def kv_notes(spec: KVCacheSpec, runner: Any, given: Mapping[str, Any], why: str = "") -> list[Note]:
    """What became of the spec's dtype; one that was not applied is a fallback. why: the reason, where it is known."""
    has = applied(runner)
    if spec.dtype == "auto":
        return []
    if has == spec.dtype:
        return [_note("note", f"KV cache: {has}, as the RuntimeSpec asks")]
    if "kv_dtype" in given:
        return [_note("note", f"KV cache: {has}, as given to load; the RuntimeSpec asks for {spec.dtype}")]
    name = type(runner).__name__ if runner is not None else "the static engine"
    reason = why or f"{name} does not have it"
    return [
        _note(
            "fallback",
            f"KV cache: {spec.dtype} of the RuntimeSpec was not applied: {reason}; keys and values are in the model's "
            "own dtype, so the cache holds fewer tokens than it might",
        )
    ]


def require_applied(spec: KVCacheSpec, runner: Any, where: str) -> None:
    """Raise RunError where a runner (None: no engine) keeps keys and values otherwise than the spec asks."""
    if spec.dtype not in ("auto", applied(runner)):
        raise RunError(
            f"the engine that opened it did not apply the KV cache {spec.dtype}, so no figure would be the artifact's",
            where,
            "Leave `dtype` out of the pass `kv_cache`, or the attention backend on auto: the static engine has none.",
        )


def _note(kind: str, message: str) -> Note:
    return {"stage": "load", "kind": kind, "message": message}
