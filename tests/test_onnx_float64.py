"""The proof's reference: float64 from end to end, whatever dtype the model's parts ask for by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from llmopt.exporters.onnx.float64 import Float64, float64_logits
from llmopt.exporters.onnx.gate import Reference, write_reference
from llmopt.tests.onnx_models import FAMILIES, save_family
from torch.utils._python_dispatch import TorchDispatchMode

VIEWS = {"aten::t", "aten::split.Tensor", "aten::slice.Tensor", "aten::detach", "aten::alias", "aten::view"}
TEXT = list(range(20, 60))


class Computed(TorchDispatchMode):
    """Counts the operators, and collects the names of those that make new float32 tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.narrow = 0, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, (list, tuple)) else [out]
        self.count += 1
        if any(isinstance(one, torch.Tensor) and one.dtype == torch.float32 for one in made):
            self.narrow.add(func.name())
        return out


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    import transformers

    base, made = tmp_path_factory.mktemp("float64"), {}

    def get(name: str) -> Any:
        if name not in made:
            folder = save_family(name, base / name)
            made[name] = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        return made[name]

    return get


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_is_computed_in_float32(name, models):
    module = models(name)
    with Computed() as plain, torch.inference_mode():
        narrow = module(torch.tensor([TEXT]), use_cache=False).logits[0].numpy()
    with Computed() as wide:
        found = float64_logits(module, TEXT, np.arange(len(TEXT)))
    assert found.dtype == np.float64 and wide.count > 50 and not wide.narrow - VIEWS - {"aten::embedding"}
    assert plain.narrow - VIEWS - {"aten::embedding"}
    assert 0 < np.abs(found - narrow).max() < 1e-5


def test_some_positions_are_those_of_all(models):
    module, kept = models("gemma2"), np.array([0, 7, 39])
    some, whole = float64_logits(module, TEXT, kept), float64_logits(module, TEXT, np.arange(len(TEXT)))
    assert np.abs(some - whole[kept]).max() < 1e-12


def test_a_weight_in_parts(models, monkeypatch):
    module = models("llama")
    whole = float64_logits(module, TEXT, np.arange(4))
    monkeypatch.setattr("llmopt.exporters.onnx.float64.ELEMENTS", 64 * 7)
    assert np.abs(float64_logits(module, TEXT, np.arange(4)) - whole).max() < 1e-12


def test_parameters_and_modes_stay(models):
    module = models("llama")
    float64_logits(module, TEXT, np.arange(4))
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert torch.ones(2, dtype=torch.float32).dtype == torch.float32
    with Float64():
        assert torch.ones(2, dtype=torch.float32).dtype == torch.float64


def test_reference(models, tmp_path):
    """The tokens are torch's greedy ones; the logits lie as far from torch's own as it says."""
    module = models("qwen3")
    found = write_reference(module, [TEXT[:5], TEXT], 4, tmp_path / "reference.npz")
    held = np.load(tmp_path / "reference.npz")
    tokens = list(TEXT)
    for _ in range(4):
        with torch.inference_mode():
            own = module(torch.tensor([tokens])).logits[0]
        tokens.append(int(own[-1].argmax()))
    assert held["tokens_1"].tolist() == tokens[40:]
    assert [held[f"prefill_{n}"].shape[0] for n in (0, 1)] == [5, 40] and held["steps_1"].shape[0] == 4
    difference = np.abs(held["prefill_1"] - own.numpy()[:40]).max()
    assert 0 < difference <= found.torch_difference + 1e-6 < 1e-5
    assert np.array_equal(held["steps_1"][0], held["prefill_1"][-1])


def test_tolerance():
    assert Reference(40.0, 2e-5).tolerance == 1e-4
    assert Reference(40.0, 3e-4).tolerance == pytest.approx(1.2e-3)
    assert Reference(40.0, 0.5).tolerance == pytest.approx(0.04)  # a reference that is wrong opens no door
