"""GPTQ checkpoints that the exporter writes: opened as the quantized model, proved by a run, refused in time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llmopt
import pytest
import torch
from llmopt.exporters.huggingface import HuggingFaceExporter
from llmopt.optimizer.base import Context
from llmopt.optimizer.calibration import Calibration
from llmopt.optimizer.errors import RunError, UsageError
from llmopt.optimizer.source_model import load_source
from llmopt.optimizer.sources import describe, resolve
from llmopt.passes.quantize import Quantize
from llmopt.runtime.kernels.gptq_linear import GPTQLinear
from llmopt.runtime.kernels.packed import PackedLinear
from llmopt.runtime.open import open_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from .gptq_definition import TOKENS, unpack_down
from .runs import EVALUATE

GPTQ: dict[str, Any] = {"quantization_format": "gptq"}
LAYER = "model.layers.1.mlp.up_proj"
OPTIONS: dict[str, dict[str, Any]] = {
    "w4": {"group_size": 32},
    "w4 asymmetric": {"group_size": 32, "symmetric": False, "method": "hqq"},
    "w3": {"bits": 3, "group_size": 32},
    "w2 asymmetric": {"bits": 2, "group_size": 32, "symmetric": False},
    "w8 channel": {"bits": 8, "group_size": -1},
    "act order": {"method": "gptq", "group_size": 32, "static_groups": False},
    "awq act order": {"method": "awq", "rounding": "gptq", "group_size": 16, "static_groups": False, "bits": 8},
    "mixed": {"group_size": 32, "overrides": {"*.mlp.*": {"bits": 8, "group_size": -1}}},
    "part": {"group_size": 32, "ignore": ["*.down_proj"]},
    "one layer kept": {"group_size": 32, "ignore": ["*.0.mlp.*"]},
    "head": {"group_size": 32, "lm_head": "quantize", "untie": True},
}


def export(source: Path, folder: Path, options: dict[str, Any], **exporter: Any) -> Any:
    """Quantize and export; returns the quantized module."""
    identity = resolve(source)
    info, model = describe(identity), load_source(identity)
    context = Context(info, Calibration(model.tokenizer, "default", 4, 64), 0, folder)
    Quantize(**options).run(model, context)
    folder.mkdir(exist_ok=True)
    HuggingFaceExporter(**{**GPTQ, **exporter}).export(model, folder, context)
    return model.module.eval()


def entry(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("name", OPTIONS)
def test_an_export_opens_as_the_quantized_model(name: str, tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with torch.inference_mode():
        module = export(tiny_model, folder, OPTIONS[name])
        opened = open_model(folder, "cpu").module
        assert torch.equal(opened(TOKENS).logits, module(TOKENS).logits)
    theirs = {n: m for n, m in opened.named_modules() if isinstance(m, GPTQLinear)}
    ours = {n: m for n, m in module.named_modules() if isinstance(m, PackedLinear)}
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(m.weight, ours[n].weight) for n, m in theirs.items())
    config = entry(folder)
    assert config == json.loads((folder / "quantize_config.json").read_text())
    assert config["checkpoint_format"] == ("gptq_v2" if "asymmetric" in name else "gptq")
    stored = load_file(folder / "model.safetensors")
    permuted = any(not torch.equal(stored[f"{n}.g_idx"], m.columns_in_order()) for n, m in theirs.items())
    assert permuted == config["desc_act"] == ("act order" in name)
    assert all(stored[f"{n}.scales"].dtype == torch.float16 for n in theirs)
    if config["sym"]:  # readers that ignore the zero points of symmetric checkpoints agree with those that do not
        zeros = unpack_down(stored[f"{next(iter(theirs))}.qzeros"].t(), config["bits"], 64)
        assert bool((zeros == 2 ** (config["bits"] - 1) - 1).all())


@pytest.mark.parametrize("name", OPTIONS)
def test_the_plan_has_the_bytes_of_the_checkpoint(name: str, tiny_model: Path, tmp_path: Path) -> None:
    from llmopt.optimizer.planning import make_plan
    from llmopt.optimizer.recipe import Recipe

    recipe = {"passes": [{"quantize": OPTIONS[name]}], "export": [{"huggingface": GPTQ}]}
    (tmp_path / "r.yaml").write_text(json.dumps(recipe))
    plan = make_plan(Recipe.load(tmp_path / "r.yaml"), describe(resolve(tiny_model)))
    export(tiny_model, tmp_path / "out", OPTIONS[name])
    stored = sum(tensor.nbytes for tensor in load_file(tmp_path / "out" / "model.safetensors").values())
    assert plan.bytes_after == stored


def test_dynamic_entries_match_what_they_are_for_and_what_engines_fuse(tiny_model: Path, tmp_path: Path) -> None:
    import re

    def matches(name: str, key: str, path: Path) -> bool:
        """Whether the folder's only pattern is of this kind and matches the name, as GPTQModel and vLLM match."""
        patterns = list(entry(path)["dynamic"])
        assert len(patterns) == 1 and patterns[0].startswith(key)
        return re.match(patterns[0].removeprefix(key), name) is not None

    export(tiny_model, tmp_path / "mixed", OPTIONS["mixed"])
    for leaf in ("gate_proj", "up_proj", "gate_up_proj", "down_proj"):
        assert matches(f"model.layers.1.mlp.{leaf}", "+:", tmp_path / "mixed")
    assert not matches("model.layers.1.self_attn.q_proj", "+:", tmp_path / "mixed")
    (overrides,) = entry(tmp_path / "mixed")["dynamic"].values()
    assert overrides == {"bits": 8, "group_size": -1, "sym": True}
    export(tiny_model, tmp_path / "part", OPTIONS["part"])
    assert matches("model.layers.0.mlp.down_proj", "-:", tmp_path / "part")
    assert not matches("model.layers.0.mlp.up_proj", "-:", tmp_path / "part")
    (inside,) = entry(tmp_path / "part")["modules_in_block_to_quantize"]
    assert set(inside) == {
        *(f"self_attn.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj", "o_proj")), "mlp.gate_proj", "mlp.up_proj",
    }  # fmt: skip
    export(tiny_model, tmp_path / "kept", OPTIONS["one layer kept"])
    assert matches("model.layers.0.mlp.gate_up_proj", "-:", tmp_path / "kept")
    assert not matches("model.layers.1.mlp.gate_up_proj", "-:", tmp_path / "kept")
    assert "modules_in_block_to_quantize" not in entry(tmp_path / "kept")


def test_auto_takes_gptq_only_where_nothing_else_holds_the_model(tiny_model: Path, tmp_path: Path) -> None:
    for name, options, method in (
        ("plain", OPTIONS["w4"], "compressed-tensors"),
        ("ordered", OPTIONS["act order"], "gptq"),
    ):
        export(tiny_model, tmp_path / name, options, quantization_format="auto")
        assert entry(tmp_path / name)["quant_method"] == method
    with pytest.raises(UsageError, match="group index per column"):
        export(tiny_model, tmp_path / "none", OPTIONS["act order"], quantization_format="compressed-tensors")


def test_biases_and_shards_are_written(make_model: Callable[..., Path], tmp_path: Path) -> None:
    source = make_model(attention_bias=True, tie_word_embeddings=False)
    with torch.inference_mode():
        module = export(source, tmp_path / "out", OPTIONS["w4"], max_shard_size="30KB")
        for layer in module.model.layers:
            assert layer.self_attn.q_proj.bias is not None
        assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
        assert torch.equal(open_model(tmp_path / "out", "cpu").module(TOKENS).logits, module(TOKENS).logits)


def test_another_dtype_keeps_the_scales(tiny_model: Path, tmp_path: Path) -> None:
    export(tiny_model, tmp_path / "out", OPTIONS["w4"])
    wide = open_model(tmp_path / "out", "cpu", "float32").module
    layer = wide.model.layers[0].mlp.up_proj
    assert layer.scales.dtype == torch.float16 and layer.weight.dtype == torch.float32
    assert wide.model.norm.weight.dtype == torch.float32
    stored = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    codes = unpack_down(stored[f"{name}.qweight"], 4, 64)
    expected = (codes - 8) * stored[f"{name}.scales"].double().repeat_interleave(32, 0)
    assert torch.equal(layer.weight.double(), expected.t())


@pytest.mark.parametrize("name", ["w4", "act order"])
def test_the_native_engine_runs_it_packed_and_keeps_a_record(name: str, tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    export(tiny_model, folder, OPTIONS[name])
    texts = []
    for attempt in ("in full", "by the record"):
        with llmopt.load(folder, device="cpu") as llm:
            notes = " ".join(note["message"] for note in llm.notes)
            assert ("by the record" in notes) == (attempt == "by the record"), notes
            runner: Any = llm.runner
            assert runner.decoder.linear_formats["int4/bfloat16"] == 14
            answers: Any = llm.generate(["Once upon a time"], max_new_tokens=8)
            texts.append(answers[0].token_ids)
    assert texts[0] == texts[1]
    module = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    opened = open_model(folder, "cpu").module
    for path, layer in opened.named_modules():
        if isinstance(layer, GPTQLinear):
            module.get_submodule(path).weight.data = layer.weight
    ids = llm.tokenizer("Once upon a time", return_tensors="pt")["input_ids"]
    plain = module.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=1)
    assert texts[0] == plain[0, ids.shape[1] :].tolist()[: len(texts[0])]


def test_a_run_writes_a_proved_artifact(tiny_model: Path, tmp_path: Path) -> None:
    from click.testing import CliRunner
    from llmopt.optimizer.cli import cli

    quantize = {"quantize": {"method": "gptq", "bits": 4, "group_size": 32, "static_groups": False}}
    artifact = llmopt.optimize(
        tiny_model, passes=[quantize], exporter=HuggingFaceExporter(**GPTQ), out=tmp_path / "out", evaluate=EVALUATE,
        calibration={"num_samples": 4, "sequence_length": 64},
    )  # fmt: skip
    manifest = artifact.manifest
    assert manifest.exporter["format"] == "gptq" and manifest.exporter["quantized_modules"] == 14
    assert manifest.exporter["config"]["quantization_format"] == "gptq"
    assert manifest.certificate["files_verified"] == len(manifest.files)
    assert manifest.files.keys() >= {"quantize_config.json", "model.safetensors", "generation_config.json"}
    assert manifest.measured["divergence"]["mean_kl"] < 0.5
    shown = CliRunner().invoke(cli, ["inspect", str(tmp_path / "out")])
    assert shown.exit_code == 0 and "W4 g32 sym act order" in shown.output
    export(tiny_model, tmp_path / "again", quantize["quantize"])  # from memory, while the run's model stays in files
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "again"))
    assert ours.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_bits_that_auto_chooses_are_written_where_every_choice_fits(tiny_model: Path, tmp_path: Path) -> None:
    auto = {"target_bits": 6, "bits": [4, 8, 16], "tokens": 256}
    options = {"method": "auto", "group_size": 32, "auto": auto}
    info = describe(resolve(tiny_model))
    assert not HuggingFaceExporter(**GPTQ).refusals(info, [Quantize(**options).plan(info)], "auto")
    export(tiny_model, tmp_path / "out", options)
    assert entry(tmp_path / "out")["quant_method"] == "gptq" and entry(tmp_path / "out")["dynamic"]


# -- what is refused before anything is loaded


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "bits": ({"bits": 5}, GPTQ, "2, 3, 4 or 8 bits, not 5"),
    "floats": ({"method": "mxfp4"}, GPTQ, "integer weights alone, not mxfp4-pack-quantized"),
    "int8 inputs": ({"activations": "int8"}, GPTQ, "integer weights alone, not int-quantized"),
    "fused": ({"overrides": {"*.v_proj": {"bits": 8}}}, GPTQ, "engines run them as one (qkv_proj)"),
    "kept one": ({"ignore": ["*.0.mlp.up_proj"]}, GPTQ, "engines run them as one (gate_up_proj)"),
    "auto bits": (
        {"method": "auto", "auto": {"target_bits": 5, "bits": [3, 5, 8]}},
        GPTQ,
        "2, 3, 4 or 8 bits, not 5 (`auto.bits`",
    ),
    "auto free": (
        {"method": "auto", "auto": {"target_bits": 5, "bits": [4, 8], "fused": "free"}},
        GPTQ,
        "engines run them as one (qkv_proj)",
    ),
    "auto beside": (
        {
            "method": "auto",
            "auto": {"target_bits": 5, "bits": [4, 8]},
            "overrides": {"*.up_proj": {"method": "rtn", "bits": 4}},
        },
        GPTQ,
        "engines run them as one (gate_up_proj)",
    ),
    "order": (
        {"method": "gptq", "static_groups": False, "group_size": 32},
        {"quantization_format": "compressed-tensors"},
        "a group index per column",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_plan_refuses_what_the_format_cannot_hold(name: str, tiny_model: Path, tmp_path: Path) -> None:
    options, exporter, message = REFUSED[name]
    options = {"group_size": 32, **options} if name not in ("floats", "int8 inputs") else options
    with pytest.raises(UsageError) as caught:
        llmopt.optimize(
            tiny_model, passes=[{"quantize": options}], exporter=HuggingFaceExporter(**exporter), out=tmp_path / "out"
        )
    assert message in str(caught.value) and not (tmp_path / "out").exists()


def test_a_plan_refuses_float32_scales_odd_widths_and_no_quantization(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    def refusal(source: Path, passes: list[Any]) -> str:
        with pytest.raises(UsageError) as caught:
            llmopt.optimize(source, passes=passes, exporter=HuggingFaceExporter(**GPTQ), out=tmp_path / "out")
        return str(caught.value)

    w4 = {"quantize": {"group_size": 8}}
    assert "float32" in refusal(make_model(dtype="float32"), [w4])
    assert "76" in refusal(make_model(intermediate_size=76), [{"quantize": {"group_size": -1, "bits": 3}}])
    assert "nothing is quantized" in refusal(make_model(), [{"kv_cache": {}}])


def test_a_scale_that_float16_lacks_fails_the_export_by_name(tiny_model: Path, tmp_path: Path) -> None:
    identity = resolve(tiny_model)
    info, model = describe(identity), load_source(identity)
    layer: Any = model.module.get_submodule(LAYER)
    layer.weight.data[3, :32] *= 2.0**-40
    context = Context(info, Calibration(model.tokenizer, "default", 4, 64), 0, tmp_path)
    Quantize(group_size=32).run(model, context)
    with pytest.raises(RunError, match="float16 does not hold the scale") as caught:
        HuggingFaceExporter(**GPTQ).export(model, tmp_path, context)
    assert caught.value.where == LAYER
