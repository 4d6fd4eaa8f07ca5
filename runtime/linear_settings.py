"""The RuntimeSpec's settings of linear layers: handed to the runner, and told apart from what the runner did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..optimizer.errors import RunError
from ..optimizer.runtime_spec import LinearSpec

Note = dict[str, str]


def linear_options(spec: LinearSpec, given: Mapping[str, Any]) -> dict[str, Any]:
    """The runner's options: `given`, and what the spec asks for beside it. What was given explicitly wins."""
    return {**spec.asked(), **given}


def applied(runner: Any) -> LinearSpec:
    """How a runner computes its linear layers; the default for a runner without a fused decoder (and for None)."""
    options = getattr(getattr(runner, "decoder", None), "options", None)
    if options is None:
        return LinearSpec.model_validate({})
    return LinearSpec(activation=options.activation, lm_head=options.lm_head)


def linear_notes(spec: LinearSpec, runner: Any, given: Mapping[str, Any]) -> list[Note]:
    """What became of the spec's settings, one note each; a setting that was not applied is a fallback."""
    actual = applied(runner).model_dump()
    name = type(runner).__name__ if runner is not None else "the static engine"
    notes = []
    for key, wanted in spec.asked().items():
        has = actual[key]
        if has == wanted:
            notes.append(_note("note", f"linears: {key} {wanted}, as the RuntimeSpec asks"))
        elif given.get(key) == has:
            notes.append(_note("note", f"linears: {key} {has}, as given to load; the RuntimeSpec asks for {wanted}"))
        else:
            why = f"{name} does not have it; {key} is {has}, so answers are not those that the proof measured"
            notes.append(_note("fallback", f"linears: {key} {wanted} of the RuntimeSpec was not applied: {why}"))
    return notes


def require_applied(spec: LinearSpec, runner: Any, where: str) -> None:
    """Raise RunError where a runner (None: no engine) computes otherwise than the spec asks."""
    actual = applied(runner).model_dump()
    missed = [f"{key} {wanted}" for key, wanted in spec.asked().items() if actual[key] != wanted]
    if missed:
        raise RunError(
            f"the engine that opened it did not apply {' and '.join(missed)}, so no figure would be the artifact's",
            where,
            "Only the native CPU engine has these settings: leave the pass `activation` out, or the attention backend "
            "on auto, and see `llmopt doctor --kernels`.",
        )


def _note(kind: str, message: str) -> Note:
    return {"stage": "load", "kind": kind, "message": message}
