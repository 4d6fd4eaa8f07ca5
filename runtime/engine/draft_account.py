"""What drafts may cost: an account of the time they gained and lost, so that a load on which they do not pay is slower
than plain decoding by a bounded share at most.

The account is in seconds. It begins with a few plain steps' worth, earns a small share of all time that passes, and
what accepted drafts save; it pays what the verified rows and the draft passes cost. Drafts are made only where it could
bear that none of them is accepted. So whatever the acceptance is, and whatever the estimate of it,

    time with drafts <= (1 + SHARE) * time of plain decoding + INITIAL plain steps,

as far as the costs are right, and those are measured from step to step (`LearntCosts`). The cap bounds what a good time
leaves to be lost when the texts change.
"""

from __future__ import annotations

SHARE = 0.01
"""Of the time that passes, which trials may cost."""
INITIAL, CAP = 1.0, 8.0
"""Plain steps' worth at the beginning and at most."""


class Account:
    """Seconds that drafts may lose. `credit` is None until the first load is known."""

    def __init__(self) -> None:
        self.credit: float | None = None
        self._cap = 0.0

    def allows(self, plain: float, needed: float, invested: float = 0.0) -> bool:
        """Whether drafts may be made that lose `needed` seconds if none is accepted, in a step that takes `plain`
        without them. invested: the part of it that is spent once (a second model's work on the prompts); it is lent
        the first time, and saved for later."""
        if self.credit is None:
            self.credit = INITIAL * plain + invested
        self._cap = max(CAP * plain, 1.5 * needed)
        return needed <= self.credit

    def settle(self, seconds: float, net: float = 0.0) -> None:
        """A step has taken `seconds` and its drafts gained `net` (lost, if negative) against plain decoding."""
        if self.credit is not None:
            self.credit = min(self.credit + SHARE * seconds + net, self._cap)
