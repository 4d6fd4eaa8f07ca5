"""Blocks run in parts, Hessians factorized in place, and the native steps of calibrated quantization."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.optimizer.base import Context
from llmopt.optimizer.model import LoadedModel, ModelInfo, SourceIdentity, TensorInfo
from llmopt.passes.quantize import Quantize, stages
from llmopt.passes.quantize import gptq as gptq_module
from llmopt.passes.quantize.factor import FactoredHessian
from llmopt.passes.quantize.hessian import Hessian
from llmopt.passes.quantize.live import Stash
from llmopt.passes.quantize.parts import Parts, dense, plan_parts
from llmopt.passes.quantize.rtn import quantize_rtn
from llmopt.runtime.decoder_blocks import BlockCall, capture, find_blocks
from llmopt.runtime.kernels import calibration
from llmopt.runtime.kernels.packed import PackedLinear, QuantScheme
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.1, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen3": {}, "phi": {}, "gpt_neox": {}, "olmo2": {},
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
}  # fmt: skip
SOURCE = SourceIdentity("tiny", "folder", Path("."), "0" * 64)


def make(kind: str = "llama", **changes: Any) -> tuple[LoadedModel, ModelInfo]:
    config = AutoConfig.for_model(kind, **{**SMALL, **KINDS.get(kind, {}), **changes})
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    state = module.state_dict().items()
    tensors = {name: TensorInfo(tuple(t.shape), "BF16", t.nbytes, "model.safetensors") for name, t in state}
    return LoadedModel(module, None, SOURCE), ModelInfo(SOURCE, module.config, tensors)


def tokens(sequences: int = 6, length: int = 24) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 96, (1, length), generator=generator) for _ in range(sequences)]


class Calibration:
    num_tokens = 6 * 24

    def batches(self) -> list[torch.Tensor]:
        return tokens()


def run(kind: str, **options: Any) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    model, info = make(kind)
    context = Context(info, Calibration(), 0, Path("."), "quantize", lambda event: None)  # type: ignore[arg-type]
    report = Quantize(method="gptq", bits=3, group_size=32, batch_tokens=48, **options).run(model, context)
    lines = [{k: v for k, v in line.items() if k != "seconds"} for line in report.layers]
    return dict(model.module.state_dict()), lines


def linears(block: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}


def planned(kind: str) -> tuple[Parts | None, nn.Module, BlockCall, torch.Tensor]:
    model, _ = make(kind)
    blocks = find_blocks(model.module)[1]
    with torch.no_grad():
        batch = capture(model.module, blocks, tokens(1))[0]
        call, hidden = batch.calls[0], batch.hidden
        return plan_parts(blocks[0], linears(blocks[0]), call, hidden), blocks[0], call, hidden


# a block in parts


@pytest.mark.parametrize("kind", KINDS)
def test_every_dense_decoder_runs_in_parts_that_compute_each_layer_once(kind: str) -> None:
    parts, block, call, hidden = planned(kind)
    assert parts is not None
    assert {name for part in parts.parts for name in part.names} == set(linears(block))
    calls: list[str] = []
    handles = [m.register_forward_hook(lambda m, a, o, n=n: calls.append(n)) for n, m in linears(block).items()]
    with torch.no_grad():
        inputs = []
        for number in range(len(parts.parts)):
            with parts.entered(number):
                inputs += [parts.run_to(number, key, call, hidden) for key in (0, 1)]
        with parts.entered(len(parts.parts)):
            outputs = [parts.run_through(key, call, hidden) for key in (0, 1)]
        alone = [part.names[0] for part in parts.parts if part.around is not None]
        assert sorted(calls) == sorted(2 * [name for name in linears(block) if name not in alone])
        assert all(torch.equal(output, call.run(block, hidden)) for output in outputs)
    for handle in handles:
        handle.remove()
    assert not any("forward" in module.__dict__ for module in block.modules())
    assert not parts.stash._kept


def test_a_llama_block_has_four_parts() -> None:
    parts = planned("llama")[0]
    assert parts is not None
    assert [part.names for part in parts.parts] == [
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",),
        ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",),
    ]  # fmt: skip
    assert [part.around for part in parts.parts] == [None, "self_attn", None, "mlp"]
    assert parts.passed[2:] == [
        ["input_layernorm"],
        ["input_layernorm"],
        ["input_layernorm", "post_attention_layernorm"],
    ]


@pytest.mark.parametrize("kind", ["llama", "phi", "gemma3_text"])
def test_parts_give_what_passes_of_their_own_give(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state, lines = run(kind)
    assert all(line["sequential"] for line in lines)
    monkeypatch.setattr(stages, "plan_parts", lambda *arguments: None)
    expected, expected_lines = run(kind, true_sequential=True)
    assert lines == expected_lines
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert not any(line["sequential"] for line in run(kind)[1]), "by default nothing takes more passes"


class Routed(nn.Module):
    """A block that sends half of the tokens through one layer and the others through another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        flat = hidden.flatten(0, 1)
        return torch.cat([self.first(flat[::2]), self.second(flat[1::2])]).view_as(hidden)


class Repeated(nn.Module):
    """A block that computes something twice, of which it hands out the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.first(hidden)))


@pytest.mark.parametrize("kind", [Routed, Repeated])
def test_other_blocks_are_found_out(kind: type[nn.Module]) -> None:
    block = kind()
    with torch.no_grad():
        assert plan_parts(block, linears(block), BlockCall((), {}, False), torch.randn(2, 4, 8)) is None
        assert not any("forward" in module.__dict__ for module in block.modules())


def test_a_stash_keeps_tensors_in_memory_or_in_files(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        stash, tensor = Stash(folder), torch.randn(3, 4).bfloat16()
        stash.put("a", tensor)
        stash.put("a", tensor + 1)
        stash.put("b", tensor)
        assert torch.equal(stash.get("a"), tensor + 1) and torch.equal(stash.take("a"), tensor + 1)
        with pytest.raises(KeyError):
            stash.get("a")
        stash.clear()
    assert not list(tmp_path.iterdir())


def test_an_unpacked_layer_computes_the_same_bits() -> None:
    linear = nn.Linear(64, 48, dtype=torch.bfloat16)
    scheme = QuantScheme(4, 32, False)
    quantized = quantize_rtn(linear.weight.detach(), scheme, torch.bfloat16)
    layer = PackedLinear.from_linear(linear, quantized.codes, quantized.scales, quantized.zeros, scheme)
    x = torch.randn(7, 64).bfloat16()
    expected = layer(x)
    with dense(nn.Sequential(layer)):
        assert layer.kernel is not None and torch.equal(layer(x), expected)
    assert layer.kernel is None


# Hessians


def correlated(rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5
    return torch.randn(rows, columns, generator=generator) @ mix * torch.logspace(0, -1.0, columns)


@pytest.mark.parametrize("by_activation", [False, True])
@pytest.mark.parametrize("columns", [40, 256, 600])
def test_one_buffer_holds_a_hessian_and_the_factor_of_its_inverse(columns: int, by_activation: bool) -> None:
    x = correlated(900, columns).double()
    hessian = x.t() @ x / len(x)
    factored = FactoredHessian(hessian.float())
    rows = torch.randn(5, columns, generator=torch.Generator().manual_seed(2))
    expected = ((rows.double() @ hessian) * rows.double()).sum(1)
    assert torch.allclose(factored.energy(rows).double(), expected, rtol=1e-4)
    assert factored.factorize(0.05, by_activation) == 0.05 == factored.factorize(0.9)
    assert torch.allclose(factored.energy(rows).double(), expected, rtol=1e-4)
    order = torch.arange(columns) if factored.order is None else factored.order
    assert torch.equal(order, hessian.float().diagonal().argsort(descending=True, stable=True)) is by_activation
    damped = (hessian + torch.eye(columns) * 0.05 * hessian.diagonal().mean())[order][:, order]
    factor = factored.matrix.triu().double()
    assert torch.allclose(factor.t() @ factor @ damped, torch.eye(columns, dtype=torch.float64), atol=2e-3)
    assert torch.equal(factored.matrix.tril(-1), hessian.float()[order][:, order].tril(-1))


@pytest.mark.parametrize("columns", [24, 64, 200])
def test_native_outer_products_are_exact_to_float32(columns: int) -> None:
    if calibration.backend() != calibration.NATIVE:
        pytest.skip(calibration.backend())
    wide = torch.randn(2051, columns + 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    total = torch.zeros(columns, columns)
    parts = [wide[:2049, :columns], wide[2049:, :columns]]
    assert all(calibration.add_outer_products(total, part) for part in parts)
    rows = wide[:, :columns].double()
    expected = rows.t() @ rows
    assert float((total.double() - expected).tril().abs().max()) < 1e-5 * float(expected.abs().max())
    assert not calibration.add_outer_products(total, rows.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_hessians_of_many_rows(dtype: torch.dtype) -> None:
    x = correlated(1500, 280).to(dtype)
    hessian = Hessian(280, x.device)
    hessian.add(x[:700].view(7, 100, 280))
    hessian.add(x[700:])
    expected = x.double().t() @ x.double() / len(x)
    assert torch.allclose(hessian.mean().double(), expected, atol=1e-5)
    assert torch.equal(hessian.mean(), hessian.take_mean()) and hessian.rows == 1500


@pytest.mark.parametrize(("bits", "symmetric", "desc_act"), [(4, True, True), (3, False, True), (2, True, False)])
def test_both_column_loops_give_the_same_bits(
    bits: int, symmetric: bool, desc_act: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, scheme = correlated(800, 192), QuantScheme(bits, 32, symmetric)
    weight = torch.randn(150, 192, generator=torch.Generator().manual_seed(3)) * 0.1
    hessian, ran = x.t() @ x / len(x), []

    def native(*arguments: Any) -> bool:
        ran.append(calibration.round_columns(*arguments))
        return ran[-1]

    def quantized(loop: Any) -> Any:
        monkeypatch.setattr(gptq_module, "round_columns", loop)
        options = {"desc_act": desc_act, "static_groups": desc_act, "block_size": 48}
        return gptq_module.quantize_gptq(weight, hessian, scheme, torch.bfloat16, **options).quantized

    one, other = quantized(native), quantized(lambda *arguments: False)
    if not all(ran):
        pytest.skip("no native kernels here")
    assert torch.equal(one.codes, other.codes) and torch.equal(one.scales, other.scales)
