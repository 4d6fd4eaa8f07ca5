"""HQQ: its proximal step, its objective against the start, the grids it may use, and its place in the pass."""

from __future__ import annotations

import pytest
import torch
from llmopt.passes.quantize.grid import to_groups
from llmopt.passes.quantize.hqq import NORM, quantize_hqq, shrink
from llmopt.passes.quantize.rtn import Quantized, quantize_rtn
from llmopt.runtime.kernels.packed import PackedLinear, QuantScheme


def weights(rows: int = 24, columns: int = 128, seed: int = 0) -> torch.Tensor:
    """Normal, with one weight in fifty ten times as large."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 0.02
    return torch.where(torch.rand(rows, columns, generator=generator) < 0.02, weight * 10, weight)


def p_norm(weight: torch.Tensor, quantized: Quantized, bits: int) -> torch.Tensor:
    residual = (weight - quantized.dequantize(bits)).abs().pow(NORM)
    return to_groups(residual, quantized.scales.shape[1]).sum(-1)


@pytest.mark.parametrize("norm", [0.5, 0.7, 1.0])
def test_shrink_solves_its_own_problem(norm: float) -> None:
    """One step of the fixed point `x = sign(r) (|r| - |x|^(p-1) / beta)` from x = r, and the solution for p = 1."""
    residuals, beta = torch.tensor([-3.0, -0.4, 0.0, 0.05, 0.9, 5.0], dtype=torch.float64), 4.0
    found = shrink(residuals, norm, beta)
    by_hand = [max(abs(r) - (abs(r) ** (norm - 1) / beta if r else torch.inf), 0.0) for r in residuals.tolist()]
    assert found.abs().tolist() == pytest.approx(by_hand)
    assert torch.equal(found.sign() * (found != 0), residuals.sign() * (found != 0))
    if norm == 1.0:
        grid = torch.linspace(-6, 6, 120_001, dtype=torch.float64)
        cost = grid.abs() / beta + (grid - residuals[:, None]).square() / 2
        assert torch.allclose(grid[cost.argmin(1)], found, atol=2e-4)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("symmetric", [True, False])
def test_no_group_ends_worse_than_it_started(bits: int, symmetric: bool) -> None:
    weight, scheme = weights(), QuantScheme(bits, 32, symmetric)
    solved = quantize_hqq(weight, scheme, torch.bfloat16)
    start = quantize_rtn(weight, scheme, torch.bfloat16)
    before, after = p_norm(weight, start, bits), p_norm(weight, solved, bits)
    assert (after <= before * (1 + 1e-5)).all()
    if bits < 7:  # with more, a step of the stored scale is as coarse as the codes
        assert after.sum() < before.sum()
    if bits in (3, 4):
        assert after.sum() < 0.98 * before.sum()


@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_zeros_and_scales_fit_the_packed_format_and_are_nearest(symmetric: bool) -> None:
    weight, scheme = weights(), QuantScheme(3, 32, symmetric)
    solved = quantize_hqq(weight, scheme, torch.bfloat16)
    assert solved.codes.dtype == torch.uint8 and int(solved.codes.max()) <= 7
    assert solved.scales.dtype == torch.bfloat16 and (solved.scales != 0).all()
    assert (solved.zeros is None) == symmetric
    if solved.zeros is not None:
        assert solved.zeros.dtype == torch.uint8 and int(solved.zeros.max()) <= 7
    assert torch.equal(solved.nearest(weight, 3), solved.dequantize(3))
    linear = torch.nn.Linear(128, 24)
    layer = PackedLinear.from_linear(linear, solved.codes, solved.scales, solved.zeros, scheme)
    assert torch.allclose(layer.dequantize().float(), solved.dequantize(3), rtol=1e-2)
    step = to_groups(torch.ones_like(weight), 4) * solved.scales.float().unsqueeze(-1)
    error = (weight - solved.dequantize(3)).abs()
    assert (error <= step.flatten(1) * 0.52).all()  # half a step for every weight, up to the rounding of the scale


def test_scaled_weights_give_scaled_grids() -> None:
    weight, scheme = weights(), QuantScheme(4, 32, False)
    one, large = (quantize_hqq(weight * factor, scheme, torch.float32) for factor in (1.0, 1024.0))
    assert torch.equal(one.codes, large.codes) and torch.equal(one.scales * 1024, large.scales)


def test_zeros_and_constants_survive() -> None:
    weight = torch.cat([torch.zeros(2, 32), torch.full((2, 32), 0.5)])
    for symmetric in (True, False):
        solved = quantize_hqq(weight, QuantScheme(4, 32, symmetric), torch.bfloat16)
        assert torch.isfinite(solved.scales.float()).all()
        assert torch.allclose(solved.dequantize(4), weight, atol=0.01)


def test_an_indivisible_group_is_refused() -> None:
    with pytest.raises(ValueError, match="does not divide"):
        quantize_hqq(weights(), QuantScheme(4, 48), torch.bfloat16)
