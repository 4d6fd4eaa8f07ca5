"""The quantize pass on tiny models: plan, patterns, run, restore, and the driver on several architectures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.optimizer.base import Context
from llmopt.optimizer.errors import RunError, UsageError
from llmopt.optimizer.events import Event
from llmopt.optimizer.model import LoadedModel, ModelInfo, SourceIdentity, TensorInfo
from llmopt.passes.quantize import Quantize
from llmopt.runtime.decoder_blocks import capture, find_blocks, join_batches
from llmopt.runtime.kernels.packed import PackedLinear
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.1, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OPT = {"ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 128}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "phi": {},
    "gpt_neox": {},
    "opt": OPT,
    "olmo2": {},
}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96}
SOURCE = SourceIdentity("tiny", "folder", Path("."), "0" * 64)


class FakeCalibration:
    def __init__(self, sequences: int = 8, length: int = 32, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._batches = [torch.randint(3, 96, (1, length), generator=generator) for _ in range(sequences)]

    def batches(self) -> list[torch.Tensor]:
        return self._batches

    @property
    def num_tokens(self) -> int:
        return sum(batch.numel() for batch in self._batches)


def make(
    kind: str = "llama", dtype: torch.dtype = torch.bfloat16, seed: int = 0, **changes: Any
) -> tuple[LoadedModel, ModelInfo]:
    options = {**SMALL, **ARCHITECTURES.get(kind, {}), **changes} if kind != "gpt2" else {**GPT2, **changes}
    config = AutoConfig.for_model(kind, **options)
    torch.manual_seed(seed)
    module = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    tied = module.config.tie_word_embeddings
    tensors = {
        name: TensorInfo(tuple(t.shape), "BF16", t.nbytes, "model.safetensors")
        for name, t in module.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    return LoadedModel(module, None, SOURCE), ModelInfo(SOURCE, module.config, tensors)


def context(info: ModelInfo, calibration: object = None, events: list[Event] | None = None) -> Context:
    listener = events.append if events is not None else (lambda event: None)
    return Context(info, calibration or FakeCalibration(), 0, Path("."), "quantize", listener)


def packed(model: LoadedModel) -> dict[str, PackedLinear]:
    return {name: m for name, m in model.module.named_modules() if isinstance(m, PackedLinear)}


def logits(model: LoadedModel) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model.module(batch).logits for batch in FakeCalibration(4).batches()]).float()


# plan


def test_plan_lists_every_module_with_its_bytes_and_run_keeps_to_it() -> None:
    model, info = make()
    quantize = Quantize(bits=4, group_size=32, symmetric=False)
    plan = quantize.plan(info)
    assert len(plan.modules) == 3 * 7 and not plan.refusals and plan.peak_memory > 0 and plan.seconds > 0
    weights = {name: rows * columns for name, (rows, columns) in info.linear_shapes.items()}
    assert all(m.bytes_before == 2 * weights[m.name] for m in plan.modules)
    report = quantize.run(model, context(info))
    assert {name: m.packed_nbytes for name, m in packed(model).items()} == {m.name: m.bytes_after for m in plan.modules}
    assert report.details["bytes_after"] == sum(m.bytes_after for m in plan.modules)
    assert report.details["skipped"] == ["lm_head"]
    assert [line["name"] for line in report.layers] == [m.name for m in plan.modules]


def test_plan_loads_no_weights() -> None:
    _, info = make()
    Quantize(method="gptq", group_size=32).plan(info)
    assert all(p.device.type == "meta" for p in info.skeleton.parameters())


@pytest.mark.parametrize("pattern", ["*.mpl.*", "re:model\\.layers\\.\\d+\\.mlp\\.up", "model.layers.0", "lm_haed"])
@pytest.mark.parametrize("option", ["ignore", "overrides"])
def test_a_pattern_that_matches_nothing_is_an_error_with_three_names(option: str, pattern: str) -> None:
    _, info = make()
    value = [pattern] if option == "ignore" else {pattern: {"bits": 8}}
    with pytest.raises(UsageError) as caught:
        Quantize(group_size=32, **{option: value}).plan(info)
    message = str(caught.value)
    assert repr(pattern) in message and f"quantize.{option}" in message
    suggested = [name for name in info.linear_shapes if repr(name) in message]
    assert len(suggested) == 3
    if pattern == "*.mpl.*":
        assert all(".mlp." in name for name in suggested)
    if pattern == "lm_haed":
        assert "lm_head" in suggested


def test_a_malformed_expression_is_an_error() -> None:
    _, info = make()
    with pytest.raises(UsageError, match="malformed"):
        Quantize(ignore=["re:(unclosed"]).plan(info)


def test_overrides_apply_in_order_setting_by_setting() -> None:
    model, info = make()
    quantize = Quantize(
        group_size=32,
        ignore=["model.layers.2.*"],
        overrides={
            "*.mlp.*": {"bits": 8, "group_size": "channel"},
            "re:.*down_proj": {"bits": 6},
            "*.v_proj": {"skip": True},
        },
    )
    quantize.run(model, context(info))
    schemes = {name.removeprefix("model.layers."): m.scheme for name, m in packed(model).items()}
    assert len(schemes) == 2 * 6
    assert (schemes["0.mlp.up_proj"].bits, schemes["0.mlp.up_proj"].group_size) == (8, -1)
    assert (schemes["1.mlp.down_proj"].bits, schemes["1.mlp.down_proj"].group_size) == (6, -1)
    assert (schemes["1.self_attn.q_proj"].bits, schemes["1.self_attn.q_proj"].group_size) == (4, 32)


def test_an_override_changes_what_it_gives_and_nothing_else() -> None:
    _, info = make()
    overrides = {"*.mlp.*": {"skip": True}, "*.layers.0.*": {"bits": 8}, "*.up_proj": {"skip": False}}
    first = Quantize(group_size=32, overrides=overrides)
    for item in (first, Quantize(**first.config.model_dump())):
        planned = {m.name: m.action for m in item.plan(info).modules}
        assert {name for name in planned if ".mlp." in name} == {f"model.layers.{i}.mlp.up_proj" for i in range(3)}
        assert planned["model.layers.0.mlp.up_proj"] == "rtn to W8 g32 sym"


@pytest.mark.parametrize(
    "options",
    [
        {"overrides": {"lm_head": {"bits": 8}}},
        {"overrides": {"*.mlp.*": {"bits": 8}}, "ignore": ["*.mlp.*"]},
        {"overrides": {"*.q_proj": {"bits": 8}, "*.self_attn.*": {"skip": True}}},
    ],
)
def test_an_override_that_changes_nothing_is_refused(options: dict[str, Any]) -> None:
    _, info = make()
    pattern = next(iter(options["overrides"]))
    (refusal,) = Quantize(group_size=32, **options).plan(info).refusals
    assert f"the override {pattern!r} changes nothing" in refusal


@pytest.mark.parametrize("size", [0, 7, 12, -2, "7", 12.0, True])
def test_impossible_group_sizes_are_refused_by_the_options(size: int) -> None:
    with pytest.raises(UsageError, match="group_size"):
        Quantize(group_size=size)


def test_indivisible_groups_are_listed_or_made_smaller() -> None:
    model, info = make()
    plan = Quantize(group_size=64).plan(info)
    (refusal,) = plan.refusals
    assert refusal.count("down_proj (96 input features, group size 64)") == 3 and "q_proj" not in refusal
    with pytest.raises(RunError, match="does not divide"):
        Quantize(group_size=64).run(model, context(info))
    assert not packed(model)

    quantize = Quantize(group_size=64, indivisible="smaller_group")
    notes = quantize.plan(info).notes
    assert sum("group size 48 instead of 64" in note for note in notes) == 3
    run = context(info)
    quantize.run(model, run)
    assert packed(model)["model.layers.0.mlp.down_proj"].scheme.group_size == 48
    assert [note["kind"] for note in run.notes] == ["fallback"] * 3


def test_what_the_format_cannot_express_is_refused() -> None:
    _, info = make("gpt2")
    assert "Conv1D" in Quantize().plan(info).refusals[0]
    _, info = make()
    act_order = Quantize(method="gptq", group_size=32, static_groups=False).plan(info)
    assert not act_order.refusals and act_order.modules[0].scheme.g_idx
    mixture = Quantize(group_size=32, symmetric=False, overrides={"*.mlp.*": {"bits": 8}}).plan(info)
    assert "share one scheme" in mixture.refusals[0]
    assert "no module is left" in Quantize(ignore=["*"]).plan(info).refusals[0]
    info.config.quantization_config = {"quant_method": "gptq"}
    assert "quantized already (gptq)" in Quantize(group_size=32).plan(info).refusals[0]


@pytest.mark.parametrize("kind", ["phimoe", "falcon"])
def test_subclasses_of_linear_count_where_they_are_called_as_one(kind: str) -> None:
    """The router of phimoe is an nn.Linear that returns three tensors; falcon has linear layers with an own forward."""
    changes = {**SMALL, "num_local_experts": 4, "new_decoder_architecture": True, "num_kv_heads": 2}
    if kind == "falcon":
        del changes["head_dim"]
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **changes), dtype=torch.float32).eval()
    tensors = {n: TensorInfo(tuple(t.shape), "F32", t.nbytes, "model") for n, t in module.state_dict().items()}
    model, info = LoadedModel(module, None, SOURCE), ModelInfo(SOURCE, module.config, tensors)
    assert len(info.linear_shapes) == 3 * 4 + 1 and not any("router" in name for name in info.linear_shapes)
    report = Quantize(method="gptq", group_size=32, experts="keep").run(model, context(info))
    assert len(report.layers) == 3 * 4 and torch.isfinite(logits(model)).all()
    notes = Quantize(group_size=32).plan(info).notes
    assert any("not called as linear layers (model.layers.0" in note for note in notes) == (kind == "phimoe")


def test_odd_widths_come_with_a_note() -> None:
    _, info = make()
    assert any("5-bit" in note for note in Quantize(bits=5, group_size=32).plan(info).notes)
    assert any("5.23" in note for note in Quantize(symmetric=False, group_size=32).plan(info).notes)
    assert not Quantize(bits=4, group_size=32).plan(info).notes


def test_stacked_experts_are_named_as_left_alone() -> None:
    _, info = make("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, mlp_only_layers=[])
    notes = Quantize(group_size=32, experts="keep").plan(info).notes
    assert any("expert tensors" in note and "stay as they are" in note for note in notes)


# the head


def test_a_tied_head_is_refused_unless_it_is_untied() -> None:
    model, info = make(tie_word_embeddings=True)
    (refusal,) = Quantize(group_size=32, lm_head="quantize").plan(info).refusals
    assert "untie: true" in refusal and "lm_head" in refusal
    embeddings = model.module.get_input_embeddings().weight.clone()
    quantize = Quantize(group_size=32, lm_head="quantize", untie=True)
    planned = {m.name: m for m in quantize.plan(info).modules}
    assert planned["lm_head"].bytes_before == 0 and planned["lm_head"].bytes_after > 0
    report = quantize.run(model, context(info))
    assert report.details["untied"] == ["lm_head"] and model.config.tie_word_embeddings is False
    assert isinstance(model.module.lm_head, PackedLinear)
    assert torch.equal(model.module.get_input_embeddings().weight, embeddings)


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_a_head_of_its_own_is_quantized_when_asked(method: str) -> None:
    model, info = make()
    report = Quantize(method=method, group_size=32, lm_head="quantize").run(model, context(info))
    assert isinstance(model.module.lm_head, PackedLinear) and report.layers[-1]["name"] == "lm_head"
    assert report.details["untied"] == []


# run and restore


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_restore_gives_a_model_that_takes_the_state_dict(method: str) -> None:
    model, info = make(tie_word_embeddings=True)
    quantize = Quantize(method=method, group_size=32, lm_head="quantize", untie=True)
    report = quantize.run(model, context(info))
    other, _ = make(tie_word_embeddings=True, seed=1)
    quantize.restore(other, report)
    other.module.load_state_dict(model.module.state_dict(), assign=True)
    assert other.config.tie_word_embeddings is False
    assert torch.equal(logits(other), logits(model))


@pytest.mark.parametrize("bits", range(2, 9))
def test_more_bits_are_closer(bits: int) -> None:
    model, info = make()
    before = logits(model)
    Quantize(bits=bits, group_size=32).run(model, context(info))
    error = float((logits(model) - before).norm() / before.norm())
    assert error < {2: 1.2, 3: 0.6, 4: 0.3, 5: 0.15, 6: 0.08, 7: 0.04, 8: 0.03}[bits]


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_gptq_runs_on_the_architecture_and_beats_rounding(kind: str) -> None:
    model, info = make(kind, torch.float32)
    before = logits(model)
    nearest, _ = make(kind, torch.float32)
    Quantize(bits=3, group_size=32).run(nearest, context(info))
    events: list[Event] = []
    report = Quantize(method="gptq", bits=3, group_size=32).run(model, context(info, events=events))
    events = [event for event in events if event.kind == "progress"]
    assert {line["method"] for line in report.layers} == {"gptq"} and len(report.layers) == len(packed(model))
    assert float((logits(model) - before).norm()) < 0.9 * float((logits(nearest) - before).norm())
    assert all(line["error"] < line["error_rtn"] for line in report.layers)
    assert [event.step for event in events] == [1, 2, 3] and {event.total for event in events} == {3}
    assert all(event.data["error_after"] < event.data["error_before"] for event in events)
    shown = f"error {events[0].data['error_after']:.3g}, {events[0].data['error_before']:.3g} by rounding"
    assert events[0].message.startswith(f"block 1 of 3: {shown}")


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_captured_calls_reproduce_the_models_own_forward(kind: str) -> None:
    model, _ = make(kind, torch.float32)
    module = model.module
    name, blocks = find_blocks(module)
    batches = join_batches(FakeCalibration(5).batches(), 64)
    assert [tuple(batch.shape) for batch in batches] == [(2, 32), (2, 32), (1, 32)]
    inputs: list[torch.Tensor] = []
    handle = blocks[-1].register_forward_hook(lambda m, a, o: inputs.append(o if isinstance(o, torch.Tensor) else o[0]))
    with torch.no_grad():
        captured = capture(module, blocks, batches)
        inputs.clear()
        for batch, calls in zip(batches, captured):
            module(batch)
            hidden = calls.hidden
            for index, block in enumerate(blocks[:-1]):
                hidden = calls.calls[index].run(block, hidden)
            hidden = calls.calls[-1].run(blocks[-1], hidden)
            assert torch.allclose(inputs[-1], inputs[-2], atol=1e-5)
    handle.remove()
    assert not any("forward" in block.__dict__ for block in blocks), f"{name} is left as it was"


def test_the_result_is_the_same_bit_for_bit_in_every_run() -> None:
    states = []
    for _ in range(2):
        model, info = make()
        Quantize(method="gptq", group_size=32, true_sequential=True).run(model, context(info))
        states.append(model.module.state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_true_sequential_calibrates_on_quantized_neighbours() -> None:
    results = []
    for sequential in (False, True):
        model, info = make()
        Quantize(method="gptq", bits=2, group_size=32, true_sequential=sequential).run(model, context(info))
        results.append(packed(model))
    first, last = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
    assert torch.equal(results[0][first].weight_packed, results[1][first].weight_packed)
    assert not torch.equal(results[0][last].weight_packed, results[1][last].weight_packed)


def test_matching_the_original_model_makes_up_for_earlier_layers() -> None:
    errors = []
    for strength in (0.0, 1.0):
        model, info = make(dtype=torch.float32, num_hidden_layers=4)
        before = logits(model)
        options = {"bits": 3, "group_size": 32, "match_original": strength}
        Quantize(method="gptq", **options).run(model, context(info, FakeCalibration(64)))
        errors.append(float((logits(model) - before).norm()))
    assert errors[1] < errors[0]


def test_methods_can_differ_by_module() -> None:
    model, info = make()
    report = Quantize(method="gptq", group_size=32, overrides={"*.self_attn.*": {"method": "rtn"}}).run(
        model, context(info)
    )
    assert {line["method"] for line in report.layers if "self_attn" in line["name"]} == {"rtn"}
    assert {line["method"] for line in report.layers if "mlp" in line["name"]} == {"gptq"}


def test_layers_outside_the_blocks_are_calibrated_too() -> None:
    model, info = make("opt", word_embed_proj_dim=32)
    report = Quantize(method="gptq", group_size=32, lm_head="quantize").run(model, context(info))
    outside = [line for line in report.layers if ".layers." not in line["name"]]
    assert {line["name"].split(".")[-1] for line in outside} == {"project_in", "project_out", "lm_head"}
    assert all(line["error"] < line["error_rtn"] for line in outside)


def test_options_are_documented_and_cheap_to_import() -> None:
    import subprocess
    import sys

    assert all(field.description for field in Quantize.Config.model_fields.values())
    code = "import sys, llmopt.passes.quantize as q; q.Quantize(bits=3); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
