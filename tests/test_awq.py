"""AWQ: folds are exact and never wrong, scales have the least output error, and the pass does better by them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from llmopt.optimizer.errors import UsageError
from llmopt.passes.quantize import Quantize
from llmopt.passes.quantize.awq import activation_scales, output_error, search_exponent, search_scales
from llmopt.passes.quantize.folding import Fold, Folds, apply_fold, find_folds, shared_modules
from llmopt.runtime.decoder_blocks import capture, find_blocks
from llmopt.runtime.kernels.packed import QuantScheme
from llmopt.tests.runs import Tokens, quantize
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SMALL = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.1, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXTRA: dict[str, dict[str, object]] = {
    "gemma3_text": {"layer_types": ["full_attention"]},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 128},
    "mixtral": {"num_local_experts": 4},
}
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
LLAMA = {
    ATTENTION: "input_layernorm",
    ("o_proj",): "v_proj",
    MLP: "post_attention_layernorm",
    ("down_proj",): "up_proj",
}
SOURCES = {
    "llama": LLAMA,
    "qwen2": LLAMA,  # biases of query, key and value
    "qwen3": LLAMA,
    "gemma3_text": {**LLAMA, MLP: "pre_feedforward_layernorm"},  # norms multiply by 1 + weight
    "phi3": {
        ("qkv_proj",): "input_layernorm",
        ("o_proj",): "qkv_proj",
        ("gate_up_proj",): "post_attention_layernorm",
        ("down_proj",): "gate_up_proj",
    },
    "gpt_neox": {
        ("query_key_value",): "input_layernorm",
        ("dense",): "query_key_value",  # interleaved head by head
        ("dense_h_to_4h",): "post_attention_layernorm",
    },
    "opt": {
        ATTENTION: "self_attn_layer_norm",
        ("out_proj",): "v_proj",
        ("fc1",): "final_layer_norm",
        ("fc2",): "fc1",  # a ReLU lets positive scales pass
    },
    "cohere": {(*ATTENTION, *MLP): "input_layernorm", ("o_proj",): "v_proj", ("down_proj",): "up_proj"},
    "mixtral": {ATTENTION: "input_layernorm", ("o_proj",): "v_proj"},
    "olmo2": {("o_proj",): "v_proj", ("down_proj",): "up_proj"},
}
REFUSED = {"olmo2": {ATTENTION, MLP}, "gpt_neox": {("dense_4h_to_h",)}}


def make(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A random model whose norms and biases are no ones and zeros, with some large channels."""
    config = AutoConfig.for_model(kind, **{**SMALL, **EXTRA.get(kind, {}), **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
            if "norm" in name and len(parameter) == 64:
                parameter.data[3::16] += 8.0
    return model.to(dtype)


def block_runs(model: PreTrainedModel) -> list[tuple[nn.Module, Callable[[], torch.Tensor]]]:
    _, blocks = find_blocks(model)
    ids = torch.randint(3, 96, (1, 24), generator=torch.Generator().manual_seed(1))
    batch = capture(model, blocks, [ids])[0]

    def run(index: int, block: nn.Module) -> torch.Tensor:
        return batch.calls[index].run(block, batch.hidden).detach()

    return [(block, partial(run, index, block)) for index, block in enumerate(blocks)]


def leaves(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name.rpartition(".")[2] for name in names)


def random_scales(fold: Fold) -> torch.Tensor:
    return torch.exp(2 * torch.rand(len(fold.rows), generator=torch.Generator().manual_seed(2)) - 1)


def found(model: PreTrainedModel) -> Folds:
    block, run = block_runs(model)[0]
    with torch.no_grad():
        return find_folds(block, run)


@pytest.mark.parametrize("kind", SOURCES)
def test_folds_are_found_and_leave_the_block_as_it_was(kind: str) -> None:
    model = make(kind)
    for block, run in block_runs(model):
        with torch.no_grad():
            before, state = run(), {name: t.clone() for name, t in block.state_dict().items()}
            folds = find_folds(block, run)
            assert all(torch.equal(t, state[name]) for name, t in block.state_dict().items()), "a probe left a trace"
            assert {leaves(f.consumers): leaves((f.source,))[0] for f in folds.folds} == SOURCES[kind]
            assert {leaves(names) for names in folds.refused} == REFUSED.get(kind, set())
            for fold in folds.folds:
                scales = random_scales(fold)
                torch.testing.assert_close(apply_fold(block, fold, scales), scales)
        changed = {name for name, t in block.state_dict().items() if not torch.equal(t, state[name])}
        assert {f"{name}.weight" for fold in folds.folds for name in (fold.source, *fold.consumers)} <= changed
        torch.testing.assert_close(run(), before, rtol=1e-4, atol=1e-5 * float(before.abs().max()))


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_rounding_a_folded_norm_to_bfloat16_costs_nothing(kind: str) -> None:
    """The scales that `apply_fold` returns are those of the rounded norm: its output times them is as it was."""
    model = make(kind, torch.bfloat16)
    block, run = block_runs(model)[0]
    with torch.no_grad():
        fold = find_folds(block, run).folds[0]
        norm, x = block.get_submodule(fold.source), torch.randn(8, 64)
        before = norm.float()(x)
        norm.bfloat16()
        scales = apply_fold(block, fold, random_scales(fold))
        torch.testing.assert_close(norm.float()(x) * scales, before, rtol=1e-5, atol=1e-6)


def test_a_channel_that_is_always_zero_is_left_alone() -> None:
    model = make("llama")
    block, run = block_runs(model)[0]
    block.input_layernorm.weight.data[5] = 0.0
    with torch.no_grad():
        before, fold = run(), find_folds(block, run).folds[0]
        scales = apply_fold(block, fold, torch.full((64,), 3.0))
        assert float(scales[5]) == 1.0 and float(scales[6]) == pytest.approx(3.0)
        torch.testing.assert_close(run(), before, rtol=1e-4, atol=1e-4)


class Residual(nn.Module):
    """A block whose norm also feeds the residual, and whose layer counts as one consumer of it only."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        return normed + self.down(torch.relu(self.up(normed)))


def test_a_norm_that_also_feeds_the_residual_is_refused() -> None:
    torch.manual_seed(0)
    block, x = Residual(), torch.randn(4, 16)
    with torch.no_grad():
        folds = find_folds(block, lambda: block(x))
    assert [fold.source for fold in folds.folds] == ["up"]
    assert list(folds.refused) == [("up",)] and "move out of norm" in folds.refused["up",]


def test_weights_used_elsewhere_are_no_sources() -> None:
    model = make("llama", num_hidden_layers=2)
    model.model.norm.weight = model.model.layers[0].input_layernorm.weight
    block, run = block_runs(model)[0]
    shared = shared_modules(model, "model.layers.0")
    assert shared == {"input_layernorm"} and not shared_modules(model, "model.layers.1")
    with torch.no_grad():
        folds = find_folds(block, run, shared)
    assert "input_layernorm" not in {fold.source for fold in folds.folds}
    assert "used elsewhere" in folds.refused["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]


def test_values_that_later_blocks_read_are_no_sources() -> None:
    model = make("llama")
    model.config.num_kv_shared_layers = 1
    assert "self_attn.v_proj" in shared_modules(model, "model.layers.0")
    assert "mlp.up_proj" not in shared_modules(model, "model.layers.0")


def inputs_with_outliers(rows: int = 400, columns: int = 64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(rows, columns, generator=generator)
    x[:, ::16] *= 20.0
    return x


def test_scales_lower_the_output_error_as_computed_from_outputs() -> None:
    """The loss of the search is the squared error of outputs in float64, and its choice is the best of the grid."""
    x, weight = inputs_with_outliers(), torch.randn(48, 64, generator=torch.Generator().manual_seed(5))
    hessian, magnitude, every, scheme = x.t() @ x / len(x), x.abs().mean(0), torch.arange(64), QuantScheme(4, 32)

    def reference(exponent: float) -> float:
        scales = magnitude**exponent
        scales /= (scales.max() * scales.min()).sqrt()
        groups = (weight * scales).view(48, 2, 32)
        step = groups.abs().amax(-1, keepdim=True) / 7.5
        rounded = ((groups / step).round().clamp(-8, 7) * step).view(48, 64) / scales
        return float(((x.double() @ (rounded - weight).double().t()) ** 2).sum() / len(x))

    losses = {i / 10: reference(i / 10) for i in range(11)}
    for exponent, expected in losses.items():
        columns = activation_scales(magnitude, exponent)
        assert output_error([(weight, scheme)], hessian, columns, torch.float32) == pytest.approx(expected, rel=1e-3)
    choice = search_scales([(weight, scheme)], hessian, magnitude, every, torch.float32, steps=10)
    assert choice.exponent == min(losses, key=losses.__getitem__) > 0
    assert choice.error < 0.6 * choice.error_unscaled
    torch.testing.assert_close(choice.scales, activation_scales(magnitude, choice.exponent))


def test_scales_stay_one_where_activations_are_alike() -> None:
    x = torch.randn(400, 64, generator=torch.Generator().manual_seed(6)).sign()
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(7))
    choice = search_scales(
        [(weight, QuantScheme(4, 32))], x.t() @ x / len(x), x.abs().mean(0), torch.arange(64), torch.float32
    )
    torch.testing.assert_close(choice.scales, torch.ones(64))
    assert choice.error == pytest.approx(choice.error_unscaled)


@pytest.mark.parametrize("best", [0, 7, 20])
def test_the_exponent_search_finds_the_least_of_a_smooth_loss(best: int) -> None:
    tried: list[float] = []

    def loss(exponent: float) -> float:
        tried.append(exponent)
        return (exponent - best / 20) ** 2

    exponent, least, unscaled = search_exponent(loss, 20)
    assert exponent == best / 20 and least < 1e-12 and unscaled == pytest.approx((best / 20) ** 2)
    assert len(tried) == len(set(tried)) <= 13


def test_scales_of_shared_values_are_those_of_all_heads_that_read_them() -> None:
    fold = next(fold for fold in found(make("llama")).folds if fold.source == "self_attn.v_proj")
    assert torch.equal(fold.columns(torch.arange(32))[:40], torch.tensor([*range(16), *range(16), *range(16, 24)]))
    pooled = fold.pool(torch.arange(64.0))
    assert float(pooled[0]) == (0 + 16) / 2 and float(pooled[16]) == (32 + 48) / 2


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.cat(Tokens().batches()[:2])).logits.detach()


def distance(model: PreTrainedModel, reference: torch.Tensor) -> float:
    return float((logits(model) - reference).norm() / reference.norm())


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_the_pass_is_closer_than_rounding_to_nearest(kind: str) -> None:
    reference = logits(make(kind))
    errors = {}
    for method in ("rtn", "awq"):
        model = make(kind)
        report = quantize(model, method=method, bits=4, group_size=32, scale_steps=8)
        errors[method] = distance(model, reference)
    assert errors["awq"] < 0.8 * errors["rtn"]
    first = report.layers[0]
    assert first["scaled_by"] == "input_layernorm" and 0 < first["exponent"] <= 1
    assert first["error_scaled"] < first["error_unscaled"]
    assert all("scaled_by" in line for line in report.layers)


OPTIONS: list[dict[str, object]] = [
    {},
    {"true_sequential": True, "rounding": "gptq"},
    {"match_original": 0.2, "rounding": "gptq"},
    {"ignore": ["*.q_proj", "*.up_proj"]},  # layers that are scaled, but not quantized
    {"overrides": {"*.v_proj": {"method": "rtn"}, "*.down_proj": {"method": "gptq"}}},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_many_bits_give_back_the_model_whatever_is_scaled(options: dict[str, object]) -> None:
    reference, model, nearest = logits(make("llama")), make("llama"), make("llama")
    quantize(nearest, method="rtn", bits=8, group_size=8)
    quantize(model, **{"method": "awq", "bits": 8, "group_size": 8, "scale_steps": 4, **options})
    assert 0 < distance(model, reference) < 1.5 * distance(nearest, reference) < 0.1


def test_layers_that_cannot_be_scaled_say_why() -> None:
    report = quantize(make("olmo2"), method="awq", group_size=32)
    lines = {line["name"]: line for line in report.layers}
    assert "hands its output straight" in lines["model.layers.0.self_attn.q_proj"]["unscaled"]
    assert lines["model.layers.0.mlp.down_proj"]["scaled_by"] == "mlp.up_proj"


def test_int8_activations_are_refused() -> None:
    with pytest.raises(UsageError, match="smoothquant"):
        Quantize(method="awq", activations="int8")
