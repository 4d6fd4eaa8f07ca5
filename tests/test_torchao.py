"""dynamic-int8: numbers against a plain reference and against torchao, folders that both sides open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.optimizer.errors import UsageError
from llmopt.optimizer.sources import describe, resolve
from llmopt.passes.quantize import Quantize, libraries
from llmopt.passes.quantize.library_formats import quantize_dynamic_int8
from llmopt.runtime.kernels.dynamic_int8 import DynamicInt8Linear, DynamicInt8Scheme
from llmopt.runtime.library_formats import runs_library_format
from llmopt.runtime.open import open_model
from llmopt.tests.library_models import GREEDY, TOKENS, bytes_of, divergence, logits, optimize
from llmopt.tests.runs import run
from safetensors import safe_open
from safetensors.torch import load_file, save_file

DTYPES = [torch.float32, torch.bfloat16]


def weights(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return (torch.randn(rows, columns, generator=generator) * torch.logspace(-2, 0, rows)[:, None]).to(dtype)


def layer_of(weight: torch.Tensor, bias: torch.Tensor | None = None) -> DynamicInt8Linear:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    if bias is not None:
        linear.bias.data = bias
    found = quantize_dynamic_int8(weight)
    return DynamicInt8Linear.from_linear(linear, found.codes, found.scales, None, DynamicInt8Scheme())


def test_codes_are_nearest_and_the_product_is_of_integers() -> None:
    weight, bias = weights(24, 64), torch.randn(24, generator=torch.Generator().manual_seed(1))
    layer = layer_of(weight, bias)
    assert ((layer.dequantize() - weight).abs() <= layer.group_scales() * 0.5001).all()
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    step = x.double().abs().amax(1, keepdim=True) / 127.5
    codes = (x.double() / step).round().clamp(-128, 127)
    expected = (codes @ layer._weight_qdata.double().t()) * step * layer._weight_scale.double().t() + bias.double()
    assert torch.allclose(layer(x).double(), expected, atol=1e-4)
    exact = x.double() @ weight.double().t() + bias.double()
    assert (layer(x).double() - exact).norm() < 0.02 * exact.norm()


def test_zeros_survive() -> None:
    weight = weights(8, 64)
    weight[3] = 0
    layer = layer_of(weight)
    assert not layer.dequantize()[3].any()
    assert torch.equal(layer(torch.zeros(2, 64)), torch.zeros(2, 8))


def test_the_layer_runs_in_a_compiled_graph() -> None:
    layer, x = layer_of(weights(32, 64), torch.ones(32)), torch.randn(5, 64)
    with torch.no_grad():
        assert torch.allclose(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x), atol=1e-6)


def test_the_layer_as_codes_for_the_kernels() -> None:
    from llmopt.runtime.kernels.packed import dequantize_codes

    layer = layer_of(weights(32, 64))
    state = layer.quant_state()
    assert torch.equal(dequantize_codes(state.codes, state.scales, state.zeros, state.bits), layer.dequantize())


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_torchao_bit_for_bit(dtype: torch.dtype) -> None:
    pytest.importorskip("torchao")
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    weight, bias = weights(48, 96, dtype), torch.randn(48).to(dtype)
    layer = layer_of(weight, bias)
    theirs = torch.nn.Linear(96, 48, dtype=dtype)
    theirs.weight.data, theirs.bias.data = weight.clone(), bias.clone()
    quantize_(theirs, Int8DynamicActivationInt8WeightConfig(set_inductor_config=False))
    for part in ("qdata", "scale", "zero_point"):
        own, other = getattr(layer, f"_weight_{part}"), getattr(theirs.weight, part)
        assert torch.equal(own, other) and own.dtype == other.dtype, part
    x = torch.randn(2, 7, 96, generator=torch.Generator().manual_seed(3)).to(dtype)
    with torch.inference_mode():
        assert torch.equal(layer(x), theirs(x)) and torch.equal(layer(x[:1, :1]), theirs(x[:1, :1]))


# folders


@pytest.fixture(scope="module")
def exported(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder, the model that the pass left, and its report."""
    pytest.importorskip("torchao")
    folder = tmp_path_factory.mktemp("torchao") / "out"
    model, report = optimize(tiny_model, folder, method="dynamic-int8")
    return folder, model.module, report


def test_llmopt_and_transformers_open_the_export(exported: Any) -> None:
    from torchao.quantization import Int8Tensor
    from transformers import AutoModelForCausalLM

    folder, module, report = exported
    ours = open_model(folder, "cpu", "auto").module
    assert torch.equal(logits(ours), logits(module))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    assert sum(isinstance(p, Int8Tensor) for p in theirs.parameters()) == 14
    assert torch.equal(logits(theirs), logits(module))
    with torch.inference_mode():
        assert torch.equal(ours.generate(TOKENS, **GREEDY), theirs.generate(TOKENS, **GREEDY))
    assert len(report.layers) == 14 and all(1e-6 < line["error"] < 5e-4 for line in report.layers)


def test_the_export_is_what_transformers_itself_saves(exported: Any, tiny_model: Path, tmp_path: Path) -> None:
    """The same tensors, the same metadata and the same entry of config.json but for what is left out; no pickle."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    folder, _, _ = exported
    config = TorchAoConfig(Int8DynamicActivationInt8WeightConfig())
    AutoModelForCausalLM.from_pretrained(tiny_model, quantization_config=config, dtype=torch.bfloat16).save_pretrained(
        tmp_path
    )
    files = [f / "model.safetensors" for f in (tmp_path, folder)]
    theirs, ours = (load_file(file) for file in files)
    assert set(ours) == set(theirs) and all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    headers = []
    for file in files:
        with safe_open(file, framework="pt") as opened:
            headers.append({k: json.loads(v) for k, v in opened.metadata().items() if k != "format"})
    names = [header.pop("tensor_names") for header in headers]
    assert headers[0] == headers[1] and sorted(names[0]) == sorted(names[1])
    entries = [json.loads((f / "config.json").read_text())["quantization_config"] for f in (tmp_path, folder)]
    assert [entry.pop("modules_to_not_convert") for entry in entries][1] == ["lm_head"]
    assert entries[0] == entries[1]
    assert not [p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".tmp")]


@pytest.mark.parametrize("with_zero_point", [True, False])
def test_folders_that_transformers_quantized_open(with_zero_point: bool, tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TorchAoConfig

    config = TorchAoConfig(Int8DynamicActivationInt8WeightConfig(), modules_to_not_convert=["lm_head", ".*down_proj"])
    model = AutoModelForCausalLM.from_pretrained(tiny_model, quantization_config=config, dtype=torch.bfloat16).eval()
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path)
    if not with_zero_point:
        state = load_file(tmp_path / "model.safetensors")
        save_file({n: t for n, t in state.items() if "zero_point" not in n}, tmp_path / "model.safetensors")
    ours = open_model(tmp_path, "cpu", "auto").module
    layers = [m for m in ours.modules() if isinstance(m, DynamicInt8Linear)]
    assert len(layers) == 12 and layers[0].scheme.zero_point is with_zero_point
    assert torch.equal(logits(ours), logits(model))
    wide = open_model(tmp_path, "cpu", "float32").module
    assert 0 < divergence(logits(model), logits(wide)) < 0.01


def test_blocks_from_files_give_the_same_bytes(exported: Any, tiny_model: Path, tmp_path: Path) -> None:
    optimize(tiny_model, tmp_path / "lazy", lazy=True, method="dynamic-int8")
    assert bytes_of(tmp_path / "lazy") == bytes_of(exported[0])


def test_shards_all_say_what_their_tensors_are(make_model: Any, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    from llmopt.exporters.huggingface import HuggingFaceExporter
    from llmopt.optimizer.base import Context
    from llmopt.optimizer.source_model import load_source
    from transformers import AutoModelForCausalLM

    found = resolve(make_model())
    model, context = load_source(found), Context(describe(found), None, 0, tmp_path)  # type: ignore[arg-type]
    with torch.no_grad():
        Quantize(method="dynamic-int8").run(model, context)
    (tmp_path / "out").mkdir()
    HuggingFaceExporter(max_shard_size="60KB").export(model, tmp_path / "out", context)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()), logits(model.module))
    assert torch.equal(logits(open_model(tmp_path / "out", "cpu", "auto").module), logits(model.module))


def test_the_pipeline_runs(tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    from llmopt.runtime.artifact import read_manifest

    run(tiny_model, [{"quantize": {"method": "dynamic-int8"}}], tmp_path / "out")
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None and manifest["passes"][0]["details"]["modules"] == 14


# refusals


def test_contradictions_and_mixtures_are_refused(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for options in ({"bits": 4}, {"group_size": 64}, {"symmetric": False}, {"activations": "int8"}):
        with pytest.raises(UsageError, match="dynamic-int8"):
            Quantize(method="dynamic-int8", **options)
    info = describe(resolve(tiny_model))
    plan = Quantize(method="rtn", overrides={"*.mlp.*": {"method": "dynamic-int8"}}).plan(info)
    assert any("`method: dynamic-int8` beside rtn: torchao's entry" in text for text in plan.refusals)
    monkeypatch.setattr(libraries, "find_spec", lambda name: None)
    plan = Quantize(method="dynamic-int8").plan(info)
    assert len(plan.refusals) == 1 and "pip install 'llmopt[torchao]'" in plan.refusals[0]


def test_other_entries_are_left_to_transformers() -> None:
    def entry(**changes: Any) -> dict[str, Any]:
        data = {
            "act_mapping_type": {"_type": "MappingType", "_data": "SYMMETRIC"},
            "granularity": {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}},
            "reduce_range": False,
        }
        kind = {"_type": "Int8DynamicActivationInt8WeightConfig", "_version": 2, "_data": {**data, **changes}}
        return {"quant_method": "torchao", "quant_type": {"default": kind}}

    assert runs_library_format(entry()) and runs_library_format(entry(granularity=None))
    assert not runs_library_format(entry(reduce_range=True))
    assert not runs_library_format(entry(act_mapping_type={"_type": "MappingType", "_data": "ASYMMETRIC"}))
    assert not runs_library_format(entry(granularity={"_type": "PerTensor", "_data": {}}))
    other = {"default": {"_type": "Int4WeightOnlyConfig"}}
    assert not runs_library_format({"quant_method": "torchao", "quant_type": other})
    assert not runs_library_format({"quant_method": "bitsandbytes", "bnb_4bit_quant_storage": "bfloat16"})
