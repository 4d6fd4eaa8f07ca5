"""`llmopt.diff`: weights, outputs and harm of each layer against whole models in memory; flips; refusals."""

from __future__ import annotations

import json
from pathlib import Path

import llmopt
import pytest
import torch
from llmopt.evaluation.divergence import kl_rows
from llmopt.evaluation.layers import ErrorSum, label
from llmopt.evaluation.windows import sliding_windows
from llmopt.optimizer.errors import UsageError
from llmopt.runtime.open import open_model
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT = "It was the best of times — it was the worst of times; naïve 日本 😀 text, twice. " * 30
FAST = {"windows": 2, "window_length": 48, "harm_tokens": 32}
BLOCKS = ["model.layers.0", "model.layers.1"]


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "my.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def found(tiny_model, packed_model, text_file):
    return llmopt.diff(tiny_model, packed_model, text=text_file, dtype="float32", **FAST)


@pytest.fixture(scope="module")
def models(tiny_model, packed_model):
    return [open_model(folder, "cpu", "float32").module for folder in (tiny_model, packed_model)]


@pytest.fixture(scope="module")
def windows(tiny_model) -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    cut = sliding_windows(TEXT, tokenizer, length=48, stride=48, limit=2)
    return torch.stack([window.ids for window in cut.windows])


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((b.double() - a.double()).norm() / a.double().norm()).item()


def unit(found, name: str) -> dict:
    return next(one for one in found.units if one["name"] == name)


def module(found, name: str) -> dict:
    return next(one for each in found.units for one in each["modules"] if one["name"] == name)


def test_weights_are_compared_as_numbers(found, models):
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "model.norm"):
        a, b = (m.get_submodule(name).weight.detach() for m in models)
        record = module(found, name)
        assert record["weight_error"] == pytest.approx(relative(a, b), rel=1e-5, abs=1e-9)
        assert record["max_weight_error"] == pytest.approx((b - a).abs().max().item(), rel=1e-5, abs=1e-9)
        assert record["shape"] == list(a.shape)


def test_outputs_are_compared_on_each_models_own_inputs(found, models, windows):
    kept: list[dict[str, list[torch.Tensor]]] = [{}, {}]
    names = [*BLOCKS, "model.layers.1.mlp.up_proj"]
    for store, model in zip(kept, models):
        for name in names:
            store[name] = []
            model.get_submodule(name).register_forward_hook(
                lambda m, i, o, to=store[name]: to.append(o if isinstance(o, torch.Tensor) else o[0])
            )
        with torch.inference_mode():
            store["logits"] = [model(row[None]).logits[0, :-1] for row in windows]
    for name in BLOCKS:
        expected = relative(torch.cat(kept[0][name]), torch.cat(kept[1][name]))
        assert unit(found, name)["output_error"] == pytest.approx(expected, rel=1e-3)
    expected = relative(torch.cat(kept[0][names[2]]), torch.cat(kept[1][names[2]]))
    assert module(found, names[2])["output_error"] == pytest.approx(expected, rel=1e-3)
    logits = [torch.cat(store["logits"]) for store in kept]
    kl, agrees = kl_rows(*logits)
    assert found.data["divergence"]["mean_kl"] == pytest.approx(kl.mean().item(), rel=1e-3)
    assert found.data["num_flips"] == int((~agrees).sum())
    assert found.data["num_positions"] == 2 * 47


def test_harm_is_kl_of_a_with_one_layer_of_b(found, models, tiny_model, windows):
    ids = windows[:1, :32]
    with torch.inference_mode():
        plain = models[0](ids).logits[0, :-1]
        for index, name in enumerate(BLOCKS):
            changed = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
            changed.model.layers[index] = models[1].model.layers[index]
            kl, _ = kl_rows(plain, changed(ids).logits[0, :-1])
            assert unit(found, name)["harm"] == pytest.approx(kl.mean().item(), rel=1e-3)
    assert sum(one["share"] for one in found.units) == pytest.approx(1)
    harms = [one["harm"] for one in found.units]
    assert harms == sorted(harms, reverse=True) and unit(found, "embeddings")["harm"] == 0


def test_sizes_and_formats(found, tiny_model, packed_model):
    packed = module(found, "model.layers.0.mlp.up_proj")
    assert label(packed["a"]) == "BF16" and packed["a"]["bytes"] == 128 * 64 * 2
    assert packed["b"]["bits"] == 4 and packed["b"]["group_size"] == 32 and packed["b"]["bytes"] < packed["a"]["bytes"]
    for side, key in (("a", "bytes_a"), ("b", "bytes_b")):
        assert sum(one[key] for one in found.units) == found.data[side]["bytes"]
    assert label({"format": "pack-quantized", "bits": 4, "group_size": -1, "symmetric": False, "bytes": 1}) == (
        "pack-quantized W4 asym"
    )


def test_a_model_from_itself(tiny_model, text_file):
    found = llmopt.diff(tiny_model, tiny_model, text=text_file, **FAST)
    assert found.flips == [] and found.data["num_flips"] == 0
    for one in found.units:
        keys = ("harm", "share", "weight_error", "max_weight_error", "output_error", "local_error")
        assert [one[key] for key in keys] == [0] * 6
    assert found.data["divergence"]["max_kl"] == 0


def test_flips_show_context_and_both_choices(tiny_model, make_model, text_file, windows):
    other = make_model(seed=5)
    found = llmopt.diff(tiny_model, other, text=text_file, dtype="float32", flips=7, **FAST)
    assert len(found.flips) == min(7, found.data["num_flips"]) > 0
    assert [f["kl"] for f in found.flips] == sorted((f["kl"] for f in found.flips), reverse=True)
    first = found.flips[0]
    models = [AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).eval() for f in (tiny_model, other)]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    ids, position = windows[first["window"]], first["position"]
    for key, model in zip("ab", models):
        with torch.inference_mode():
            p = model(ids[None]).logits[0, position - 1].softmax(-1)
        assert first[key]["token_id"] == int(p.argmax())
        assert first[key][f"probability_{key}"] == pytest.approx(p.max().item(), rel=1e-3)
    assert first["actual"]["token_id"] == int(ids[position])
    assert first["context"] == tokenizer.decode(ids[max(0, position - 24) : position])


def test_embeddings_and_head_are_units(tiny_model, make_model, text_file):
    other = make_model()
    model = AutoModelForCausalLM.from_pretrained(other)
    model.model.norm.weight.data.mul_(1.5)
    model.save_pretrained(other)
    found = llmopt.diff(tiny_model, other, text=text_file, **FAST)
    worst = found.units[0]
    assert worst["name"] == "final norm and head" and worst["harm"] > 0 and worst["share"] == 1
    assert module(found, "model.norm")["weight_error"] == pytest.approx(0.5, rel=1e-2)


def test_models_in_memory_give_the_same(tiny_model, packed_model, text_file, found, monkeypatch):
    monkeypatch.setattr("llmopt.optimizer.diff.try_streamed", lambda *arguments: "no reason")
    whole = llmopt.diff(tiny_model, packed_model, text=text_file, dtype="float32", **FAST)
    assert "no reason" in whole.data["notes"][0]["message"]
    for one in found.units:
        assert unit(whole, one["name"])["harm"] == pytest.approx(one["harm"], rel=1e-4)
        assert unit(whole, one["name"])["weight_error"] == pytest.approx(one["weight_error"], rel=1e-6)


def test_error_sums():
    error = ErrorSum()
    assert error.relative == 0
    error.add(torch.zeros(3), torch.ones(3))
    assert error.relative is None and error.largest == 1
    error.add(torch.full((4,), 3.0), torch.full((4,), 3.0))
    assert error.relative == pytest.approx((3 / 36) ** 0.5)


def test_models_that_do_not_compare(tiny_model, make_model, text_file):
    from transformers import GPT2Config, GPT2LMHeadModel

    with pytest.raises(UsageError, match="num_hidden_layers: 2 and 3"):
        llmopt.diff(tiny_model, make_model(num_hidden_layers=3), text=text_file)
    other = make_model()
    GPT2LMHeadModel(GPT2Config(vocab_size=400, n_layer=2, n_embd=32, n_head=2)).save_pretrained(other)
    with pytest.raises(UsageError, match="different architectures: LlamaForCausalLM"):
        llmopt.diff(tiny_model, other, text=text_file)
    changed = make_model()
    data = json.loads((changed / "tokenizer.json").read_text(encoding="utf-8"))
    data["model"]["merges"] = data["model"]["merges"][:20]
    (changed / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(UsageError, match="tokenizers"):
        llmopt.diff(tiny_model, changed, text=text_file)
    with pytest.raises(UsageError, match="no such"):
        llmopt.diff(tiny_model, "./nowhere", text=text_file)
    with pytest.raises(UsageError, match="context of 512"):
        llmopt.diff(tiny_model, tiny_model, text=text_file, window_length=513)
    with pytest.raises(UsageError, match="windows measure nothing"):
        llmopt.diff(tiny_model, tiny_model, text=text_file, windows=0)
