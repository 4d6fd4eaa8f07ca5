"""Counters of the engine; names follow vLLM's where it has one."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


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
    prompt_tokens_total: int = 0
    """Tokens of prompts that were run or found in the cache."""
    generation_tokens_total: int = 0
    request_success_total: dict[str, int] = field(default_factory=dict)
    """Ended sequences by finish reason (errors included)."""
    spec_decode_num_drafts_total: int = 0
    """Rows with drafts, drafted tokens, and accepted ones."""
    spec_decode_num_draft_tokens_total: int = 0
    spec_decode_num_accepted_tokens_total: int = 0
    steps_total: int = 0
    step_tokens: int = 0
    """Tokens in the last step's batch."""
    schedule_seconds: float = 0.0
    """The last step's parts: plan, forward, sample, and the rest (detokenize, commit, callbacks)."""
    execute_seconds: float = 0.0
    sample_seconds: float = 0.0
    output_seconds: float = 0.0
    generation_tokens_per_second: float = 0.0
    """Over the last `RateWindow.seconds` seconds."""


class RateWindow:
    """Events per second over a sliding window."""

    def __init__(self, seconds: float = 10.0) -> None:
        self.seconds = seconds
        self._events: deque[tuple[float, int]] = deque()
        self._total = 0
        self._start: float | None = None

    def add(self, now: float, count: int) -> None:
        if self._start is None:
            self._start = now
        self._events.append((now, count))
        self._total += count
        self._drop(now)

    def rate(self, now: float) -> float:
        self._drop(now)
        span = min(self.seconds, now - self._start) if self._start is not None else 0.0
        return self._total / span if span > 0 else 0.0

    def _drop(self, now: float) -> None:
        while self._events and self._events[0][0] <= now - self.seconds:
            self._total -= self._events.popleft()[1]
