"""Tiny random models of the families that are written as GGUF, with a tokenizer of the kind that each has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .conftest import ROOT, build_tokenizer
from .tiny_families import llama3_rope, make_family

VOCAB = 640
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.3,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 256,
    "short_factor": [1.0 + i / 10 for i in range(8)], "long_factor": [2.0 + i / 5 for i in range(8)],
}  # fmt: skip
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "llama": ({"rope_parameters": llama3_rope(8.0), "tie_word_embeddings": True}, "bpe"),
    "mistral": ({"sliding_window": None}, "spm"),
    "qwen2": ({"tie_word_embeddings": True}, "bpe"),
    "qwen3": ({}, "bpe"),
    "gemma2": ({"sliding_window": 32, "query_pre_attn_scalar": 16}, "gemma"),
    "gemma3": ({"sliding_window": 32, "query_pre_attn_scalar": 16, "num_hidden_layers": 6}, "gemma"),
    "phi3": (
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 256, "max_position_embeddings": 512},
        "spm",
    ),
}
"""Name → changes of the config, tokenizer."""


def spm_tokenizer(prefix: bool) -> Any:
    """A tokenizer as transformers makes it of a SentencePiece BPE. prefix: a text begins with a space."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("(?=▁)"), "isolated")
    lines = (ROOT / "data" / "calibration.txt").read_text(encoding="utf-8")[:30_000].replace(" ", "▁").split("\n")
    trained.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=VOCAB - 300, show_progress=False))
    import json

    state = json.loads(trained.to_str())["model"]
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *state["vocab"]]
    model = models.BPE(
        {piece: i for i, piece in enumerate(dict.fromkeys(pieces))},
        [tuple(pair) for pair in state["merges"]],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    space = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def save_family(name: str, folder: Path, dtype: str = "bfloat16", **changes: Any) -> Path:
    """A random model of the family, whose norms are not ones, saved with its tokenizer."""
    import torch

    own, kind = FAMILIES[name]
    model = make_family(name, 0, **{**COMMON, **own, **changes})
    with torch.no_grad():
        for key, value in model.named_parameters():
            if key.endswith(("norm.weight", ".bias")):
                value.normal_(0.0 if name.startswith("gemma") or key.endswith("bias") else 1.0, 0.1)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer = build_tokenizer(VOCAB - 8) if kind == "bpe" else spm_tokenizer(kind == "spm")
    tokenizer.save_pretrained(folder)
    return folder


def open_family(folder: Path, workdir: Path) -> tuple[Any, Any]:
    """The LoadedModel of a folder, and an exporter's context."""
    from llmopt.optimizer.export import export_context, open_finished
    from llmopt.optimizer.sources import describe, resolve

    source = resolve(folder)
    model, _ = open_finished(source)
    workdir.mkdir(exist_ok=True)
    return model, export_context(describe(source), model, "gguf", workdir)
