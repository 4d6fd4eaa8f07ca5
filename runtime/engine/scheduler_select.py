"""Which scheduler an engine gets: the one for the KV cache that its runner has."""

from __future__ import annotations

from .protocols import ModelRunner
from .scheduler import Scheduler
from .scheduler_config import SchedulerConfig


def make_scheduler(config: SchedulerConfig, runner: ModelRunner) -> Scheduler:
    """A scheduler over the runner's blocks. runner: see `ModelRunner`; `sliding` is an attribute it may have."""
    sliding = getattr(runner, "sliding", None)
    if sliding is not None:
        from .sliding import SlidingScheduler

        return SlidingScheduler(config, runner.num_blocks, runner.block_size, sliding)
    return Scheduler(config, runner.num_blocks, runner.block_size)
