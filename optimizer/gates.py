"""Gates: the recipe's limits against what was measured."""

from __future__ import annotations

import math
from typing import Any

from .manifest import GateRecord
from .recipe import Gates

MEASURES = {
    "max_perplexity_increase": ("divergence", "perplexity_increase"),
    "max_mean_kl": ("divergence", "mean_kl"),
    "min_top1_agreement": ("divergence", "top1_agreement"),
    "min_compression": ("divergence", "compression"),
    "min_decode_speedup": ("divergence", "decode_speedup"),
}


def judge(gates: Gates, measured: dict[str, Any]) -> list[GateRecord]:
    """One record a gate that the recipe sets. A figure that is absent or not finite fails its gate.

    With a quantized KV cache the worse of two figures counts: over whole windows, and over what reads the cache.
    """
    records = []
    for name, (group, key) in MEASURES.items():
        limit = getattr(gates, name)
        if limit is None:
            continue
        figures = measured.get(group, {})
        value, cached = figures.get(key), figures.get(f"cached_{key}")
        if value is not None and cached is not None and (cached > value) == name.startswith("max_"):
            value = cached
        if value is None or not math.isfinite(value):
            records.append(GateRecord(name=name, limit=limit, value=None, passed=False))
            continue
        holds = value <= limit if name.startswith("max_") else value >= limit
        records.append(GateRecord(name=name, limit=limit, value=value, passed=holds))
    return records


def describe(record: GateRecord) -> str:
    """`max_mean_kl: 0.153 exceeds 0.1`."""
    if record.value is None:
        return f"{record.name}: was not measured (limit {record.limit:.4g})"
    percent = record.name == "max_perplexity_increase"
    value, limit = (f"{x:.2%}" if percent else f"{x:.4g}" for x in (record.value, record.limit))
    if value == limit:
        value, limit = repr(record.value), repr(record.limit)
    verb = "exceeds" if record.name.startswith("max_") else "is below"
    return f"{record.name}: {value} {'holds' if record.passed else verb} {limit}"
