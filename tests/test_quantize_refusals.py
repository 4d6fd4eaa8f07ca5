"""What the quantize pass refuses: empty calibration, damaged weights and activations, results other than planned."""

from __future__ import annotations

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
