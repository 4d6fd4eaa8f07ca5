"""Rotations and folds on tiny random models of many architectures: exact in float32, or refused by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.optimizer.base import Context
from llmopt.optimizer.errors import RunError, UsageError
from llmopt.optimizer.model import LoadedModel, ModelInfo, SourceIdentity, TensorInfo
from llmopt.passes.quantize.rtn import quantize_rtn
from llmopt.passes.rotate import Rotate
from llmopt.passes.rotation.basis import Rotation
from llmopt.passes.rotation.edits import Edits
from llmopt.passes.rotation.hadamard import cosine, factors, is_hadamard, paley, sylvester
from llmopt.passes.rotation.norms import norm_form
from llmopt.runtime.kernels.packed import QuantScheme
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "initializer_range": 0.2, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 128,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
EXACT: dict[str, dict[str, object]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": {},
    "smollm3": {},
    "granite": {"residual_multiplier": 0.3, "embedding_multiplier": 5.0, "logits_scaling": 2.0},
    "gemma": {},
    "phi3": {"partial_rotary_factor": 0.5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
             "partial_rotary_factor": 0.5}},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {**MOE, "mlp_only_layers": [0]},
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 40},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "starcoder2": {"use_bias": True},
    "stablelm": {"use_qkv_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                 "partial_rotary_factor": 0.5}},
    "phi": {},
    "cohere": {},
    "nemotron": {},
    "olmo": {},
}  # fmt: skip
OUTPUT_NORMS = ["gemma2", "gemma3_text", "olmo2", "glm4", "exaone4"]
SOURCE = SourceIdentity("tiny", "folder", Path("."), "0" * 64)


def make(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[LoadedModel, ModelInfo]:
    config = AutoConfig.for_model(kind, **{**SMALL, **EXACT.get(kind, {}), **changes})
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim == 1:
                noise = torch.rand(parameter.shape, generator=generator)
                parameter.add_(noise - 0.5 if "norm" not in name or name.endswith("bias") else 0.6 * noise)
    module = module.to(dtype)
    tied = module.config.tie_word_embeddings
    tensors = {
        name: TensorInfo(tuple(t.shape), "F32", t.nbytes, "model.safetensors")
        for name, t in module.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    return LoadedModel(module, None, SOURCE), ModelInfo(SOURCE, module.config, tensors)  # type: ignore[arg-type]


def context(info: ModelInfo, seed: int = 0) -> Context:
    return Context(info, None, seed, Path("."), "rotate")  # type: ignore[arg-type]


def logits(model: LoadedModel) -> torch.Tensor:
    ids = torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return model.module(ids, use_cache=False).logits


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


# numerics


@pytest.mark.parametrize("order", [4, 12, 20, 28, 36, 60, 180, 200])
def test_paley_gives_hadamard_matrices_that_begin_with_ones(order: int) -> None:
    matrix = paley(order)
    assert matrix is not None and bool((matrix.abs() == 1).all()) and bool((matrix[0] == 1).all())
    assert torch.equal(matrix @ matrix.T, order * torch.eye(order, dtype=torch.float64))


def test_orders_that_paley_does_not_reach() -> None:
    assert all(paley(order) is None for order in (1, 2, 6, 52, 92, 100))


@pytest.mark.parametrize("size", [1, 3, 12, 64, 100, 576, 896, 1600, 2880, 4096])
def test_factors_are_orthogonal_with_a_constant_first_row(size: int) -> None:
    found = factors(size)
    assert math.prod(f.shape[0] for f in found) == size
    for factor in found:
        identity = torch.eye(len(factor), dtype=torch.float64)
        assert torch.allclose(factor @ factor.T, identity, atol=1e-12)
        assert torch.allclose(factor[0], torch.full_like(factor[0], 1 / math.sqrt(len(factor))), atol=1e-12)
    assert is_hadamard(size) == (size not in (3, 100))


@pytest.mark.parametrize("kind", ["randomized", "mean_preserving"])
@pytest.mark.parametrize("size", [48, 36, 15])
def test_a_rotation_is_applied_as_its_matrix_is(kind: str, size: int) -> None:
    rotation = getattr(Rotation, kind)(size, torch.Generator().manual_seed(3))
    product = torch.eye(1, dtype=torch.float64)
    for factor in factors(size):
        product = torch.kron(product, factor)
    if kind == "randomized":
        expected = torch.diag(rotation.signs) @ product
    else:
        permuted = torch.zeros(size, size, dtype=torch.float64)
        permuted[torch.arange(size), rotation.permutation] = rotation.signs
        expected = product.T @ permuted @ product
        ones = torch.ones(1, size, dtype=torch.float64)
        assert torch.allclose(rotation.apply(ones), ones, atol=1e-12)
    assert torch.allclose(rotation.matrix(), expected, atol=1e-12)
    assert torch.allclose(expected @ expected.T, torch.eye(size, dtype=torch.float64), atol=1e-12)
    weight = torch.randn(size, 7, dtype=torch.float64)
    assert torch.allclose(rotation.apply_outputs(weight), expected.T @ weight, atol=1e-12)


def test_sylvester_and_cosine() -> None:
    assert sylvester(4).tolist() == [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
    assert torch.allclose(cosine(7) @ cosine(7).T, torch.eye(7, dtype=torch.float64), atol=1e-12)


def test_edits_round_once() -> None:
    module = nn.Linear(8, 8, bias=False).to(torch.bfloat16)
    weight = module.weight.detach().double()
    edits, scale = Edits(), torch.rand(8, dtype=torch.float64) + 0.5
    rotation = Rotation.randomized(8, torch.Generator().manual_seed(0))
    edits.scale_inputs("weight", scale)
    edits.rotate_inputs("weight", rotation)
    edits.rotate_outputs("weight", rotation)
    edits.apply(module)
    q = rotation.matrix()
    assert torch.equal(module.weight.detach(), (q.T @ (weight * scale) @ q).to(torch.bfloat16))


def test_norm_forms_are_told_apart() -> None:
    layer = nn.LayerNorm(16)
    form = norm_form(layer)
    assert form is not None and form.centered and form.has_bias and form.offset == 0
    form = norm_form(nn.LayerNorm(16, elementwise_affine=False))
    assert form is not None and form.centered and not form.has_weight
    form = norm_form(nn.RMSNorm(16))
    assert form is not None and not form.centered and not form.has_bias
    gemma, _ = make("gemma")
    form = norm_form(gemma.module.model.norm)
    assert form is not None and form.offset == 1
    assert norm_form(nn.BatchNorm1d(16)) is None and norm_form(nn.Linear(16, 16)) is None


# the pass


@pytest.mark.parametrize("kind", EXACT)
def test_rotated_logits_are_the_same(kind: str) -> None:
    model, info = make(kind)
    before, weights = logits(model), {n: p.detach().clone() for n, p in model.module.named_parameters()}
    plan = Rotate().plan(info)
    assert plan.refusals == [] and plan.modules == []
    report = Rotate().run(model, context(info))
    assert relative(logits(model), before) < 1e-4
    for name, parameter in model.module.named_parameters():
        inner = parameter.ndim == 1 or "q_proj" in name.replace("q_proj.weight", "")
        if not inner:
            assert relative(parameter.detach(), weights[name]) > 0.1, f"{name} was not rotated"
    assert report.details["logit_change"] < 1e-4 and report.details["untied"] is False


@pytest.mark.parametrize("kind", OUTPUT_NORMS)
def test_output_norms_are_refused_by_name_and_values_rotate_alone(kind: str) -> None:
    model, info = make(kind)
    (refusal,) = Rotate().plan(info).refusals
    assert "layers.0.post_" in refusal and "do not commute" in refusal and "`residual: false`" in refusal
    with pytest.raises(RunError, match="commute"):
        Rotate().run(model, context(info))
    before = logits(model)
    assert Rotate(residual=False).plan(info).refusals == []
    Rotate(residual=False).run(model, context(info))
    assert relative(logits(model), before) < 1e-4
    layer = model.module.model.layers[0].self_attn
    assert not torch.equal(layer.v_proj.weight, make(kind)[0].module.model.layers[0].self_attn.v_proj.weight)


@pytest.mark.parametrize(("kind", "names"), [("gpt2", "transformer.h.0"), ("gpt_oss", "transposed")])
def test_what_is_not_known_is_refused_by_name(kind: str, names: str) -> None:
    changes = {"n_embd": 48, "n_layer": 2, "n_head": 4} if kind == "gpt2" else {"num_local_experts": 4}
    _, info = make(kind, **changes)
    assert names in Rotate().plan(info).refusals[0]


def test_a_tied_head_is_refused_until_it_may_be_untied(tmp_path: Path) -> None:
    model, _ = make("llama", tie_word_embeddings=True)
    model.module.save_pretrained(tmp_path)
    info = ModelInfo(SourceIdentity("t", "folder", tmp_path, "0"), model.config, _headers(model))
    (refusal,) = Rotate().plan(info).refusals
    assert "untie: true" in refusal and "residual: false" in refusal
    with pytest.raises(RunError, match="untie: true"):
        Rotate().run(model, context(info))
    before = logits(model)
    plan = Rotate(untie=True).plan(info)
    assert [(m.name, m.bytes_before, m.bytes_after) for m in plan.modules] == [("lm_head", 0, 96 * 48 * 4)]
    report = Rotate(untie=True).run(model, context(info))
    assert relative(logits(model), before) < 1e-4
    assert model.module.lm_head.weight is not model.module.model.embed_tokens.weight
    assert model.config.tie_word_embeddings is False
    # A reopened folder and a restored skeleton hold the same model.
    model.module.save_pretrained(tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert relative(logits(LoadedModel(again, None, SOURCE)), before) < 1e-4  # type: ignore[arg-type]
    other, _ = make("llama", tie_word_embeddings=True)
    Rotate(untie=True).restore(other, report)
    other.module.load_state_dict(model.module.state_dict(), assign=True)
    other.module.tie_weights()
    assert torch.equal(logits(other), logits(model))


def test_a_uniform_final_norm_lets_a_tied_head_stay_tied(tmp_path: Path) -> None:
    model, _ = make("llama", tie_word_embeddings=True)
    model.module.model.norm.weight.data.fill_(1.5)
    model.module.save_pretrained(tmp_path)
    info = ModelInfo(SourceIdentity("t", "folder", tmp_path, "0"), model.config, _headers(model))
    before = logits(model)
    assert Rotate().plan(info).refusals == []
    report = Rotate().run(model, context(info))
    assert report.details["folded_norms"] == 4
    assert model.module.lm_head.weight is model.module.model.embed_tokens.weight
    assert relative(logits(model), before) < 1e-4


def _headers(model: LoadedModel) -> dict[str, TensorInfo]:
    return {
        name: TensorInfo(tuple(t.shape), "F32", t.nbytes, "model.safetensors")
        for name, t in model.module.state_dict().items()
        if name != "lm_head.weight"
    }


def test_norms_are_left_with_weight_one() -> None:
    for kind, left in (("llama", 1.0), ("gemma", 0.0)):
        model, info = make(kind)
        Rotate().run(model, context(info))
        norms = [p for n, p in model.module.named_parameters() if "norm" in n]
        assert len(norms) == 5 and all(bool((p == left).all()) for p in norms)


def test_half_precision_stays_within_its_rounding() -> None:
    model, info = make("llama", torch.bfloat16)
    report = Rotate().run(model, context(info))
    assert 0 < report.details["logit_change"] < 0.1


def test_the_seed_decides_and_repeats() -> None:
    weights = []
    for seed in (0, 0, 1):
        model, info = make("llama")
        Rotate().run(model, context(info, seed))
        weights.append(model.module.model.layers[0].self_attn.q_proj.weight.detach())
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_an_outlier_channel_no_longer_stands_out() -> None:
    model, info = make("llama")
    gate = model.module.model.layers[0].mlp.gate_proj
    with torch.no_grad():
        gate.weight[:, 5] *= 30
    errors = []
    for _ in range(2):
        weight = gate.weight.detach()
        errors.append(relative(quantize_rtn(weight, QuantScheme(4, -1, True), torch.float32).dequantize(4), weight))
        Rotate().run(model, context(info))
    assert errors[1] < errors[0] / 2


def test_a_change_that_rounding_does_not_explain_fails_the_run() -> None:
    model, info = make("llama")
    attention = model.module.model.layers[0].self_attn
    forward = attention.o_proj.forward
    attention.o_proj.forward = lambda x: forward(x) + x.roll(1, -1)  # mixes channels in a basis of its own
    with pytest.raises(RunError, match="rounding explains"):
        Rotate().run(model, context(info))


def test_options_that_do_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="nothing to rotate"):
        Rotate(residual=False, values=False)
    with pytest.raises(UsageError, match="untie"):
        Rotate(residual=False, untie=True)
