"""Errors that a user sees: one line that says what, where and what to do.

The command line prints the line without a traceback and exits with `exit_code`: 2 where the request itself is wrong
(usage), 1 where a run failed.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class LlmoptError(Exception):
    """Base of every error that llmopt raises on purpose.

    what: the fault, as a clause without a full stop.
    where: the file, line, key or module it concerns; may be empty.
    what_to_do: the mend, as an imperative; may be empty.
    """

    exit_code = 1

    def __init__(self, what: str, where: str = "", what_to_do: str = "") -> None:
        self.what, self.where, self.what_to_do = what, where, what_to_do
        super().__init__(what, where, what_to_do)

    def __str__(self) -> str:
        line = f"{self.where}: {self.what}" if self.where else self.what
        if self.what_to_do:
            line = f"{line.rstrip('.')}. {self.what_to_do}"
        return " ".join(line.split())


class UsageError(LlmoptError):
    """The request is wrong: a bad recipe, option, path or name (exit code 2)."""

    exit_code = 2


class RunError(LlmoptError):
    """The run failed: a bad weight file, no disk space, a numerical failure (exit code 1)."""


class WeightError(RunError):
    """A weight of the source is NaN or infinite, or the run's dtype does not hold it (exit code 1)."""


class GateError(RunError):
    """A quality gate did not hold (exit code 1).

    shares: (module name, share of the error) of the layers that hurt most, worst first.
    kept: where the failing artifact lies, None where none was written.
    """

    def __init__(self, what: str, shares: list[tuple[str, float]], kept: object = None) -> None:
        self.shares, self.kept = shares, kept
        fate = f"The failing artifact was kept at {kept}" if kept else "No artifact was written"
        super().__init__(
            f"the result misses its gates: {what}", what_to_do=f"{fate}; see the layers' shares of the error"
        )


class MissingDependency(UsageError):
    """An optional library is needed and absent."""

    def __init__(self, library: str, extra: str, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs the library {library!r}, which is not installed",
            what_to_do=f"Install it with: pip install 'llmopt[{extra}]'",
        )


def brief(error: BaseException) -> str:
    """The first line of another library's error, at most 300 characters; its type where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def nearest(name: str, known: Iterable[str], count: int = 1, cutoff: float = 0.5) -> list[str]:
    """The `count` names of `known` that lie nearest to `name` in spelling, best first."""
    lowered = {k.lower(): k for k in known}
    return [lowered[m] for m in get_close_matches(name.lower(), list(lowered), n=count, cutoff=cutoff)]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence that names the nearest valid name, or all of them where none is near."""
    known = sorted(known)
    near = nearest(name, known)
    if near:
        return f"Did you mean {near[0]!r}?"
    return f"Valid names: {', '.join(known)}." if known else ""
