"""Channels that calibration never activates are scaled like the others, so that text that does is computed well."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from llmopt.passes.quantize.awq import activation_scales, revived
from llmopt.passes.quantize.smoothquant import smoothing_scales
from llmopt.tests.runs import Tokens, quantize
from transformers import OPTConfig, OPTForCausalLM

CALIBRATED = 96
"""Tokens from here on are not in the calibration's text, and wake the sleeping units."""
SLEEPING = 24


def make() -> OPTForCausalLM:
    """A random OPT in whose feed-forward layers 24 of 128 ReLU units answer to the tokens of another language only."""
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=128, hidden_size=64, word_embed_proj_dim=64, ffn_dim=128, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, init_std=0.1, dropout=0.0,
    )  # fmt: skip
    model = OPTForCausalLM(config).eval()
    decoder = model.model.decoder
    with torch.no_grad():
        decoder.embed_tokens.weight[:, 0] = 0.0
        decoder.embed_tokens.weight[CALIBRATED:, 0] = 0.6
        decoder.embed_positions.weight[:, 0] = 0.0
        for layer in decoder.layers:
            layer.self_attn.out_proj.weight[0] = 0.0
            layer.fc2.weight[0] = 0.0
            layer.fc1.weight[:SLEEPING] = 0.0
            layer.fc1.weight[:SLEEPING, 0] = torch.linspace(1.5, 2.5, SLEEPING)
            layer.fc1.bias[:SLEEPING] = -2.5
    return model


def outputs(model: OPTForCausalLM, first: int, last: int) -> torch.Tensor:
    ids = torch.randint(first, last, (4, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(ids).logits.double()


def error_on_other_text(model: OPTForCausalLM) -> float:
    """Relative error of the logits on text that wakes the units."""
    found, exact = (outputs(m, CALIBRATED, 128) for m in (model, make()))
    return float((found - exact).norm() / exact.norm())


def test_the_units_sleep_through_the_calibration_and_wake_after_it() -> None:
    model, seen = make(), []
    layer = model.model.decoder.layers[0]
    layer.fc2.register_forward_pre_hook(lambda _, args: seen.append(args[0][..., :SLEEPING].amax()))
    with torch.no_grad():
        model(torch.cat(Tokens().batches()))
    outputs(model, CALIBRATED, 128)
    assert float(seen[0]) == 0.0 and float(seen[1]) > 1.0


@pytest.mark.parametrize(
    ("method", "plain", "limit"),
    [
        ({"method": "smoothquant"}, {"method": "rtn", "activations": "int8"}, 3.0),
        ({"method": "awq", "bits": 4, "group_size": 32}, {"method": "rtn", "bits": 4, "group_size": 32}, 1.5),
    ],
)
def test_text_that_wakes_them_costs_no_accuracy(method: dict[str, Any], plain: dict[str, Any], limit: float) -> None:
    """Small scales of dead channels gave 18 times the error of int8 without any, and 1.73 times that of 4 bits."""
    scaled, unscaled = make(), make()
    report = quantize(scaled, **method)
    quantize(unscaled, **plain)
    lines = [line for line in report.layers if line["name"].endswith("fc2")]
    assert len(lines) == 2 and all(line["scaled_by"] == "fc1" for line in lines)
    assert error_on_other_text(scaled) < limit * error_on_other_text(unscaled)


def test_a_dead_channel_counts_as_the_median_of_the_living() -> None:
    values = torch.tensor([4.0, 0.0, 1.0, 1e-9, 9.0])
    torch.testing.assert_close(revived(values), torch.tensor([4.0, 1.0, 1.0, 1.0, 9.0]))
    assert torch.equal(revived(torch.zeros(3)), torch.ones(3))
    living = torch.tensor([1e-3, 1.0, 1e3])
    assert torch.equal(revived(living), living)


def test_scales_of_the_living_do_not_depend_on_the_dead() -> None:
    living, dead = torch.tensor([1.0, 4.0, 9.0]), torch.tensor([1.0, 0.0, 4.0, 0.0, 9.0])
    torch.testing.assert_close(activation_scales(dead, 0.5)[::2], activation_scales(living, 0.5))
    ones = torch.ones(5)
    torch.testing.assert_close(smoothing_scales(dead, ones, 0.5), torch.tensor([1.0, 2.0, 2.0, 2.0, 3.0]))
