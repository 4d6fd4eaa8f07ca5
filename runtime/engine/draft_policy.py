"""How many tokens to draft: as many as make the step's tokens a second the most, by what was accepted so far.

A draft that follows j accepted ones is accepted with the probability a ** (j + 1), where `a` is estimated for each
request, and within it for each class of drafts (how long the matched text was, say). A step of n tokens costs what
`StepCosts` says. Drafts are taken as long as the expected tokens a second grow, so that they end by themselves where a
batch is large enough to keep the machine busy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .draft_costs import StepCosts

LONGEST = 24
"""Most drafts of a request in one step."""
MARGIN = 1.03
"""Drafts must promise this many times the plain step's tokens a second: what the costs leave out is in it."""
STEP_OVERHEAD, TOKEN_OVERHEAD = 1e-4, 2e-5
"""Seconds that drafts cost outside the model: finding them and laying out longer rows; sampling and reading each."""


@dataclass
class Acceptance:
    """Accepted and tried drafts, the recent ones weighted more; beginning with `weight` imagined trials at `rate`."""

    rate: float
    weight: float
    keep: float
    """How much the past counts after each new row, 0 … 1."""
    hits: float = 0.0
    trials: float = 0.0

    @property
    def mean(self) -> float:
        return (self.hits + self.rate * self.weight) / (self.trials + self.weight)

    def add(self, drafted: int, accepted: int) -> None:
        """A row of `drafted` tokens of which the first `accepted` were: one trial more where one was rejected."""
        tried = accepted + (accepted < drafted)
        self.hits = self.keep * self.hits + accepted
        self.trials = self.keep * self.trials + tried

    def fade(self, keep: float) -> None:
        """Believe the past a little less (nothing was tried)."""
        self.hits *= keep
        self.trials *= keep


class AcceptanceBook:
    """Acceptance by request and class; new requests begin with what the engine has seen of the class.

    priors: the rate of each class before anything was seen.
    """

    FADE, FADE_ALL = 0.985, 0.995
    """Of a request, and of the engine in each step, whose drafts do not pay now: they are tried again some fifty looks
    later, where texts have changed some hundreds of steps later by newcomers too."""

    def __init__(self, priors: Sequence[float]) -> None:
        self._engine = [Acceptance(rate, 8.0, 0.995) for rate in priors]
        self._requests: dict[int, dict[int, Acceptance]] = {}
        self._passed: set[int] = set()

    def rate(self, request_id: int, kind: int) -> float:
        return self._own(request_id, kind).mean

    def trials(self, kind: int) -> float:
        """Drafts of the class that the engine has tried, the recent ones weighted more."""
        return self._engine[kind].trials

    def add(self, request_id: int, kind: int, drafted: int, accepted: int) -> None:
        self._own(request_id, kind).add(drafted, accepted)
        self._engine[kind].add(drafted, accepted)

    def passed_over(self, request_id: int, kind: int) -> None:
        """Drafts could have been made and did not pay."""
        self._own(request_id, kind).fade(self.FADE)
        self._passed.add(kind)

    def end_step(self) -> None:
        """Fade what the engine knows of the classes that were passed over."""
        for kind in self._passed:
            self._engine[kind].fade(self.FADE_ALL)
        self._passed.clear()

    def forget(self, request_id: int) -> None:
        self._requests.pop(request_id, None)

    def _own(self, request_id: int, kind: int) -> Acceptance:
        kinds = self._requests.setdefault(request_id, {})
        if kind not in kinds:
            kinds[kind] = Acceptance(self._engine[kind].mean, 3.0, 0.9)
        kinds[kind].rate = self._engine[kind].mean
        return kinds[kind]


@dataclass(frozen=True)
class Load:
    """The step without drafts: `decoding` rows of one token with `context` tokens before them on average, and
    `others` tokens of prompts."""

    decoding: int
    context: float = 0.0
    others: int = 0


def expected_gain(rates: Sequence[float], lengths: Sequence[int]) -> float:
    """Tokens that drafts of these lengths bring on average beyond the plain step's."""
    return sum(sum(rate**j for j in range(1, length + 1)) for rate, length in zip(rates, lengths) if length)


def plain_seconds(costs: StepCosts, load: Load) -> float:
    """Of the step without drafts."""
    return costs.of(load.decoding + load.others) + load.decoding * costs.attention(load.context)


def drafts_seconds(costs: StepCosts, load: Load, drafts: int) -> float:
    """What verifying so many drafts adds to the step."""
    if not drafts:
        return 0.0
    tokens = load.decoding + load.others
    return costs.of(tokens + drafts) - costs.of(tokens) + drafts * costs.token_context * load.context


def least_rate(costs: StepCosts, load: Load) -> float:
    """The acceptance above which drafts can pay: as much of a token as each of them costs, if there are as many as is
    best for that. From 1 on not even those do that are certain of acceptance."""
    each = costs.least_rise(load.decoding + load.others) + costs.token_context * load.context + TOKEN_OVERHEAD
    return MARGIN * load.decoding * each / plain_seconds(costs, load)


def best_lengths(
    rates: Sequence[float],
    limits: Sequence[int],
    load: Load,
    costs: StepCosts,
    draft_seconds: Callable[[int], float] | None = None,
) -> list[int]:
    """Drafts for each request: 0 … its limit.

    rates: acceptance of each request's drafts. limits: most drafts it may have. draft_seconds: of one more draft for
    so many requests at once, where drafts cost time of their own.

    A request takes part at depth j while its j-th draft yields more tokens a second than the plain step; of the common
    depths that are left the best is taken.
    """
    longest = min(LONGEST, max(limits, default=0))
    if longest < 1:
        return [0] * len(rates)
    tokens, rows = load.decoding + load.others, load.decoding
    plain = costs.of(tokens) + rows * costs.attention(load.context)
    speed = rows / plain
    each = costs.token_context * load.context + TOKEN_OVERHEAD
    floor = speed * (costs.least_slope + each)
    if max(rate for rate, limit in zip(rates, limits) if limit > 0) <= floor:
        return [0] * len(rates)
    survival = np.minimum(np.asarray(rates, float), 0.995)[:, None] ** np.arange(1, longest + 1)
    inside = (np.asarray(limits)[:, None] >= np.arange(1, longest + 1)) & (survival > floor)
    counts = inside.sum(axis=0)
    gained = (survival * inside).sum(axis=0).cumsum()
    added = counts.cumsum()
    best, depth, spent = speed * MARGIN, 0, STEP_OVERHEAD
    for j in range(longest):
        if not counts[j]:
            break
        if draft_seconds is not None:
            spent += draft_seconds(int(counts[j]))
        more = int(added[j])
        seconds = costs.of(tokens + more) + rows * costs.attention(load.context) + more * each + spent
        if (rows + gained[j]) / seconds > best:
            best, depth = (rows + gained[j]) / seconds, j + 1
    return [min(depth, int(n)) for n in inside.sum(axis=1)]
