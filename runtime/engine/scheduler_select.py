"""Which scheduler an engine gets: the one for the KV cache that its runner has."""

from __future__ import annotations

from .protocols import ModelRunner
from .scheduler import Scheduler
from .scheduler_config import SchedulerConfig


def make_scheduler(config: SchedulerConfig, runner: ModelRunner) -> Scheduler:
    """A scheduler over the runner's blocks. runner: see `ModelRunner`; attributes it may have choose."""
    sliding = getattr(runner, "sliding", None)
    if sliding is not None:
        from .sliding import SlidingScheduler

        return SlidingScheduler(config, runner.num_blocks, runner.block_size, sliding)
    host = getattr(runner, "num_host_blocks", 0)
    if host:
        from .offload import OffloadScheduler, SwapCosts

        costs = SwapCosts(getattr(runner, "swap_seconds", 0.0))
        return OffloadScheduler(config, runner.num_blocks, runner.block_size, host, costs)
    return Scheduler(config, runner.num_blocks, runner.block_size)
