"""Int8Linear and Float8Linear: arithmetic against float64, compressed-tensors' quantizer and the native kernels."""

from __future__ import annotations

import pytest
import torch
from llmopt.runtime.kernels.scaled import FLOAT8, Float8Linear, Int8Linear, ScaledScheme, quantize_tokens

SHAPES = [(3, 64, 24), (1, 576, 40), (40, 100, 17)]


def linear(inputs: int, outputs: int, bias: bool = True, seed: int = 0) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(inputs, outputs, bias=bias)


def int8_layer(module: torch.nn.Linear) -> Int8Linear:
    weight = module.weight.detach()
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (torch.round(weight / scales) + 128).to(torch.uint8)
    return Int8Linear.from_linear(module, codes, scales, None, ScaledScheme())


def float8_layer(module: torch.nn.Linear, block: int = -1) -> Float8Linear:
    weight, scheme = module.weight.detach(), ScaledScheme(group_size=block, kind="float8")
    scales = torch.rand(scheme.scale_shape(*weight.shape)) / 448 + 1e-4
    full = scales if block == -1 else scales.repeat_interleave(block, 0)[: len(weight)].repeat_interleave(block, 1)
    return Float8Linear.from_linear(module, (weight / full).to(FLOAT8), scales, None, scheme)


@pytest.mark.parametrize("dtype", [torch.int8, FLOAT8])
@pytest.mark.parametrize("group_size", [-1, 32])
def test_inputs_are_rounded_to_the_nearest_value_of_their_own_scale(dtype: torch.dtype, group_size: int) -> None:
    x = (
        torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1.0, 1e-6, 1e4, 0.0, 3.0])[:, None]
    )
    codes, scales = quantize_tokens(x, dtype, group_size)
    assert codes.dtype == dtype and scales.shape == (5, 1 if group_size == -1 else 2)
    largest = 127 if dtype == torch.int8 else 448
    groups = codes.float().unflatten(1, (scales.shape[1], -1))
    assert (groups[[0, 1, 2, 4]].abs().amax(-1) == largest).all() and not groups[3].any()
    value = (groups * scales.unsqueeze(-1)).flatten(1)
    step = torch.ones_like(groups) if dtype == torch.int8 else (2.0 ** (torch.log2(groups.abs()).floor() - 3))
    half_step = (step.clamp(min=2.0**-9) / 2 * scales.unsqueeze(-1)).flatten(1)
    assert ((value - x).abs() <= half_step * 1.0001).all()


def test_inputs_are_quantized_as_compressed_tensors_does_for_float8() -> None:
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.quant_scheme import FP8_BLOCK, FP8_DYNAMIC
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    x = torch.randn(1, 6, 256, generator=torch.Generator().manual_seed(0))
    for preset, group in ((FP8_DYNAMIC, -1), (FP8_BLOCK, 128)):
        args = preset["input_activations"]
        scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Module())
        codes, scales = quantize_tokens(x[0], FLOAT8, group)
        ours = (codes.float().unflatten(1, (scales.shape[1], -1)) * scales.unsqueeze(-1)).flatten(1)
        assert torch.equal(scales.flatten(), scale.flatten())
        assert torch.equal(ours, fake_quantize(x, scale, zero, args)[0])


def test_a_fixed_input_scale_clips() -> None:
    codes, scales = quantize_tokens(torch.tensor([[1.0, -1000.0]]), FLOAT8, scale=torch.tensor([0.5]))
    assert codes.float().tolist() == [[2.0, -448.0]] and scales.tolist() == [[0.5]]


@pytest.mark.parametrize(("rows", "columns", "outputs"), SHAPES)
def test_the_int8_product_is_exact(rows: int, columns: int, outputs: int) -> None:
    layer = int8_layer(linear(columns, outputs))
    x = torch.randn(2, rows, columns, generator=torch.Generator().manual_seed(1))
    codes, scales = quantize_tokens(x.view(-1, columns), torch.int8)
    exact = (codes.double() @ layer.weight.double().t()) * scales.double() * layer.weight_scale.double().t()
    exact = (exact + layer.get_parameter("bias").double()).view(2, rows, outputs)
    assert torch.allclose(layer(x).double(), exact, rtol=1e-6, atol=1e-6)
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    error = layer(x) - torch.nn.functional.linear(x, layer.dequantize(), layer.bias)
    assert 0 < error.norm() < 0.02 * layer(x).norm()


@pytest.mark.parametrize(("rows", "columns", "outputs"), SHAPES)
@pytest.mark.parametrize("block", [-1, 4])
def test_the_float8_product_is_that_of_the_dequantized_values(
    rows: int, columns: int, outputs: int, block: int
) -> None:
    layer = float8_layer(linear(columns, outputs), block)
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    codes, scales = quantize_tokens(x, FLOAT8, block)
    values = codes.double().unflatten(1, (scales.shape[1], -1)) * scales.double().unsqueeze(-1)
    exact = values.flatten(1) @ layer.dequantize().double().t() + layer.get_parameter("bias").double()
    assert torch.allclose(layer(x).double(), exact, rtol=1e-5, atol=1e-5)


def test_the_native_kernels_compute_the_same() -> None:
    from llmopt.runtime.kernels.build import NativeUnavailable
    from llmopt.runtime.kernels.linear import NativeLinear

    layer = int8_layer(linear(96, 64))
    state = layer.quant_state()
    try:
        native = NativeLinear.from_codes(
            state.codes, state.scales, state.zeros, bits=state.bits, bias=layer.bias, activation=layer.activation
        )
    except NativeUnavailable as error:
        pytest.skip(str(error))
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(native(x), layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_empty_takes_the_state_of_a_layer_and_its_bytes_are_as_announced(bias: bool) -> None:
    for layer in (
        int8_layer(linear(64, 24, bias)),
        float8_layer(linear(64, 24, bias)),
        float8_layer(linear(64, 24, bias), 16),
    ):
        other = type(layer).empty(64, 24, layer.scheme, bias=bias, dtype=torch.float32)
        assert {k: (v.shape, v.dtype) for k, v in other.state_dict().items()} == {
            k: (v.shape, v.dtype) for k, v in layer.state_dict().items()
        }
        other.load_state_dict(layer.state_dict(), assign=True)
        x = torch.randn(3, 64)
        assert torch.equal(other(x), layer(x))
        assert layer.packed_nbytes == layer.scheme.nbytes(24, 64, 4)
    static = ScaledScheme(kind="float8", per_tensor=True, static_input=True)
    layer = Float8Linear.empty(64, 24, static, dtype=torch.bfloat16, device="cpu")
    assert layer.packed_nbytes == static.nbytes(24, 64, 2) and layer.input_scale.shape == (1,)


def test_impossible_schemes_and_contents_are_refused() -> None:
    for options in (
        {"kind": "int4"}, {"bits": 4}, {"symmetric": False}, {"group_size": 64}, {"static_input": True},
        {"kind": "float8", "group_size": 128, "per_tensor": True},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="scale"):
            ScaledScheme(**options)
    with pytest.raises(ValueError, match="does not divide"):
        Float8Linear.empty(576, 128, ScaledScheme(group_size=128, kind="float8"))
    with pytest.raises(ValueError, match="holds no weight"):
        Int8Linear.empty(64, 64, ScaledScheme(kind="float8"))
    module = linear(8, 4)
    with pytest.raises(ValueError, match="do not fit"):
        Int8Linear.from_linear(module, torch.zeros(4, 8, dtype=torch.uint8), torch.ones(4), None, ScaledScheme())
    with pytest.raises(ValueError, match="do not fit"):
        Float8Linear.from_linear(
            module, torch.zeros(4, 8, dtype=torch.uint8), torch.ones(4, 1), None, ScaledScheme(kind="float8")
        )


@pytest.mark.parametrize("kind", ["int8", "float8", "mxfp4", "nvfp4"])
def test_layers_are_compiled_as_one_graph(kind: str) -> None:
    from llmopt.passes.quantize.microscaling import quantize_mxfp4, quantize_nvfp4
    from llmopt.runtime.kernels.float4 import Float4Scheme
    from llmopt.runtime.kernels.formats import layer_class

    module = linear(64, 24)
    layer: torch.nn.Module
    if kind in ("int8", "float8"):
        layer = int8_layer(module) if kind == "int8" else float8_layer(module)
    else:
        found = quantize_mxfp4(module.weight) if kind == "mxfp4" else quantize_nvfp4(module.weight)
        scheme = Float4Scheme.of(kind)
        layer = layer_class(scheme).from_linear(module, found.codes, found.scales, found.global_scale, scheme)
    x = torch.randn(3, 64)
    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), layer(x))
