"""The scheduler's limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...optimizer.errors import UsageError


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Raises `UsageError` for values with which no schedule could hold its promises."""

    max_num_seqs: int = 256
    """Most requests that run at once."""
    max_num_batched_tokens: int = 2048
    """Most tokens in one step; at least `max_num_seqs`, so that every running request moves in every step."""
    mode: Literal["continuous", "dynamic"] = "continuous"
    """`dynamic` admits only into an empty batch: the classic scheme of static batches from a queue."""
    watermark: float = 0.01
    """Share of the blocks that admission leaves free for running requests to grow into."""
    aging_steps: int = 200
    """Steps of waiting that weigh as much as one unit of priority."""
    prefix_caching: bool = True
    max_prompt_logprob_tokens: int = 256
    """Most logits rows a step makes for prompt logprobs, to bound their memory."""

    def __post_init__(self) -> None:
        faults = [
            (self.max_num_seqs < 1, "max_num_seqs must be at least 1"),
            (
                self.max_num_batched_tokens < self.max_num_seqs,
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}",
            ),
            (self.mode not in ("continuous", "dynamic"), f"mode={self.mode!r} is neither 'continuous' nor 'dynamic'"),
            (not 0 <= self.watermark < 1, f"watermark={self.watermark} is not in [0, 1)"),
            (self.aging_steps < 1, "aging_steps must be at least 1"),
            (self.max_prompt_logprob_tokens < 1, "max_prompt_logprob_tokens must be at least 1"),
        ]
        for wrong, what in faults:
            if wrong:
                raise UsageError(what, where="scheduler")
