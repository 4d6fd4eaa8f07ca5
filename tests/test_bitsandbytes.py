"""bnb-nf4 and bnb-int8: numbers against the papers and against bitsandbytes, folders that both sides open."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.optimizer.errors import RunError, UsageError
from llmopt.optimizer.sources import describe, resolve
from llmopt.passes.quantize import Quantize, libraries
from llmopt.runtime.kernels.four_bit import FourBitLinear, FourBitScheme
from llmopt.runtime.kernels.llm_int8 import LLMInt8Linear, LLMInt8Scheme, llm_int8_product
from llmopt.runtime.open import open_model
from llmopt.tests.library_models import GREEDY, TOKENS, bytes_of, divergence, logits, optimize
from llmopt.tests.runs import run
from llmopt.tests.test_bitsandbytes_numbers import nf4_layer, same, weights
from safetensors.torch import load_file, save_file

METHODS = ["bnb-nf4", "bnb-int8"]


@pytest.fixture(scope="module")
def source(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers' inputs have outliers: what leaves its first norm is large in two columns."""
    folder = tmp_path_factory.mktemp("source") / "llama"
    shutil.copytree(tiny_model, folder)
    state = load_file(folder / "model.safetensors")
    state["model.layers.0.input_layernorm.weight"][3:5] = 5.0
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module", params=METHODS)
def exported(request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Method, folder, and the model that the pass left."""
    pytest.importorskip("bitsandbytes")
    folder = tmp_path_factory.mktemp("exported") / request.param
    model, report = optimize(source, folder, method=request.param)
    return request.param, folder, model.module, report


def test_llmopt_and_transformers_open_the_export(exported: Any) -> None:
    from transformers import AutoModelForCausalLM

    method, folder, module, report = exported
    ours = open_model(folder, "cpu", "auto").module
    expected = logits(module)
    assert torch.equal(logits(ours), expected)
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert sum(type(m).__module__.startswith("bitsandbytes") for m in theirs.modules()) == 14
    assert divergence(expected, logits(theirs)) < 0.01
    with torch.inference_mode():
        assert torch.equal(ours.generate(TOKENS, **GREEDY), theirs.generate(TOKENS, **GREEDY))
    assert len(report.layers) == 14 and all(line["method"] == method for line in report.layers)
    limits = {"bnb-nf4": (1e-3, 0.02), "bnb-int8": (1e-6, 5e-4)}[method]
    assert all(limits[0] < line["error"] < limits[1] for line in report.layers)


def test_the_export_is_what_transformers_itself_saves(exported: Any, source: Path, tmp_path: Path) -> None:
    """The same tensors under the same names, and an entry of config.json that differs in what is left out alone."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    method, folder, _, _ = exported
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": torch.bfloat16}  # fmt: skip
    config = BitsAndBytesConfig(**(four if method == "bnb-nf4" else {"load_in_8bit": True}))
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    theirs, ours = load_file(tmp_path / "model.safetensors"), load_file(folder / "model.safetensors")
    assert set(ours) == set(theirs)
    assert [name for name, tensor in theirs.items() if not same(name, ours[name], tensor)] == []
    entries = [json.loads((f / "config.json").read_text())["quantization_config"] for f in (tmp_path, folder)]
    assert [e.pop("llm_int8_skip_modules") for e in entries][1] == ["lm_head"]
    assert entries[0] == entries[1]


OTHERS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "nf4 with plain scales": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"load_in_4bit": True},
    "fp4 in bfloat16": {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.bfloat16},
    "int8": {"load_in_8bit": True},
    "int8 without outliers": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
    "int8 but for some": {"load_in_8bit": True, "llm_int8_skip_modules": ["lm_head", "down_proj"]},
}


@pytest.mark.parametrize("name", OTHERS)
def test_folders_that_transformers_quantized_open(name: str, source: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    config = BitsAndBytesConfig(**OTHERS[name])
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config, dtype=torch.bfloat16).eval()
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(source).save_pretrained(tmp_path)
    ours = open_model(tmp_path, "cpu", "auto").module
    layers = [m for m in ours.modules() if isinstance(m, (FourBitLinear, LLMInt8Linear))]
    assert len(layers) == (12 if "some" in name else 14)
    assert divergence(logits(model), logits(ours)) < (1e-4 if "4" in name else 1e-9)
    if name == "nf4":
        assert layers[0].scheme.compute_dtype == "float32"
        wide = open_model(tmp_path, "cpu", "float32").module
        assert divergence(logits(model), logits(wide)) < 0.01


def test_blocks_from_files_give_the_same_bytes(exported: Any, source: Path, tmp_path: Path) -> None:
    method, folder, _, _ = exported
    optimize(source, tmp_path / "lazy", lazy=True, method=method)
    assert bytes_of(tmp_path / "lazy") == bytes_of(folder)


def test_an_export_can_stay_in_its_files(exported: Any) -> None:
    from llmopt.runtime.lazy import open_lazy
    from transformers import AutoConfig

    _, folder, module, _ = exported
    opened = open_lazy(folder, AutoConfig.from_pretrained(folder), torch.bfloat16, "tiny", packed=True)
    assert not isinstance(opened, str), opened
    lazy, stored = opened
    with stored.loaded(""):
        assert torch.equal(logits(lazy), logits(module))
    assert all(p.is_meta for p in lazy.parameters())


def test_a_cached_result_is_restored(exported: Any, source: Path) -> None:
    from llmopt.optimizer.source_model import load_source

    method, _, module, report = exported
    again = load_source(resolve(source))
    Quantize(method=method).restore(again, report)
    found = again.module.load_state_dict(module.state_dict(), strict=False, assign=True)
    assert not found.unexpected_keys and not found.missing_keys
    assert torch.equal(logits(again.module), logits(module))


def test_the_pipeline_runs_and_resumes(source: Path, tmp_path: Path) -> None:
    """Through the command's own code: evaluated, proved, cached, and taken from the cache."""
    pytest.importorskip("bitsandbytes")
    from llmopt.runtime.artifact import read_manifest

    for name in ("one", "two"):
        run(source, [{"quantize": {"method": "bnb-nf4"}}], tmp_path / name)
    manifests = [read_manifest(tmp_path / name) for name in ("one", "two")]
    assert [m["passes"][0]["cached"] for m in manifests if m] == [False, True]
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "two")


def test_the_head_and_skipped_layers(source: Path, tmp_path: Path, make_model: Any) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM

    untied = make_model(tie_word_embeddings=False, vocab_size=416)  # a multiple of 32 for bitsandbytes
    options: dict[str, Any] = {"method": "bnb-nf4", "lm_head": "quantize", "overrides": {"*.up_proj": {"skip": True}}}
    model, _ = optimize(untied, tmp_path / "head", ignore=["*.0.self_attn.q_proj"], **options)
    entry = json.loads((tmp_path / "head" / "config.json").read_text())["quantization_config"]
    left = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"]
    assert entry["llm_int8_skip_modules"] == left
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "head").eval()
    plain = [n for n, m in theirs.named_modules() if type(m) is torch.nn.Linear]
    assert plain == left
    assert divergence(logits(model.module), logits(theirs)) < 0.01
    assert isinstance(open_model(tmp_path / "head", "cpu", "auto").module.lm_head, FourBitLinear)


def test_a_name_that_begins_another_is_skipped_alone() -> None:
    from llmopt.exporters.libraries import skipped_names

    model = torch.nn.Module()
    model.gate = torch.nn.Linear(64, 32)
    model.gate_proj = nf4_layer(weights(32, 64))
    model.up = torch.nn.Linear(64, 32)
    assert skipped_names(model) == ["gate$", "up"]


def test_experts_are_kept(tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=400, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        mlp_only_layers=[], tie_word_embeddings=False, initializer_range=0.1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "moe")
    for file in tiny_model.glob("*token*"):
        shutil.copy(file, tmp_path / "moe")
    info = describe(resolve(tmp_path / "moe"))
    assert any("experts: keep" in text for text in Quantize(method="bnb-int8").plan(info).refusals)
    model, report = optimize(tmp_path / "moe", tmp_path / "out", method="bnb-int8", experts="keep")
    assert {line["name"].rpartition(".")[2] for line in report.layers} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    ours = open_model(tmp_path / "out", "cpu", "auto").module
    assert torch.allclose(logits(ours), logits(model.module), atol=1e-2)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert divergence(logits(model.module), logits(theirs)) < 0.01


# refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "bnb-nf4", "group_size": 32}, "group_size 64, not 32"),
        ({"method": "bnb-nf4", "symmetric": False}, "symmetric true, not false"),
        ({"method": "bnb-int8", "bits": 4}, "bits 8, not 4"),
        ({"method": "bnb-int8", "activations": "int8"}, "for integer weights"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Quantize(**options)


@pytest.mark.parametrize("other", ["rtn", "bnb-int8", "fp8"])
def test_one_method_a_model(other: str, tiny_model: Path) -> None:
    info = describe(resolve(tiny_model))
    plan = Quantize(method="bnb-nf4", overrides={"*.mlp.*": {"method": other}}).plan(info)
    assert any("one method for all layers" in text for text in plan.refusals)


def test_the_absent_library_is_named(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "find_spec", lambda name: None)
    plan = Quantize(method="bnb-nf4").plan(describe(resolve(tiny_model)))
    assert plan.refusals == [
        "`method: bnb-nf4` writes a folder that transformers opens with bitsandbytes, which is not installed: "
        "pip install 'llmopt[bitsandbytes]'"
    ]


def test_damaged_folders_are_refused(exported: Any, tmp_path: Path) -> None:
    method, folder, _, _ = exported
    state = load_file(folder / "model.safetensors")
    q = "model.layers.0.self_attn.q_proj"
    if method == "bnb-nf4":
        bad = {
            "cannot be read": {f"{q}.weight.quant_state.bitsandbytes__nf4": torch.zeros(256, dtype=torch.uint8)},
            "do not fit": {f"{q}.weight.absmax": torch.ones(64)},
        }
    else:
        bad = {
            "row by row": {f"{q}.weight_format": torch.tensor(1, dtype=torch.uint8)},
            "has shape": {f"{q}.SCB": torch.ones(63)},
        }
    for number, (message, change) in enumerate(bad.items()):
        shutil.copytree(folder, tmp_path / str(number))
        save_file({**state, **change}, tmp_path / str(number) / "model.safetensors", {"format": "pt"})
        with pytest.raises(RunError, match=message):
            open_model(tmp_path / str(number), "cpu", "auto")
    plain = {name: tensor for name, tensor in state.items() if "quant_state" not in name and not name.endswith("SCB")}
    shutil.copytree(folder, tmp_path / "plain")
    save_file(plain, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    with pytest.raises(RunError, match="no weight is"):
        open_model(tmp_path / "plain", "cpu", "auto")


def test_wrong_contents_and_schemes_are_refused() -> None:
    linear, codes = torch.nn.Linear(64, 4), torch.zeros(4, 64, dtype=torch.uint8)
    with pytest.raises(ValueError, match="do not fit"):
        FourBitLinear.from_linear(linear, codes, torch.ones(5), None, FourBitScheme())
    with pytest.raises(ValueError, match="double quantization"):
        FourBitLinear.from_linear(linear, codes, torch.ones(4), None, FourBitScheme(nested=False))
    with pytest.raises(ValueError, match="do not fit"):
        LLMInt8Linear.from_linear(linear, codes, torch.ones(4), None, LLMInt8Scheme())
    with pytest.raises(ValueError, match="no scheme"):
        FourBitScheme(kind="fp3")
    with pytest.raises(ValueError, match="8 bits"):
        LLMInt8Scheme(bits=4)
    x = torch.randn(2, 64)
    assert llm_int8_product(x, codes.char(), torch.ones(4), None, 6.0).shape == (2, 4)
