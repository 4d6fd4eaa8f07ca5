"""Native linear layers against float64 references of their own stated arithmetic."""

import pytest
import torch
from llmopt.runtime.kernels import build
from llmopt.runtime.kernels.linear import NativeLinear, quantize_rows, torch_chunks
from llmopt.runtime.kernels.native import instruction_set, library, set_num_threads, stop_threads
from llmopt.runtime.kernels.packed import dequantize_codes


@pytest.fixture(params=["native", "portable"], autouse=True)
def isa(request, monkeypatch):
    monkeypatch.setenv("LLMOPT_KERNELS_ISA", request.param)
    reason = build.unavailable_reason()
    if reason:
        pytest.skip(reason)
    set_num_threads(1)
    return request.param


def random_codes(rows, columns, group, bits, symmetric, seed=0):
    generator = torch.Generator().manual_seed(seed)
    groups = columns // group
    codes = torch.randint(0, 2**bits, (rows, columns), generator=generator, dtype=torch.uint8)
    scales = torch.rand(rows, groups, generator=generator) * 0.1 - 0.03
    zeros = None if symmetric else torch.randint(0, 2**bits, (rows, groups), generator=generator, dtype=torch.uint8)
    return codes, scales, zeros


def reference(x, codes, scales, zeros, bits, activation):
    """The arithmetic of linear.h in float64."""
    rows, groups = scales.shape
    zero = torch.full_like(scales, 2 ** (bits - 1)) if zeros is None else zeros
    shifted = codes.double().view(rows, groups, -1) - zero.double().unsqueeze(-1)
    grouped = x.view(len(x), groups, -1)
    if activation == "int8":
        peak = grouped.abs().amax(-1, keepdim=True)
        inverse = torch.where(peak > 0, 127.0 / peak, torch.zeros_like(peak))
        values = (grouped * inverse).round().double() * (peak / 127.0).double()
    elif activation == "bfloat16":
        values = grouped.bfloat16().double()
    else:
        values = grouped.double()
    return torch.einsum("mgk,ngk,ng->mn", values, shifted, scales.double())


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 12, 13, 29])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("activation", ["int8", "bfloat16", "float32"])
def test_codes(rows, bits, symmetric, activation):
    columns, group, out = 192, 64, 70
    codes, scales, zeros = random_codes(out, columns, group, bits, symmetric)
    bias = torch.randn(out)
    layer = NativeLinear.from_codes(codes, scales, zeros, bits=bits, bias=bias, activation=activation)
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    x[0, :group] = 0
    expected = reference(x, codes, scales, zeros, bits, activation) + bias.double()
    error = (layer(x).double() - expected).abs().max() / expected.abs().max()
    assert error < 2e-6


@pytest.mark.parametrize("columns, group", [(96, 32), (96, 96), (256, 128), (80, 80)])
@pytest.mark.parametrize("bits", [4, 8])
def test_groups(columns, group, bits):
    """Groups of 32 and more, one group a row, and columns that are no multiple of 32."""
    codes, scales, zeros = random_codes(33, columns, group, bits, True)
    layer = NativeLinear.from_codes(codes, scales, zeros, bits=bits, activation="int8")
    x = torch.randn(5, columns)
    expected = reference(x, codes, scales, zeros, bits, "int8")
    assert (layer(x).double() - expected).abs().max() < 2e-6 * expected.abs().max()


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("columns, group", [(192, 32), (192, 64), (192, 96), (192, 192), (80, 80)])
@pytest.mark.parametrize("zeros", ["middle", "own"])
def test_bfloat16_rows_of_every_number(bits, columns, group, zeros):
    """The exact path: codes of each width in the container that holds them, 1 to 40 rows."""
    codes, scales, own = random_codes(70, columns, group, bits, zeros == "middle", seed=bits)
    codes[0, :2], codes[-1, -1] = torch.tensor([0, 2**bits - 1]), 0
    points = torch.full(scales.shape, 2 ** (bits - 1), dtype=torch.uint8) if own is None else own
    container = 4 if bits <= 4 else 8
    layer = NativeLinear.from_codes(codes, scales, points, bits=container, activation="bfloat16")
    x = torch.randn(40, columns, generator=torch.Generator().manual_seed(bits))
    expected = reference(x, codes, scales, points, container, "bfloat16")
    for rows in range(1, 41):
        assert (layer(x[:rows]).double() - expected[:rows]).abs().max() < 3e-6 * expected.abs().max()


@pytest.mark.parametrize("activation", ["int8", "bfloat16", "float32"])
@pytest.mark.parametrize(
    "bits, low, high, zero", [(8, 0, 32, 16), (8, 112, 144, None), (8, 112, 145, None), (8, 100, 256, 0), (4, 9, 16, 1)]
)
def test_constant_zero_points(bits, low, high, zero, activation):
    """A zero point shared by all groups is folded into the codes where they still fit, and changes no result."""
    codes = torch.randint(low, high, (40, 128), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    codes[0, :2] = torch.tensor([low, high - 1])
    scales = torch.rand(40, 2) * 0.1
    zeros = None if zero is None else torch.full((40, 2), zero, dtype=torch.uint8)
    layer = NativeLinear.from_codes(codes, scales, zeros, bits=bits, activation=activation)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1))
    expected = reference(x, codes, scales, zeros, bits, activation)
    assert (layer(x).double() - expected).abs().max() < 3e-6 * expected.abs().max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows, columns, out", [(1, 64, 32), (5, 50, 7), (26, 576, 96)])
def test_float_weights(dtype, rows, columns, out):
    kind = getattr(torch, dtype)
    weight, bias = torch.randn(out, columns).to(kind), torch.randn(out)
    layer = NativeLinear.from_weight(weight, bias)
    x = torch.randn(rows, columns)
    expected = x.to(kind).double() @ weight.double().T + bias.double()
    assert layer.weight_format == dtype
    assert (layer(x).double() - expected).abs().max() < 2e-6 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("symmetric", [True, False])
def test_short_scales_are_kept_short_and_exact(dtype, symmetric):
    codes, scales, zeros = random_codes(40, 128, 32, 4, symmetric)
    scales = scales.to(dtype)
    layer = NativeLinear.from_codes(codes, scales, zeros, bits=4)
    wide = NativeLinear.from_codes(codes, scales.float() + 1e-7, zeros, bits=4)
    assert wide.nbytes - layer.nbytes == 64 * 4 * 2
    x = torch.randn(3, 128)
    expected = reference(x, codes, scales, zeros, 4, "int8")
    assert (layer(x).double() - expected).abs().max() < 2e-6 * expected.abs().max()


def test_memory_is_the_formats():
    codes, scales, _ = random_codes(64, 256, 64, 4, True)
    assert NativeLinear.from_codes(codes, scales, None, bits=4).nbytes == 64 * 256 // 2 + 64 * 4 * 4
    assert NativeLinear.from_weight(torch.zeros(64, 256, dtype=torch.bfloat16)).nbytes == 64 * 256 * 2


@pytest.mark.parametrize("bits, group, bound", [(8, 0, 0.008), (4, 32, 0.1)])
def test_quantize_rows(bits, group, bound):
    weight = torch.randn(48, 128)
    codes, scales, zeros = quantize_rows(weight, bits=bits, group_size=group)
    size = group or 128
    restored = (codes.float().view(48, -1, size) - 2 ** (bits - 1)) * scales.unsqueeze(-1)
    assert zeros is None and codes.dtype == torch.uint8
    assert (restored.view(48, 128) - weight).norm() / weight.norm() < bound


def test_bad_input_is_one_clear_error():
    codes, scales, _ = random_codes(8, 96, 96, 4, True)
    with pytest.raises(ValueError, match="multiple of 32"):
        NativeLinear.from_codes(codes, scales.repeat(1, 2), None, bits=4)
    with pytest.raises(ValueError, match="below 16"):
        NativeLinear.from_codes(codes + 16, scales, None, bits=4)
    with pytest.raises(ValueError, match="bits"):
        NativeLinear.from_codes(codes, scales, None, bits=3)
    with pytest.raises(ValueError, match="end in 96"):
        NativeLinear.from_codes(codes, scales, None, bits=4)(torch.zeros(2, 95))


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_do_not_change_results(threads):
    """Sharing and stealing of tiles; every element is still one thread's sum."""
    codes, scales, zeros = random_codes(1000, 128, 32, 4, False)
    layer = NativeLinear.from_codes(codes, scales, zeros, bits=4)
    inputs = [torch.randn(rows, 128) for rows in (1, 3, 30)]
    alone = [layer(x) for x in inputs]
    set_num_threads(threads)
    for _ in range(20):
        for x, expected in zip(inputs, alone):
            assert torch.equal(layer(x), expected)
    stop_threads()
    assert torch.equal(layer(inputs[2]), alone[2])
    set_num_threads(1)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "columns", "group"), [(4, 1536, 64), (4, 576, 96), (8, 576, 64), (8, 640, 640)])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_dequantized_weights_are_rounded_once(bits, columns, group, symmetric, rows):
    """As transformers decompresses a layer; on a machine whose order of sums is known, with the bits of its product."""
    codes, scales, zeros = random_codes(70, columns, group, bits, symmetric)
    scales = scales.bfloat16()
    layer = NativeLinear.from_codes(
        codes, scales, zeros, bits=bits, activation="bfloat16", dequantize=True
    ).sum_as_torch()
    weight = dequantize_codes(codes, scales, zeros, bits)
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(4)).bfloat16()
    exact = x.double() @ weight.double().t()
    assert (layer(x) - exact).abs().max() < 2e-6 * columns * weight.abs().max()
    if build.requested_isa() != "portable" and torch_chunks(columns) != (0, 0):
        assert torch.equal(layer(x).bfloat16(), torch.nn.functional.linear(x, weight))


def codes_of_width(width, rows, columns, group, symmetric):
    """Random codes of 4, 5 (narrow) or 8 bits, with the zero points of `symmetric` or of their own."""
    codes, scales, zeros = random_codes(rows, columns, group, width, symmetric, seed=columns + width)
    codes[0, 0], codes[-1, -1] = 0, 2**width - 1
    if width == 5 and symmetric:
        codes += 112
    return codes, scales, zeros


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    "width, columns, group, dtype",
    [
        *((8, *shape, torch.bfloat16) for shape in ((80, 80), (576, 576), (576, 64), (672, 96), (320, 32))),
        *((8, 192, 64, dtype) for dtype in (torch.float16, torch.float32)),
        *((width, *shape, torch.bfloat16) for width in (4, 5) for shape in ((576, 576), (672, 96))),
    ],
)
def test_dequantized_codes_have_the_bits_of_their_weights(width, columns, group, dtype, symmetric):
    """A layer of codes gives what one of its bfloat16 weights gives, for any rows and wherever the sums are cut."""
    codes, scales, zeros = codes_of_width(width, 40, columns, group, symmetric)
    scales = scales.to(dtype)
    bits = 4 if width == 4 else 8
    coded = NativeLinear.from_codes(codes, scales, zeros, bits=bits, activation="bfloat16", dequantize=True)
    plain = NativeLinear.from_weight(dequantize_codes(codes, scales.float(), zeros, bits).bfloat16())
    x = torch.randn(33, columns, generator=torch.Generator().manual_seed(columns))
    for chunks, numbers in (((256, 128), range(1, 34)), ((128, 512), (1, 12, 33)), ((0, 0), (1, 5, 25))):
        for layer in (coded, plain):
            library().llmopt_linear_set_chunks(layer.handle, *chunks)
        for rows in numbers:
            assert torch.equal(coded(x[:rows]), plain(x[:rows])), (chunks, rows)


@pytest.mark.parametrize("columns, group", [(80, 80), (576, 576), (576, 64)])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dequantize", [True, False])
def test_rows_of_bytes_do_not_depend_on_their_number(columns, group, symmetric, dequantize):
    codes, scales, zeros = codes_of_width(8, 33, columns, group, symmetric)
    layer = NativeLinear.from_codes(codes, scales, zeros, bits=8, activation="bfloat16", dequantize=dequantize)
    x = torch.randn(33, columns, generator=torch.Generator().manual_seed(columns))
    together = layer(x)
    for rows in range(1, 33):
        assert torch.equal(layer(x[:rows]), together[:rows]), rows


@pytest.mark.parametrize("columns, group", [(80, 80), (576, 576), (576, 64)])
@pytest.mark.parametrize("rows", [1, 5, 12, 33])
@pytest.mark.parametrize("width, dtype", [(8, torch.bfloat16), (8, torch.float32), (4, torch.float32)])
def test_group_sums_of_codes(width, dtype, columns, group, rows):
    """Each group's sum is that of a float layer of its differences; then one multiply-add a group."""
    codes, scales, _ = codes_of_width(width, 70, columns, group, True)
    activation = str(dtype).removeprefix("torch.")
    layer = NativeLinear.from_codes(codes, scales, None, bits=width, activation=activation)
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns))
    total = torch.zeros(rows, 70)
    for g in range(columns // group):
        part = slice(g * group, (g + 1) * group)
        sums = NativeLinear.from_weight((codes[:, part].float() - 2 ** (width - 1)).to(dtype))(x[:, part])
        total = (sums.double() * scales[:, g].double() + total.double()).float()
    if instruction_set() == "portable":
        assert (layer(x) - total).abs().max() < 2e-6 * total.abs().max()
    else:
        assert torch.equal(layer(x), total)
