"""The GPTQ checkpoint format: packing against a slow definition, activation order, checkpoints of other tools."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.exporters.gptq import checkpoint_format
from llmopt.optimizer.errors import LlmoptError
from llmopt.passes.quantize.gptq import quantize_gptq
from llmopt.passes.quantize.grid import minmax_grid
from llmopt.runtime.kernels.gptq_linear import BITS, GPTQLinear, GPTQScheme, half_scales, plus_one
from llmopt.runtime.kernels.packed import QuantScheme
from llmopt.runtime.open import open_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from .gptq_definition import TOKENS, make_tensors, pack_down, unpack_down


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


def test_a_scheme_counts_the_bytes_of_its_layer() -> None:
    for scheme in (GPTQScheme(4, 32, True, True), GPTQScheme(3, -1, False, False, False)):
        layer = GPTQLinear.empty(96, 64, scheme)
        assert scheme.nbytes(64, 96, 2) == layer.packed_nbytes and scheme.format == "gptq"
        assert checkpoint_format([scheme]) == ("gptq" if scheme.symmetric else "gptq_v2")
