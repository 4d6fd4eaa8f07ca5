"""A fresh process proves an artifact; errors are attributed to the layers that make them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from llmopt.evaluation.attribution import attribute, attribute_error, units
from llmopt.evaluation.proof import ProofSettings, prove
from llmopt.evaluation.reference import write_reference
from llmopt.evaluation.texts import token_windows
from llmopt.optimizer.errors import RunError
from llmopt.runtime.llm import load
from llmopt.runtime.open import open_model
from safetensors.torch import load_file, save_file

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 20


@pytest.fixture(scope="module")
def reference(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    opened = open_model(tiny_model)
    path = tmp_path_factory.mktemp("reference") / "reference.safetensors"
    write_reference(opened.module, opened.tokenizer, token_windows(TEXT, opened.tokenizer, 64, 2), path)
    return path


def test_a_model_is_its_own_equal_in_a_fresh_process(tiny_model: Path, reference: Path):
    settings = ProofSettings(new_tokens=4, rounds=1, prompts=("Hello", "The sky"), engine="static")
    proof = prove(tiny_model, reference, settings)
    assert proof["divergence"]["mean_kl"] == 0.0
    assert proof["divergence"]["top1_agreement"] == 1.0
    assert proof["perplexity"]["num_tokens"] == 126
    assert proof["speed"]["decode"] > 0
    assert proof["memory"]["weight_bytes"] > 0
    assert proof["certificate"]["backend"] == "static"
    with load(tiny_model, engine="static") as llm:
        for sample in proof["certificate"]["samples"]:
            assert llm.generate(sample["prompt"], max_new_tokens=4).token_ids == sample["token_ids"]


def test_failures_come_back_as_one_line(tiny_model: Path, reference: Path, tmp_path: Path):
    copy = Path(shutil.copytree(tiny_model, tmp_path / "copy"))
    (copy / "model.safetensors").write_bytes(b"12345")
    with pytest.raises(RunError, match=r"fresh process failed: .*model\.safetensors: the file is not whole"):
        prove(copy, reference, {"speed": False})


def changed(folder: Path, out: Path, **noise: float) -> Path:
    """A copy whose named weights got noise of the given relative size."""
    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    for name, size in noise.items():
        tensor = tensors[name].float()
        tensors[name] = (tensor + size * tensor.std() * torch.randn(tensor.shape)).to(tensors[name].dtype)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def test_the_layer_that_was_damaged_is_named_first(tiny_model: Path, tmp_path: Path):
    torch.manual_seed(0)
    worst, slight = "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.q_proj"
    other = changed(tiny_model, tmp_path / "x", **{f"{worst}.weight": 2.0, f"{slight}.weight": 0.02})
    shares = attribute(tiny_model, other, TEXT, num_tokens=64)
    assert [name for name, _ in shares] == [worst, slight]
    assert shares[0][1] > 0.9
    assert sum(share for _, share in shares) == pytest.approx(1.0)


def test_what_lies_outside_the_blocks_counts_too(tiny_model: Path, tmp_path: Path):
    torch.manual_seed(0)
    other = changed(tiny_model, tmp_path / "x", **{"model.norm.weight": 0.0, "model.embed_tokens.weight": 0.3})
    names = [name for name, _ in attribute(tiny_model, other, TEXT, num_tokens=64)]
    assert set(names) == {"model.embed_tokens", "lm_head"}


def test_equal_models_have_nothing_to_attribute(tiny_model: Path):
    module = open_model(tiny_model).module
    assert list(units(module)) == ["model.layers.0", "model.layers.1", "model.embed_tokens", "model.norm", "lm_head"]
    assert attribute_error(module, open_model(tiny_model).module, torch.arange(32)) == []
