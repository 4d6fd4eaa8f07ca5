"""Counters of the engine; names follow vLLM's where it has one."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf


@dataclass(slots=True)
class EngineMetrics:
    """A snapshot. Counters (`*_total`, `prefix_cache_*`) only grow; the others are of the moment."""

    num_requests_waiting: int = 0
    num_requests_running: int = 0
    kv_cache_usage_perc: float = 0.0
    """Share of the blocks that requests hold, 0 … 1."""
    prefix_cache_queries_total: int = 0
    """Tokens looked up in the prefix cache by admissions, and those found."""
    prefix_cache_hits_total: int = 0
    num_preemptions_total: int = 0
    kv_blocks_swapped_out_total: int = 0
    """Blocks of preempted requests copied to host memory, and back."""
    kv_blocks_swapped_in_total: int = 0
    kv_swap_failures_total: int = 0
    """Copies that raised; after the first nothing is copied any more."""
    kv_host_usage_perc: float = 0.0
    """Share of the host blocks that preempted requests hold, 0 … 1."""
    prompt_tokens_total: int = 0
    """Tokens of prompts that were run or found in the cache."""
    generation_tokens_total: int = 0
    request_success_total: dict[str, int] = field(default_factory=dict)
    """Ended sequences by finish reason (errors included)."""
    spec_decode_num_drafts_total: int = 0
    """Rows with drafts, drafted tokens, and accepted ones."""
    spec_decode_num_draft_tokens_total: int = 0
    spec_decode_num_accepted_tokens_total: int = 0
    spec_decode_num_draft_tokens_per_pos_total: list[int] = field(default_factory=list)
    """Drafted tokens by their position in the draft, and accepted ones."""
    spec_decode_num_accepted_tokens_per_pos_total: list[int] = field(default_factory=list)
    steps_total: int = 0
    step_tokens: int = 0
    """Tokens in the last step's batch."""
    schedule_seconds: float = 0.0
    """The last step's parts: plan, forward, sample, and the rest (detokenize, commit, callbacks)."""
    draft_seconds: float = 0.0
    """Making the last step's drafts, before its plan."""
    execute_seconds: float = 0.0
    sample_seconds: float = 0.0
    output_seconds: float = 0.0
    generation_tokens_per_second: float = 0.0
    """Over the last `RateWindow.seconds` seconds."""


class RateWindow:
    """Events per second over a sliding window. One thread writes; `recent` may be read by any."""

    def __init__(self, seconds: float = 10.0) -> None:
        self.seconds = seconds
        self._steps: deque[tuple[float, int]] = deque()
        self._total = self._open = 0
        self._latest: tuple[float, float] = (-inf, 0.0)

    def add(self, count: int) -> None:
        self._open += count

    def close_step(self, now: float) -> None:
        """Book what came since the last call. The window starts at the end of a step, whose own events it leaves out,
        so that the rate is events over the time that made them."""
        self._steps.append((now, self._open))
        self._total += self._open
        self._open = 0
        while self._steps[0][0] < now - self.seconds:
            self._total -= self._steps.popleft()[1]
        start, first = self._steps[0]
        self._latest = (now, (self._total - first) / (now - start) if now > start else 0.0)

    def recent(self, now: float) -> float:
        """Events per second up to the last step; 0 once that is longer ago than the window."""
        when, rate = self._latest
        return rate if now - when <= self.seconds else 0.0
