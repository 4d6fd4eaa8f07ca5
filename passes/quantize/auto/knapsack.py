"""One choice for every unit, under a limit on the sum: the multiple-choice knapsack problem, by dynamic programming.

Every unit has options with a size (bytes) and an error (any non-negative number); a solution takes one option of each.
The table holds, for every total size, the least total error, so that one table answers both questions: the least error
within a size and the least size within an error. Sizes are counted above each unit's smallest, in multiples of their
greatest common divisor where that makes at most `LIMIT` of them (then solutions are exact), else of a coarser grain:
what that leaves of a budget is spent on single units afterwards. There is no randomness; of equals the first counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

LIMIT = 1 << 16
"""Sizes that the table distinguishes."""


@dataclass(frozen=True)
class Option:
    """size: bytes; error: what it adds to the total error."""

    size: int
    error: float


class Knapsack:
    """Units, each a sequence of options, and the table over them."""

    def __init__(self, units: Sequence[Sequence[Option]], limit: int = LIMIT) -> None:
        if not units or not all(units):
            raise ValueError("every unit needs an option, and there must be a unit")
        self.units = units
        self.least = [min(option.size for option in unit) for unit in units]
        above = [[option.size - least for option in unit] for unit, least in zip(units, self.least)]
        span = sum(max(unit) for unit in above)
        common = max(1, gcd(*(size for unit in above for size in unit)))
        self.grain = common if span // common < limit else -(-span // (limit - 1))
        self._steps = [[round(size / self.grain) for size in unit] for unit in above]
        self._fill()

    @property
    def smallest(self) -> int:
        """Bytes of the smallest solution."""
        return sum(self.least)

    def size(self, choice: Sequence[int]) -> int:
        """Bytes of a solution, given as the option's number for each unit."""
        return sum(unit[i].size for unit, i in zip(self.units, choice))

    def error(self, choice: Sequence[int]) -> float:
        """Total error of a solution."""
        return sum(unit[i].error for unit, i in zip(self.units, choice))

    def least_error(self, budget: int) -> list[int] | None:
        """The solution with the least error of at most `budget` bytes; None where even the smallest is larger."""
        if budget < self.smallest:
            return None
        width = min(len(self._errors) - 1, (budget - self.smallest) // self.grain + len(self.units))
        while width >= 0:
            column = int(np.argmin(self._errors[: width + 1]))
            choice = self._trace(column)
            if self.size(choice) <= budget:
                return self._spend(choice, budget)
            width = column - 1
        return self._spend(self._smallest_choice(), budget)

    def least_size(self, error: float) -> list[int] | None:
        """The smallest solution whose error is at most `error`; None where there is none."""
        columns = np.flatnonzero(self._errors <= error)
        return self._trace(int(columns[0])) if len(columns) else None

    def _fill(self) -> None:
        """The least error for every number of grains, and the option of each unit that leads there."""
        width = 1 + sum(max(steps) for steps in self._steps)
        errors, self._taken = np.full(width, np.inf), []
        errors[0] = 0.0
        for unit, steps in zip(self.units, self._steps):
            best, taken = np.full(width, np.inf), np.zeros(width, dtype=np.int16)
            for number, (option, step) in enumerate(zip(unit, steps)):
                reached = errors[: width - step] + option.error
                better = reached < best[step:]
                best[step:][better], taken[step:][better] = reached[better], number
            errors = best
            self._taken.append(taken)
        self._errors = errors

    def _trace(self, column: int) -> list[int]:
        """The options that lead to a column of the table."""
        choice = []
        for steps, taken in zip(reversed(self._steps), reversed(self._taken)):
            choice.append(int(taken[column]))
            column -= steps[choice[-1]]
        return choice[::-1]

    def _smallest_choice(self) -> list[int]:
        """The least error among the smallest options of each unit."""
        return [
            min((option.error, i) for i, option in enumerate(unit) if option.size == least)[1]
            for unit, least in zip(self.units, self.least)
        ]

    def _spend(self, choice: list[int], budget: int) -> list[int]:
        """Spend what is left of the budget on the single changes that lower the error most, until none fits."""
        left = budget - self.size(choice)
        while True:
            gains = [
                (unit[old].error - option.error, -number, -i)
                for number, (unit, old) in enumerate(zip(self.units, choice))
                for i, option in enumerate(unit)
                if option.size - unit[old].size <= left and option.error < unit[old].error
            ]
            if not gains:
                return choice
            _, number, i = max(gains)
            unit = self.units[-number]
            left -= unit[-i].size - unit[choice[-number]].size
            choice[-number] = -i
