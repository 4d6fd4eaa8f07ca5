"""Quantized folders open packed, with every tensor as transformers would compute it, and in memory once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from llmopt.evaluation.memory import weight_bytes
from llmopt.optimizer.errors import RunError
from llmopt.runtime.open import open_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


def test_packed_logits_equal_transformers(packed_model: Path):
    opened = open_model(packed_model)
    kinds = {type(module).__name__ for module in opened.module.modules()}
    assert "PackedLinear" in kinds
    theirs = AutoModelForCausalLM.from_pretrained(packed_model).eval()
    ids = torch.arange(60)[None]
    with torch.inference_mode():
        assert torch.equal(opened.module(ids).logits, theirs(ids).logits)
    buffers = dict(theirs.named_buffers())
    assert dict(opened.module.named_buffers()).keys() == buffers.keys()
    for name, buffer in opened.module.named_buffers():
        assert torch.equal(buffer, buffers[name])


def test_nothing_is_left_on_the_meta_device_and_nothing_is_held_twice(packed_model: Path):
    module = open_model(packed_model).module
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert not any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])
    stored = sum(t.nbytes for t in load_file(packed_model / "model.safetensors").values())
    computed = sum(b.nbytes for b in module.buffers())
    assert weight_bytes(module) <= stored + computed + 4096


def test_another_dtype_is_honoured(packed_model: Path):
    wide, own = open_model(packed_model, dtype="float32").module, open_model(packed_model).module
    assert wide.dtype == torch.float32
    assert {p.dtype for p in wide.parameters() if p.is_floating_point()} == {torch.float32}
    ids = torch.arange(60)[None]
    with torch.inference_mode():
        a, b = wide(ids).logits, own(ids).logits
    assert a.dtype == torch.float32
    assert 0 < (a - b).abs().max() < 0.05 * b.float().std() + 0.05


def test_missing_and_unexpected_tensors_are_named(packed_model: Path, tmp_path: Path):
    for file in packed_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(packed_model / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight_scale"
    scale = tensors.pop(name)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RunError, match=f"lack {name}"):
        open_model(tmp_path)
    save_file({**tensors, name: scale, "model.stray": scale.clone()}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RunError, match=r"unknown tensors: model\.stray"):
        open_model(tmp_path)
    save_file({**tensors, name: scale[:3].clone()}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RunError, match=f"{name} has shape"):
        open_model(tmp_path)
