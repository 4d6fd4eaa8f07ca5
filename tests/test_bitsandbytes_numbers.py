"""bnb-nf4 and bnb-int8: numbers against the papers and against bitsandbytes."""

from __future__ import annotations

import json

import pytest
import torch
from llmopt.passes.quantize.library_formats import quantize_llm_int8, quantize_nf4
from llmopt.runtime.kernels.dynamic8 import compress, dynamic_map, expand, nearest
from llmopt.runtime.kernels.four_bit import NF4, FourBitLinear, FourBitScheme
from llmopt.runtime.kernels.llm_int8 import LLMInt8Linear, LLMInt8Scheme

SHAPES = [(32, 64), (48, 96), (7, 33), (5, 27), (96, 640)]


def weights(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return (torch.randn(rows, columns, generator=generator) * torch.logspace(-2, 0, rows)[:, None]).to(dtype)


def nf4_layer(weight: torch.Tensor, bias: bool = False) -> FourBitLinear:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias, dtype=weight.dtype)
    found = quantize_nf4(weight)
    return FourBitLinear.from_linear(linear, found.codes, found.scales, None, FourBitScheme())


def int8_layer(weight: torch.Tensor, bias: torch.Tensor | None = None, threshold: float = 6.0) -> LLMInt8Linear:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    if bias is not None:
        linear.bias.data = bias
    found = quantize_llm_int8(weight)
    return LLMInt8Linear.from_linear(linear, found.codes, found.scales, None, LLMInt8Scheme(threshold=threshold))


# numbers against the papers


def test_nf4_is_the_published_table() -> None:
    """QLoRA, equation 4 and appendix E: normal quantiles of 2^3 negative and 2^3 + 1 positive levels, zero shared."""
    printed = [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]  # fmt: skip
    assert list(NF4) == printed
    offset = 0.5 * ((1 - 1 / 32) + (1 - 1 / 30))
    positive = torch.special.ndtri(torch.linspace(offset, 0.5, 9, dtype=torch.float64)[:-1])
    negative = -torch.special.ndtri(torch.linspace(offset, 0.5, 8, dtype=torch.float64)[:-1])
    derived = torch.cat((negative, torch.zeros(1), positive)).sort().values
    assert torch.allclose(torch.tensor(NF4, dtype=torch.float64), derived / derived.abs().max(), atol=1e-6)


def test_the_dynamic_map_is_that_of_the_paper() -> None:
    """Dettmers 2015: a sign, zeros for the exponent, an indicator bit, and a linear fraction in what bits are left."""
    values = dynamic_map().double()
    assert len(values.unique()) == 256 and torch.equal(values, values.sort().values)
    assert float(values[-1]) == 1 and float(values[127]) == 0 and torch.equal(values[:127], -values[128:255].flip(0))
    for exponent in range(7):
        inside = values[(values > 10.0 ** (exponent - 7)) & (values < 10.0 ** (exponent - 6))]
        assert len(inside) == 2**exponent
        if exponent:
            assert torch.allclose(inside.diff(), inside.diff().mean(), rtol=1e-3)


def test_nf4_codes_are_nearest() -> None:
    weight = weights(48, 96)
    found = quantize_nf4(weight)
    scaled = weight.view(-1, 64) / found.scales.unsqueeze(1)
    table = torch.tensor(NF4)
    least = (scaled.unsqueeze(-1) - table).abs().amin(-1)
    assert torch.allclose((table[found.codes.view(-1, 64).long()] - scaled).abs(), least, atol=1e-6)
    assert torch.equal(found.scales, weight.view(-1, 64).abs().amax(1))


def test_double_quantization_is_nearest_in_blocks_of_256() -> None:
    scales = torch.rand(700, generator=torch.Generator().manual_seed(0)) + 0.5
    found = compress(scales)
    assert found.offset == float(scales.mean()) and len(found.largest) == 3
    centred = (scales - scales.mean()).split(256)
    assert torch.equal(found.largest, torch.stack([part.abs().max() for part in centred]))
    shares = torch.cat([part / largest for part, largest in zip(centred, found.largest)])
    least = (shares.unsqueeze(1) - found.table).abs().amin(1)
    assert torch.allclose((found.table[found.codes.long()] - shares).abs(), least, atol=1e-7)
    again = expand(found.codes, found.largest, found.table, found.offset)
    assert (again - scales).abs().max() < 0.01 * 0.5
    assert nearest(torch.tensor([-2.0, 2.0, 0.0]), found.table).tolist() == [0, 255, 127]


def test_equal_scales_and_zeros_survive() -> None:
    layer = nf4_layer(torch.zeros(32, 64))
    assert not layer.dequantize().any() and layer.dequantize().shape == (32, 64)
    ones = nf4_layer(torch.ones(32, 64))
    assert torch.equal(ones.dequantize(), torch.ones(32, 64))
    zero_row = weights(8, 64)
    zero_row[3] = 0
    assert not int8_layer(zero_row).dequantize()[3].any() and bool(int8_layer(zero_row).dequantize().isfinite().all())


@pytest.mark.parametrize("rows", [1, 5])
def test_llm_int8_is_a_product_in_two_parts(rows: int) -> None:
    """Against the paper's equation 8 in float64: outlier columns with dequantized weights, the rest as integers."""
    weight, bias = weights(24, 64), torch.randn(24, generator=torch.Generator().manual_seed(1))
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(2))
    x[0, 5], x[-1, 40] = 60.0, -6.0
    layer = int8_layer(weight, bias)
    codes, step = layer.weight.double(), layer.SCB.double()[:, None] / 127
    outliers = (x.half().abs() >= 6).any(0)
    assert outliers.sum() == 2
    plain = x.half().double() * ~outliers
    kept = (x.half().double() * (x.half().abs() < 6)).abs().amax(1, keepdim=True)
    rounded = (plain * 127 / kept).round()
    expected = (rounded @ codes.t()) * (kept / 127) * step.t() + bias.double()
    expected += x.double()[:, outliers] @ (codes * step)[:, outliers].t()
    assert torch.allclose(layer(x).double(), expected, rtol=0, atol=5e-4)  # its 1 / 127² is 1.8e-5 too large
    exact = x.double() @ weight.double().t() + bias.double()
    assert (layer(x).double() - exact).norm() < 0.02 * exact.norm()
    without = int8_layer(weight, bias, threshold=0.0)(x).double()
    assert (without - exact).norm() > 1.5 * (layer(x).double() - exact).norm()


def test_the_layers_run_in_a_compiled_graph() -> None:
    x = torch.randn(5, 64)
    x[2, 7] = 11
    for layer in (nf4_layer(weights(32, 64), bias=True), int8_layer(weights(32, 64), torch.ones(32))):
        with torch.no_grad():
            compiled = torch.compile(layer, backend="eager", fullgraph=True)
            assert torch.equal(compiled(x), layer(x))


# numbers against bitsandbytes


def same(key: str, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two stored tensors are equal: bit for bit, the JSON by its contents. Codes of scales may be neighbours,
    where bitsandbytes' CPU code, which looks them up in a coarse table, does not take the nearest."""
    if "quant_state" in key:
        return bool(json.loads(bytes(ours.tolist())) == json.loads(bytes(theirs.tolist())))
    if key.endswith("weight.absmax"):
        apart = (ours.int() - theirs.int()).abs()
        return ours.dtype == theirs.dtype and int(apart.max()) <= 1 and int(apart.sum()) <= 0.1 * apart.numel()
    return ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_nf4_is_bitsandbytes_bit_for_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    weight = weights(*shape, dtype)
    packed, state = bnb.functional.quantize_4bit(weight.clone(), quant_type="nf4", compress_statistics=True)
    layer = nf4_layer(weight)
    ours = layer.state_dict()
    theirs = {"weight": packed, **{f"weight.{k}": v for k, v in state.as_dict(packed=True).items()}}
    assert set(ours) == set(theirs)
    for key, tensor in theirs.items():
        assert same(key, ours[key], tensor), key
    state_bytes = len(theirs["weight.quant_state.bitsandbytes__nf4"])
    layer = FourBitLinear.empty(*shape[::-1], FourBitScheme(state_bytes=state_bytes))
    layer.load_state_dict(theirs, assign=True)
    scales = bnb.functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    assert torch.equal(layer.group_scales(), scales)
    codes = torch.cat((packed >> 4, packed & 15), 1).view(-1)[: weight.numel()].long()
    values = state.code[codes] * scales.repeat_interleave(64)[: weight.numel()]
    assert torch.equal(layer.dequantize(), values.view(shape))
    if shape[1] % 64 == 0:  # else its CPU code takes other blocks' scales
        assert torch.equal(layer.dequantize().to(dtype), bnb.functional.dequantize_4bit(packed, state))
    assert layer.packed_nbytes == layer.scheme.nbytes(*shape, 2) == sum(t.nbytes for t in theirs.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_llm_int8_is_bitsandbytes_bit_for_bit(dtype: torch.dtype) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    weight, bias = weights(48, 96, dtype), torch.randn(48).to(dtype)
    layer = int8_layer(weight, bias)
    theirs = bnb.nn.Linear8bitLt(96, 48, bias=True, has_fp16_weights=False, threshold=6.0)
    theirs.weight = bnb.nn.Int8Params(weight.clone(), requires_grad=False, has_fp16_weights=False)
    theirs.bias = torch.nn.Parameter(bias.clone(), requires_grad=False)
    theirs = theirs.to("cpu").eval()
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(layer.state_dict()[key], tensor) and layer.state_dict()[key].dtype == tensor.dtype, key
    x = torch.randn(2, 7, 96, generator=torch.Generator().manual_seed(3)).to(dtype)
    for outlier in (0.0, 6.5, 70.0):
        x[1, 3, 17] = outlier
        for inputs in (x, x[1:, 3:4]):
            with torch.inference_mode():
                assert torch.equal(layer(inputs), theirs(inputs.clone()))


def test_the_maps_are_those_of_bitsandbytes() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    assert torch.equal(dynamic_map(), bnb.functional.create_dynamic_map())
    assert torch.equal(torch.tensor(NF4), bnb.functional.get_4bit_type("nf4", device="cpu"))


# folders
