"""The fuse pass: norms folded exactly, requests for fused products recorded and applied by engines that can."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from llmopt.optimizer.errors import RunError, UsageError
from llmopt.optimizer.runtime_spec import FuseSpec, RuntimeSpec
from llmopt.passes.fuse import Fuse
from llmopt.runtime.fused_linears import FusedPart, apply_around, fuse_linears

from .test_pass_rotate import context, logits, make, relative

EXACT = ["llama", "qwen2", "gemma", "phi3", "mixtral", "starcoder2", "stablelm", "cohere"]
NORMS = {"qkv": False, "gate_up": False, "norms": True}


@pytest.mark.parametrize("kind", EXACT)
def test_folded_norms_keep_the_logits(kind: str) -> None:
    model, info = make(kind)
    before, inner = logits(model), model.module.model.layers[0].self_attn.o_proj.weight.clone()
    assert Fuse(**NORMS).plan(info).refusals == []
    report = Fuse(**NORMS).run(model, context(info))
    assert relative(logits(model), before) < 1e-4 and report.details["logit_change"] < 1e-4
    assert report.details["kept_norms"] == [] and model.runtime.fuse == FuseSpec()
    left = 0.0 if kind == "gemma" else 1.0
    norms = [p for n, p in model.module.named_parameters() if n.endswith("norm.weight") and "q_" not in n]
    assert norms and all(bool((p == left).all()) for p in norms)
    assert torch.equal(model.module.model.layers[0].self_attn.o_proj.weight, inner)


def test_a_tied_head_keeps_the_final_norm() -> None:
    model, info = make("llama", tie_word_embeddings=True)
    before, final = logits(model), model.module.model.norm.weight.clone()
    assert any("final norm keeps" in note for note in Fuse(**NORMS).plan(info).notes)
    report = Fuse(**NORMS).run(model, context(info))
    assert report.details["folded_norms"] == 4 and report.details["kept_norms"] == ["model.norm"]
    assert torch.equal(model.module.model.norm.weight, final)
    assert model.module.lm_head.weight is model.module.model.embed_tokens.weight
    assert relative(logits(model), before) < 1e-4


def test_norms_of_outputs_are_refused() -> None:
    model, info = make("olmo2")
    (refusal,) = Fuse(**NORMS).plan(info).refusals
    assert "layers.0 normalizes outputs" in refusal and "`norms: false`" in refusal
    with pytest.raises(RunError, match="normalizes outputs"):
        Fuse(**NORMS).run(model, context(info))


def test_the_request_is_recorded_and_changes_no_weight() -> None:
    model, info = make("llama")
    weights = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    plan = Fuse().plan(info)
    assert plan.refusals == [] and plan.modules == [] and "change no file" in plan.notes[-1]
    Fuse().run(model, context(info))
    assert model.runtime.fuse == FuseSpec(qkv=True, gate_up=True)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.module.state_dict().items())
    assert RuntimeSpec.model_validate(model.runtime.model_dump()).fuse.qkv


def test_plans_say_what_has_no_effect() -> None:
    _, phi3 = make("phi3")
    notes = Fuse().plan(phi3).notes
    assert any("qkv_proj" in note and "already" in note for note in notes)
    _, starcoder = make("starcoder2")
    assert "gate_up" in Fuse().plan(starcoder).refusals[0]
    with pytest.raises(UsageError, match="nothing to fuse"):
        Fuse(qkv=False, gate_up=False)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mixtral"])
def test_fused_layers_compute_the_same(kind: str) -> None:
    model, _ = make(kind)
    before, names = logits(model), set(model.module.state_dict())
    done = fuse_linears(model.module, FuseSpec(qkv=True, gate_up=True))
    assert done == {"qkv": 2, "gate_up": 0 if kind == "mixtral" else 2}
    assert relative(logits(model), before) < 1e-6 and set(model.module.state_dict()) == names
    attention = model.module.model.layers[0].self_attn
    start = attention.q_proj.weight.untyped_storage().data_ptr()
    assert attention.k_proj.weight.untyped_storage().data_ptr() == start, "the weights are in memory once"


def test_a_part_called_with_another_input_computes_by_itself() -> None:
    layers = torch.nn.ModuleDict({n: torch.nn.Linear(8, r) for n, r in (("q_proj", 6), ("k_proj", 4), ("v_proj", 4))})
    parent = torch.nn.Module()
    for name, layer in layers.items():
        setattr(parent, name, layer)
    fuse_linears(parent, FuseSpec(qkv=True))
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    for order in (("q_proj", "k_proj", "v_proj"), ("v_proj", "q_proj", "k_proj"), ("k_proj", "k_proj", "q_proj")):
        for inputs in ((x, x, x), (x, y, x), (y, x, y)):
            for name, value in zip(order, inputs):
                assert torch.allclose(getattr(parent, name)(value), layers[name](value), atol=1e-6)


def test_layers_that_differ_or_are_not_plain_are_left_alone() -> None:
    parent = torch.nn.Module()
    parent.gate_proj, parent.up_proj = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4, bias=False)
    assert fuse_linears(parent, FuseSpec(gate_up=True)) == {"gate_up": 0}
    parent.up_proj = torch.nn.Identity()
    assert fuse_linears(parent, FuseSpec(gate_up=True)) == {"gate_up": 0}


@pytest.mark.parametrize(("device", "decoder"), [("cpu", None), ("cpu", object()), ("cuda", None)])
def test_engines_fuse_where_modules_are_called(device: str, decoder: Any) -> None:
    model, _ = make("llama")
    notes: list[str] = []
    opened = SimpleNamespace(
        module=model.module,
        runtime=RuntimeSpec(fuse=FuseSpec(qkv=True)),
        device=SimpleNamespace(type=device),
        note=lambda message, kind="note": notes.append(message),
    )
    q_proj = model.module.model.layers[0].self_attn
    seen = []

    def build() -> Any:
        seen.append(isinstance(q_proj.q_proj, FusedPart))
        return SimpleNamespace(decoder=decoder)

    apply_around(opened, build)
    assert seen == [device == "cuda"]
    assert isinstance(q_proj.q_proj, FusedPart) == (decoder is None)
    assert len(notes) == 1 and ("in any case" in notes[0]) == (decoder is not None)


def test_an_artifact_is_opened_fused(tiny_model: Path, tmp_path: Path) -> None:
    import llmopt

    evaluate = {"windows": 2, "window_length": 64, "speed": False, "new_tokens": 4, "prompts": ["Once"]}
    artifact = llmopt.optimize(
        tiny_model, passes=[{"fuse": {"norms": True}}], out=tmp_path / "out", evaluate=evaluate, dtype="float32"
    )
    assert artifact.manifest.runtime.fuse.qkv and artifact.manifest.measured["divergence"]["mean_kl"] < 1e-4
    with llmopt.load(tmp_path / "out", engine="static") as llm:
        assert isinstance(llm.module.model.layers[1].mlp.up_proj, FusedPart)
        assert [note["kind"] for note in llm.notes if "fuse" in note["message"]] == ["note", "note"]
