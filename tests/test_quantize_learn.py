"""Learned rounding: it starts from what the method chose, lowers the block's error, and refuses what it cannot do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from llmopt.optimizer.base import Context
from llmopt.optimizer.errors import UsageError
from llmopt.passes.quantize.learn import STRETCH, TRAVEL, LatentLinear, _descend, learn_rounding
from llmopt.passes.quantize.rtn import quantize_rtn
from llmopt.runtime.kernels.packed import PackedLinear, QuantScheme
from llmopt.tests.runs import Tokens, quantize
from llmopt.tests.test_awq import make
from torch import nn

BASE = {"bits": 3, "group_size": 32, "scale_search": 5}


def layer(symmetric: bool = True, dtype: torch.dtype = torch.float32) -> tuple[PackedLinear, torch.Tensor]:
    torch.manual_seed(0)
    linear = nn.Linear(64, 24, dtype=dtype)
    scheme = QuantScheme(3, 32, symmetric)
    weight = linear.weight.detach()
    found = quantize_rtn(weight, scheme, dtype, 5)
    return PackedLinear.from_linear(linear, found.codes, found.scales, found.zeros, scheme), weight


@pytest.mark.parametrize("symmetric", [True, False])
def test_it_starts_as_the_packed_layer_and_packs_to_the_same_bits(symmetric: bool) -> None:
    packed, weight = layer(symmetric)
    latent, x = LatentLinear(packed, weight), torch.randn(5, 64)
    assert torch.equal(latent(x), packed(x))
    # a block may multiply by a layer's weight itself, as mamba's does
    assert torch.equal(torch.nn.functional.linear(x, latent.weight, latent.bias), packed(x))
    latent.weight.sum().backward()
    assert latent.latent.grad is not None
    again = latent.pack()
    assert all(torch.equal(a, b) for a, b in zip(packed.state_dict().values(), again.state_dict().values()))


def test_a_latent_is_the_weight_itself_within_its_code() -> None:
    packed, weight = layer()
    latent = LatentLinear(packed, weight)
    wanted = (weight.view(24, 2, 32) / latent.scales + latent.zeros).double()
    codes = latent.codes().view(24, 2, 32).double()
    near = (wanted - codes).abs() < 0.49
    assert near.float().mean() > 0.8
    assert torch.allclose(latent.latent.detach().double()[near], wanted[near], atol=1e-6)
    assert ((latent.latent.detach().double() - codes).abs() <= 0.49 + 1e-6).all()


def test_gradients_pass_the_rounding() -> None:
    """dL/dlatent is the weight's gradient times the scale, dL/dstretch the code's offset times it, summed."""
    packed, weight = layer()
    latent, x = LatentLinear(packed, weight), torch.randn(7, 64)
    out = latent(x)
    up = torch.randn_like(out)
    by_latent, by_stretch = torch.autograd.grad(out, latent.leaves, up)
    by_weight = (up.double().t() @ x.double()).view(24, 2, 32)
    offsets = latent.codes().view(24, 2, 32).double() - 4
    assert torch.allclose(by_latent.double(), by_weight * latent.scales.double(), atol=1e-4)
    assert torch.allclose(
        by_stretch.double(), (by_weight * offsets * latent.scales.double()).sum(-1, keepdim=True), atol=1e-4
    )


class Block(nn.Module):
    def __init__(self, packed: PackedLinear) -> None:
        super().__init__()
        self.layer = packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def test_the_error_falls_and_the_result_repeats() -> None:
    packed, weight = layer()
    mixed = torch.randn(64, 64) @ torch.diag(torch.linspace(0.1, 3, 64)) @ torch.randn(64, 64)  # correlated inputs
    inputs = [torch.randn(2, 40, 64) @ mixed for _ in range(4)]

    def once() -> tuple[Any, torch.Tensor]:
        block = Block(packed)
        found = learn_rounding(
            block,
            {"layer": weight},
            lambda n: block(inputs[n]),
            lambda n: nn.functional.linear(inputs[n], weight, packed.bias),
            len(inputs),
            steps=60,
            seed=3,
        )
        return found, block.layer.dequantize()

    (found, value), again = once(), once()
    assert found.error_after < 0.9 * found.error_before
    assert 0 < found.changed["layer"] < 1
    assert torch.equal(value, again[1]) and found == again[0]


def test_nothing_changes_where_the_error_cannot_fall() -> None:
    packed, _ = layer()
    exact = packed.dequantize()
    block, x = Block(packed), torch.randn(1, 30, 64)
    found = learn_rounding(
        block,
        {"layer": exact},
        lambda n: block(x),
        lambda n: nn.functional.linear(x, exact, packed.bias),
        1,
        steps=5,
        seed=0,
    )
    assert found.changed == {"layer": 0.0} and found.error_after == found.error_before
    assert torch.equal(block.layer.dequantize(), exact)


@pytest.mark.parametrize("size", [1.0, 1e-19, 1e-22, 1e-24, 1e-28])
def test_no_step_is_longer_than_its_rate(size: float) -> None:
    """Squares of small gradients are 0 in float32: what is divided by their root must not leap."""
    latent, x = LatentLinear(*layer()), torch.randn(1, 30, 64)
    start = [leaf.detach().clone() for leaf in latent.leaves]
    _descend([latent], lambda n: size * latent(x), lambda n: torch.ones(1, 30, 24), 1, 4, seed=0)
    for leaf, before, most in zip(latent.leaves, start, (TRAVEL, STRETCH)):
        assert (leaf.detach() - before).abs().max() <= most
    assert size < 1 or (latent.stretch.detach() != 0).any()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_what_no_batch_reaches_stays_and_few_steps_are_enough(steps: int) -> None:
    packed, weight = layer()
    reached, other = LatentLinear(packed, weight), LatentLinear(packed, weight)
    start = [leaf.detach().clone() for leaf in other.leaves]
    _descend([reached, other], lambda n: reached(torch.ones(1, 2, 64)), lambda n: torch.ones(1, 2, 24), 2, steps, 0)
    assert all(torch.equal(leaf, before) for leaf, before in zip(other.leaves, start))
    assert not torch.equal(reached.latent, start[0]) and not torch.equal(reached.stretch, start[1])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"method": "gptq"}),
        ("llama", {"method": "awq", "rounding": "gptq", "symmetric": False}),
        ("qwen3", {"method": "awq", "batch_tokens": 48}),
        ("gemma3_text", {"method": "gptq", "overrides": {"*.o_proj": {"skip": True}}}),
        ("mixtral", {"method": "gptq", "bits": 4}),
    ],
)
def test_blocks_come_closer_to_the_original(kind: str, options: dict[str, object]) -> None:
    errors = {}
    more = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8} if "gemma" in kind else {}
    for steps in (0, 30):
        report = quantize(make(kind, num_hidden_layers=2, **more), **{**BASE, **options, "learn_steps": steps})
        errors[steps] = [line for line in report.layers if "block_error" in line]
    assert not errors[0]
    last = errors[30][-1]
    assert last["block_error"] < last["block_error_rounded"]
    assert any(line["codes_learned"] > 0 for line in errors[30])


def test_a_block_that_no_calibration_reaches_is_only_rounded() -> None:
    overrides = {"*.layers.1.*": {"method": "rtn"}}
    report = quantize(make("llama", num_hidden_layers=2), **BASE, method="gptq", learn_steps=5, overrides=overrides)
    assert {"layers.0." in line["name"] for line in report.layers if "block_error" in line} == {True}
    assert len(report.layers) == 14


def test_the_models_output_comes_closer() -> None:
    model = make("llama", num_hidden_layers=2)
    ids = torch.cat(Tokens().batches())
    with torch.no_grad():
        want = model(ids).logits
        distance = []
        for steps in (0, 60):
            learned = make("llama", num_hidden_layers=2)
            quantize(learned, **BASE, method="gptq", learn_steps=steps)
            distance.append(float((learned(ids).logits - want).square().mean()))
    assert distance[1] < 0.95 * distance[0]


@pytest.mark.parametrize(
    "options",
    [
        {"method": "rtn"},
        {"method": "smoothquant"},
        {"method": "gptq", "activations": "int8"},
        {"method": "gptq", "match_original": 0.5},
        {"method": "gptq", "static_groups": False},
    ],
)
def test_what_cannot_be_learned_is_refused(options: dict[str, object]) -> None:
    with pytest.raises((UsageError, ValueError), match="learn_steps"):
        quantize(make("llama"), **options, learn_steps=10)


def test_learning_that_helps_no_block_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from llmopt.passes.quantize import learn

    told: list[str] = []
    monkeypatch.setattr(Context, "note", lambda self, kind, message: told.append(message))
    quantize(make("llama", num_hidden_layers=2), **BASE, method="gptq", learn_steps=30)
    assert not any(message.startswith("14 of 14 layers") for message in told)
    monkeypatch.setattr(learn, "_descend", lambda *args: None)
    report = quantize(make("llama", num_hidden_layers=2), **BASE, method="gptq", learn_steps=30)
    (message,) = [message for message in told if message.startswith("14 of 14 layers")]
    assert "30 steps of learned rounding" in message
    assert all(line["codes_learned"] == 0 for line in report.layers)
