"""fp8, mxfp4 and nvfp4: numbers against the published tables, rounding, scales, and the layers that hold them."""

from __future__ import annotations

import pytest
import torch
from llmopt.passes.quantize.fp8 import FloatQuantized, from_blocks, quantize_fp8, to_blocks
from llmopt.passes.quantize.microscaling import dequantize, nearest_e2m1, quantize_mxfp4, quantize_nvfp4
from llmopt.runtime.kernels.float4 import (
    E2M1,
    Float4Scheme,
    MXFP4Linear,
    NVFP4Linear,
    e2m1_values,
    e8m0_values,
    pack_nibbles,
    unpack_nibbles,
)
from llmopt.runtime.kernels.formats import layer_class, make_scheme
from llmopt.runtime.kernels.scaled import FLOAT8, ScaledScheme

KINDS = ["mxfp4", "nvfp4"]


def weights(rows: int = 24, columns: int = 128, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.logspace(-3, 1, rows)[:, None]


def divisor(found: FloatQuantized) -> torch.Tensor:
    assert found.global_scale is not None
    return found.global_scale


def quantize(kind: str, weight: torch.Tensor, search: int = 0) -> FloatQuantized:
    return quantize_mxfp4(weight, search > 0) if kind == "mxfp4" else quantize_nvfp4(weight, search)


# the published tables


def test_e2m1_is_that_of_the_specification() -> None:
    """OCP Microscaling Formats v1.0, table of FP4: S EE M, bias 1."""
    assert E2M1 == (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    by_bits = []
    for code in range(16):
        sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
        size = mantissa * 0.5 if exponent == 0 else (1 + mantissa * 0.5) * 2.0 ** (exponent - 1)
        by_bits.append(-size if sign else size)
    assert e2m1_values(torch.arange(16, dtype=torch.uint8)).tolist() == by_bits


def test_e8m0_is_that_of_the_specification() -> None:
    """Bias 127, 2**-127 to 2**127, 255 is NaN, no zero and no sign."""
    values = e8m0_values(torch.arange(256).to(torch.uint8))
    assert values[:255].double().tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert values[255].isnan()


def test_e4m3_is_that_of_the_specification() -> None:
    """OCP 8-bit Floating Point v1.0: S EEEE MMM, bias 7, subnormals, no infinities, S.1111.111 is NaN."""
    values = torch.arange(256).to(torch.uint8).view(FLOAT8).float()
    for code in range(256):
        sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
        size = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        if exponent == 15 and mantissa == 7:
            assert values[code].isnan()
        else:
            assert float(values[code]) == (-size if sign else size)
    assert values[~values.isnan()].max() == 448


def test_rounding_to_e2m1_is_to_nearest_with_ties_to_even() -> None:
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 100.0])
    assert e2m1_values(nearest_e2m1(halves)).tolist() == [0, 1, 1, 2, 2, 4, 4, 6, 6]
    assert torch.equal(e2m1_values(nearest_e2m1(-halves)), -e2m1_values(nearest_e2m1(halves)))
    x = torch.linspace(-7, 7, 4001)
    table = torch.tensor(E2M1)
    nearest = (x.abs().clamp(max=6)[:, None] - table).abs().amin(1)
    assert torch.allclose((e2m1_values(nearest_e2m1(x)) - x.clamp(-6, 6)).abs(), nearest)


def test_rounding_to_e2m1_is_that_of_compressed_tensors() -> None:
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
    from compressed_tensors.quantization.utils.fp4_utils import cast_to_fp4

    ties = torch.tensor([0.25, -0.75, 1.25, 1.75, 2.5, -3.5, 5.0, 0.0])
    x = torch.cat([torch.linspace(-7, 7, 1016), ties]).view(8, -1)
    codes = nearest_e2m1(x)
    assert torch.equal(e2m1_values(codes), cast_to_fp4(x.clone()))
    packed = pack_nibbles(codes)
    assert torch.equal(packed & 0x77, pack_fp4_to_uint8(cast_to_fp4(x.clone())) & 0x77)  # a zero's sign is free
    assert torch.equal(unpack_fp4_from_uint8(packed, *x.shape, dtype=torch.float32), e2m1_values(codes))
    assert torch.equal(unpack_nibbles(packed), codes)


# mxfp4 and nvfp4


@pytest.mark.parametrize("search", [0, 10])
@pytest.mark.parametrize("kind", KINDS)
def test_four_bit_floats_are_within_half_a_step(kind: str, search: int) -> None:
    weight = weights()
    found = quantize(kind, weight, search)
    size = 32 if kind == "mxfp4" else 16
    scales = e8m0_values(found.scales) if kind == "mxfp4" else found.scales.float() / divisor(found)
    scaled = weight.view(24, -1, size) / scales.unsqueeze(-1)
    table = torch.tensor(E2M1)
    nearest = (scaled.abs().clamp(max=6).unsqueeze(-1) - table).abs().amin(-1)
    values = e2m1_values(found.codes).view_as(scaled)
    assert torch.allclose((values - scaled.clamp(-6, 6)).abs(), nearest, atol=1e-5)
    assert torch.allclose(dequantize(found), (values * scales.unsqueeze(-1)).view_as(weight))


def test_mxfp4_scales_are_those_of_the_specification() -> None:
    """Shared exponent: that of the largest magnitude less 2, whatever the mantissa; zeros get the smallest."""
    largest = torch.tensor([1.0, 1.99, 2.0, 4.0, 6.0, 7.9, 2.0**-120, 0.0, 3e38, 1e-45])
    weight = torch.zeros(10, 32)
    weight[:, 3] = largest
    found = quantize_mxfp4(weight)
    assert found.scales.flatten().tolist() == [125, 125, 126, 127, 127, 127, 5, 0, 252, 0]
    assert dequantize(found)[:5, 3].tolist() == [1.0, 1.5, 2.0, 4.0, 6.0]  # 1.99 lies outside the scale's range
    assert float(dequantize(found)[5, 3]) == 6.0  # 7.9 lies outside and is clipped
    assert float(dequantize(quantize_mxfp4(weight, search=True))[5, 3]) == 8.0


def test_nvfp4_scales_fill_e4m3_and_share_the_divisor() -> None:
    weight = weights()
    found = quantize_nvfp4(weight)
    assert float(divisor(found)) == pytest.approx(448 * 6 / float(weight.abs().max()))
    assert found.scales.float().max() == 448
    other = quantize_nvfp4(weight, largest=weight.abs().max() * 2)
    assert float(divisor(other)) == pytest.approx(float(divisor(found)) / 2)
    zeros = quantize_nvfp4(torch.zeros(4, 32))
    assert float(divisor(zeros)) == 1 and not dequantize(zeros).any()


@pytest.mark.parametrize("kind", KINDS)
def test_searching_scales_is_never_worse(kind: str) -> None:
    weight = weights()
    size = 32 if kind == "mxfp4" else 16
    errors = [
        (dequantize(quantize(kind, weight, search)) - weight).square().view(24, -1, size).sum(-1) for search in (0, 10)
    ]
    assert (errors[1] <= errors[0] * (1 + 1e-5)).all() and errors[1].sum() < errors[0].sum()


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_that_does_not_divide_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="divide"):
        quantize(kind, weights(columns=40))


# fp8


@pytest.mark.parametrize("search", [0, 10])
@pytest.mark.parametrize("block", [-1, 32, 64])
def test_fp8_is_within_half_a_step(block: int, search: int) -> None:
    weight = weights(rows=72)
    scheme = ScaledScheme(group_size=block, kind="float8")
    found = quantize_fp8(weight, scheme, torch.bfloat16, search)
    assert found.codes.dtype == FLOAT8 and found.scales.dtype == torch.bfloat16
    assert tuple(found.scales.shape) == ((72, 1) if block == -1 else (-(-72 // block), 128 // block))
    layer = layer_class(scheme).from_linear(torch.nn.Linear(128, 72), found.codes, found.scales, None, scheme)
    blocks, error = to_blocks(weight, block), to_blocks(layer.dequantize() - weight, block).abs()
    scale = found.scales.float().view(blocks.shape[:2]).unsqueeze(-1)
    size = (blocks / scale).abs().clamp(min=2.0**-6)
    half_step = 2.0 ** (size.log2().floor() - 3) / 2 * scale
    inside = size <= 448
    assert (error <= half_step * 1.001)[inside].all() and inside.float().mean() > 0.98


def test_fp8_search_is_never_worse() -> None:
    weight, scheme = weights(), ScaledScheme(kind="float8")
    errors = []
    for steps in (0, 10):
        found = quantize_fp8(weight, scheme, torch.float32, steps)
        errors.append((found.codes.float() * found.scales - weight).square().sum(1))
    assert (errors[1] <= errors[0]).all() and errors[1].sum() < errors[0].sum()


@pytest.mark.parametrize(("rows", "size"), [(72, 32), (64, 16), (5, -1)])
def test_blocks_come_back_in_place(rows: int, size: int) -> None:
    weight = torch.arange(rows * 96, dtype=torch.float32).view(rows, 96)
    blocks = to_blocks(weight, size)
    assert torch.equal(from_blocks(blocks, rows, 96, size), weight)
    if size != -1:
        assert torch.equal(blocks[0, 1].view(size, size), weight[:size, size : 2 * size])


# the layers


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_computes_with_its_values(kind: str) -> None:
    weight = weights(24, 64)
    linear = torch.nn.Linear(64, 24)
    found = quantize(kind, weight)
    scheme = Float4Scheme.of(kind)
    layer = layer_class(scheme).from_linear(linear, found.codes, found.scales, found.global_scale, scheme)
    assert torch.equal(layer.weight, dequantize(found)) and layer.packed_nbytes == scheme.nbytes(24, 64, 2)
    x = torch.randn(3, 64)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, linear.bias))
    other = type(layer).empty(64, 24, scheme, bias=True, dtype=torch.float32)
    assert {k: (v.shape, v.dtype) for k, v in other.state_dict().items()} == {
        k: (v.shape, v.dtype) for k, v in layer.state_dict().items()
    }
    other.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(other(x), layer(x))


def test_mxfp4_as_integers_is_exact() -> None:
    from llmopt.runtime.kernels.packed import dequantize_codes

    weight = weights(24, 64)
    found, scheme = quantize_mxfp4(weight), Float4Scheme.of("mxfp4")
    layer = MXFP4Linear.from_linear(torch.nn.Linear(64, 24), found.codes, found.scales, None, scheme)
    state = layer.quant_state()
    assert int(state.codes.max()) < 2**state.bits
    assert torch.equal(dequantize_codes(state.codes, state.scales, state.zeros, state.bits), layer.weight)
    assert torch.equal(layer.weight.bfloat16().float(), layer.weight)


def test_wrong_contents_and_schemes_are_refused() -> None:
    linear, codes = torch.nn.Linear(64, 4), torch.zeros(4, 64, dtype=torch.uint8)
    with pytest.raises(ValueError, match="do not fit"):
        MXFP4Linear.from_linear(linear, codes, codes[:, :4], None, Float4Scheme.of("mxfp4"))
    with pytest.raises(ValueError, match="nvfp4"):
        NVFP4Linear.from_linear(linear, codes, codes[:, :4], torch.ones(1), Float4Scheme.of("nvfp4"))
    with pytest.raises(ValueError, match="no four-bit float scheme"):
        Float4Scheme(group_size=16, kind="mxfp4")
    with pytest.raises(ValueError, match="no four-bit float scheme"):
        make_scheme("fp5-pack-quantized", 4, 32)
    with pytest.raises(ValueError, match="holds no weight"):
        NVFP4Linear(64, 4, Float4Scheme.of("mxfp4"))


# the pass


def test_the_method_brings_its_own_figures() -> None:
    from llmopt.passes.quantize import Quantize

    for options, expected in (
        ({}, (4, 64, True)),
        ({"activations": "int8"}, (8, -1, True)),
        ({"method": "fp8"}, (8, -1, True)),
        ({"method": "fp8", "group_size": 128}, (8, 128, True)),
        ({"method": "mxfp4"}, (4, 32, True)),
        ({"method": "nvfp4"}, (4, 16, True)),
    ):
        config = Quantize(**options).config
        assert (config.bits, config.group_size, config.symmetric) == expected
        again = Quantize(**config.model_dump()).config
        assert again == config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "nvfp4", "group_size": 32}, "group_size 16, not 32"),
        ({"method": "mxfp4", "bits": 8}, "bits 4, not 8"),
        ({"method": "fp8", "symmetric": False}, "symmetric true, not false"),
        ({"activations": "int8", "group_size": 64}, "group_size channel, not 64"),
        ({"activations": "int8", "method": "mxfp4"}, "for integer weights"),
    ],
)
def test_contradictions_are_refused(options: dict, message: str) -> None:
    from llmopt.optimizer.errors import UsageError
    from llmopt.passes.quantize import Quantize

    with pytest.raises(UsageError, match=message):
        Quantize(**options)


def test_the_search_rounds_as_the_codes_do() -> None:
    from llmopt.passes.quantize.microscaling import _error

    values = torch.cat([torch.linspace(0, 7, 1401), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])])[
        :, None, None
    ]
    rounded = e2m1_values(nearest_e2m1(values * 3 / 3))
    expected = (rounded * 3 - values * 3).square().sum(-1)
    assert torch.allclose(_error(values * 3, torch.full((len(values), 1), 3.0)), expected, atol=1e-4)
