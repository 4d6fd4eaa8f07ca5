"""Module patterns: globs such as `*.mlp.*` and `re:` expressions, matched against full module names.

A pattern that matches nothing is an error that shows names it could have meant, because a misspelt pattern would
otherwise leave a layer untouched (or touched) in silence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from fnmatch import fnmatchcase

from ...optimizer.errors import UsageError


def matches(pattern: str, name: str) -> bool:
    """Whether `pattern` covers the whole of `name`: a glob (`*` also spans dots), or `re:` and a regular expression.

    Raises UsageError where the regular expression is malformed.
    """
    if not pattern.startswith("re:"):
        return fnmatchcase(name, pattern)
    try:
        return re.fullmatch(pattern[3:], name) is not None
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"the regular expression is malformed: {error}", where=f"pattern {pattern!r}") from None


def select(pattern: str, names: Sequence[str], where: str) -> list[str]:
    """The names that `pattern` matches, in order. Raises UsageError, with three suggestions, where there are none.

    where: the option the pattern stands in, for the message.
    """
    found = [name for name in names if matches(pattern, name)]
    if found or not names:
        return found
    shown = ", ".join(repr(name) for name in suggestions(pattern, names))
    raise UsageError(
        f"the pattern {pattern!r} matches none of the model's {len(names)} modules",
        where=where,
        what_to_do=f"Names it could have meant: {shown}.",
    )


def suggestions(pattern: str, names: Iterable[str], count: int = 3) -> list[str]:
    """The `count` names whose parts look most like the pattern's, one for each kind of layer where there are enough."""
    words = [word for word in re.split(r"[^A-Za-z0-9_]+", pattern.removeprefix("re:")) if word]
    scored = sorted(((_likeness(words, name), -i, name) for i, name in enumerate(names)), reverse=True)
    kinds: dict[str, str] = {}
    for _, _, name in scored:
        kinds.setdefault(re.sub(r"\d+", "N", name), name)
    best = list(kinds.values())[:count]
    rest = [name for _, _, name in scored if name not in best]
    return best + rest[: count - len(best)]


def _likeness(words: list[str], name: str) -> float:
    parts = name.split(".")
    return sum(max(SequenceMatcher(None, word, part).ratio() for part in parts) for word in words)
