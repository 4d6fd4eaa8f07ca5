"""Whether a list of passes can run in its order: requires, provides, conflicts."""

from __future__ import annotations

from .base import Pass
from .errors import UsageError
from .recipe import LoadedRecipe


def check_chain(loaded: LoadedRecipe) -> None:
    """Raise UsageError where a pass lacks what it requires, conflicts with an earlier one, or the passes form a cycle.

    The message names the pass that has to move, or both passes where no order would do.
    """
    passes = loaded.passes
    provided: dict[str, Pass] = {}
    for i, item in enumerate(passes):
        where = loaded.pass_where(i)
        for tag in sorted(item.conflicts):
            if tag in provided:
                other = provided[tag]
                what = f"pass {item.name!r} cannot follow {other.name!r}, which provides {tag!r}"
                repeated = other.name == item.name
                raise UsageError(what, where, f"Remove one of the two{'' if repeated else ', or reorder them'}")
        for tag in sorted(item.requires - provided.keys()):
            later = [p for p in passes[i + 1 :] if tag in p.provides]
            if not later:
                raise UsageError(f"pass {item.name!r} requires {tag!r}, which no earlier pass provides", where)
            if _depends(later[0], item, passes, set()):
                what = f"passes {item.name!r} and {later[0].name!r} require each other, so no order is right"
                raise UsageError(what, where, "Remove one of them")
            what = f"pass {item.name!r} requires {tag!r}, which {later[0].name!r} provides only later"
            raise UsageError(what, where, f"Move {later[0].name!r} before {item.name!r}")
        for tag in item.provides:
            provided[tag] = item


def _depends(item: Pass, on: Pass, passes: list[Pass], seen: set[int]) -> bool:
    """Whether `item` needs, directly or through others, something that only `on` provides."""
    if id(item) in seen:
        return False
    seen.add(id(item))
    for tag in item.requires:
        providers = [p for p in passes if tag in p.provides and p is not item]
        if providers and all(p is on or _depends(p, on, passes, seen) for p in providers):
            return True
    return False
