"""Engine counters that outlive an engine: a reload or restart must not set a counter back."""

from __future__ import annotations

from collections.abc import Iterable

from ..engine.metrics import EngineMetrics

COUNTERS = (
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "steps_total",
)
PER_POSITION = ("spec_decode_num_draft_tokens_per_pos_total", "spec_decode_num_accepted_tokens_per_pos_total")


class Totals:
    """Sums of counters by name, of lists by position, of ended sequences by reason."""

    def __init__(self, metrics: Iterable[EngineMetrics] = ()) -> None:
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.positions: dict[str, list[int]] = {name: [] for name in PER_POSITION}
        self.finished: dict[str, int] = {}
        for each in metrics:
            self.add(each)

    def add(self, metrics: EngineMetrics) -> None:
        for name in COUNTERS:
            self.counters[name] += getattr(metrics, name)
        for name, sums in self.positions.items():
            values = getattr(metrics, name)
            sums.extend([0] * (len(values) - len(sums)))
            for i, value in enumerate(values):
                sums[i] += value
        for reason, count in metrics.request_success_total.items():
            self.finished[reason] = self.finished.get(reason, 0) + count

    def copy(self) -> Totals:
        other = Totals()
        other.counters = dict(self.counters)
        other.positions = {name: list(values) for name, values in self.positions.items()}
        other.finished = dict(self.finished)
        return other
