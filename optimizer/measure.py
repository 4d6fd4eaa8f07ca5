"""Figures of source and artifact, side by side in the manifest's `measured`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..evaluation.cached import cached_figures
from ..evaluation.perplexity import Perplexity
from ..evaluation.proof import prove
from ..evaluation.proof_streamed import too_large
from ..runtime.weight_files import weight_files
from .files import folder_bytes
from .model import ModelInfo
from .recipe import Recipe


def source_figures(info: ModelInfo, memory_bytes: int, perplexity: Perplexity) -> dict[str, Any]:
    """The source's figures that are known before the passes; its speed is measured later, beside the artifact's."""
    return {
        "disk_bytes": info.weight_bytes,
        "memory_bytes": memory_bytes,
        "perplexity": perplexity.perplexity,
        "evaluated_tokens": perplexity.num_tokens,
    }


def prove_and_compare(
    before: dict[str, Any],
    info: ModelInfo,
    artifact: Path,
    reference: Path,
    recipe: Recipe,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reopen the artifact in a fresh process, then the source for its speed; returns (`measured`, `certificate`).

    `measured` has `before` and `after` (disk_bytes of the weight files, memory_bytes, perplexity, tokens a second) and
    `divergence` (KL in nats, top-1 agreement, and the ratios that gates limit; with a quantized KV cache also what half
    of each window costs when it is read from it, under names with `cached_`). `certificate` has what the artifact's
    process saw, a histogram of the KL, and where speed was measured what the source answered. Raises RunError where the
    artifact does not open or answer.
    """
    settings: dict[str, Any] = {
        **recipe.evaluate.model_dump(),
        "trust_remote_code": info.trust_remote_code,
        "max_memory": recipe.max_memory,
    }
    proof = prove(artifact, reference, settings)
    after = {
        "disk_bytes": sum(file.stat().st_size for file in weight_files(artifact)),
        "folder_bytes": folder_bytes(artifact),
        "memory_bytes": proof["memory"]["weight_bytes"],
        "peak_rss_bytes": proof["memory"]["peak_rss"],
        "load_seconds": proof["load_seconds"],
        "perplexity": proof["perplexity"]["perplexity"],
    }
    certificate = dict(proof["certificate"])
    if proof.get("histogram") is not None:
        certificate["kl_histogram"] = proof["histogram"]
    before = dict(before)
    timed = proof["speed"] is not None and not too_large(info.source.folder, recipe.max_memory)
    if timed:
        source = prove(
            info.source.folder,
            None,
            {
                **settings,
                "dtype": recipe.dtype,
                "device": proof["certificate"]["device"],
            },
        )
        before.update(_speed(source))
        before["peak_rss_bytes"] = source["memory"]["peak_rss"]
        certificate["source_samples"] = source["certificate"]["samples"]
        after.update(_speed(proof))
    divergence = {
        **proof["divergence"],
        "perplexity_increase": after["perplexity"] / before["perplexity"] - 1,
        "compression": before["disk_bytes"] / after["disk_bytes"],
    }
    if proof.get("cached") is not None:
        divergence.update(cached_figures(proof["cached"]))
    if timed:
        divergence["decode_speedup"] = after["decode_tokens_per_second"] / before["decode_tokens_per_second"]
    return {"before": before, "after": after, "divergence": divergence}, certificate


def _speed(proof: dict[str, Any]) -> dict[str, Any]:
    speed = proof["speed"]
    return {
        "decode_tokens_per_second": speed["decode"],
        "prefill_tokens_per_second": speed["prefill"],
        "foreign_cpu": speed["foreign_cpu"],
    }
