"""Stacked experts as single linear layers: the same function, quantized by the pass, stored so that others read it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.exporters.huggingface import HuggingFaceExporter
from llmopt.optimizer.base import Context
from llmopt.optimizer.calibration import Calibration
from llmopt.optimizer.errors import RunError
from llmopt.optimizer.source_model import load_source
from llmopt.optimizer.sources import describe, resolve
from llmopt.passes.quantize import Quantize
from llmopt.runtime.experts import Experts, expert_shapes, find_stacked, split_experts
from llmopt.runtime.kernels.formats import QUANTIZED
from llmopt.runtime.open import open_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {
    "vocab_size": 400, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.1, "tie_word_embeddings": False, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [],
}  # fmt: skip
TOKENS = torch.randint(3, 400, (2, 11), generator=torch.Generator().manual_seed(0))


def make(kind: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SMALL, **changes})
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe"])
def test_split_experts_compute_what_stacked_ones_do(kind: str) -> None:
    more = {"num_local_experts": 4} if kind == "mixtral" else {}
    model = make(kind, torch.float32, **more)
    stacked = find_stacked(model)
    shapes = {n: s for name, module in stacked.items() for n, s in expert_shapes(name, module).items()}
    with torch.inference_mode():
        before = model(TOKENS).logits
        assert split_experts(model) == list(stacked) and len(stacked) == 2
        assert torch.allclose(model(TOKENS).logits, before, atol=1e-5)
    linear = {n: (m.out_features, m.in_features) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert {n: linear[n] for n in shapes} == shapes and len(shapes) == 2 * 4 * 3
    assert not find_stacked(model)


@pytest.fixture(scope="module")
def source(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    make("qwen3_moe").save_pretrained(folder)
    for file in tiny_model.glob("*token*"):
        shutil.copy(file, folder)
    return folder


def optimize(source: Path, folder: Path, **options: Any) -> Any:
    found = resolve(source)
    info, model = describe(found), load_source(found)
    context = Context(info, Calibration(model.tokenizer, "default", 4, 64), 0, folder)
    quantize = Quantize(**{"group_size": 32, **options})
    planned = {m.name: m.bytes_after for m in quantize.plan(info).modules}
    with torch.no_grad():
        quantize.run(model, context)
    held = {n: m.packed_nbytes for n, m in model.module.named_modules() if isinstance(m, QUANTIZED)}
    assert held == planned
    HuggingFaceExporter().export(model, folder, context)
    return model.module


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_quantized_experts_are_opened_by_plain_transformers_and_by_llmopt(
    source: Path, tmp_path: Path, method: str
) -> None:
    module = optimize(source, tmp_path, method=method)
    names = load_file(tmp_path / "model.safetensors")
    assert "model.layers.1.mlp.experts.3.down_proj.weight_packed" in names
    assert not any("experts" in name and name.endswith(".weight") for name in names)
    with torch.inference_mode():
        expected = module(TOKENS).logits
        ours = open_model(tmp_path).module
        assert isinstance(ours.model.layers[0].mlp.experts, Experts) and torch.equal(ours(TOKENS).logits, expected)
        plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
        assert torch.allclose(plain(TOKENS).logits, expected, atol=0.05 * float(expected.float().std()))


def test_experts_may_have_a_scheme_of_their_own(source: Path, tmp_path: Path) -> None:
    module = optimize(source, tmp_path, method="rtn", bits=8, overrides={"*.experts.*": {"method": "mxfp4"}})
    with torch.inference_mode():
        expected = module(TOKENS).logits
        assert torch.equal(open_model(tmp_path).module(TOKENS).logits, expected)
        plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
        assert torch.allclose(plain(TOKENS).logits, expected, atol=0.05 * float(expected.float().std()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experts": "keep"}, "quantize all experts"),
        ({"ignore": ["*.experts.2.*"]}, "quantize all experts"),
        ({"symmetric": False}, "symmetric"),
        ({"activations": "int8", "group_size": -1}, "int8 activations"),
        ({"overrides": {"*.experts.*": {"method": "nvfp4"}}}, "mxfp4"),
        ({"overrides": {"*.experts.0.*": {"bits": 8}}}, "one scheme"),
        ({"method": "gptq", "match_original": 0.3}, "not sent the same tokens"),
    ],
)
def test_what_transformers_could_not_open_is_refused(source: Path, options: dict[str, Any], message: str) -> None:
    plan = Quantize(**{"group_size": 32, **options}).plan(describe(resolve(source)))
    assert message in " ".join(plan.refusals)


def test_kept_experts_beside_float8_layers_are_stored_as_before(source: Path, tmp_path: Path) -> None:
    module = optimize(source, tmp_path, method="fp8", group_size=-1, experts="keep")
    ignore = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["ignore"]
    assert any("experts" in pattern for pattern in ignore)
    with torch.inference_mode():
        expected = module(TOKENS).logits
        for other in (open_model(tmp_path).module, AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()):
            assert (other(TOKENS).logits - expected).norm() < 0.2 * expected.norm()  # a router may choose otherwise


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_experts_that_few_tokens_reach_fail_or_fall_back_as_declared(source: Path, method: str) -> None:
    """Two of four experts see each of the 256 tokens, so none sees 240, and every other layer sees all."""
    found = resolve(source)
    info = describe(found)

    def run(**options: Any) -> tuple[Any, Context]:
        model = load_source(found)
        context = Context(info, Calibration(model.tokenizer, "default", 4, 64), 0, source)
        return Quantize(method=method, group_size=32, min_tokens=240, **options).run(model, context), context

    with pytest.raises(RunError, match=r"`min_tokens` is 240") as failure:
        run()
    assert ".experts." in failure.value.where
    report, context = run(few_tokens="rtn")
    fell = [line for line in report.layers if line["method"] == "rtn"]
    assert {".experts." in line["name"] for line in fell} == {True}
    assert all((line["tokens"] < 240) == (line["method"] == "rtn") for line in report.layers)
    assert len(fell) + sum(line["tokens"] == 256 for line in report.layers) == len(report.layers)
    assert any(f"{len(fell)} layers were reached by fewer than 240" in note["message"] for note in context.notes)


def test_the_gate_of_a_shared_expert_stays_as_it_is(tmp_path: Path, tiny_model: Path) -> None:
    make("qwen2_moe", shared_expert_intermediate_size=32).save_pretrained(tmp_path)
    for file in tiny_model.glob("*token*"):
        shutil.copy(file, tmp_path)
    info = describe(resolve(tmp_path))
    names = [f"model.layers.{i}.mlp.shared_expert_gate" for i in range(2)]
    plan = Quantize(group_size=32).plan(info)
    assert not {module.name for module in plan.modules} & set(names) and not plan.refusals
    assert any(note.startswith("2 layers with one output") for note in plan.notes)
    broad = Quantize(group_size=32, overrides={"*.layers.0.*": {"bits": 8}}).plan(info)
    assert not {module.name for module in broad.modules} & set(names)
    asked = Quantize(group_size=32, overrides={"*.shared_expert_gate": {"bits": 8}}).plan(info)
    assert {module.name for module in asked.modules} >= set(names)
