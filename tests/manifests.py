"""Manifests as `llmopt optimize` writes them, made up: for tests of what is drawn from them."""

from __future__ import annotations

from typing import Any

KINDS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
PROMPT, SAME, OTHER = "The capital", " of France is", " of Spain is"


def layer_lines(layers: int) -> list[dict[str, Any]]:
    """One record a module, as the quantize pass writes them; errors rise with the layer."""
    return [
        {
            "name": f"model.layers.{layer}.{kind}",
            "method": "gptq",
            "format": "pack-quantized",
            "bits": 5 if kind.endswith(("v_proj", "down_proj")) else 4,
            "group_size": 64,
            "symmetric": True,
            "bytes": 176272,
            "scale_min": 0.0205078125,
            "scale_max": 0.6484375,
            "error": 1e-4 * (layer + 1) * (place + 1),
            "error_rtn": 3e-4 * (layer + 1) * (place + 1),
            "weighted": True,
            "damping": 0.01,
            "dead_columns": 0,
            "seconds": 0.0633,
            "tokens": 32768,
        }
        for layer in range(layers)
        for place, kind in enumerate(KINDS)
    ]


def timeline(samples: int = 300) -> dict[str, Any]:
    times = [round(0.25 * place, 3) for place in range(samples)]
    end = times[-1]
    return {
        "interval": 0.25,
        "times": times,
        "rss": [(200 + place) * 2**20 for place in range(samples)],
        "children": [0 if time < end / 2 else 500 * 2**20 for time in times],
        "device": [0] * samples,
        "stages": [
            {"name": "load", "start": 0.0, "end": end / 4},
            {"name": "quantize", "start": end / 4, "end": end / 2},
            {"name": "prove", "start": end / 2, "end": end},
        ],
    }


def manifest(layers: int = 2, **changes: Any) -> dict[str, Any]:
    """A whole manifest with every part that a report shows; `changes` replace keys of the top level."""
    before = {"disk_bytes": 2 * 10**8, "memory_bytes": 2 * 10**8, "perplexity": 30.0, "evaluated_tokens": 128,
              "decode_tokens_per_second": 100.0, "prefill_tokens_per_second": 1000.0, "foreign_cpu": 0.01,
              "peak_rss_bytes": 10**9}  # fmt: skip
    after = {**before, "disk_bytes": 10**8, "perplexity": 33.0, "decode_tokens_per_second": 150.0,
             "prefill_tokens_per_second": 900.0}  # fmt: skip
    divergence = {"mean_kl": 0.05, "median_kl": 0.02, "p99_kl": 0.6, "max_kl": 2.0, "top1_agreement": 0.9,
                  "num_tokens": 128, "perplexity_increase": 0.1, "compression": 2.0, "decode_speedup": 1.5}  # fmt: skip
    sample = {"prompt": PROMPT, "finish_reason": "length", "token_ends": [3, 10, 13]}
    mine = {**sample, "text": SAME, "token_ids": [5, 6, 7]}
    theirs = {**sample, "text": OTHER, "token_ids": [5, 8, 7], "token_ends": [3, 9, 12]}
    data: dict[str, Any] = {
        "schema_version": 1,
        "llmopt_version": "0.1.0",
        "created": "2026-01-02T03:04:05Z",
        "source": {"id": "org/tiny", "kind": "hub", "sha256": "a" * 64, "revision": "main", "license": "apache-2.0"},
        "seed": 7,
        "recipe": {
            "name": "int4-test",
            "evaluate": {"text": "default", "windows": 2, "window_length": 65, "prompts": [PROMPT]},
            "passes": [{"quantize": {"bits": 4}}],
        },
        "calibration": {"text": "default", "num_tokens": 4096},
        "passes": [
            {
                "name": "quantize",
                "config": {"bits": 4},
                "code_sha256": "b" * 64,
                "seconds": 12.5,
                "cached": False,
                "summary": "14 linear layers to gptq W4",
                "details": {},
                "layers": layer_lines(layers),
            }
        ],
        "exporter": {"name": "huggingface", "format": "pack-quantized"},
        "runtime": {},
        "measured": {"before": before, "after": after, "divergence": divergence},
        "certificate": {
            "device": "cpu",
            "dtype": "bfloat16",
            "backend": "native",
            "notes": [{"stage": "load", "kind": "fallback", "message": "no compiled kernel: torch is used"}],
            "environment": {"machine": "x86_64", "threads": 2},
            "samples": [mine],
            "source_samples": [theirs],
            "kl_histogram": {"edges": [0.0, 1e-3, 1e-2, 0.1, 1.0], "counts": [8, 40, 60, 18, 2]},
        },
        "gates": [
            {"name": "max_mean_kl", "limit": 0.1, "value": 0.05, "passed": True},
            {"name": "min_top1_agreement", "limit": 0.95, "value": 0.9, "passed": False},
        ],
        "notes": [{"stage": "flash_attention", "kind": "fallback", "message": "flash_attn was passed over"}],
        "timeline": timeline(),
        "environment": {"python": "3.11.7", "torch": "2.13.0", "platform": "Linux x86_64"},
        "files": {"config.json": "c" * 64, "model.safetensors": "d" * 64},
    }
    return {**data, **changes}
