"""The offloaded KV cache: preempted requests keep their blocks in host memory. Pure Python, no torch.

A preempted request gives its blocks back at once, as ever; where host blocks are free, and copying out and in again is
estimated to be faster than computing its tokens again, the plan also copies them out, before anything is written, and
a later plan copies them in. Copies are a transaction of their own: planned and reserved by `schedule`, run by the
runner, then taken over by `commit_swaps` or undone by `swaps_failed`, whatever becomes of the step after. A request's
host blocks belong to it until it is back or ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...optimizer.errors import RunError
from .metrics import EngineMetrics
from .plan import StepPlan
from .request import FinishReason, Request
from .scheduler import Scheduler
from .scheduler_config import SchedulerConfig


class Swapped(NamedTuple):
    """A preempted request's copy: the host blocks, in order, of its first `num_computed` tokens, and of its tail."""

    blocks: tuple[int, ...]
    num_computed: int


class HostPool:
    """`num_blocks` blocks of host memory, each free or of one request."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks - 1, -1, -1))

    def allocate(self, count: int) -> tuple[int, ...]:
        """Raises RunError where so many are not free."""
        if count > len(self.free):
            raise RunError(f"{count} host blocks are wanted, {len(self.free)} are free", "host pool")
        return tuple(self.free.pop() for _ in range(count))

    def release(self, blocks: Sequence[int]) -> None:
        """Raises RunError on a double free."""
        if len(self.free) + len(blocks) > self.num_blocks:
            raise RunError(f"host blocks {list(blocks)} are freed twice", "host pool")
        self.free += blocks


class SwapCosts:
    """Whether copying a request out and in again is faster than computing it again.

    seconds_per_block: of one copy in one direction, as measured at load; later ones are averaged in. What a token of a
    prompt costs is measured while prompts run; until then everything is copied.
    """

    WEIGHT = 0.2
    """Of the newest measurement in the averages."""
    LEAST_TOKENS = 16
    """Fewest tokens of a step, and four a row, that say what a prompt's token costs."""

    def __init__(self, seconds_per_block: float) -> None:
        self.seconds_per_block = seconds_per_block
        self.seconds_per_token: float | None = None

    def worth(self, blocks: int, tokens: int) -> bool:
        if self.seconds_per_token is None:
            return True
        return 2 * blocks * self.seconds_per_block <= tokens * self.seconds_per_token

    def saw_step(self, plan: StepPlan, seconds: float) -> None:
        """A plan was executed in so many seconds."""
        tokens = plan.total_tokens
        if tokens >= max(self.LEAST_TOKENS, 4 * len(plan.rows)):
            self.seconds_per_token = self._mean(self.seconds_per_token, seconds / tokens)

    def saw_swap(self, blocks: int, seconds: float) -> None:
        """So many blocks were copied."""
        self.seconds_per_block = self._mean(self.seconds_per_block, seconds / blocks)

    def _mean(self, before: float | None, now: float) -> float:
        return now if before is None else (1 - self.WEIGHT) * before + self.WEIGHT * now


class OffloadScheduler(Scheduler):
    """`Scheduler` with `num_host_blocks` blocks of host memory for preempted requests."""

    def __init__(
        self,
        config: SchedulerConfig,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int,
        costs: SwapCosts,
        tail_blocks: int = 0,
    ) -> None:
        super().__init__(config, num_blocks, block_size, tail_blocks)
        self.host, self.costs = HostPool(num_host_blocks), costs
        self.swapping = True
        """False once a copy has failed: requests are computed again from then on."""
        self._leaving: dict[int, tuple[Swapped, tuple[int, ...]]] = {}
        """This plan's copies out, by request: with the pool's blocks they are taken from."""
        self._arriving: dict[int, tuple[Swapped, int]] = {}
        """This plan's copies in, by request: with the first block that is not in the pool anyway."""

    def schedule(self) -> StepPlan:
        self._leaving, self._arriving = {}, {}
        plan = super().schedule()
        if not self._leaving and not self._arriving:
            return plan
        out = [pair for swapped, ids in self._leaving.values() for pair in zip(ids, swapped.blocks)]
        back = []
        for request_id, (swapped, first) in self._arriving.items():
            ids = self.requests[request_id].table.ids
            back += [(ids[i], swapped.blocks[i]) for i in range(first, len(swapped.blocks))]
        return StepPlan(plan.rows, plan.preempted, tuple(out), tuple(back))

    def commit_swaps(self) -> None:
        """The plan's copies were made."""
        for request_id, (swapped, _) in self._arriving.items():
            request = self.requests[request_id]
            request.table.commit(request.token_ids, request.num_computed)
            self.host.release(swapped.blocks)
        self._leaving, self._arriving = {}, {}

    def swaps_failed(self) -> None:
        """The plan's copies were not made: nothing is copied any more, every request is computed again instead."""
        self.swapping = False
        for request_id, (swapped, _) in self._arriving.items():
            self.host.release(swapped.blocks)
            super()._preempt(self.requests[request_id])
        self._leaving, self._arriving = {}, {}
        for request in self.requests.values():
            self._drop(request)

    def finish(self, request: Request, reason: FinishReason) -> bool:
        if request.id in self.requests:
            self._drop(request)
        request.swapped = None  # of an engine that failed: its host pool is gone
        return super().finish(request, reason)

    def _preempt(self, request: Request) -> None:
        arriving = self._arriving.pop(request.id, None)
        count = request.num_computed
        blocks = -(-count // self.pool.block_size) + (self.pool.tail_blocks if count % self.pool.block_size else 0)
        if arriving is not None:  # its copy is where it was
            request.swapped = arriving[0]
        elif self.swapping and 0 < blocks <= len(self.host.free) and self.costs.worth(blocks, count):
            request.swapped = Swapped(self.host.allocate(blocks), count)
            self._leaving[request.id] = (request.swapped, tuple(request.table.ids[:blocks]))
        super()._preempt(request)

    def _admit(self) -> Request | None:
        request = super()._admit()
        if request is None or request.swapped is None:
            return request
        swapped, request.swapped = request.swapped, None
        if swapped.num_computed > request.num_computed:  # else the prefix cache has as much of it
            self._arriving[request.id] = (swapped, request.num_computed // self.pool.block_size)
            request.num_computed = swapped.num_computed
        else:
            self.host.release(swapped.blocks)
        return request

    def _drop(self, request: Request) -> None:
        if request.swapped is not None:
            self.host.release(request.swapped.blocks)
            request.swapped = None


def run_swaps(
    runner: Any, scheduler: OffloadScheduler, plan: StepPlan, counters: EngineMetrics, clock: Callable[[], float]
) -> bool:
    """Make a plan's copies. False where they failed: the plan is then void, and the next one makes no copies."""
    began = clock()
    try:
        runner.swap(plan.swap_out, plan.swap_in)
    except Exception:
        counters.kv_swap_failures_total += 1
        scheduler.swaps_failed()
        return False
    scheduler.commit_swaps()
    scheduler.costs.saw_swap(len(plan.swap_out) + len(plan.swap_in), clock() - began)
    counters.kv_blocks_swapped_out_total += len(plan.swap_out)
    counters.kv_blocks_swapped_in_total += len(plan.swap_in)
    return True
