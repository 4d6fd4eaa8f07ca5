"""What a step costs by its tokens: measured on the runner at load and from every step since, so that drafts are made
only where they pay."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .plan import Row, StepPlan

SIZES = (1, 2, 3, 5, 8, 12, 13, 17, 24, 32, 48)
"""Tokens of the steps that are timed: 12 and 13 since the CPU kernels take rows by twelves."""
FAR = 512
"""Context of the steps from which the cost of attention is told."""


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step: a curve over its tokens, straight between the points and beyond the last, plus attention's.

    sizes, seconds: the curve at a context of next to nothing. row_context: seconds a row and token of its context;
    token_context: the same for each token of a row beyond the first.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    row_context: float = 0.0
    token_context: float = 0.0

    def of(self, tokens: float) -> float:
        """Seconds of a step of `tokens` tokens without attention to what came before."""
        sizes, seconds = self.sizes, self.seconds
        if len(sizes) == 1 or tokens <= sizes[0]:
            return seconds[0] * (tokens / sizes[0] if len(sizes) == 1 else 1.0)
        right = min(bisect_left(sizes, tokens), len(sizes) - 1)
        x0, x1, y0, y1 = sizes[right - 1], sizes[right], seconds[right - 1], seconds[right]
        return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)

    def attention(self, context: float, tokens: float = 1) -> float:
        """Seconds that attention of one row of `tokens` tokens takes over `context` tokens."""
        return (self.row_context + self.token_context * (tokens - 1)) * context

    @property
    def least_slope(self) -> float:
        """Seconds that one more token costs at least, wherever it is added."""
        pairs = zip(self.sizes, self.sizes[1:], self.seconds, self.seconds[1:])
        return max(0.0, min(((y1 - y0) / (x1 - x0) for x0, x1, y0, y1 in pairs), default=0.0))

    def least_rise(self, tokens: float) -> float:
        """Seconds for each token added to a step of `tokens`, where the number added is the best one for that."""
        sizes, seconds = self.sizes, self.seconds
        if len(sizes) == 1:
            return seconds[0] / sizes[0]
        base, beyond = self.of(tokens), (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        rises = [(y - base) / (x - tokens) for x, y in zip(sizes, seconds) if x > tokens]
        return max(0.0, min([beyond, *rises]))


class LearntCosts:
    """A curve (`now`) that follows the steps that are really made, the sampler and all else between them included.

    Each step moves the point next to its number of tokens by a part of its error. Points that were not met for a while
    move along in proportion: what slows a step down, such as a busy neighbour, mostly slows all. A step whose size is
    no point's, give or take a tenth, adds one.
    """

    RATE = 0.1
    """How much of its error a step corrects; the first steps of a size correct more: a half, a third …"""
    FOLLOW = 0.25
    """How much of it the points correct that were not met for long, at most: one slow step must not make all sizes
    dear, since what is dear is not tried again."""
    CLIP, CLIP_FIRST, FIRST = 2.0, 8.0, 3
    """A step counts as at most so many times as long as expected, among the first ones of its size CLIP_FIRST times:
    hiccups do not say what a step costs."""
    POINTS = 24
    AGE = 32.0
    """Steps after which a point that was not met follows the others by half."""

    def __init__(self, known: StepCosts) -> None:
        self.now = known
        self._met = [-(10**6)] * len(known.sizes)
        self._visits = [0] * len(known.sizes)
        """When each point was last met, and how often."""
        self._time = 0

    def learn(self, tokens: int, seconds: float) -> None:
        """A step of `tokens` tokens took `seconds`, without attention to what came before."""
        self._time += 1
        sizes, curve = list(self.now.sizes), list(self.now.seconds)
        nearest = min(range(len(sizes)), key=lambda i: abs(sizes[i] - tokens))
        expected, visits = self.now.of(tokens), self._visits[nearest]
        new = len(sizes) < self.POINTS and not 0.9 <= tokens / sizes[nearest] <= 1.1
        clip = self.CLIP_FIRST if new or visits < self.FIRST else self.CLIP
        error = min(max(seconds / expected, 1 / clip), clip) - 1
        if new:
            nearest, visits = bisect_left(sizes, tokens), 0
            sizes.insert(nearest, tokens)
            curve.insert(nearest, expected)
            self._met.insert(nearest, self._time)
            self._visits.insert(nearest, 0)
        rate = max(self.RATE, 1 / (visits + 2))
        for i, met in enumerate(self._met):
            age = self._time - met
            curve[i] *= 1 + error * (rate if i == nearest else min(rate, self.FOLLOW) * age / (age + self.AGE))
        self._met[nearest] = self._time
        self._visits[nearest] += 1
        for i in range(nearest + 1, len(curve)):  # more tokens do not take less
            curve[i] = max(curve[i], curve[i - 1])
        for i in range(nearest - 1, -1, -1):
            curve[i] = min(curve[i], curve[i + 1])
        self._set(sizes, curve)

    def known(self, tokens: int, steps: int) -> bool:
        """Whether a step of about so many tokens was among the last `steps` ones."""
        near = [i for i, size in enumerate(self.now.sizes) if 0.8 <= tokens / size <= 1.25]
        return any(self._visits[i] and self._time - self._met[i] < steps for i in near)

    def _set(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        self.now = StepCosts(tuple(sizes), tuple(seconds), self.now.row_context, self.now.token_context)


FLAT = StepCosts((1, 64), (1.0, 2.0))
"""Of a runner that nobody could measure: 64 tokens take twice as long as one."""


def measure(runner: Any, seconds: float = 0.6, execute: Callable[[StepPlan], Any] | None = None) -> StepCosts:
    """Time steps of the sizes above, the least of three each, within about `seconds` (two sizes at least).

    Writes into the first blocks of the pool, which must be unused. execute: in the place of `runner.execute`.
    """
    execute = execute or runner.execute
    blocks = runner.num_blocks - getattr(runner, "tail_blocks", 0)
    room = min(blocks * runner.block_size, runner.max_model_len)
    sizes = [size for size in SIZES if size <= room] or [1]
    until = time.perf_counter() + seconds
    times: dict[int, float] = {}
    for size in sorted(sizes, key=lambda s: (s not in (1, 5, 17), s)):  # the most telling first
        if time.perf_counter() > until and len(times) > 1:
            break
        times[size] = least_time(runner, execute, [size])
    known = sorted(times)
    curve = [times[size] for size in known]
    for i in range(1, len(curve)):  # noise: more tokens do not take less
        curve[i] = max(curve[i], curve[i - 1])
    far = min(FAR, room - 5)
    row = token = 0.0
    if far > 64 and time.perf_counter() < until:
        base, several = times[1], times.get(5, times[known[-1]])
        row = max(0.0, (least_time(runner, execute, [1], far) - base) / far)
        token = max(0.0, (least_time(runner, execute, [5], far) - several) / far - row) / 4
    return StepCosts(tuple(known), tuple(curve), row, token)


def least_time(runner: Any, execute: Callable[[StepPlan], Any], lengths: Sequence[int], context: int = 0) -> float:
    """Seconds of the fastest of three steps with verification rows of these lengths, each after `context` tokens."""
    size, rows, first = runner.block_size, [], 0
    tail = getattr(runner, "tail_blocks", 0)
    for number, length in enumerate(lengths):
        if tail:
            context -= context % size  # a row that begins inside a block ends in it
        blocks = -(-(context + length) // size) + tail
        table = tuple(range(first, first + blocks))
        drafts = 0 if tail else length - 1  # which are fewer than a block there; the work is the same
        rows.append(Row(-1 - number, context, (0,) * length, table, length, drafts))
        first += blocks
    plan, best = StepPlan(tuple(rows)), float("inf")
    for _ in range(3):
        started = time.perf_counter()
        logits = execute(plan)
        if getattr(logits, "is_cuda", False):
            logits[0, 0].item()  # wait for the device
        best = min(best, time.perf_counter() - started)
    return best
