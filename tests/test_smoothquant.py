"""SmoothQuant: scales by the paper's formula, a searched strength, folded exactly, and better than W8A8 without it."""

from __future__ import annotations

import pytest
import torch
from llmopt.optimizer.errors import UsageError
from llmopt.passes.quantize import Quantize
from llmopt.passes.quantize.samples import InputSample, sampling
from llmopt.passes.quantize.smoothquant import search_strength, smoothed_error, smoothing_scales
from llmopt.runtime.kernels.scaled import Int8Linear, ScaledScheme
from llmopt.tests.runs import Tokens, quantize
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SCHEME = ScaledScheme()


def problem(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [200, 64] with four channels of outliers, and a weight [48, 64]."""
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(200, 64, generator=generator), 0.1 * torch.randn(48, 64, generator=generator)
    x[:, ::16] *= 60.0
    return x, weight


def reference_error(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> float:
    """W8A8 of x / s and W s in float64: inputs by max|x| / 127 a token, weights by max|w| / 127.5 a channel.

    The largest weight of a channel lies between two codes, so that float32 may take the other one.
    """
    inputs, scaled = x.double() / scales.double(), weight.double() * scales.double()
    token = inputs.abs().amax(1, keepdim=True) / 127
    channel = scaled.abs().amax(1, keepdim=True) / 127.5
    rounded = (inputs / token).round() * token
    quantized = (scaled / channel).round().clamp(-128, 127) * channel
    return float(((rounded @ quantized.t() - x.double() @ weight.double().t()) ** 2).sum())


def test_scales_are_those_of_the_paper() -> None:
    activations, weights = torch.tensor([16.0, 1.0, 0.0]), torch.tensor([1.0, 4.0, 0.0])
    half = smoothing_scales(activations, weights, 0.5)
    torch.testing.assert_close(half, torch.tensor([4.0, 0.5, 1.0]))
    torch.testing.assert_close(smoothing_scales(activations, weights, 1.0)[:2], activations[:2])
    torch.testing.assert_close(smoothing_scales(activations, weights, 0.0)[:2], 1 / weights[:2])
    assert all(bool(torch.isfinite(smoothing_scales(activations, weights, a)).all()) for a in (0.0, 0.5, 1.0))


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_the_error_is_that_of_outputs_in_float64(strength: float) -> None:
    x, weight = problem()
    scales = smoothing_scales(x.abs().amax(0), weight.abs().amax(0), strength)
    error = smoothed_error([(weight, SCHEME)], x, scales, torch.float32)
    assert error == pytest.approx(reference_error(x, weight, scales), rel=0.02)


def test_the_search_takes_the_best_strength_of_the_grid() -> None:
    x, weight = problem()
    top, every = x.abs().amax(0), torch.arange(64)
    choice = search_strength([(weight[:30], SCHEME), (weight[30:], SCHEME)], x, top, every, torch.float32, steps=10)
    weights = weight.abs().amax(0)
    losses = {i / 10: reference_error(x, weight, smoothing_scales(top, weights, i / 10)) for i in range(11)}
    assert choice.exponent == min(losses, key=losses.__getitem__)
    assert choice.error < 0.2 * choice.error_unscaled
    energy = float((x @ weight.t()).square().sum())
    assert choice.error == pytest.approx(losses[choice.exponent] / energy, rel=0.02)
    assert choice.error_unscaled == pytest.approx(reference_error(x, weight, torch.ones(64)) / energy, rel=0.02)


def test_channels_that_several_columns_read_share_a_scale() -> None:
    x, weight = problem()
    channels = torch.arange(64) % 32
    top = torch.stack([x.abs().amax(0)[:32], x.abs().amax(0)[32:]]).amax(0)
    choice = search_strength([(weight, SCHEME)], x, top, channels, torch.float32, steps=4)
    assert choice.scales.shape == (32,) and choice.error <= choice.error_unscaled


def test_layers_that_are_exact_without_scales_stay_unscaled() -> None:
    """Inputs of one magnitude are on their grid as they are."""
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(3)).sign()
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(4)).sign()
    choice = search_strength([(weight, SCHEME)], x, x.abs().amax(0), torch.arange(32), torch.float32, steps=4)
    torch.testing.assert_close(choice.scales, torch.ones(32))
    assert choice.exponent == -1


def test_samples_are_means_maxima_and_rows_spread_over_the_calls() -> None:
    x = torch.randn(4, 10, 8, generator=torch.Generator().manual_seed(5))
    sample = InputSample(5)
    for part in x:
        sample.add(part[None])
    sample.add(x[:0])
    assert sample.count == 40
    torch.testing.assert_close(sample.mean_magnitude, x.abs().mean((0, 1)))
    assert torch.equal(sample.largest, x.abs().amax((0, 1)))
    assert torch.equal(sample.rows, x[:, ::2].reshape(-1, 8))


def test_sampling_watches_only_while_it_lasts() -> None:
    layer, x = nn.Linear(8, 8), torch.ones(3, 8)
    with sampling({"layer": layer}, 1) as samples:
        layer(x)
    layer(2 * x)
    assert samples["layer"].count == 3 and float(samples["layer"].largest.max()) == 1.0


def make(kind: str) -> PreTrainedModel:
    """A random model with three outlier channels behind its norms, as large as those of trained models."""
    config = AutoConfig.for_model(
        kind, vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, initializer_range=0.1, tie_word_embeddings=False, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if "layernorm" in name:
            parameter.data[5::20] += 40.0
        elif parameter.dim() == 2 and parameter.shape[1] == 64 and "embed" not in name:
            parameter.data[:, 5::20] *= 0.1
    return model


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.cat(Tokens().batches())).logits.detach()


@pytest.mark.parametrize(("kind", "rounding", "first"), [("llama", "gptq", "q_proj"), ("phi3", "nearest", "qkv_proj")])
def test_the_pass_is_closer_than_w8a8_without_smoothing(kind: str, rounding: str, first: str) -> None:
    reference, plain, smooth = logits(make(kind)), make(kind), make(kind)
    quantize(plain, method="rtn", activations="int8")
    report = quantize(smooth, method="smoothquant", scale_steps=6, rounding=rounding)
    errors = [float((logits(model) - reference).norm() / reference.norm()) for model in (plain, smooth)]
    assert errors[1] < 0.7 * errors[0]
    assert sum(isinstance(module, Int8Linear) for module in smooth.modules()) == len(report.layers)
    line = next(line for line in report.layers if line["name"].endswith(first))
    assert line["format"] == "int-quantized" and line["scaled_by"] == "input_layernorm"
    assert line["error_scaled"] < line["error_unscaled"]


@pytest.mark.parametrize("options", [{"bits": 4}, {"group_size": 64}, {"symmetric": False}])
def test_other_figures_than_w8a8_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="method: smoothquant"):
        Quantize(method="smoothquant", **options)
