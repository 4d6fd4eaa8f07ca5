"""What the quantize pass refuses: empty calibration, damaged weights and activations, results other than planned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from llmopt.optimizer.base import Context
from llmopt.optimizer.errors import RunError
from llmopt.optimizer.events import Event
from llmopt.optimizer.model import LoadedModel, ModelInfo, SourceIdentity, TensorInfo
from llmopt.passes.quantize import Quantize
from transformers import LlamaConfig, LlamaForCausalLM

SOURCE = SourceIdentity("tiny", "folder", Path("."), "0" * 64)


class Tokens:
    """Random calibration: `sequences` of 32 tokens."""

    def __init__(self, sequences: int = 8) -> None:
        generator = torch.Generator().manual_seed(0)
        self._batches = [torch.randint(3, 96, (1, 32), generator=generator) for _ in range(sequences)]

    def batches(self) -> list[torch.Tensor]:
        return self._batches


def make() -> tuple[LoadedModel, ModelInfo]:
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.1, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    module = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    tensors = {
        name: TensorInfo(tuple(t.shape), "BF16", t.nbytes, "model.safetensors")
        for name, t in module.state_dict().items()
    }
    return LoadedModel(module, None, SOURCE), ModelInfo(SOURCE, config, tensors)


def context(info: ModelInfo, calibration: object = None, events: list[Event] | None = None) -> Context:
    listener = events.append if events is not None else (lambda event: None)
    return Context(info, calibration or Tokens(), 0, Path("."), "quantize", listener)


def test_an_empty_calibration_is_an_error() -> None:
    model, info = make()
    with pytest.raises(RunError, match="no tokens"):
        Quantize(method="gptq", group_size=32).run(model, context(info, Tokens(0)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_a_damaged_weight_is_named(method: str, value: float) -> None:
    model, info = make()
    name = "model.layers.1.mlp.up_proj"
    model.module.get_submodule(name).weight.data[3, 5] = value
    with pytest.raises(RunError, match="NaN or infinite") as caught:
        Quantize(method=method, group_size=32).run(model, context(info))
    assert caught.value.where == name


def test_damaged_activations_name_the_module_that_received_them() -> None:
    model, info = make()
    model.module.model.layers[1].post_attention_layernorm.weight.data[0] = float("nan")
    with pytest.raises(RunError, match="inputs have NaN") as caught:
        Quantize(method="gptq", group_size=32).run(model, context(info))
    assert "model.layers.1.mlp.gate_proj" in caught.value.where


@pytest.mark.parametrize("options", [{"method": "fp8"}, {"method": "gptq", "bits": 8, "group_size": 32}])
def test_a_quantized_weight_that_overflows_names_its_layer(options: dict) -> None:
    """65504 is float16's largest number, and 448 times the scale that maps it to 448 is more."""
    model, info = make()
    model.module.to(torch.float16)
    info.tensors = {name: replace(tensor, dtype="F16") for name, tensor in info.tensors.items()}
    name = "model.layers.1.mlp.down_proj"
    model.module.get_submodule(name).weight.data[3, 5:7] = torch.tensor([65504.0, -65504.0])
    with pytest.raises(RunError, match="float16 does not hold") as caught:
        Quantize(**options).run(model, context(info))
    assert caught.value.where == name


@pytest.mark.parametrize("options", [{"method": "rtn"}, {"method": "rtn", "symmetric": False}, {"method": "hqq"}])
def test_the_reported_error_is_that_of_the_weight_that_is_computed_with(options: dict) -> None:
    model, info = make()
    before = {n: m.weight.detach().double() for n, m in model.module.named_modules() if isinstance(m, torch.nn.Linear)}
    found = Quantize(bits=8, group_size=32, **options).run(model, context(info))
    for line in found.layers:
        difference = model.module.get_submodule(line["name"]).weight.detach().double() - before[line["name"]]
        own = float(difference.square().sum() / before[line["name"]].square().sum())
        assert line["error"] == pytest.approx(own, rel=1e-5)


def test_tiny_and_huge_weights_have_an_error_too() -> None:
    for factor in (1e-30, 1e15):
        model, info = make()
        layer = model.module.get_submodule("model.layers.0.mlp.down_proj")
        layer.weight.data.mul_(factor)
        found = Quantize(method="rtn", bits=4, group_size=32).run(model, context(info))
        (line,) = [line for line in found.layers if line["name"] == "model.layers.0.mlp.down_proj"]
        assert 1e-3 < line["error"] < 1e-1


def test_a_scale_that_is_not_finite_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from llmopt.passes.quantize import rtn

    def overflow(*args: object) -> tuple[torch.Tensor, None]:
        scales, _ = original(*args)
        return scales * torch.inf, None

    original = rtn.minmax_grid
    monkeypatch.setattr(rtn, "minmax_grid", overflow)
    model, info = make()
    with pytest.raises(RunError, match="scale is not finite") as caught:
        Quantize(group_size=32, scale_search=0).run(model, context(info))
    assert caught.value.where == "model.layers.0.self_attn.q_proj"


def test_a_cancelled_run_stops_at_the_next_block() -> None:
    model, info = make()
    seen: list[Event] = []
    run = context(info, events=seen)
    run.cancelled = lambda: len(seen) == 1
    with pytest.raises(RunError, match="cancelled"):
        Quantize(method="gptq", group_size=32).run(model, run)
    assert len(seen) == 1


def test_a_result_that_differs_from_the_plan_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model, info = make()
    original = model.module.set_submodule

    def lose_one(name: str, module: torch.nn.Module) -> None:
        if not name.endswith("layers.1.mlp.up_proj"):
            original(name, module)

    monkeypatch.setattr(model.module, "set_submodule", lose_one)
    with pytest.raises(RunError, match="20 modules are packed, 21 were planned"):
        Quantize(group_size=32).run(model, context(info))


def test_layers_that_fall_back_are_rounded_where_groups_have_an_index_too() -> None:
    """`few_tokens: rtn` beside activation order without static groups, whose planned scheme has g_idx."""
    model, info = make()
    quantize = Quantize(method="gptq", group_size=32, static_groups=False, min_tokens=10**6, few_tokens="rtn")
    report = quantize.run(model, context(info))
    assert {(line["method"], line["g_idx"]) for line in report.layers} == {("rtn", True)}
    nearest, _ = make()
    Quantize(group_size=32).run(nearest, context(info))
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        assert torch.equal(model.module(ids).logits, nearest.module(ids).logits)
