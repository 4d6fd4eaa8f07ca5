"""GPTQ checkpoints exported to ONNX and GGUF: the graph and the file have the codes and scales of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.exporters.huggingface import HuggingFaceExporter
from llmopt.optimizer.errors import UsageError
from llmopt.optimizer.sources import resolve
from llmopt.passes.quantize import Quantize
from llmopt.runtime.kernels.gptq_linear import GPTQLinear
from llmopt.runtime.open import open_model
from safetensors.torch import load_file, save_file

from . import gguf_models, onnx_models

LAYER = "model.layers.1.mlp.down_proj"
OPTIONS: dict[str, dict[str, Any]] = {
    "w4": {"method": "rtn", "group_size": 32},
    "w3 asymmetric": {"method": "hqq", "bits": 3, "group_size": 32, "symmetric": False},
    "w8 channel": {"method": "rtn", "bits": 8, "group_size": -1},
    "act order": {"method": "gptq", "group_size": 32, "static_groups": False},
}


def checkpoint(source: Path, folder: Path, **options: Any) -> Path:
    """Quantize a folder into a GPTQ checkpoint."""
    model, context = onnx_models.open_loaded(source, folder.with_name(f"{folder.name}-work"))
    Quantize(**options).run(model, context)
    folder.mkdir()
    HuggingFaceExporter(quantization_format="gptq").export(model, folder, context)
    return folder


def layer_of(folder: Path) -> GPTQLinear:
    layer = open_model(resolve(folder).folder, "cpu").module.get_submodule(LAYER)
    assert isinstance(layer, GPTQLinear)
    return layer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return onnx_models.save_family("llama", tmp_path_factory.mktemp("gptq") / "llama", "bfloat16")


@pytest.mark.parametrize("name", OPTIONS)
def test_onnx_has_its_codes_and_its_answers(name: str, tiny: Path, tmp_path: Path) -> None:
    """The export's own proof holds the graph against torch, within 1e-4."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    folder = checkpoint(tiny, tmp_path / "gptq", **OPTIONS[name])
    record, context = onnx_models.export(folder, tmp_path / "out")
    assert record["linears"] == {"float": 1, "MatMulNBits": 14}
    assert record["parity"]["prefill_max_difference"] < 1e-4 and record["parity"]["greedy_differing"] == 0
    assert not any("plain weights" in note["message"] for note in context.notes)
    state = layer_of(folder).quant_state()
    tensors = {t.name: t for t in onnx.load(tmp_path / "out" / "model.onnx").graph.initializer}
    found = torch.from_numpy(onnx.numpy_helper.to_array(tensors["layers.1/mlp/down_proj.weight_scale"]).copy())
    repeat = found.shape[1] // state.scales.shape[1]
    assert torch.equal(found, state.scales.float().repeat_interleave(repeat, 1))
    assert ("layers.1/mlp/down_proj.order" in tensors) == (name == "act order")


def test_onnx_has_the_values_of_groups_that_do_not_divide_the_columns(tiny: Path, tmp_path: Path) -> None:
    """64 and 128 columns in groups of 48, as GPTQModel writes them; the last one is shorter."""
    pytest.importorskip("onnxruntime")
    folder = checkpoint(tiny, tmp_path / "gptq", method="rtn", group_size=16)
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    for name, columns in ((n, len(t)) for n, t in tensors.items() if n.endswith(".g_idx")):
        layer, groups = name.removesuffix("g_idx"), -(-columns // 48)
        tensors[name] = (torch.arange(columns) // 48).int()
        for kind in ("scales", "qzeros"):
            tensors[layer + kind] = tensors[layer + kind][:groups].contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    for path in (folder / "config.json", folder / "quantize_config.json"):
        path.write_text(path.read_text().replace('"group_size": 16', '"group_size": 48'))
    record, context = onnx_models.export(folder, tmp_path / "out")
    assert record["linears"] == {"float": 15} and record["parity"]["prefill_max_difference"] < 1e-4
    assert any("14 packed layers are written as plain weights" in note["message"] for note in context.notes)


@pytest.mark.parametrize("name", ["w4", "w3 asymmetric"])
def test_gguf_has_its_values(name: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    from gguf.quants import dequantize

    from .test_gguf_export import write

    source = gguf_models.save_family("qwen3", tmp_path / "model")
    folder = checkpoint(source, tmp_path / "gptq", **OPTIONS[name])
    model, context = gguf_models.open_family(folder, tmp_path / "work")
    entries, _ = write(model, context, tmp_path / "out")
    kinds = {entry.source: entry.kind for entry in entries}
    assert kinds[f"{LAYER}.weight"] == ("Q4_0" if name == "w4" else "Q4_1")
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    tensor = tensors["blk.1.ffn_down.weight"]
    values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
    expected = layer_of(folder).dequantize()
    # a minimum of Q4_1 is scale times zero point, rounded to float16
    atol = 0 if name == "w4" else 2.0**-10 * float(expected.abs().max())
    torch.testing.assert_close(values, expected, rtol=0, atol=atol)


def test_gguf_refuses_activation_order_by_name(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from .test_gguf_export import write

    folder = checkpoint(gguf_models.save_family("qwen3", tmp_path / "model"), tmp_path / "gptq", **OPTIONS["act order"])
    model, context = gguf_models.open_family(folder, tmp_path / "work")
    with pytest.raises(UsageError, match=r"14 quantized layers .* groups are no equal runs"):
        write(model, context, tmp_path / "out")
