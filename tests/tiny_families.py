"""Tiny random models of the decoder families that exporters write, by name."""

from __future__ import annotations

from typing import Any

PREFIXES = {
    "llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral", "gemma2": "Gemma2", "gemma3": "Gemma3",
    "phi3": "Phi3", "gpt2": "GPT2",
}  # fmt: skip
"""Name → prefix of transformers' classes."""


def llama3_rope(factor: float) -> dict[str, Any]:
    """Rotary embeddings by Llama 3's rule, stretched from 64 positions."""
    frequencies = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    return {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": factor, **frequencies}


def make_family(name: str, seed: int, **config: Any) -> Any:
    """A causal language model of the family with random weights, float32."""
    import torch
    import transformers

    prefix = PREFIXES[name]
    made = getattr(transformers, f"{prefix}{'Text' if name == 'gemma3' else ''}Config")(**config)
    torch.manual_seed(seed)
    model = transformers.GPT2LMHeadModel if name == "gpt2" else getattr(transformers, f"{prefix}ForCausalLM")
    return model(made).eval()
