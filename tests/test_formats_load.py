"""W8A8, mxfp4 and nvfp4 folders: written by the pass, opened by transformers and by llmopt; llm-compressor's too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.exporters.compressed_tensors import packed_modules, quantization_config
from llmopt.optimizer.base import Context
from llmopt.optimizer.errors import UsageError
from llmopt.optimizer.model import LoadedModel, ModelInfo, SourceIdentity, TensorInfo
from llmopt.passes.quantize import Quantize
from llmopt.passes.quantize.fp8 import to_blocks
from llmopt.runtime.kernels.formats import QUANTIZED
from llmopt.runtime.packed_format import install_packed_linears, runs_packed
from llmopt.runtime.packed_load import load_packed
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

SOURCE = SourceIdentity("tiny", "folder", Path("."), "0" * 64)
TOKENS = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(0))
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
MIXED = {"method": "mxfp4", "overrides": {"*.mlp.*": {"method": "fp8"}, "*.q_proj": {"method": "hqq", "bits": 4}}}
OPTIONS: dict[str, dict[str, Any]] = {
    "int8": {"activations": "int8"},
    "int8 by hqq": {"method": "hqq", "activations": "int8"},
    "fp8": {"method": "fp8"},
    "fp8 blocks": {"method": "fp8", "group_size": 128},
    "mxfp4": {"method": "mxfp4"},
    "nvfp4": {"method": "nvfp4"},
    "with head": {"method": "fp8", "lm_head": "quantize"},
    "mixed": MIXED,
}
FORMATS = {
    "int8": "int-quantized",
    "fp8": "float-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "mixed": "mixed-precision",
}


def make(dtype: torch.dtype, **changes: Any) -> tuple[LoadedModel, ModelInfo]:
    config = LlamaConfig(
        vocab_size=96, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, initializer_range=0.08, **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    kind = "BF16" if dtype == torch.bfloat16 else "F32"
    tensors = {n: TensorInfo(tuple(t.shape), kind, t.nbytes, "") for n, t in module.state_dict().items()}
    return LoadedModel(module, None, SOURCE), ModelInfo(SOURCE, module.config, tensors)


def quantized(options: dict[str, Any], dtype: torch.dtype, folder: Path) -> Any:
    """A quantized model that is saved in `folder` too."""
    model, info = make(dtype)
    with torch.no_grad():
        Quantize(**options).run(model, Context(info, None, 0, folder, "quantize"))  # type: ignore[arg-type]
    module: Any = model.module
    module.config.quantization_config = quantization_config(module)
    module.save_pretrained(folder)
    return module


def reopen(folder: Path, dtype: torch.dtype) -> Any:
    quantization = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert runs_packed(quantization)
    return load_packed(folder, AutoConfig.from_pretrained(folder), quantization, dtype=dtype)


def exact(name: str, dtype: torch.dtype) -> bool:
    """Whether transformers computes what we do: it quantizes inputs in the model's dtype, and int8 ones otherwise."""
    return "fp4" in name or ("int8" not in name and dtype == torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", OPTIONS)
def test_plain_transformers_and_llmopt_load_the_same_model(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    if name == "mixed" and dtype == torch.float32:
        pytest.skip("transformers cannot decompress four-bit floats beside another scheme into float32, see below")
    with torch.inference_mode():
        model = quantized(OPTIONS[name], dtype, tmp_path)
        ours = reopen(tmp_path, dtype)
        expected = model(TOKENS).logits.float()
        assert torch.equal(ours(TOKENS).logits.float(), expected)
        plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
        theirs = plain(TOKENS).logits.float()
        if name == "nvfp4" and dtype == torch.float32:
            assert (theirs - expected).norm() < 0.01 * expected.norm()  # its weights are rounded to bfloat16
        elif exact(name, dtype):
            assert torch.equal(theirs, expected)
            assert torch.equal(plain.generate(TOKENS, **GREEDY), ours.generate(TOKENS, **GREEDY))
        else:
            divergence = torch.nn.functional.kl_div(
                theirs.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="none"
            )
            assert divergence.sum(-1).mean() < 0.01
    assert {n: m.scheme for n, m in packed_modules(ours)} == {n: m.scheme for n, m in packed_modules(model)}
    assert all(type(ours.get_submodule(n)) is type(m) for n, m in packed_modules(model))
    config = model.config.quantization_config
    assert config["format"] == FORMATS.get(name, config["format"])
    assert config["ignore"] == ([] if name == "with head" else ["lm_head"])


def test_the_other_dtype_converts_scales_but_no_codes(tmp_path: Path) -> None:
    with torch.inference_mode():
        for name in ("int8", "fp8", "nvfp4"):
            folder = tmp_path / name
            model = quantized(OPTIONS[name], torch.bfloat16, folder)
            wide = reopen(folder, torch.float32)
            error = wide(TOKENS).logits - model(TOKENS).logits.float()
            assert 0 < error.norm() < 0.2 * model(TOKENS).logits.float().norm()
            layer, own = wide.model.layers[0].mlp.up_proj, model.model.layers[0].mlp.up_proj
            for leaf, parameter in own.named_parameters():
                converted = parameter.dtype == torch.bfloat16
                assert getattr(layer, leaf).dtype == (torch.float32 if converted else parameter.dtype)
                assert torch.equal(getattr(layer, leaf), parameter.float() if converted else parameter)


def test_mixtures_with_four_bit_floats_are_refused_outside_bfloat16(tmp_path: Path) -> None:
    """transformers makes four-bit floats bfloat16, and decompresses into another dtype only one scheme for all."""
    with pytest.raises(UsageError, match=r"four-bit floats beside torch\.float32"):
        quantized(MIXED, torch.float32, tmp_path)


def test_restore_makes_layers_that_take_the_state_dict() -> None:
    model, info = make(torch.bfloat16)
    quantize = Quantize(**MIXED)
    with torch.no_grad():
        report = quantize.run(model, Context(info, None, 0, Path(), "quantize"))  # type: ignore[arg-type]
    other, _ = make(torch.bfloat16)
    quantize.restore(other, report)
    other.module.load_state_dict(model.module.state_dict(), assign=True)
    with torch.inference_mode():
        assert torch.equal(other.module(TOKENS).logits, model.module(TOKENS).logits)
    planned = {m.name: m.bytes_after for m in quantize.plan(info).modules}
    assert {n: m.packed_nbytes for n, m in packed_modules(model.module)} == planned


def test_layers_that_engines_fuse_share_nvfp4s_divisor() -> None:
    model, info = make(torch.bfloat16)
    block = model.module.model.layers[0]
    block.self_attn.k_proj.weight.data[0, 0] = 3.0
    with torch.no_grad():
        Quantize(method="nvfp4").run(model, Context(info, None, 0, Path(), "quantize"))  # type: ignore[arg-type]
    attention, mlp = model.module.model.layers[0].self_attn, model.module.model.layers[0].mlp
    divisors = [float(getattr(attention, f"{n}_proj").weight_global_scale) for n in "qkv"]
    assert divisors == [pytest.approx(448 * 6 / 3)] * 3
    assert float(attention.o_proj.weight_global_scale) != divisors[0]
    assert torch.equal(mlp.gate_proj.weight_global_scale, mlp.up_proj.weight_global_scale)


# checkpoints as llm-compressor writes them: through compressed-tensors' own compressor


def compressed(preset: str, dtype: torch.dtype, folder: Path) -> None:
    """A tiny model quantized to nearest and saved by compressed-tensors alone."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    model: Any = make(dtype)[0].module
    config = QuantizationConfig(config_groups={preset: ["Linear"]}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None:
            continue
        args, weight = scheme.weights, module.weight.detach()
        views = {
            "tensor": lambda w, a: w.reshape(1, -1),
            "channel": lambda w, a: w,
            "group": lambda w, a: w.unflatten(1, (-1, a.group_size)),
            "tensor_group": lambda w, a: w.unflatten(1, (-1, a.group_size)),
            "block": lambda w, a: to_blocks(w, 128),
        }
        view = views[args.strategy](weight, args)
        low, high = view.amin(-1), view.amax(-1)
        divisor = None
        if args.strategy == "tensor_group":
            divisor = generate_gparam(low.amin(), high.amax())
            module.weight_global_scale.data.copy_(divisor)
        scale, zero = calculate_qparams(low, high, args, global_scale=divisor)
        module.weight_scale.data.copy_(scale.view(module.weight_scale.shape))
        module.weight_zero_point.data.copy_(zero.view(module.weight_zero_point.shape))
        if scheme.input_activations is not None and not scheme.input_activations.dynamic:
            module.input_scale.data.fill_(0.01)
        module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    compressor.remove_decompression_hook(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))


PRESETS = {"W8A8": False, "FP8_DYNAMIC": True, "FP8_BLOCK": True, "FP8": True, "MXFP4A16": True, "NVFP4A16": True,
           "W4A16": True, "W4A16_ASYM": True}  # fmt: skip
"""compressed-tensors' presets by name: whether its emulation computes what we do."""


@pytest.mark.parametrize("preset", PRESETS)
def test_checkpoints_of_other_tools_open(preset: str, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if "FP4" in preset else torch.float32
    compressed(preset, dtype, tmp_path)
    with torch.inference_mode():
        ours = reopen(tmp_path, dtype)
        assert sum(isinstance(m, QUANTIZED) for m in ours.modules()) == 14
        if preset == "W4A16_ASYM":
            return  # transformers expects packed zero points of another shape than compressed-tensors writes
        plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
        theirs, own = plain(TOKENS).logits, ours(TOKENS).logits
        if PRESETS[preset]:
            assert torch.equal(theirs, own)
            assert torch.equal(plain.generate(TOKENS, **GREEDY), ours.generate(TOKENS, **GREEDY))
        else:
            assert (theirs - own).norm() < 0.05 * own.norm()


def entry(format_: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": format_}
    return {"quant_method": "compressed-tensors", "format": format_, "config_groups": {"group_0": group}}


INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
FLOAT8 = {**INT8, "type": "float"}
TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (entry("int-quantized", INT8, None), "input activations"),
        (entry("int-quantized", INT8, {**TOKEN, "symmetric": False}), "symmetric"),
        (entry("int-quantized", INT8, {**TOKEN, "dynamic": False, "strategy": "tensor"}), "int8"),
        (entry("int-quantized", {**INT8, "strategy": "group", "group_size": 64}, TOKEN), "strategy 'group'"),
        (entry("float-quantized", FLOAT8, TOKEN), "type 'int', not 'float'"),
        (entry("float-quantized", {**FLOAT8, "strategy": "block", "block_structure": [128, 64]}, TOKEN), "not square"),
        (entry("nvfp4-pack-quantized", NVFP4, {**NVFP4, "dynamic": "local"}), "input activations"),
        (entry("mxfp4-pack-quantized", NVFP4, None), "strategy 'tensor_group', not 'group'"),
        (entry("naive-quantized", INT8, None), "naive-quantized"),
    ],
)
def test_what_cannot_run_packed_is_left_to_transformers_with_a_reason(config: dict[str, Any], message: str) -> None:
    assert not runs_packed(config)
    with torch.device("meta"):
        module = make(torch.bfloat16)[0].module
    with pytest.raises(UsageError, match=message):
        install_packed_linears(module, config)
