"""The extras of this package, as its installed metadata declares them: what each needs, and what of it is missing."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement

    from .doctor import Finding

PACKAGE = "llmopt"
HIDDEN = ("dev",)


def extras() -> list[Finding]:
    """A finding for each extra: ok, absent (something is not installed) or broken (something is too old)."""
    try:
        declared = requires(PACKAGE) or []
    except PackageNotFoundError:  # run from a source tree that was never installed
        return []
    return [_finding(name, needs) for name, needs in by_extra(declared).items()]


def by_extra(declared: list[str]) -> dict[str, list[Requirement]]:
    """Requirements that an extra brings on this Python and system, by its name, in the order of the declarations."""
    from packaging.requirements import Requirement

    found: dict[str, list[Requirement]] = {}
    for text in declared:
        need = Requirement(text)
        for name in _names(text):
            if name in HIDDEN or need.marker is None:
                continue
            own = found.setdefault(name, [])
            if need.marker.evaluate({"extra": name}):
                own += [need, *_behind(need)]
    return found


def _behind(need: Requirement) -> list[Requirement]:
    """What the extras of a requirement bring (`fastapi[opentelemetry]`), as far as it is installed to say so."""
    try:
        declared = requires(need.name) or [] if need.extras else []
    except PackageNotFoundError:
        return []
    known = by_extra(declared)
    return [other for name in sorted(need.extras) for other in known.get(name, [])]


def _names(text: str) -> list[str]:
    """The extras that a requirement's marker names."""
    import re

    return re.findall(r"extra\s*==\s*['\"]([^'\"]+)['\"]", text)


def _finding(name: str, needs: list[Requirement]) -> Finding:
    from ..environment import library_version
    from .doctor import Finding

    present, missing, old = [], [], []
    for need in needs:
        version = library_version(need.name)
        if version is None:
            missing.append(need.name)
        elif not need.specifier.contains(version, prereleases=True):
            old.append(f"{need.name} {version} is not {need.specifier}")
        else:
            present.append(f"{need.name} {version}")
    title, hint = f"extra {name}", f"pip install 'llmopt[{name}]'"
    if old:
        return Finding(title, "broken", detail=f"{', '.join(old)}: {hint}")
    if missing:
        there = f"; present: {', '.join(present)}" if present else ""
        return Finding(title, "absent", detail=f"missing: {', '.join(missing)}{there}: {hint}")
    if not needs:
        return Finding(title, "absent", detail="not for this Python or system")
    return Finding(title, "ok", detail=", ".join(present))
