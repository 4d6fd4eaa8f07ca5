"""Several artifacts of one source side by side: which of them are on the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..evaluation.report.comparison import compare as compared
from ..evaluation.report.pareto import DEFAULT, OBJECTIVES
from .errors import UsageError, did_you_mean
from .manifest import Manifest, read_manifest

BUSY = 0.2
"""Share of the machine that other processes used, from which on a measured speed is doubted."""


def compare(folders: Sequence[str | Path], by: Sequence[str] = DEFAULT) -> dict[str, Any]:
    """What a report of kind "comparison" is drawn from: `artifacts` (name, manifest), `by`, `warnings` and, for those
    who read it, `rows` (name, recipe, values, dominated_by, gates_missed).

    by: names of figures, see `evaluation.report.pareto.OBJECTIVES`. Raises UsageError where there are fewer than two
    artifacts, a figure is unknown, or the artifacts come from different sources: then their KL does not compare.
    Raises RunError where a folder is no artifact.
    """
    _check_figures(by)
    if len(folders) < 2:
        raise UsageError("one artifact compares with nothing", "compare", "Name two or more")
    paths = [Path(folder) for folder in folders]
    manifests = [read_manifest(path) for path in paths]
    _check_sources(paths, manifests)
    names = _names(paths)
    artifacts = [{"name": name, "manifest": m.model_dump(mode="json")} for name, m in zip(names, manifests)]
    warnings = [*_evaluated_otherwise(names, manifests), *_doubtful_speeds(names, manifests)]
    return {"artifacts": artifacts, "warnings": warnings, **compared(artifacts, by)}


def _check_figures(by: Sequence[str]) -> None:
    for name in by:
        if name not in OBJECTIVES:
            raise UsageError(f"unknown figure {name!r}", "--by", did_you_mean(name, OBJECTIVES))
    if not by:
        raise UsageError("no figure to compare by is named", "--by", f"Figures: {', '.join(OBJECTIVES)}")


def _check_sources(paths: Sequence[Path], manifests: Sequence[Manifest]) -> None:
    first = manifests[0].source
    for path, manifest in zip(paths[1:], manifests[1:]):
        if manifest.source.sha256 != first.sha256:
            raise UsageError(
                f"comes from another source than {paths[0]}: {manifest.source.id} ({manifest.source.sha256[:12]}…), "
                f"not {first.id} ({first.sha256[:12]}…); their divergences are from different models",
                str(path),
                "Compare artifacts of one source",
            )


def _names(paths: Sequence[Path]) -> list[str]:
    """The folders' names, with as many parents as tell them apart. Raises UsageError where a folder is named twice."""
    whole = [path.resolve() for path in paths]
    if len(set(whole)) < len(whole):
        twice = next(path for path in whole if whole.count(path) > 1)
        raise UsageError("is named twice", str(twice), "Name each artifact once")
    depth = 1
    while len({path.parts[-depth:] for path in whole}) < len(whole):
        depth += 1
    return ["/".join(path.parts[-depth:]) for path in whole]


def _evaluated_otherwise(names: Sequence[str], manifests: Sequence[Manifest]) -> list[str]:
    """A warning for each artifact that was measured on other tokens than the first."""

    def tokens(manifest: Manifest) -> tuple[Any, ...]:
        options = manifest.recipe["evaluate"]
        count = manifest.measured["divergence"].get("num_tokens")
        return options.get("text"), options.get("windows"), options.get("window_length"), count

    first = tokens(manifests[0])
    return [
        f"{name} was evaluated on other tokens than {names[0]} ({_told(tokens(manifest))}, not {_told(first)}), "
        "so KL and perplexity compare only roughly."
        for name, manifest in zip(names, manifests)
        if tokens(manifest) != first
    ]


def _told(tokens: tuple[Any, ...]) -> str:
    text, windows, length, count = tokens
    return f"text {text!r}, {windows} windows of {length}, {count} positions"


def _doubtful_speeds(names: Sequence[str], manifests: Sequence[Manifest]) -> list[str]:
    warnings = []
    for name, manifest in zip(names, manifests):
        shares = [(manifest.measured[part].get("foreign_cpu") or 0.0) for part in ("before", "after")]
        if max(shares) > BUSY:
            warnings.append(
                f"The speed of {name} was measured while other processes used {max(shares):.0%} of the machine."
            )
    machines = {
        (m.environment.get("platform"), m.environment.get("device"), m.environment.get("cpu_threads"))
        for m in manifests
    }
    if len(machines) > 1:
        warnings.append("The speeds were measured on machines of different kinds; each is a ratio to its own source's.")
    return warnings
