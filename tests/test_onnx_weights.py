"""Packed weights in MatMulNBits: code for code, scale for scale, and value for value whatever the bits and groups."""

from __future__ import annotations

from dataclasses import replace

import llmopt
import pytest
import torch
from llmopt.exporters.onnx import OnnxExporter
from llmopt.exporters.onnx.nbits import BlockWeight, block_size, to_blocks
from llmopt.exporters.onnx.prepare import round_linear, turn_conv1d
from llmopt.optimizer.errors import UsageError
from llmopt.runtime.kernels.packed import QuantScheme, QuantState, dequantize_codes
from llmopt.tests.library_models import optimize
from llmopt.tests.onnx_models import export, open_loaded, save_family, write_graph

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


GPT2_LINEARS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
GROUPS = [(16, 96), (32, 96), (64, 128), (128, 256), (48, 96), (256, 512), (72, 72)]
"""Group sizes and columns: blocks of the operator, multiples of blocks, and one group of all columns."""


def random_state(bits: int, group: int, columns: int, symmetric: bool, rows: int = 6) -> QuantState:
    generator = torch.Generator().manual_seed(bits * 1000 + group)
    groups = columns // group
    codes = torch.randint(0, 2**bits, (rows, columns), generator=generator, dtype=torch.uint8)
    scales = torch.randn(rows, groups, generator=generator)
    zeros = None if symmetric else torch.randint(0, 2**bits, (rows, groups), generator=generator, dtype=torch.uint8)
    return QuantState(codes, scales, zeros, bits, group)


def values(weight: BlockWeight) -> torch.Tensor:
    """The operator's definition, in float64: `(code - zero) * scale` of each block; float64 [N, K]."""
    rows, blocks, _ = weight.packed.shape

    def codes(packed: torch.Tensor, count: int) -> torch.Tensor:
        if weight.bits == 8:
            return packed[..., :count]
        return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)[..., :count]

    unpacked = codes(weight.packed, weight.block).double()
    zeros = torch.full((rows, blocks), 2.0 ** (weight.bits - 1)).double()
    if weight.zeros is not None:
        zeros = codes(weight.zeros, blocks).double()
    out = ((unpacked - zeros.unsqueeze(-1)) * weight.scales.double().unsqueeze(-1)).view(rows, -1)
    return out[:, : weight.columns]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize(
    ("group", "columns"), [(16, 96), (32, 96), (64, 128), (128, 256), (48, 96), (256, 512), (72, 72)]
)
def test_values_are_kept(bits, group, columns, symmetric):
    state = random_state(bits, group, columns, symmetric)
    weight = to_blocks(state)
    assert weight is not None and weight.bits == (4 if bits <= 4 else 8)
    expected = dequantize_codes(state.codes, state.scales.double(), state.zeros, bits)
    assert torch.equal(values(weight), expected)


def test_codes_are_kept_where_the_operator_has_the_format():
    state = random_state(4, 32, 96, symmetric=False)
    weight = to_blocks(state)
    assert weight.block == 32 and torch.equal(weight.scales, state.scales)
    assert torch.equal(weight.packed.view(6, -1) & 15, state.codes[:, 0::2])
    assert torch.equal(weight.packed.view(6, -1) >> 4, state.codes[:, 1::2])


def test_columns_in_another_order():
    state = random_state(4, 32, 96, symmetric=True)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(0))
    g_idx = (torch.arange(96) // 32)[order].to(torch.int32)
    weight = to_blocks(replace(state, g_idx=g_idx))
    expected = dequantize_codes(state.codes, state.scales.double(), None, 4, g_idx)
    assert torch.equal(values(weight), expected[:, weight.order])


@pytest.mark.parametrize("order", ["in order", "mixed"])
def test_groups_are_as_long_as_the_index_says(order):
    """A GPTQ checkpoint's group size is the longest; its index may cut the columns otherwise."""
    state = random_state(4, 32, 96, symmetric=False)
    g_idx = torch.arange(96, dtype=torch.int32) // 32
    if order == "mixed":
        g_idx = g_idx[torch.randperm(96, generator=torch.Generator().manual_seed(0))]
    weight = to_blocks(replace(state, group_size=48, g_idx=g_idx))
    expected = dequantize_codes(state.codes, state.scales.double(), state.zeros, 4, g_idx)
    assert weight.block == 32 and torch.equal(values(weight), expected[:, weight.order])
    single = replace(random_state(4, 96, 96, True), group_size=128, g_idx=torch.zeros(96, dtype=torch.int32))
    assert to_blocks(single).block == 32 and to_blocks(single).scales.shape == (6, 3)


def test_groups_that_are_no_blocks():
    assert block_size(8, 96) is None and to_blocks(random_state(4, 8, 96, True)) is None
    assert block_size(72, 72) == 32 and block_size(40, 80) is None
    uneven = torch.tensor([0] * 40 + [1] * 56, dtype=torch.int32)
    assert to_blocks(replace(random_state(4, 48, 96, True), g_idx=uneven)) is None


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_family("llama", tmp_path_factory.mktemp("weights") / "llama", "bfloat16")


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return save_family("llama", tmp_path_factory.mktemp("tied") / "llama", "bfloat16", tie_word_embeddings=True)


@pytest.mark.parametrize("symmetric", [True, False])
def test_an_artifact_bit_for_bit(symmetric, tiny, tmp_path):
    from onnx.numpy_helper import to_array

    model, _ = optimize(tiny, tmp_path / "packed", method="rtn", bits=4, group_size=32, symmetric=symmetric)
    record, _ = export(tmp_path / "packed", tmp_path / "out", flavor="genai")
    assert record["linears"] == {"float": 1, "MatMulNBits": 14} and record["accuracy_level"] == 0
    assert record["parity"]["prefill_max_difference"] < 1e-4 and record["parity"]["greedy_differing"] == 0
    graph = onnx.load(tmp_path / "out" / "model.onnx").graph
    tensors = {tensor.name: torch.from_numpy(to_array(tensor).copy()) for tensor in graph.initializer}
    layer = model.module.get_submodule("model.layers.1.mlp.down_proj")
    state, prefix = layer.quant_state(), "layers.1/mlp/down_proj"
    packed = tensors[f"{prefix}.weight_packed"].view(64, -1)
    assert torch.equal(torch.stack((packed & 15, packed >> 4), -1).view(64, -1), state.codes)
    assert torch.equal(tensors[f"{prefix}.weight_scale"], state.scales.float())
    assert (f"{prefix}.weight_zero_point" in tensors) is not symmetric
    if not symmetric:
        zeros = tensors[f"{prefix}.weight_zero_point"]
        assert torch.equal(torch.stack((zeros & 15, zeros >> 4), -1).view(64, -1), state.zeros)


@pytest.mark.parametrize("flavor", ["genai", "ort"])
def test_int4_is_off_by_its_rounding_alone(flavor, tiny, tmp_path):
    """Log-probabilities of a text: the graph's differ from the unquantized model's as the packed torch model's do."""
    optimize(tiny, tmp_path / "packed", method="rtn", bits=4, group_size=32)
    write_graph(tmp_path / "packed", tmp_path / "out", flavor=flavor)

    def logprobs(folder, **options):
        with llmopt.load(folder, device="cpu", **options) as llm:
            return torch.tensor(llm.score("Once upon a time there was a river that ran to the sea").logprobs[1:])

    in_torch = {"engine": "static", "dtype": "float32"}
    source, packed = logprobs(tiny, **in_torch), logprobs(tmp_path / "packed", **in_torch)
    graph, rounding = logprobs(tmp_path / "out"), (packed - source).abs()
    assert rounding.max() > 0.02
    assert (graph - packed).abs().max() < 0.01 * rounding.max()
    assert ((graph - source).abs() <= rounding + 0.01 * rounding.max()).all()


@pytest.mark.parametrize("flavor", ["genai", "ort"])
def test_int8_inputs_are_measured_beside_the_exact_graph(flavor, tiny, tmp_path):
    optimize(tiny, tmp_path / "packed", method="rtn", bits=4, group_size=32)
    record, _ = export(tmp_path / "packed", tmp_path / "out", flavor=flavor, activations="int8", lm_head="int8")
    parity = record["parity"]
    assert not record["exact"] and record["accuracy_level"] == 4 and record["linears"] == {"MatMulNBits": 15}
    assert parity["float_prefill_max_difference"] < 1e-4 < parity["prefill_max_difference"]
    assert 0 < parity["mean_kl"] < 1e-3
    assert not (tmp_path / "out" / "twin.onnx").exists()


def test_a_head_that_the_embedding_reads(tied, tmp_path):
    export(tied, tmp_path / "plain", dtype="bfloat16")
    record, _ = export(tied, tmp_path / "out", lm_head="int4", share_head=True, dtype="bfloat16")
    graph = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False).graph
    assert [node.op_type for node in graph.node].count("GatherBlockQuantized") == 1
    assert "embedding.weight" not in {tensor.name for tensor in graph.initializer}
    assert record["parity"]["prefill_max_difference"] < 1e-4
    saved = [(tmp_path / name / "model.onnx_data").stat().st_size for name in ("plain", "out")]
    assert saved[0] - saved[1] > 400 * 64  # more than a byte of each element of the embedding


def test_an_embedding_does_not_read_a_head_that_was_rounded_without_it(tied, tmp_path):
    options = {"method": "rtn", "bits": 4, "group_size": 32, "lm_head": "quantize", "untie": True}
    optimize(tied, tmp_path / "packed", **options)
    with pytest.raises(UsageError, match="the embedding and the head are two matrices"):
        export(tmp_path / "packed", tmp_path / "out", share_head=True)


@pytest.mark.parametrize("head", ["stored", "int4"])
def test_an_embedding_does_not_read_the_head_where_they_are_two_matrices(head, tiny, tmp_path):
    source = tiny  # not tied
    if head == "stored":
        optimize(source, tmp_path / "packed", method="rtn", bits=8, group_size=32, lm_head="quantize")
        source = tmp_path / "packed"
    with pytest.raises(UsageError, match="the embedding and the head are two matrices"):
        export(source, tmp_path / "out", lm_head=head, share_head=True)


@pytest.mark.parametrize("flavor", ["genai", "ort"])
@pytest.mark.parametrize("activations", ["float", "int8"])
def test_gpt2_with_packed_layers(flavor, activations, tmp_path):
    """Layers that were Conv1D, rounded to our grid: the graph has their codes and scales as they are, and the proof
    holds its answers against torch."""
    from onnx.numpy_helper import to_array

    source = save_family("gpt2", tmp_path / "gpt2")
    model, context = open_loaded(source, tmp_path / "work")
    turn_conv1d(model.module)
    for name in GPT2_LINEARS:
        parent, _, leaf = name.rpartition(".")
        block = model.module.get_submodule(f"transformer.h.1.{parent}")
        setattr(block, leaf, round_linear(getattr(block, leaf), QuantScheme(4, 32)))
    state = model.module.get_submodule("transformer.h.1.mlp.c_fc").quant_state()
    (tmp_path / "out").mkdir()
    exporter = OnnxExporter(flavor=flavor, activations=activations, lm_head="int4", share_head=True, gate_tokens=8)
    record = exporter.export(model, tmp_path / "out", context)
    assert record["linears"] == {"float": 4, "MatMulNBits": 5}
    prefix, parity = "float_" if activations == "int8" else "", record["parity"]
    assert parity[f"{prefix}decode_max_difference"] < 1e-5 and parity[f"{prefix}greedy_differing"] == 0
    graph = onnx.load(tmp_path / "out" / "model.onnx").graph
    tensors = {tensor.name: torch.from_numpy(to_array(tensor).copy()) for tensor in graph.initializer}
    packed = tensors["layers.1/mlp/c_fc.weight_packed"].view(256, -1)
    assert torch.equal(torch.stack((packed & 15, packed >> 4), -1).view(256, -1), state.codes)
    assert torch.equal(tensors["layers.1/mlp/c_fc.weight_scale"], state.scales.float())


@pytest.mark.parametrize("flavor", ["genai", "ort"])
def test_w8a8(flavor, tiny, tmp_path):
    optimize(tiny, tmp_path / "packed", method="rtn", bits=8, group_size=-1, activations="int8")
    record, _ = export(tmp_path / "packed", tmp_path / "out", flavor=flavor)
    assert record["linears"] == {"float": 1, "int8": 14}
    assert record["parity"]["mean_kl"] < 1e-4
    graph = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False).graph
    assert [node.op_type for node in graph.node].count("MatMulInteger") == 8  # qkv, o, gate and up, down of 2 layers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_becomes_plain_is_said(dtype, tiny, tmp_path):
    optimize(tiny, tmp_path / "packed", method="rtn", bits=4, group_size=8)
    record, context = export(tmp_path / "packed", tmp_path / "out", dtype=dtype)
    assert record["linears"] == {"float": 15}
    assert record["parity"]["mean_kl"] < 1e-5
    assert not any("rounded" in note["message"] for note in context.notes), "they are bfloat16's already"
    assert any("14 packed layers are written as plain weights" in note["message"] for note in context.notes)
    optimize(tiny, tmp_path / "fp8", method="fp8")
    _, context = export(tmp_path / "fp8", tmp_path / "out8")
    assert any("14 layers of the format float-quantized" in note["message"] for note in context.notes)
