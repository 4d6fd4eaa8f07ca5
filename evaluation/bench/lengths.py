"""Lengths of prompts and outputs: one number, or a range to draw from."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ...optimizer.errors import UsageError


@dataclass(frozen=True)
class Lengths:
    """Tokens, drawn uniformly from `low` … `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, where: str = "lengths") -> Lengths:
        """`128` or `16-256`. Raises UsageError."""
        low, dash, high = text.strip().partition("-")
        try:
            found = cls(int(low), int(high) if dash else int(low))
        except ValueError:
            raise UsageError(
                f"{text!r} is neither a number of tokens nor a range", where, "Write 128 or 16-256."
            ) from None
        if not 1 <= found.low <= found.high:
            raise UsageError(f"{text!r} is no range of positive numbers", where, "Write 128 or 16-256.")
        return found

    def draw(self, generator: random.Random) -> int:
        return generator.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"
