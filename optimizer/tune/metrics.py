"""The figures that a target may name, and where the manifest's `measured` has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ...evaluation.report.values import BY_UNIT, number, ratio

Unit = Literal["bytes", "nats", "share", "rise", "ratio", "plain", "seconds"]


@dataclass(frozen=True)
class Metric:
    """A figure of a trial. part, key: its place in `measured`; more: whether more is better; speed: whether it is
    there only where speed was measured."""

    name: str
    part: str
    key: str
    unit: Unit
    more: bool = False
    speed: bool = False

    def of(self, measured: dict[str, Any]) -> float | None:
        """The figure; None where it was not measured. With a quantized KV cache the worse of two counts, as for gates:
        over whole windows, and over what reads the cache."""
        if self.key == "prefill_speedup":
            parts = (measured.get(side) or {} for side in ("after", "before"))
            return ratio(*(part.get("prefill_tokens_per_second") for part in parts))
        figures = measured.get(self.part) or {}
        value, cached = number(figures.get(self.key)), number(figures.get(f"cached_{self.key}"))
        if value is None or cached is None:
            return value
        return min(value, cached) if self.more else max(value, cached)

    def show(self, value: float | None) -> str:
        return BY_UNIT[self.unit](value)


METRICS = {
    metric.name: metric
    for metric in (
        Metric("size", "after", "disk_bytes", "bytes"),
        Metric("folder_size", "after", "folder_bytes", "bytes"),
        Metric("memory", "after", "memory_bytes", "bytes"),
        Metric("peak_rss", "after", "peak_rss_bytes", "bytes"),
        Metric("load_seconds", "after", "load_seconds", "seconds"),
        Metric("compression", "divergence", "compression", "ratio", more=True),
        Metric("mean_kl", "divergence", "mean_kl", "nats"),
        Metric("median_kl", "divergence", "median_kl", "nats"),
        Metric("p99_kl", "divergence", "p99_kl", "nats"),
        Metric("max_kl", "divergence", "max_kl", "nats"),
        Metric("top1_agreement", "divergence", "top1_agreement", "share", more=True),
        Metric("perplexity", "after", "perplexity", "plain"),
        Metric("perplexity_increase", "divergence", "perplexity_increase", "rise"),
        Metric("decode_speedup", "divergence", "decode_speedup", "ratio", more=True, speed=True),
        Metric("prefill_speedup", "divergence", "prefill_speedup", "ratio", more=True, speed=True),
        Metric("decode_tokens_per_second", "after", "decode_tokens_per_second", "plain", more=True, speed=True),
        Metric("prefill_tokens_per_second", "after", "prefill_tokens_per_second", "plain", more=True, speed=True),
    )
}


def figures(measured: dict[str, Any]) -> dict[str, float]:
    """Every figure that was measured, by name."""
    found = {name: metric.of(measured) for name, metric in METRICS.items()}
    return {name: value for name, value in found.items() if value is not None}
