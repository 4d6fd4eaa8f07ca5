"""The GPTQ checkpoint format: packing against a slow definition, what is written and read, what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llmopt
import pytest
import torch
from llmopt.exporters.gptq import checkpoint_format
from llmopt.exporters.huggingface import HuggingFaceExporter
from llmopt.optimizer.base import Context
from llmopt.optimizer.calibration import Calibration
from llmopt.optimizer.errors import LlmoptError, RunError, UsageError
from llmopt.optimizer.source_model import load_source
from llmopt.optimizer.sources import describe, resolve
from llmopt.passes.quantize import Quantize
from llmopt.passes.quantize.gptq import quantize_gptq
from llmopt.passes.quantize.grid import minmax_grid
from llmopt.runtime.kernels.gptq_linear import BITS, GPTQLinear, GPTQScheme, half_scales, plus_one
from llmopt.runtime.kernels.packed import PackedLinear, QuantScheme
from llmopt.runtime.open import open_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from .runs import EVALUATE

TOKENS = torch.randint(2, 400, (2, 11), generator=torch.Generator().manual_seed(0))
GPTQ: dict[str, Any] = {"quantization_format": "gptq"}


# -- the definition, one code at a time


def pack_down(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack integers [L, M] along L: element i takes bits i * bits … of one string of 32-bit words."""
    length, many = values.shape
    words = -(-length * bits // 32)
    out = torch.zeros(words, many, dtype=torch.int64)
    for m in range(many):
        text = sum(int(values[i, m]) << (bits * i) for i in range(length))
        for w in range(words):
            word = text >> (32 * w) & 0xFFFFFFFF
            out[w, m] = word - 2**32 if word >= 2**31 else word
    return out.int()


def unpack_down(words: torch.Tensor, bits: int, length: int) -> torch.Tensor:
    out = torch.zeros(length, words.shape[1], dtype=torch.int64)
    for m in range(words.shape[1]):
        text = sum((int(words[w, m]) & 0xFFFFFFFF) << (32 * w) for w in range(len(words)))
        for i in range(length):
            out[i, m] = text >> (bits * i) & (2**bits - 1)
    return out


def make_tensors(
    rows: int, columns: int, bits: int, size: int, minus_one: bool = True, sym: bool = True, g_idx: Any = None, seed=0
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors of a layer of [rows, columns] with random contents, and its weight by the definition, float64 [N, K]."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-columns // size)
    codes = torch.randint(0, 2**bits, (columns, rows), generator=generator)
    zeros = torch.full((groups, rows), 2 ** (bits - 1))
    if not sym:
        zeros = torch.randint(1, 2**bits, (groups, rows), generator=generator)
    scales = ((torch.rand(groups, rows, generator=generator) + 0.5) * 0.1 / 2**bits).half()
    index = torch.arange(columns) // size if g_idx is None else g_idx
    weight = torch.stack([(codes[k] - zeros[index[k]]) * scales[index[k]].double() for k in range(columns)])
    tensors = {
        "qweight": pack_down(codes, bits),
        "qzeros": pack_down((zeros - int(minus_one)).t(), bits).t().contiguous(),
        "scales": scales,
        "g_idx": index.int(),
    }
    return tensors, weight.t().contiguous()


def layer_of(tensors: dict[str, torch.Tensor], rows: int, columns: int, scheme: GPTQScheme) -> GPTQLinear:
    layer = GPTQLinear.empty(columns, rows, scheme, dtype=torch.float32)
    layer.load_state_dict(tensors, assign=True)
    return layer


@pytest.mark.parametrize("minus_one", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_weights_are_those_of_the_definition(bits: int, minus_one: bool) -> None:
    rows, columns, size = 32, 96, 32
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(1)) // size
    for sym, index, seed in ((True, None, 2), (False, None, 3), (False, order, 4)):
        tensors, weight = make_tensors(rows, columns, bits, size, minus_one=minus_one, sym=sym, g_idx=index, seed=seed)
        layer = layer_of(tensors, rows, columns, GPTQScheme(bits, size, sym, True, minus_one))
        assert torch.equal(layer.dequantize().double(), weight)
        for dtype in (torch.bfloat16, torch.float16):
            assert torch.equal(layer.dequantize(dtype), weight.to(dtype))
        state = layer.quant_state()
        assert (state.zeros is None) == sym and (state.g_idx is None) == (index is None)
        x = torch.randn(3, columns, generator=torch.Generator().manual_seed(5))
        assert torch.equal(layer(x), torch.nn.functional.linear(x, weight.float()))


def test_three_bits_are_32_codes_in_three_words() -> None:
    """The layout as AutoGPTQ documents it: ten codes, one that crosses, ten, one that crosses, ten."""
    codes = torch.randint(0, 8, (32,), generator=torch.Generator().manual_seed(0)).tolist()
    words = [0, 0, 0]
    for j in range(10):
        words[0] |= codes[j] << 3 * j
        words[1] |= codes[11 + j] << 3 * j + 1
        words[2] |= codes[22 + j] << 3 * j + 2
    words[0] |= (codes[10] & 3) << 30
    words[1] |= codes[10] >> 2 | (codes[21] & 1) << 31
    words[2] |= codes[21] >> 1
    expected = torch.tensor(words).to(torch.int32)[:, None]
    assert torch.equal(pack_down(torch.tensor(codes)[:, None], 3), expected)
    tensors = {"qweight": expected, "qzeros": torch.zeros(1, 1, dtype=torch.int32), "scales": torch.ones(1, 1).half()}
    layer = layer_of(tensors, 1, 32, GPTQScheme(3, -1, True, False, False))
    assert layer.codes()[0].tolist() == codes and layer.dequantize()[0].tolist() == codes


@pytest.mark.parametrize("bits", BITS)
def test_zero_points_come_back_from_words_that_writers_lowered_as_a_whole(bits: int) -> None:
    zeros = torch.randint(0, 2**bits, (32, 5), generator=torch.Generator().manual_seed(bits))
    zeros[3], zeros[-1] = 0, 0
    if 32 % bits == 0:
        lowered = pack_down(zeros, bits) - sum(1 << shift for shift in range(0, 32, bits))
    else:
        lowered = pack_down((zeros - 1) % 2**bits, bits)
    back = plus_one(lowered.t().contiguous(), bits)
    assert torch.equal(unpack_down(back.t(), bits, 32), zeros)


def test_a_short_last_group_and_a_missing_index_are_read() -> None:
    tensors, weight = make_tensors(8, 72, 4, 32)
    del tensors["g_idx"]
    layer = layer_of(tensors, 8, 72, GPTQScheme(4, 32, True, False))
    assert torch.equal(layer.weight.double(), weight)
    assert layer.quant_state().g_idx is not None  # kernels that want whole groups have to refuse it


def test_scales_that_float16_lacks_are_refused_unless_their_groups_are_idle() -> None:
    scales = torch.tensor([[0.5, 2.0**-130], [2.0**-20 * 1.0078125, 1.0]]).bfloat16()
    idle = torch.tensor([[False, True], [True, False]])
    half = half_scales(scales, lambda: idle)
    assert half.dtype == torch.float16 and half.shape == (2, 2)
    assert half[0, 0] == 0.5 and half[1, 1] == 1 and half[1, 0] == half[0, 1] == torch.finfo(torch.float16).tiny
    for bad in (2.0**-20 * 1.0078125, 2.0**-130, 70_000.0):
        with pytest.raises(ValueError, match="float16 does not hold"):
            half_scales(torch.tensor([[bad]]).bfloat16(), lambda: torch.tensor([[False]]))
    exact = torch.tensor([[2.0**-24, 65280.0, -0.001953125]]).bfloat16()
    assert torch.equal(half_scales(exact, lambda: idle).t().float(), exact.float())


# -- activation order without static groups


def test_moving_groups_in_activation_order_equal_a_float64_reference() -> None:
    rows, columns, size, bits = 6, 48, 16, 4
    generator = torch.Generator().manual_seed(3)
    w = torch.randn(rows, columns, generator=generator)
    x = torch.randn(300, columns, generator=generator) * (torch.rand(columns, generator=generator) + 0.2)
    hessian = x.t() @ x / len(x)
    found = quantize_gptq(
        w, hessian, QuantScheme(bits, size, False), torch.float32, static_groups=False, search_steps=0
    ).quantized
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True).tolist()
    assert found.g_idx is not None and found.zeros is not None
    assert [int(found.g_idx[column]) for column in order] == [i // size for i in range(columns)]

    work, left = w.double().clone(), list(order)
    damped = hessian.double() + torch.eye(columns) * (0.01 * hessian.diagonal().mean())
    inverse = torch.linalg.inv(damped[left][:, left])
    codes = torch.zeros(rows, columns, dtype=torch.float64)
    for i, column in enumerate(order):
        if i % size == 0:
            scales, zeros = minmax_grid(work[:, left[:size]].float()[:, None], bits, False, torch.float32)
            assert zeros is not None
            assert torch.allclose(scales[:, 0], found.scales[:, i // size], rtol=1e-4)
            step, zero = scales[:, 0].double(), zeros[:, 0].double()
        codes[:, column] = (torch.round(work[:, column] / step) + zero).clamp(0, 15)
        error = (work[:, column] - (codes[:, column] - zero) * step) / inverse[0, 0]
        work[:, left] -= error[:, None] * inverse[0][None, :]
        inverse = inverse[1:, 1:] - torch.outer(inverse[1:, 0], inverse[0, 1:]) / inverse[0, 0]
        left = left[1:]
    same = (found.codes.double() == codes).all(dim=1)  # a value on an edge may fall either way, and moves its row
    assert int(same.sum()) >= rows - 1
    index = found.g_idx.long()
    expected = (found.codes.float() - found.zeros.float()[:, index]) * found.scales[:, index]
    assert torch.equal(found.dequantize(bits), expected)
    assert float((w - expected).square().sum()) < float(w.square().sum()) * 0.05
    nearest = found.nearest(w, bits)
    assert float((w - nearest).abs().max()) <= float(found.scales.max()) * 1.01 * 8


# -- export and load


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
            (answer,) = llm.generate(["Once upon a time"], max_new_tokens=8)
            texts.append(answer.token_ids)
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


# -- checkpoints of other tools


def by_hand(source: Path, folder: Path, **settings: Any) -> dict[str, torch.Tensor]:
    """A folder as GPTQModel lays it out, of random codes; returns the weights of its layers by the definition."""
    permuted = settings.get("desc_act", False)
    minus_one = settings.get("checkpoint_format", "gptq") == "gptq"
    stored, weights = load_file(source / "model.safetensors"), {}
    for number, name in enumerate([n for n in stored if n.endswith("_proj.weight")]):
        rows, columns = stored.pop(name).shape
        index = None
        if permuted:
            index = torch.randperm(columns, generator=torch.Generator().manual_seed(number)) // 32
        layer = name.removesuffix(".weight")
        tensors, weights[layer] = make_tensors(
            rows, columns, 4, 32, minus_one=minus_one, sym=settings.get("sym", True), g_idx=index, seed=number
        )
        stored |= {f"{layer}.{leaf}": tensor for leaf, tensor in tensors.items()}
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "bits": 4, "group_size": 32, "sym": True, "desc_act": False, "lm_head": False, "quant_method": "gptq",
        "method": "gptq", "checkpoint_format": "gptq", "format": settings.get("checkpoint_format", "gptq"),
        "pack_dtype": "int32", "meta": {"quantizer": ["gptqmodel:7.6.0"], "damp_percent": 0.05, "mse": 0.0}, **settings,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return weights


@pytest.mark.parametrize(
    "settings",
    [{}, {"sym": False, "checkpoint_format": "gptq_v2"}, {"sym": False}, {"desc_act": True}],
    ids=["v1", "v2", "v1 asymmetric", "act order"],
)
def test_a_checkpoint_made_by_another_tool_opens_with_its_weights(
    settings: dict[str, Any], make_model: Callable[..., Path], tmp_path: Path
) -> None:
    source = make_model(dtype="float16")
    weights = by_hand(source, tmp_path / "made", **settings)
    opened: Any = open_model(tmp_path / "made", "cpu").module
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16).eval()
    for name, weight in weights.items():
        assert torch.equal(opened.get_submodule(name).weight, weight.half())
        plain.get_submodule(name).weight.data = weight.half()
    with torch.inference_mode():
        assert torch.equal(opened(TOKENS).logits, plain(TOKENS).logits)


def test_an_old_checkpoint_has_its_entry_in_quantize_config_json(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    source = make_model(dtype="float16")
    weights = by_hand(source, tmp_path / "made")
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    old = {key: config.pop("quantization_config")[key] for key in ("bits",)}
    (tmp_path / "made" / "quantize_config.json").write_text(
        json.dumps({**old, "group_size": 32, "desc_act": False, "sym": True, "damp_percent": 0.01})
    )
    (tmp_path / "made" / "config.json").write_text(json.dumps(config))
    opened: Any = open_model(tmp_path / "made", "cpu").module
    assert all(torch.equal(opened.get_submodule(n).weight, w.half()) for n, w in weights.items())


def change(folder: Path, name: str, to: str | torch.Tensor) -> None:
    """Give a stored tensor another name, or other contents."""
    stored = load_file(folder / "model.safetensors")
    tensor = stored.pop(name)
    stored |= {to: tensor} if isinstance(to, str) else {name: to}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})


LAYER = "model.layers.1.mlp.up_proj"
DAMAGE: dict[str, tuple[dict[str, Any], Callable[[Path], None] | None, str]] = {
    "marlin": ({"checkpoint_format": "marlin"}, None, "checkpoint_format is 'marlin'"),
    "five bits": ({"bits": 5}, None, "5 bits"),
    "other words": ({"pack_dtype": "int16"}, None, "packed in int16"),
    "group size": ({"group_size": 0}, None, "group size 0"),
    "other bits": ({"bits": 8}, None, "has shape"),
    "other groups": ({"group_size": 64}, None, "has shape"),
    "contradiction": ({"dynamic": {"-:.*up_proj": {}}}, None, "says with '-:.*up_proj' that it is not"),
    "no group": ({}, lambda f: change(f, f"{LAYER}.g_idx", torch.full((64,), 2).int()), "g_idx has group 2"),
    "no scales": ({}, lambda f: change(f, f"{LAYER}.scales", "x.scales"), "lack model.layers.1.mlp.up_proj.scales"),
    "no layer": ({}, lambda f: change(f, f"{LAYER}.qweight", "model.extra.qweight"), "has no such layer"),
    "embedding": (
        {}, lambda f: change(f, f"{LAYER}.qweight", "model.embed_tokens.qweight"), "a Embedding is no linear layer"
    ),
    "order without index": (
        {"desc_act": True}, lambda f: change(f, f"{LAYER}.g_idx", f"{LAYER}.lost"), "there is no g_idx"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def sound(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that `by_hand` made."""
    folder = tmp_path_factory.mktemp("sound") / "made"
    by_hand(tiny_model, folder)
    return folder


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_or_unknown_checkpoint_is_one_clear_error(name: str, sound: Path, tmp_path: Path) -> None:
    settings, damage, message = DAMAGE[name]
    shutil.copytree(sound, tmp_path / "made")
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    config["quantization_config"] |= settings
    (tmp_path / "made" / "config.json").write_text(json.dumps(config))
    if damage is not None:
        damage(tmp_path / "made")
    with pytest.raises(LlmoptError) as caught:
        open_model(tmp_path / "made", "cpu")
    assert message in str(caught.value)


# -- what is refused before anything is loaded


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "bits": ({"bits": 5}, GPTQ, "2, 3, 4 or 8 bits, not 5"),
    "floats": ({"method": "mxfp4"}, GPTQ, "integer weights alone, not mxfp4-pack-quantized"),
    "int8 inputs": ({"activations": "int8"}, GPTQ, "integer weights alone, not int-quantized"),
    "fused": ({"overrides": {"*.v_proj": {"bits": 8}}}, GPTQ, "engines run them as one (qkv_proj)"),
    "kept one": ({"ignore": ["*.0.mlp.up_proj"]}, GPTQ, "engines run them as one (gate_up_proj)"),
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


def test_a_scheme_counts_the_bytes_of_its_layer() -> None:
    for scheme in (GPTQScheme(4, 32, True, True), GPTQScheme(3, -1, False, False, False)):
        layer = GPTQLinear.empty(96, 64, scheme)
        assert scheme.nbytes(64, 96, 2) == layer.packed_nbytes and scheme.format == "gptq"
        assert checkpoint_format([scheme]) == ("gptq" if scheme.symmetric else "gptq_v2")
