"""Stacked experts of every layout: as single layers, streamed from their files, stored under the checkpoint's names."""

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
from llmopt.optimizer.source_model import load_source, open_source
from llmopt.optimizer.sources import describe, resolve
from llmopt.passes.quantize import Quantize
from llmopt.runtime.checkpoint_names import CheckpointNames
from llmopt.runtime.experts import Experts, Layout, find_stacked, layout_of, split_experts, stack_experts
from llmopt.runtime.open import open_model
from llmopt.runtime.tensor_files import Stored, locate, read_stored
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from .library_models import optimize

SMALL = {
    "vocab_size": 400, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.1, "tie_word_embeddings": False, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 64, "first_k_dense_replace": 0, "mlp_only_layers": [], "pad_token_id": 0,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "num_key_value_heads": 4,
}  # fmt: skip
TOKENS = torch.randint(3, 400, (2, 11), generator=torch.Generator().manual_seed(0))
GPTQ: dict[str, Any] = {"method": "gptq", "group_size": 32, "few_tokens": "rtn"}
RTN: dict[str, Any] = {"method": "rtn", "group_size": 32}


def make(kind: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    torch.manual_seed(0)
    more = LATENT if kind.startswith("deepseek") else {}
    config = AutoConfig.for_model(kind, **{**SMALL, **more, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():  # some architectures leave theirs empty
        values = torch.randn(parameter.shape, generator=generator) * 0.1
        parameter.data = (values + ("norm" in name)).to(parameter.dtype)
    return model


def save(model: Any, folder: Path, tiny_model: Path) -> Path:
    model.save_pretrained(folder)
    for file in tiny_model.glob("*token*"):
        shutil.copy(file, folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("mixtral", Layout(4, 64, 96)),
        ("deepseek_v2", Layout(4, 64, 32)),
        ("gpt_oss", Layout(4, 64, 96, transposed=True, interleaved=True, bias=True)),
        ("llama4_text", Layout(4, 64, 96, transposed=True, sorted=True)),
        ("nemotron_h", Layout(4, 64, 32, gated=False)),
        ("granitemoe", Layout(4, 64, 96)),
        ("minimax_m3_vl_text", Layout(4, 64, 96)),  # its gate clamps
    ],
)
def test_single_layers_compute_what_every_layout_does(kind: str, layout: Layout) -> None:
    model = make(kind, torch.float32)
    stacked = find_stacked(model)
    assert stacked and {layout_of(module) for module in stacked.values()} == {layout}
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.inference_mode():
        before = model(TOKENS).logits
        assert split_experts(model) == list(stacked) and not find_stacked(model)
        assert torch.allclose(model(TOKENS).logits, before, atol=1e-5 * float(before.abs().max()))
        assert stack_experts(model) == list(stacked)
        assert torch.equal(model(TOKENS).logits, before)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_a_gate_of_its_own_is_used() -> None:
    model = make("gpt_oss", torch.float32)
    experts = next(iter(find_stacked(model).values()))
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(2)) * 20
    index, weight = torch.tensor([[0, 3]] * 5), torch.full((5, 2), 0.5)
    with torch.inference_mode():
        expected = experts(hidden, index, weight)
        split_experts(model)
        split: Any = model.model.layers[0].mlp.experts
        assert torch.allclose(split(hidden, index, weight), expected, rtol=1e-4, atol=1e-3)
        gate = split._modules["0"].gate_proj(hidden)
        assert gate.abs().max() > experts.limit  # so that the clamp had something to do


def test_unknown_layouts_are_left_alone() -> None:
    module = next(iter(find_stacked(make("qwen3_moe")).values()))
    assert layout_of(module) is not None and layout_of(torch.nn.Linear(2, 2)) is None
    module.post_norm = torch.nn.RMSNorm(64)
    assert layout_of(module) is None


# files


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        ("mixtral", GPTQ, "model.layers.1.block_sparse_moe.experts.3.w2.weight_packed"),
        ("phimoe", RTN, "model.layers.1.block_sparse_moe.experts.3.w1.weight_packed"),
        ("llama4_text", GPTQ, "model.layers.1.feed_forward.experts.3.gate_proj.weight_packed"),
        ("deepseek_v2", RTN, "model.layers.1.mlp.experts.3.down_proj.weight_packed"),
        ("nemotron_h", RTN, "backbone.layers.1.mixer.experts.3.up_proj.weight_packed"),
        ("qwen3_moe", {"method": "fp8"}, "model.layers.1.mlp.experts.3.up_proj.weight"),
    ],
)
def test_experts_are_streamed_and_stored_as_other_tools_look_for_them(
    kind: str, options: dict[str, Any], name: str, tiny_model: Path, tmp_path: Path
) -> None:
    source = save(make(kind), tmp_path / "source", tiny_model)
    model, report = optimize(source, tmp_path / "whole", **options)
    optimize(source, tmp_path / "streamed", lazy=True, **options)
    one, other = (load_file(tmp_path / folder / "model.safetensors") for folder in ("whole", "streamed"))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    assert (tmp_path / "whole" / "config.json").read_text() == (tmp_path / "streamed" / "config.json").read_text()
    assert name in one and any(".experts." in line["name"] for line in report.layers)
    with torch.inference_mode():
        expected = model.module(TOKENS).logits
        ours = open_model(tmp_path / "streamed").module
        assert any(isinstance(module, Experts) for module in ours.modules())
        assert torch.equal(ours(TOKENS).logits, expected)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            tmp_path / "streamed", dtype="auto", output_loading_info=True
        )
        plain, info = loaded
        assert not info["missing_keys"] and not info["unexpected_keys"]
        close = 0.3 if options["method"] == "fp8" else 0.02  # it leaves the inputs of float8 experts as they are
        assert (plain.eval()(TOKENS).logits - expected).norm() < close * expected.norm()


@pytest.mark.parametrize("method", [RTN, GPTQ], ids=["rtn", "gptq"])
@pytest.mark.parametrize("kind", ["gpt_oss", "granitemoe"])
def test_experts_that_transformers_cannot_read_singly_are_quantized_only_where_that_is_wanted(
    kind: str, method: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    source = save(make(kind), tmp_path / "source", tiny_model)
    info = describe(resolve(source))
    plan = Quantize(**method).plan(info)
    assert not any(".experts." in module.name for module in plan.modules) and not plan.refusals
    assert "experts: always" in next(note for note in plan.notes if "stacked expert tensors" in note)
    options = {**method, "experts": "always"}
    wanted = Quantize(**options).plan(info)
    assert sum(".experts." in module.name for module in wanted.modules) == 2 * 4 * 3
    assert any("random experts" in note for note in wanted.notes)
    model, _ = optimize(source, tmp_path / "whole", **options)
    optimize(source, tmp_path / "streamed", lazy=True, **options)
    with torch.inference_mode():
        expected = model.module(TOKENS).logits
        for folder in ("whole", "streamed"):
            assert torch.equal(open_model(tmp_path / folder).module(TOKENS).logits, expected)


def test_llama4s_experts_count_the_tokens_that_are_sent_to_them(tiny_model: Path, tmp_path: Path) -> None:
    """transformers runs each on all tokens, with zeros in the place of those that are not its own."""
    source = save(make("llama4_text", num_experts_per_tok=1), tmp_path / "source", tiny_model)
    _, report = optimize(source, tmp_path / "out", method="gptq", group_size=32, min_tokens=1, few_tokens="rtn")
    seen = {line["name"]: line["tokens"] for line in report.layers}
    total = seen["model.layers.1.feed_forward.shared_expert.down_proj"]
    assert sum(seen[f"model.layers.1.feed_forward.experts.{number}.up_proj"] for number in range(4)) == total


def test_experts_that_transformers_replaces_cannot_be_kept(tiny_model: Path, tmp_path: Path) -> None:
    info = describe(resolve(save(make("llama4_text"), tmp_path, tiny_model)))
    for options in ({"experts": "keep"}, {"ignore": ["*.experts.2.*"]}):
        (refusal,) = Quantize(**{**RTN, **options}).plan(info).refusals
        assert "quantize all experts" in refusal and "feed_forward.experts" in refusal
    assert not Quantize(**{**RTN, "overrides": {"*.experts.*": {"bits": 8}}}).plan(info).refusals


def test_a_gptq_checkpoint_has_the_checkpoints_names_too(tiny_model: Path, tmp_path: Path) -> None:
    source = save(make("mixtral"), tmp_path / "source", tiny_model)
    found = resolve(source)
    model = load_source(found)
    context = Context(describe(found), Calibration(model.tokenizer, "default", 4, 64), 0, tmp_path)
    Quantize(**RTN).run(model, context)
    HuggingFaceExporter(quantization_format="gptq").export(model, tmp_path, context)
    assert "model.layers.0.block_sparse_moe.experts.0.w1.qweight" in load_file(tmp_path / "model.safetensors")
    with torch.inference_mode():
        ours = open_model(tmp_path).module(TOKENS).logits.float()
        expected = model.module(TOKENS).logits.float()  # the scales of its twin are float16
    assert (ours - expected).norm() < 0.05 * expected.norm()


def test_kept_experts_beside_float8_layers_stream_and_are_ignored_as_a_block(tiny_model: Path, tmp_path: Path) -> None:
    source = save(make("mixtral"), tmp_path / "source", tiny_model)
    for lazy in (False, True):
        optimize(source, tmp_path / f"out-{lazy}", lazy=lazy, method="fp8", experts="keep")
    one, other = (load_file(tmp_path / f"out-{lazy}" / "model.safetensors") for lazy in (False, True))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    entries = [json.loads((tmp_path / f"out-{lazy}/config.json").read_text()) for lazy in (False, True)]
    assert entries[0] == entries[1] and entries[0]["quantization_config"]["ignore"][-2:] == [
        rf"re:model\.layers\.{index}\.mlp\.experts(\.|$)" for index in (0, 1)
    ]


@pytest.mark.parametrize(
    ("kind", "own"), [("deepseek_v2", "gate.weight"), ("glm4_moe", "gate.e_score_correction_bias")]
)
def test_a_router_that_is_kept_in_float32_is_so_in_a_lazy_model(
    kind: str, own: str, tiny_model: Path, tmp_path: Path
) -> None:
    """The second is a buffer, which bfloat16 would round: 9 + 0.01 x."""
    source = save(make(kind), tmp_path / "source", tiny_model)
    stored = load_file(source / "model.safetensors")
    name = f"model.layers.1.mlp.{own}"
    stored[name] = (stored[name].float() * 0.01 + 9).to(stored[name].dtype)
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    whole = load_source(resolve(source)).module.state_dict()
    lazy: Any = open_source(resolve(source))
    assert lazy.weights.read(name).dtype == whole[name].dtype == torch.float32
    assert torch.equal(lazy.weights.read(name), whole[name])
    assert lazy.weights.read("model.layers.1.mlp.experts.0.up_proj.weight").dtype == torch.bfloat16
    optimize(source, tmp_path / "out", lazy=True, **RTN)
    for dtype in ("auto", "float16"):
        opened = open_model(tmp_path / "out", dtype=dtype).module.state_dict()[name]
        assert torch.equal(opened, whole[name]) and opened.dtype == torch.float32


def test_a_lazy_model_becomes_transformers_own_again(tiny_model: Path, tmp_path: Path) -> None:
    model = make("mixtral")
    source = save(model, tmp_path, tiny_model)
    lazy: Any = open_source(resolve(source))
    lazy.materialize()
    with torch.inference_mode():
        assert torch.equal(lazy.module(TOKENS).logits, model(TOKENS).logits)
    assert list(find_stacked(lazy.module)) == [f"model.layers.{index}.mlp.experts" for index in (0, 1)]


def test_a_file_of_stacked_experts_is_split_into_what_transformers_merges(tiny_model: Path, tmp_path: Path) -> None:
    """As written from the state dict of the model in memory."""
    model = make("mixtral")
    source = save(model, tmp_path / "source", tiny_model)
    save_file(model.state_dict(), source / "model.safetensors", metadata={"format": "pt"})
    _, report = optimize(source, tmp_path / "out", lazy=True, **RTN)
    assert "model.layers.0.mlp.experts.0.w1" in {line["name"] for line in report.layers}
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    plain, info = loaded
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.inference_mode():
        expected = open_model(tmp_path / "out").module(TOKENS).logits
        assert (plain.eval()(TOKENS).logits - expected).norm() < 0.02 * expected.norm()


def test_some_experts_of_a_block_are_not_quantized_alone(tiny_model: Path, tmp_path: Path) -> None:
    info = describe(resolve(save(make("mixtral"), tmp_path, tiny_model)))
    (refusal,) = Quantize(method="fp8", ignore=["*.layers.1.*.experts.2.w1"]).plan(info).refusals
    assert "model.layers.1.mlp.experts.*.w1" in refusal
    assert not Quantize(method="fp8", ignore=["*.layers.1.*.experts.*"]).plan(info).refusals


def test_what_transformers_converts_as_it_loads_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    """Its queries, keys and values are one tensor in the files."""
    info = describe(resolve(save(make("sarvam_moe"), tmp_path, tiny_model)))
    (refusal,) = Quantize(**RTN).plan(info).refusals
    assert "merges, splits or permutes" in refusal and "query_key_value" in refusal


# names and parts


def test_names_go_both_ways() -> None:
    model = make("mixtral")
    files = ["model.layers.0.block_sparse_moe.experts.0.w1.weight", "model.layers.0.self_attn.q_proj.weight"]
    names = CheckpointNames(model, files)
    own = ["model.layers.0.mlp.experts.0.w1.weight", files[1]]
    assert [names.in_module(name) for name in files] == own and [names.in_files(name) for name in own] == files
    assert names.in_files(own[0] + "_packed") == files[0] + "_packed" and names.in_files("lm_head.x") == "lm_head.x"
    plain = CheckpointNames(model, own)
    assert [plain.in_module(name) for name in own] == own == [plain.in_files(name) for name in own]


def test_a_rule_that_leads_nowhere_is_not_followed() -> None:
    """deepseek_v4's rule for the norm of keys and values would rename the final norm too."""
    model = make("deepseek_v4")
    names = CheckpointNames(model, ["model.norm.weight", "model.layers.0.self_attn.norm.weight"])
    assert names.in_module("model.norm.weight") == "model.norm.weight" == names.in_files("model.norm.weight")


def test_parts_of_stored_tensors(tmp_path: Path) -> None:
    whole = torch.arange(3 * 4 * 6, dtype=torch.float32).reshape(3, 4, 6)
    save_file({"x": whole}, tmp_path / "x.safetensors")
    place: Stored = locate([tmp_path / "x.safetensors"])["x"]
    assert torch.equal(read_stored(place.at(2)), whole[2])
    for rows in (slice(0, 2), slice(2, None), slice(None), slice(0, None, 2), slice(1, None, 2)):
        for transposed in (False, True):
            part = place.at(1).part(rows, transposed)
            expected = (whole[1].t() if transposed else whole[1])[rows]
            assert part.shape == expected.shape and torch.equal(read_stored(part), expected)
            assert read_stored(part).is_contiguous()
    assert place.at(0).part(slice(1, 3)).nbytes == 2 * 6 * 4  # no more than is needed
