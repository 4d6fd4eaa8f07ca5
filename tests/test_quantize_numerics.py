"""Grids, rounding to nearest and GPTQ against plain float64 references."""

from __future__ import annotations

import pytest
import torch
from llmopt.optimizer.errors import RunError
from llmopt.passes.quantize.gptq import NotPositiveDefinite, inverse_factor, matched_weight, quantize_gptq
from llmopt.passes.quantize.grid import dequantize_groups, minmax_grid, quantize_groups, round_scales, search_grid
from llmopt.passes.quantize.hessian import Hessian, HessianCollector
from llmopt.passes.quantize.rtn import quantize_rtn
from llmopt.runtime.kernels.packed import QuantScheme


def weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * 0.1


def correlated_inputs(tokens: int, columns: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5
    spread = torch.logspace(0, -1.5, columns)
    return torch.randn(tokens, columns, generator=generator) @ mix * spread


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", range(2, 9))
def test_rounding_error_is_at_most_half_a_step(bits: int, symmetric: bool, dtype: torch.dtype) -> None:
    groups = weight(16, 96).view(16, 3, 32)
    scales, zeros = minmax_grid(groups, bits, symmetric, dtype)
    assert torch.equal(scales, scales.to(dtype).float()), "codes are computed against the stored scale"
    codes = quantize_groups(groups, scales, zeros, bits)
    assert int(codes.max()) <= 2**bits - 1
    error = (dequantize_groups(codes, scales, zeros, bits) - groups).abs()
    # Rounding the scale to the stored dtype can cut the range's ends by a little; the zero point is a whole code.
    slack = 0.5 + 2**bits * torch.finfo(dtype).eps
    if not symmetric:
        slack += 0.5 * (codes == 0) + 0.5 * (codes == 2**bits - 1)
    assert bool((error <= scales.unsqueeze(-1) * slack).all())


@pytest.mark.parametrize("symmetric", [True, False])
def test_values_on_a_grid_come_back_exactly(symmetric: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (8, 4, 32), generator=generator, dtype=torch.uint8)
    codes[..., 0], codes[..., 1] = 0, 15
    scales = torch.full((8, 4), 0.0625)
    zeros = None if symmetric else torch.randint(0, 16, (8, 4), generator=generator, dtype=torch.uint8)
    values = dequantize_groups(codes, scales, zeros, 4)
    found = search_grid(values, 4, symmetric, torch.bfloat16)
    again = dequantize_groups(quantize_groups(values, *found, 4), *found, 4)
    assert torch.equal(again, values)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_search_is_never_worse_than_the_full_range(bits: int, symmetric: bool) -> None:
    groups = weight(32, 128, seed=5).view(32, 2, 64)
    importance = torch.rand(2, 64, generator=torch.Generator().manual_seed(6))

    def errors(grid: tuple[torch.Tensor, torch.Tensor | None]) -> torch.Tensor:
        values = dequantize_groups(quantize_groups(groups, *grid, bits), *grid, bits)
        return ((values - groups).square() * importance).sum(-1)

    plain = errors(minmax_grid(groups, bits, symmetric, torch.bfloat16))
    searched = errors(search_grid(groups, bits, symmetric, torch.bfloat16, importance))
    assert bool((searched <= plain * (1 + 1e-5)).all())
    assert float(searched.sum()) < 0.98 * float(plain.sum())


def test_degenerate_groups_have_finite_scales() -> None:
    groups = torch.stack([torch.zeros(32), torch.full((32,), 1e-30), torch.full((32,), -3.0)]).view(1, 3, 32)
    for symmetric in (True, False):
        for search in (minmax_grid, search_grid):
            scales, zeros = search(groups, 4, symmetric, torch.bfloat16)
            assert bool(torch.isfinite(scales).all()) and bool((scales != 0).all())
            values = dequantize_groups(quantize_groups(groups, scales, zeros, 4), scales, zeros, 4)
            assert bool(((values - groups).abs() <= 0.21).all())


def test_channel_scales_cover_the_whole_row() -> None:
    w = weight(8, 80)
    result = quantize_rtn(w, QuantScheme(8, -1, True), torch.float32)
    assert result.scales.shape == (8, 1) and result.zeros is None
    assert float((result.dequantize(8) - w).abs().max()) <= float(result.scales.max()) * 0.51


def reference_gptq(
    w: torch.Tensor, hessian: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int, order: list[int]
) -> torch.Tensor:
    """Optimal brain quantization column by column in float64, with an explicit inverse that is shrunk at each step.

    Follows the derivation, not the factorization: after column i is fixed, the inverse Hessian of the rest is the Schur
    complement. scales and zeros are float64 [N, K], one for each column.
    """
    w = w.double().clone()
    codes = torch.zeros_like(w)
    left = list(order)
    inverse = torch.linalg.inv(hessian.double()[left][:, left])
    while left:
        i = left[0]
        code = torch.clamp(torch.round(w[:, i] / scales[:, i]) + zeros[:, i], 0, 2**bits - 1)
        codes[:, i] = code
        error = (w[:, i] - (code - zeros[:, i]) * scales[:, i]) / inverse[0, 0]
        w[:, left] -= error[:, None] * inverse[0][None, :]
        inverse = inverse[1:, 1:] - torch.outer(inverse[1:, 0], inverse[0, 1:]) / inverse[0, 0]
        left = left[1:]
    return codes


@pytest.mark.parametrize("desc_act", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("block_size", [8, 24, 64])
def test_gptq_equals_the_float64_reference(desc_act: bool, symmetric: bool, block_size: int) -> None:
    rows, columns, size, bits = 12, 64, 16, 4
    w, x = weight(rows, columns), correlated_inputs(500, columns)
    hessian = x.t() @ x / len(x)
    result = quantize_gptq(
        w, hessian, QuantScheme(bits, size, symmetric), torch.float32, desc_act=desc_act, block_size=block_size
    )
    scales = result.quantized.scales.double().repeat_interleave(size, dim=1)
    zeros = torch.full_like(scales, 2 ** (bits - 1))
    if result.quantized.zeros is not None:
        zeros = result.quantized.zeros.double().repeat_interleave(size, dim=1)
    damped = hessian.double() + torch.eye(columns) * (0.01 * hessian.diagonal().mean())
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True).tolist() if desc_act else range(columns)
    expected = reference_gptq(w, damped, scales, zeros, bits, list(order))
    # A value on the edge between two codes may fall either way in float32, and moves what follows in its row.
    same_rows = (result.quantized.codes.double() == expected).all(dim=1)
    assert int(same_rows.sum()) >= rows - 1


def test_dynamic_groups_take_their_grid_from_the_corrected_weights() -> None:
    w, x = weight(16, 64), correlated_inputs(400, 64)
    hessian = x.t() @ x / len(x)
    scheme = QuantScheme(3, 32, False)
    options = {"desc_act": False, "search_steps": 0}
    static = quantize_gptq(w, hessian, scheme, torch.float32, **options)
    moving = quantize_gptq(w, hessian, scheme, torch.float32, static_groups=False, **options)
    wide = quantize_gptq(w, hessian, scheme, torch.float32, static_groups=False, block_size=8, **options)
    assert torch.equal(moving.quantized.scales[:, 0], static.quantized.scales[:, 0])
    assert not torch.equal(moving.quantized.scales[:, 1], static.quantized.scales[:, 1])
    assert torch.allclose(moving.quantized.scales, wide.quantized.scales, rtol=1e-4)
    assert moving.quantized.g_idx is None


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_gptq_beats_rounding_on_its_own_loss(bits: int) -> None:
    w, x = weight(32, 128), correlated_inputs(1000, 128)
    hessian = x.t() @ x / len(x)
    scheme = QuantScheme(bits, 32, True)

    def loss(values: torch.Tensor) -> float:
        error = (values - w).double()
        return float(((error @ hessian.double()) * error).sum())

    nearest = loss(quantize_rtn(w, scheme, torch.float32, 10).dequantize(bits))
    result = quantize_gptq(w, hessian, scheme, torch.float32)
    assert loss(result.quantized.dequantize(bits)) < 0.6 * nearest


def test_columns_without_inputs_are_rounded_to_nearest() -> None:
    w, x = weight(8, 32), correlated_inputs(300, 32)
    x[:, [3, 17]] = 0
    hessian = x.t() @ x / len(x)
    scheme = QuantScheme(4, 16, True)
    result = quantize_gptq(w, hessian, scheme, torch.float32, search_steps=0)
    nearest = quantize_rtn(w, scheme, torch.float32)
    assert result.dead == 2
    assert torch.equal(result.quantized.codes[:, [3, 17]], nearest.codes[:, [3, 17]])


def test_factor_reproduces_the_inverse() -> None:
    x = correlated_inputs(300, 48)
    hessian = x.t() @ x / len(x)
    factor, damping = inverse_factor(hessian, torch.zeros(48, dtype=torch.bool), 0.05)
    damped = hessian.double() + torch.eye(48) * 0.05 * hessian.diagonal().mean()
    assert damping == 0.05 and bool((torch.tril(factor, -1) == 0).all())
    product = factor.double().t() @ factor.double() @ damped
    assert torch.allclose(product, torch.eye(48, dtype=torch.float64), atol=1e-3)


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_matched_weight_solves_the_least_squares_problem(strength: float) -> None:
    w, y = weight(6, 32).double(), correlated_inputs(400, 32, seed=2).double()
    x = y + 0.3 * correlated_inputs(400, 32, seed=3).double().roll(1, dims=1)
    solution = torch.linalg.lstsq(x, y @ w.t()).solution.t()
    hessian, cross = (x.t() @ x / len(x)).float(), (y.t() @ x / len(x)).float()
    found = matched_weight(w.float(), hessian, cross, 1e-7, strength)
    expected = w + strength * (solution - w)
    assert torch.allclose(found.double(), expected, atol=2e-3)
    if strength == 1.0:
        assert float((y @ w.t() - x @ found.t().double()).norm()) < 0.9 * float((y @ w.t() - x @ w.t()).norm())


def test_damping_escalates_and_then_gives_up() -> None:
    alive = torch.zeros(16, dtype=torch.bool)
    x = correlated_inputs(100, 16)
    hessian = x.t() @ x / len(x)
    lowest = float(torch.linalg.eigvalsh(hessian)[0])
    indefinite = hessian - torch.eye(16) * (lowest + 0.05 * hessian.diagonal().mean())
    _, damping = inverse_factor(indefinite, alive, 0.01)
    assert 0.04 <= damping < 0.2
    _, damping = inverse_factor(hessian - torch.eye(16) * (lowest + 0.44 * hessian.diagonal().mean()), alive, 0.01)
    assert damping == 1.0, "the last try, past 0.64"
    with pytest.raises(NotPositiveDefinite):
        inverse_factor(hessian - torch.eye(16) * 10 * hessian.diagonal().mean(), alive, 0.01)


@pytest.mark.parametrize("columns", [40, 300, 520])
def test_hessian_is_the_mean_outer_product(columns: int) -> None:
    x = torch.randn(3, 50, columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    hessian = Hessian(columns, x.device)
    hessian.add(x[:1])
    hessian.add(x[1:])
    rows = x.reshape(-1, columns).double()
    assert torch.allclose(hessian.mean().double(), rows.t() @ rows / len(rows), atol=1e-5)


def test_layers_share_a_hessian_only_while_their_inputs_are_the_same() -> None:
    layers = {name: torch.nn.Linear(8, 8, bias=False) for name in ("a", "b", "c")}
    collector = HessianCollector(layers)
    first, second, third = torch.randn(5, 8), torch.randn(4, 8), torch.randn(3, 8)
    with collector.hooks(), torch.no_grad():
        layers["a"](first), layers["b"](first), layers["c"](second)
        collector.flush()
        assert [group.names for group in collector.groups] == [["a", "b"], ["c"]]
        layers["a"](second), layers["b"](third)
        collector.flush()
    found = {group.names[0]: group.hessian for group in collector.groups}
    expected = {"a": [first, second], "b": [first, third], "c": [second]}
    assert len(found) == 3
    for name, inputs in expected.items():
        rows = torch.cat(inputs)
        assert found[name].rows == len(rows)
        assert torch.allclose(found[name].mean(), rows.t() @ rows / len(rows), atol=1e-5)


def test_the_cross_moment_pairs_the_original_models_inputs_with_the_quantized_ones() -> None:
    quantized, original = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    collector = HessianCollector({"a": quantized}, {"a": original})
    x, y = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    with collector.hooks(), torch.no_grad():
        for i in range(2):
            original(y[i])
            quantized(x[i])
            collector.flush()
    (group,) = collector.groups
    assert torch.allclose(group.hessian.cross(), y.view(-1, 8).t() @ x.view(-1, 8) / 10, atol=1e-5)


def test_the_original_must_see_the_same_tokens() -> None:
    """Another router sends an expert other tokens, or none: the cross moment would pair rows that do not belong."""
    for rows in (4, 0):
        quantized, original = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        collector = HessianCollector({"a": quantized}, {"a": original})
        with collector.hooks(), torch.no_grad():
            if rows:
                original(torch.randn(rows, 8))
            quantized(torch.randn(5, 8))
            with pytest.raises(RunError, match="match_original") as caught:
                collector.flush()
        assert caught.value.where == "a"


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("spread", [2e-3, 4e-4, 3e-5])
def test_small_weights_keep_their_bits_in_float16(spread: float, symmetric: bool) -> None:
    """Scales below float16's least normal number, 6.1e-5, are subnormal ones, not that number."""
    values, scheme = weight(64, 96) * (spread / 0.1), QuantScheme(8, 32, symmetric)
    errors = []
    for dtype in (torch.float16, torch.float32):
        found = quantize_rtn(values, scheme, dtype)
        assert bool((found.scales != 0).all())
        errors.append(float((found.dequantize(8) - values).double().square().mean() / values.double().square().mean()))
    # a scale of a few units of 2**-24 is off by some per cent, and the range's ends with it
    assert errors[0] < 1.3 * errors[1] if spread > 1e-4 else errors[0] < 1e-3


def test_what_is_too_small_for_a_scale_keeps_its_sign() -> None:
    scales = torch.tensor([1e-12, -1e-12, 0.0, -3e-6, 3e-6, -0.25])
    half = round_scales(scales, torch.float16)
    assert half.tolist()[:3] == [2**-24, -(2**-24), 2**-24]
    assert torch.allclose(half[3:], scales[3:], rtol=0.01)
    assert torch.equal(half, half.to(torch.float16).float())
    wide = round_scales(torch.tensor([-1e-45, 1e-45, 0.0]), torch.bfloat16)
    assert wide.tolist() == [-torch.finfo(torch.bfloat16).tiny, *[torch.finfo(torch.bfloat16).tiny] * 2]
