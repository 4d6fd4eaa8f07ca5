"""Which scheduler an engine gets: the one for the KV cache that its runner has."""

from __future__ import annotations

from .protocols import ModelRunner
from .scheduler import Scheduler
from .scheduler_config import SchedulerConfig


def make_scheduler(config: SchedulerConfig, runner: ModelRunner) -> Scheduler:
    """A scheduler over the runner's blocks. runner: see `ModelRunner`; attributes it may have choose."""
    sliding, tail = getattr(runner, "sliding", None), getattr(runner, "tail_blocks", 0)
    if sliding is not None:
        from .sliding import SlidingScheduler

        return SlidingScheduler(config, runner.num_blocks, runner.block_size, sliding, tail)
    host = getattr(runner, "num_host_blocks", 0)
    if host:
        from .offload import OffloadScheduler, SwapCosts

        costs = SwapCosts(getattr(runner, "swap_seconds", 0.0))
        return OffloadScheduler(config, runner.num_blocks, runner.block_size, host, costs, tail)
    return Scheduler(config, runner.num_blocks, runner.block_size, tail)
