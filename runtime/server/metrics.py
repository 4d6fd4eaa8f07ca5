"""`/metrics`: vLLM's metric names under the prefix `llmopt:`, and the server's own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .totals import PER_POSITION, Totals

if TYPE_CHECKING:
    from ..engine.outputs import RequestOutput
    from .bridge import TokenStream
    from .host import Host

PREFIX = "llmopt:"
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
PER_TOKEN = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.015,
    0.02,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
)
WHOLE = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request's arrival in the engine to its first token.", FIRST_TOKEN),
    "inter_token_latency_seconds": ("Between outputs of a sequence; with drafts one holds several tokens.", PER_TOKEN),
    "request_time_per_output_token_seconds": (
        "Of a sequence: from first token to end, by tokens after the first.",
        PER_TOKEN,
    ),
    "e2e_request_latency_seconds": ("From arrival to end.", WHOLE),
    "request_queue_time_seconds": ("From arrival to the first step.", WHOLE),
    "request_prefill_time_seconds": ("From the first step to the first token.", WHOLE),
    "request_decode_time_seconds": ("From the first token to the end.", WHOLE),
    "request_inference_time_seconds": ("From the first step to the end.", WHOLE),
    "request_prompt_tokens": ("Prompt tokens of a sequence.", COUNTS),
    "request_generation_tokens": ("New tokens of a sequence.", COUNTS),
}


class ServerMetrics:
    """Everything that `/metrics` says. Histograms are filled by the event loop, engine counters are read on demand."""

    def __init__(self, host: Host, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._histograms = {
            name: Histogram(PREFIX + name, text, ["model_name"], buckets=buckets, registry=self.registry).labels(
                model_name
            )
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self._rejected = Counter(
            f"{PREFIX}request_rejected", "Requests that got an error, by reason.", ["reason"], registry=self.registry
        )
        self._answers = Counter(
            f"{PREFIX}http_requests", "Answered HTTP requests.", ["path", "status"], registry=self.registry
        )
        self.registry.register(EngineCollector(host, model_name))
        ProcessCollector(registry=self.registry)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)

    def rejected(self, reason: str) -> None:
        self._rejected.labels(reason).inc()

    def answered(self, path: str, status: int) -> None:
        self._answers.labels(path, str(status)).inc()

    def observe_gaps(self, stream: TokenStream) -> None:
        gaps, stream.gaps = stream.gaps, []
        histogram = self._histograms["inter_token_latency_seconds"]
        for gap in gaps:
            histogram.observe(gap)

    def observe_end(self, output: RequestOutput) -> None:
        """Book a sequence's times. Those of moments that never came are left out."""
        times = output.times
        if times is None or times.finish is None:
            return
        count = output.num_output_tokens
        spans = {
            "time_to_first_token_seconds": (times.arrival, times.first_token),
            "e2e_request_latency_seconds": (times.arrival, times.finish),
            "request_queue_time_seconds": (times.arrival, times.first_scheduled),
            "request_prefill_time_seconds": (times.first_scheduled, times.first_token),
            "request_decode_time_seconds": (times.first_token, times.finish),
            "request_inference_time_seconds": (times.first_scheduled, times.finish),
        }
        for name, (start, end) in spans.items():
            if start is not None and end is not None:
                self._histograms[name].observe(end - start)
        if times.first_token is not None and count > 1:
            each = (times.finish - times.first_token) / (count - 1)
            self._histograms["request_time_per_output_token_seconds"].observe(each)
        self._histograms["request_prompt_tokens"].observe(output.num_prompt_tokens)
        self._histograms["request_generation_tokens"].observe(count)


class EngineCollector(Collector):
    """Reads the engines' own counters at each scrape."""

    def __init__(self, host: Host, model_name: str) -> None:
        self._host, self._model_name = host, model_name

    def collect(self) -> Iterator[Metric]:
        host, snapshots = self._host, [model.loop.engine.metrics() for model in self._host.models]
        totals = host.totals.copy()
        for snapshot in snapshots:
            totals.add(snapshot)
        current = snapshots[0] if host.model is not None and snapshots else None
        pools = [model.loop.engine.scheduler.pool for model in host.models]
        yield self._gauge(
            "num_requests_running", "In the engine's batch.", sum(s.num_requests_running for s in snapshots)
        )
        waiting = host.turns.num_waiting + host.queue.num_waiting + sum(s.num_requests_waiting for s in snapshots)
        yield self._gauge("num_requests_waiting", "Waiting, before the engine and in it.", waiting)
        usage = current.kv_cache_usage_perc if current is not None else 0.0
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks that requests hold, 0 … 1.", usage)
        yield self._gauge("kv_blocks_total", "KV blocks.", sum(pool.num_blocks for pool in pools))
        yield self._gauge("kv_blocks_free", "KV blocks that no request holds.", sum(pool.num_free for pool in pools))
        rate = current.generation_tokens_per_second if current is not None else 0.0
        yield self._gauge("generation_tokens_per_second", "Over the last ten seconds.", rate)
        yield self._gauge("healthy", "1 while the engine works.", float(host.healthy))
        yield self._gauge("engine_models", "Loaded models: more than one while a reload drains the old.", len(pools))
        yield self._gauge("server_tasks", "Tasks of the event loop.", _tasks())
        yield self._counter("sequences_accepted", "Sequences that the engine took.", host.accepted)
        yield self._counter("sequences_ended", "Ends of sequences that it reported: one each.", host.ended)
        yield self._counter("engine_restarts", "Restarts after a crash.", host.restarts)
        yield from self._totals(totals)

    def _totals(self, totals: Totals) -> Iterator[Metric]:
        for name, value in totals.counters.items():
            base = name.removesuffix("_total").removeprefix("steps")
            yield self._counter(base or "engine_steps", "A counter of the engine.", value)
        for name in PER_POSITION:
            family = CounterMetricFamily(
                PREFIX + name.removesuffix("_total"), "By position in the draft.", labels=["model_name", "position"]
            )
            for position, value in enumerate(totals.positions[name]):
                family.add_metric([self._model_name, str(position)], value)
            yield family
        ends = CounterMetricFamily(
            f"{PREFIX}request_success", "Ended sequences.", labels=["model_name", "finished_reason"]
        )
        for reason, count in sorted(totals.finished.items()):
            ends.add_metric([self._model_name, reason], count)
        yield ends

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family


def _tasks() -> int:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:  # read from outside the event loop
        return 0
