"""The RuntimeSpec's KV cache: handed to the runner, and told apart from what the runner has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..optimizer.errors import RunError
from ..optimizer.runtime_spec import KVCacheSpec

Note = dict[str, str]

OPTIONS = {"kv_dtype": "kv_dtype", "kv_sinks": "kv_window", "kv_window": "kv_window", "offload_gib": "offload_gib"}
"""The runners' options that a spec sets, each with the one by which a caller of load takes the choice over."""


def kv_options(spec: KVCacheSpec, given: Mapping[str, Any]) -> dict[str, Any]:
    """The runner's options: `given`, and what the spec asks for where that was not given to load."""
    asked: dict[str, Any] = {}
    if spec.dtype != "auto":
        asked["kv_dtype"] = spec.dtype
    if spec.kind == "sliding":
        asked.update(kv_sinks=spec.sinks, kv_window=spec.window)
    if spec.kind == "offloaded":
        asked["offload_gib"] = spec.offload_gib
    return {**{name: value for name, value in asked.items() if OPTIONS[name] not in given}, **given}


def drop_refused(error: RunError, options: dict[str, Any], given: Mapping[str, Any]) -> str:
    """Take out of `options` what the spec asked for and `error` refuses (UnsupportedFormat, UnsupportedSliding); the
    option's name. Raises the error where a caller of load asked for it."""
    from .kernels.kv_format import UnsupportedFormat

    refused = "kv_dtype" if isinstance(error, UnsupportedFormat) else "kv_window"
    if refused in given or refused not in options:
        raise error
    for name in [name for name, by in OPTIONS.items() if by == refused]:
        options.pop(name, None)
    return refused


def applied(runner: Any) -> str:
    """Name of the dtype in which a runner keeps keys and values; `auto`, the model's own, for None."""
    return getattr(runner, "kv_dtype", "auto")


def quantized(runner: Any) -> bool:
    """Whether a runner keeps codes."""
    from .kernels.kv_format import FORMATS

    return applied(runner) in FORMATS


def sliding(runner: Any) -> tuple[int, int] | None:
    """(sinks, window) of a runner's sliding cache; None where all tokens are kept."""
    found = getattr(runner, "sliding", None)
    return None if found is None else (found.sinks, found.window)


def changes_logits(runner: Any) -> bool:
    """Whether a text reads from the cache other than a single forward computes: a proof must read it from there."""
    return quantized(runner) or sliding(runner) is not None


def kv_notes(
    spec: KVCacheSpec, runner: Any, given: Mapping[str, Any], why: str = "", why_not_sliding: str = ""
) -> list[Note]:
    """What became of the spec's settings; one that was not applied is a fallback. why: the reasons, where known."""
    return _dtype_notes(spec, runner, given, why) + _kind_notes(spec, runner, given, why_not_sliding)


def _dtype_notes(spec: KVCacheSpec, runner: Any, given: Mapping[str, Any], why: str) -> list[Note]:
    has = applied(runner)
    if spec.dtype == "auto":
        return []
    if has == spec.dtype:
        return [_note("note", f"KV cache: {has}, as the RuntimeSpec asks")]
    if "kv_dtype" in given:
        return [_note("note", f"KV cache: {has}, as given to load; the RuntimeSpec asks for {spec.dtype}")]
    reason = why or f"{_name(runner)} does not have it"
    return [
        _note(
            "fallback",
            f"KV cache: {spec.dtype} of the RuntimeSpec was not applied: {reason}; keys and values are in the model's "
            "own dtype, so the cache holds fewer tokens than it might",
        )
    ]


def _kind_notes(spec: KVCacheSpec, runner: Any, given: Mapping[str, Any], why: str) -> list[Note]:
    if spec.kind == "sliding":
        wanted = f"the first {spec.sinks} and the last {spec.window} tokens"
        if sliding(runner) == (spec.sinks, spec.window):
            return [_note("note", f"KV cache: sliding, {wanted}, as the RuntimeSpec asks")]
        if "kv_window" in given:
            return [_note("note", f"KV cache: kv_window as given to load; the RuntimeSpec asks for {wanted}")]
        reason = why or f"{_name(runner)} does not have it"
        text = (
            f"KV cache: sliding ({wanted}) of the RuntimeSpec was not applied: {reason}; all tokens are kept and seen"
        )
        return [_note("fallback", text)]
    if spec.kind == "offloaded":
        blocks = getattr(runner, "num_host_blocks", 0)
        if blocks:
            return [_note("note", f"KV cache: offloaded, {blocks} blocks of host memory for preempted requests")]
        if "offload_gib" in given:
            return [_note("note", "KV cache: offload_gib as given to load")]
        text = f"KV cache: offloaded of the RuntimeSpec was not applied: {_name(runner)} does not have it"
        return [_note("fallback", f"{text}; preempted requests are computed again")]
    return []


def require_applied(spec: KVCacheSpec, runner: Any, where: str) -> None:
    """Raise RunError where a runner (None: no engine) keeps keys and values otherwise than the spec asks."""
    what_to_do = "Leave `dtype` and kind: sliding out of the pass `kv_cache`, or the attention backend on auto: the "
    what_to_do += "static engine has none."
    missing: list[str] = []
    if spec.dtype not in ("auto", applied(runner)):
        missing.append(spec.dtype)
    if spec.kind == "sliding" and sliding(runner) != (spec.sinks, spec.window):
        missing.append("of kind sliding")
    if missing:
        raise RunError(
            f"the engine that opened it did not apply the KV cache {missing[0]}, so no figure would be the artifact's",
            where,
            what_to_do,
        )


def _name(runner: Any) -> str:
    return type(runner).__name__ if runner is not None else "the static engine"


def _note(kind: str, message: str) -> Note:
    return {"stage": "load", "kind": kind, "message": message}
