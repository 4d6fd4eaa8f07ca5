"""What of a space can be checked before the search: every value must stand in some draw that is a valid recipe."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from ..chain import check_chain
from ..errors import LlmoptError, UsageError
from ..recipe import LoadedRecipe, build
from .space import Domain, Draw, Space

ALL = 200
"""Draws up to which a space is checked whole; larger ones by this many, besides each value once and again."""
MORE = 40
"""Further draws for a value that no valid recipe had."""


def parse(draw: Draw) -> LoadedRecipe:
    """The recipe of a draw, its passes in a possible order. Raises UsageError."""
    loaded = build(draw.source)
    check_chain(loaded)
    return loaded


def every_draw(space: Space, most: int) -> list[Draw] | None:
    """All draws of a space; None where they are more than `most` or cannot be listed."""
    found: list[Draw] = []
    open_: list[dict[str, Any]] = [{}]
    while open_:
        fixed = open_.pop()
        ahead: list[dict[str, Any]] = []

        def pick(domain: Domain, fixed: dict[str, Any] = fixed, ahead: list[dict[str, Any]] = ahead) -> Any:
            if domain.name in fixed:
                return fixed[domain.name]
            values = domain.values()
            if values is None:
                raise _Endless
            if not ahead:
                ahead += [{**fixed, domain.name: value} for value in values]
            return values[0]

        try:
            draw = space.draw(pick)
        except _Endless:
            return None
        if ahead:
            open_ += reversed(ahead)
        else:
            found.append(draw)
        if len(found) + len(open_) > most:
            return None
    return found


class _Endless(Exception):
    """A domain whose values cannot be listed."""


def check(space: Space, parse: Callable[[Draw], LoadedRecipe] = parse) -> list[LoadedRecipe]:
    """The valid recipes among the draws that were tried. Raises UsageError where a value stands in none of them.

    parse: makes a draw a recipe, and may ask more of it than this module's.
    """
    draws = every_draw(space, ALL) or _many(space)
    recipes: list[LoadedRecipe] = []
    good: set[tuple[str, Any]] = set()
    errors: dict[tuple[str, Any], LlmoptError] = {}

    def attempt(draw: Draw) -> None:
        pairs = list(draw.values.items())
        try:
            recipes.append(parse(draw))
            good.update(pairs)
        except LlmoptError as error:
            for pair in pairs:
                errors.setdefault(pair, error)

    for draw in draws:
        attempt(draw)
    generator = random.Random(0)
    for pair in [pair for pair in errors if pair not in good]:
        for _ in range(MORE):
            if pair in good:
                break
            attempt(_random(space, generator, dict([pair])))
        if pair not in good:
            raise errors[pair]
    if not recipes:
        raise UsageError("no draw is a valid recipe", space.source.name)
    return recipes


def corner_draws(space: Space) -> list[Draw]:
    """Each corner of each domain with the others at their first, each draw once."""
    draws = [space.draw(lambda domain: domain.corners()[0])]
    for domain in space.domains.values():
        for value in domain.corners():
            draws.append(_towards(space, domain, value))
    return list({draw.key: draw for draw in draws}.values())


def _many(space: Space) -> list[Draw]:
    """The corners, and random draws beside them."""
    generator = random.Random(0)
    draws = corner_draws(space) + [_random(space, generator, {}) for _ in range(ALL)]
    return list({draw.key: draw for draw in draws}.values())


def _towards(space: Space, wanted: Domain, value: Any) -> Draw:
    """A draw that has the value, as far as the choices around the domain can be made so."""

    def pick(domain: Domain) -> Any:
        if domain.name == wanted.name:
            return value
        at = domain.location
        if domain.kind == "choice" and wanted.location[: len(at) + 1] == (*at, "choice"):
            return domain.labels[wanted.location[len(at) + 1]]
        return domain.corners()[0]

    return space.draw(pick)


def _random(space: Space, generator: random.Random, fixed: dict[str, Any]) -> Draw:
    wanted = [space.domains[name].location for name in fixed]

    def pick(domain: Domain) -> Any:
        if domain.name in fixed:
            return fixed[domain.name]
        at = domain.location
        for location in wanted:
            if domain.kind == "choice" and location[: len(at) + 1] == (*at, "choice"):
                return domain.labels[location[len(at) + 1]]
        return generator.choice(domain.corners())

    return space.draw(pick)
