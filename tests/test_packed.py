"""PackedLinear and the compressed-tensors format: packing, arithmetic, and loading by plain transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.exporters.compressed_tensors import packed_modules, quantization_config
from llmopt.optimizer.errors import UsageError
from llmopt.passes.quantize.rtn import quantize_rtn
from llmopt.runtime.kernels.bitpack import pack_rows, packed_words, unpack_rows
from llmopt.runtime.kernels.packed import PackedLinear, QuantScheme
from llmopt.runtime.packed_format import install_packed_linears
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

BITS = range(2, 9)


def tiny_model(tied: bool = False, seed: int = 0, **options: Any) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        **options,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def pack(linear: torch.nn.Linear, scheme: QuantScheme) -> PackedLinear:
    weight = linear.weight.detach()
    result = quantize_rtn(weight, scheme, weight.dtype)
    return PackedLinear.from_linear(linear, result.codes, result.scales, result.zeros, scheme)


def pack_model(model: torch.nn.Module, schemes: dict[str, QuantScheme]) -> None:
    """Pack the modules whose names end with a key."""
    for name, module in list(model.named_modules()):
        for suffix, scheme in schemes.items():
            if name.endswith(suffix) and isinstance(module, torch.nn.Linear):
                model.set_submodule(name, pack(module, scheme))


def save(model: Any, folder: Path) -> dict:
    config = quantization_config(model)
    assert config is not None
    model.config.quantization_config = config
    model.save_pretrained(folder)
    return config


def load_packed(folder: Path) -> torch.nn.Module:
    """A new model, packed layers put in place, then the checkpoint's tensors as they are."""
    from safetensors.torch import load_file

    config = AutoConfig.from_pretrained(folder)
    quantization = json.loads((folder / "config.json").read_text())["quantization_config"]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    install_packed_linears(model, quantization)
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False, assign=True)
    model.tie_weights()
    return model


@pytest.mark.parametrize("columns", [8, 40, 100, 576])
@pytest.mark.parametrize("bits", BITS)
def test_packing_is_that_of_compressed_tensors(bits: int, columns: int) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

    codes = torch.randint(0, 2**bits, (7, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    packed = pack_rows(codes, bits)
    signed = (codes.int() - 2 ** (bits - 1)).to(torch.int8)
    assert packed.shape == (7, packed_words(columns, bits))
    assert torch.equal(packed, pack_to_int32(signed, bits))
    assert torch.equal(unpack_from_int32(packed, bits, signed.shape), signed)
    assert torch.equal(unpack_rows(packed, bits, columns), codes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("group_size", [32, -1])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_weight_is_what_compressed_tensors_decompresses(
    bits: int, symmetric: bool, group_size: int, dtype: torch.dtype
) -> None:
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    torch.manual_seed(bits)
    linear = torch.nn.Linear(96, 40, bias=True).to(dtype)
    layer = pack(linear, QuantScheme(bits, group_size, symmetric))
    weights = {"num_bits": bits, "symmetric": symmetric, "type": "int", "strategy": "group", "group_size": group_size}
    if group_size == -1:
        weights["strategy"] = "channel"
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    expected = PackedQuantizationCompressor.decompress(dict(layer.state_dict()), scheme)["weight"]
    assert layer.weight.dtype == expected.dtype == dtype
    assert torch.equal(layer.weight, expected)
    x = torch.randn(5, 96).to(dtype)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, expected, linear.bias))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_state_is_unpacked_as_it_was_packed(bits: int, symmetric: bool) -> None:
    linear = torch.nn.Linear(64, 24, bias=False)
    scheme = QuantScheme(bits, 16, symmetric)
    result = quantize_rtn(linear.weight.detach(), scheme, torch.float32)
    layer = PackedLinear.from_linear(linear, result.codes, result.scales, result.zeros, scheme)
    state = layer.quant_state()
    assert torch.equal(state.codes, result.codes) and torch.equal(state.scales, result.scales)
    assert (state.bits, state.group_size) == (bits, 16)
    assert state.zeros is None if symmetric else torch.equal(state.zeros, result.zeros)


def test_bytes_are_those_the_scheme_announces() -> None:
    for scheme in (QuantScheme(4, 32, False), QuantScheme(3, -1, True), QuantScheme(5, 8, False)):
        layer = PackedLinear.empty(96, 40, scheme, bias=True, dtype=torch.float16, device="cpu")
        assert layer.packed_nbytes == scheme.nbytes(40, 96, 2)


def test_empty_takes_the_state_of_a_packed_layer() -> None:
    linear = torch.nn.Linear(64, 24)
    for scheme in (QuantScheme(4, 16, False), QuantScheme(6, -1, True)):
        layer = pack(linear, scheme)
        other = PackedLinear.empty(64, 24, scheme, bias=True, dtype=torch.float32)
        assert {k: (v.shape, v.dtype) for k, v in other.state_dict().items()} == {
            k: (v.shape, v.dtype) for k, v in layer.state_dict().items()
        }
        other.load_state_dict(layer.state_dict(), assign=True)
        x = torch.randn(3, 64)
        assert torch.equal(other(x), layer(x))


def test_columns_with_an_index_take_their_own_group() -> None:
    scheme = QuantScheme(4, 8, False, g_idx=True)
    layer = PackedLinear.empty(32, 16, scheme, dtype=torch.float32, device="cpu")
    codes = torch.randint(0, 16, (16, 32), dtype=torch.uint8)
    zeros, scales = torch.randint(0, 16, (16, 4), dtype=torch.uint8), torch.rand(16, 4)
    index = torch.randperm(32) // 8
    layer.weight_packed.data, layer.weight_scale.data = pack_rows(codes, 4), scales
    layer.weight_zero_point.data = pack_rows(zeros.t().contiguous(), 4).t()
    layer.weight_g_idx.data = index.int()
    expected = (codes.float() - zeros.float()[:, index]) * scales[:, index]
    assert torch.equal(layer.weight, expected)


def test_wrong_contents_are_refused() -> None:
    linear = torch.nn.Linear(64, 24)
    result = quantize_rtn(linear.weight.detach(), QuantScheme(4, 16, True), torch.float32)
    with pytest.raises(ValueError, match="do not fit"):
        PackedLinear.from_linear(linear, result.codes, result.scales, None, QuantScheme(4, 32, True))
    with pytest.raises(ValueError, match="asymmetric"):
        PackedLinear.from_linear(linear, result.codes, result.scales, None, QuantScheme(4, 16, False))
    with pytest.raises(ValueError, match="does not divide"):
        PackedLinear.empty(64, 24, QuantScheme(4, 48))


SCHEMES = {
    "one symmetric": {"_proj": QuantScheme(4, 32, True)},
    "one asymmetric": {"_proj": QuantScheme(4, 32, False)},
    "asymmetric channel": {"_proj": QuantScheme(8, -1, False)},
    "five bits asymmetric": {"_proj": QuantScheme(5, 16, False)},
    "part of the layers": {"down_proj": QuantScheme(3, -1, True)},
    "mixed": {"down_proj": QuantScheme(8, -1, True), "q_proj": QuantScheme(3, 32, True), "o_proj": QuantScheme(6, 8)},
    "with head": {"_proj": QuantScheme(4, 32, True), "lm_head": QuantScheme(8, -1, True)},
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", SCHEMES)
def test_plain_transformers_and_llmopt_load_the_same_model(name: str, tied: bool, tmp_path: Path) -> None:
    model = tiny_model(tied)
    if tied and name == "with head":
        model.config.tie_word_embeddings = False
    pack_model(model, SCHEMES[name])
    config = save(model, tmp_path)
    tokens = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(tokens).logits
        plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
        assert torch.equal(plain(tokens).logits, expected)
        ours = load_packed(tmp_path).eval()
        assert torch.equal(ours(tokens).logits, expected)
    assert {n: m.scheme for n, m in packed_modules(ours)} == {n: m.scheme for n, m in packed_modules(model)}
    greedy = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(plain.generate(tokens, **greedy), ours.generate(tokens, **greedy))
    untouched = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    assert config["ignore"] == untouched


def test_asymmetric_mixtures_are_refused_because_transformers_could_not_load_them() -> None:
    model = tiny_model()
    pack_model(model, {"down_proj": QuantScheme(8, -1, True), "q_proj": QuantScheme(4, 32, False)})
    with pytest.raises(UsageError, match="one among them"):
        quantization_config(model)


def test_a_model_without_packed_layers_has_no_quantization_config() -> None:
    assert quantization_config(tiny_model()) is None


def checkpoint_config(**changes: Any) -> dict:
    """As llm-compressor writes it for W4A16."""
    weights: dict[str, Any] = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4,
        "observer": "minmax", "observer_kwargs": {}, "scale_dtype": None, "strategy": "group", "symmetric": True,
        "type": "int", "zp_dtype": None,
    }  # fmt: skip
    weights.update(changes.pop("weights", {}))
    group: dict[str, Any] = {
        "format": "pack-quantized", "input_activations": None, "output_activations": None, "targets": ["Linear"],
    }  # fmt: skip
    group.update(changes.pop("group", {}))
    config = {
        "config_groups": {"group_0": {**group, "weights": weights}},
        "format": "pack-quantized", "global_compression_ratio": None, "ignore": ["lm_head"], "kv_cache_scheme": None,
        "quant_method": "compressed-tensors", "quantization_status": "compressed", "sparsity_config": {},
        "transform_config": {}, "version": "0.20.1",
    }  # fmt: skip
    return {**config, **changes}


def meta_model() -> torch.nn.Module:
    with torch.device("meta"):
        return tiny_model()


def test_targets_and_ignore_follow_the_rules_of_compressed_tensors() -> None:
    model = meta_model()
    names = install_packed_linears(model, checkpoint_config())
    assert len(names) == 14 and isinstance(model.lm_head, torch.nn.Linear)
    model = meta_model()
    config = checkpoint_config(ignore=["re:.*lm_head", "re:model.layers.1"])
    assert [n for n in install_packed_linears(model, config) if "layers.1." in n] == []
    config = checkpoint_config(ignore=[])
    special = {**config["config_groups"]["group_0"], "targets": ["re:.*down_proj$", "model.layers.0.self_attn.q_proj"]}
    special["weights"] = {**special["weights"], "num_bits": 8, "strategy": "channel", "group_size": None}
    config["config_groups"]["group_1"] = special
    model = meta_model()
    install_packed_linears(model, config)
    found = {n: m.scheme.bits for n, m in packed_modules(model)}
    assert {n for n, bits in found.items() if bits == 8} == {
        "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj",
    }  # fmt: skip
    assert len(found) == 15 and model.lm_head.scheme == QuantScheme(4, 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "gptq"}, "method is 'gptq'"),
        ({"group": {"format": "nvfp4-pack-quantized"}}, "nvfp4"),
        ({"weights": {"type": "float"}}, "type 'float'"),
        ({"weights": {"num_bits": 16}}, "16-bit"),
        ({"weights": {"strategy": "tensor"}}, "strategy 'tensor'"),
        ({"group": {"input_activations": {"num_bits": 8}}}, "input activations"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        ({"quantization_status": "frozen"}, "frozen"),
        ({"config_groups": {"W4A16": ["Linear"]}}, "preset"),
        ({"config_groups": {}}, "no config_groups"),
        ({"weights": {"num_bits": 3}, "version": "0.17.0"}, "padded layout"),
        ({"weights": {"group_size": 48}}, "does not divide"),
        ({"ignore": ["Linear"]}, "matches no linear layer"),
    ],
)
def test_what_cannot_run_packed_is_refused_with_a_reason(changes: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        install_packed_linears(meta_model(), checkpoint_config(**changes))
