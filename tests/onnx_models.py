"""What the tests of the exporter `onnx` share: tiny models of each family, and an export without a manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from llmopt.exporters.onnx import OnnxExporter
from llmopt.optimizer.base import Context
from llmopt.optimizer.calibration import Calibration
from llmopt.optimizer.model import LoadedModel
from llmopt.optimizer.sources import describe, resolve
from llmopt.runtime.open import open_model
from llmopt.tests.conftest import build_tokenizer
from llmopt.tests.tiny_families import llama3_rope, make_family

SIZES: dict[str, Any] = {
    "vocab_size": 400,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
SLIDING = ["sliding_attention", "sliding_attention", "full_attention"]
TYPED_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": llama3_rope(4.0)},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"head_dim": 32},
    "mistral": {"sliding_window": 24},
    "gemma2": {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 20},
    "gemma3": {"head_dim": 32, "sliding_window": 24, "num_hidden_layers": 3, "layer_types": SLIDING}
    | {"rope_parameters": TYPED_ROPE},
    "phi3": {"hidden_size": 128, "sliding_window": 24}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "gpt2": {},
}
"""Windows are shorter than the gate's long prompt, so that they decide; phi3 rotates half of each head."""


def save_family(name: str, folder: Path, dtype: str = "float32", **changes: Any) -> Path:
    """A random model of that family with a real tokenizer, far enough from its initial weights to write varied text."""
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    gpt2 = {"vocab_size": 400, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
    module = make_family(name, 5, **{**(gpt2 if name == "gpt2" else SIZES), **FAMILIES[name], **ids, **changes})
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.06)
    module.to(getattr(torch, dtype)).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def open_loaded(folder: Path, work: Path) -> tuple[LoadedModel, Context]:
    """A finished folder as `llmopt export` opens it, and the exporter's context."""
    source = resolve(folder)
    opened = open_model(folder, "cpu")
    opened.module.generation_config = opened.generation_config
    model = LoadedModel(opened.module, opened.tokenizer, source, opened.runtime)
    work.mkdir(parents=True, exist_ok=True)
    return model, Context(describe(source), Calibration(opened.tokenizer, "default", 1, 2), 0, work)


def export(folder: Path, out: Path, **options: Any) -> tuple[dict[str, Any], Context]:
    """Export a model folder to `out`; the exporter's record and its context."""
    model, context = open_loaded(folder, out.with_name(f"{out.name}-work"))
    out.mkdir()
    return OnnxExporter(**{"gate_tokens": 8, **options}).export(model, out, context), context


def write_graph(folder: Path, out: Path, **options: Any) -> Path:
    """The graph of a model folder with what stands beside it, unproved: for tests of what runs it."""
    from unittest.mock import patch

    with patch("llmopt.exporters.onnx.gate.prove_graph", return_value={}):
        export(folder, out, **options)
    return out
