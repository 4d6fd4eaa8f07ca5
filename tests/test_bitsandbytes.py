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
from llmopt.passes.quantize.library_formats import quantize_llm_int8, quantize_nf4
from llmopt.runtime.kernels.dynamic8 import compress, dynamic_map, expand, nearest
from llmopt.runtime.kernels.four_bit import NF4, FourBitLinear, FourBitScheme
from llmopt.runtime.kernels.llm_int8 import LLMInt8Linear, LLMInt8Scheme, llm_int8_product
from llmopt.runtime.open import open_model
from llmopt.tests.library_models import GREEDY, TOKENS, bytes_of, divergence, logits, optimize
from llmopt.tests.runs import run
from safetensors.torch import load_file, save_file

SHAPES = [(32, 64), (48, 96), (7, 33), (5, 27), (96, 640)]


def weights(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return (torch.randn(rows, columns, generator=generator) * torch.logspace(-2, 0, rows)[:, None]).to(dtype)


def nf4_layer(weight: torch.Tensor, bias: bool = False) -> FourBitLinear:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias, dtype=weight.dtype)
    found = quantize_nf4(weight)
    return FourBitLinear.from_linear(linear, found.codes, found.scales, None, FourBitScheme())


def int8_layer(weight: torch.Tensor, bias: torch.Tensor | None = None, threshold: float = 6.0) -> LLMInt8Linear:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    if bias is not None:
        linear.bias.data = bias
    found = quantize_llm_int8(weight)
    return LLMInt8Linear.from_linear(linear, found.codes, found.scales, None, LLMInt8Scheme(threshold=threshold))


# numbers against the papers


def test_nf4_is_the_published_table() -> None:
    """QLoRA, equation 4 and appendix E: normal quantiles of 2^3 negative and 2^3 + 1 positive levels, zero shared."""
    printed = [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]  # fmt: skip
    assert list(NF4) == printed
    offset = 0.5 * ((1 - 1 / 32) + (1 - 1 / 30))
    positive = torch.special.ndtri(torch.linspace(offset, 0.5, 9, dtype=torch.float64)[:-1])
    negative = -torch.special.ndtri(torch.linspace(offset, 0.5, 8, dtype=torch.float64)[:-1])
    derived = torch.cat((negative, torch.zeros(1), positive)).sort().values
    assert torch.allclose(torch.tensor(NF4, dtype=torch.float64), derived / derived.abs().max(), atol=1e-6)


def test_the_dynamic_map_is_that_of_the_paper() -> None:
    """Dettmers 2015: a sign, zeros for the exponent, an indicator bit, and a linear fraction in what bits are left."""
    values = dynamic_map().double()
    assert len(values.unique()) == 256 and torch.equal(values, values.sort().values)
    assert float(values[-1]) == 1 and float(values[127]) == 0 and torch.equal(values[:127], -values[128:255].flip(0))
    for exponent in range(7):
        inside = values[(values > 10.0 ** (exponent - 7)) & (values < 10.0 ** (exponent - 6))]
        assert len(inside) == 2**exponent
        if exponent:
            assert torch.allclose(inside.diff(), inside.diff().mean(), rtol=1e-3)


def test_nf4_codes_are_nearest() -> None:
    weight = weights(48, 96)
    found = quantize_nf4(weight)
    scaled = weight.view(-1, 64) / found.scales.unsqueeze(1)
    table = torch.tensor(NF4)
    least = (scaled.unsqueeze(-1) - table).abs().amin(-1)
    assert torch.allclose((table[found.codes.view(-1, 64).long()] - scaled).abs(), least, atol=1e-6)
    assert torch.equal(found.scales, weight.view(-1, 64).abs().amax(1))


def test_double_quantization_is_nearest_in_blocks_of_256() -> None:
    scales = torch.rand(700, generator=torch.Generator().manual_seed(0)) + 0.5
    found = compress(scales)
    assert found.offset == float(scales.mean()) and len(found.largest) == 3
    centred = (scales - scales.mean()).split(256)
    assert torch.equal(found.largest, torch.stack([part.abs().max() for part in centred]))
    shares = torch.cat([part / largest for part, largest in zip(centred, found.largest)])
    least = (shares.unsqueeze(1) - found.table).abs().amin(1)
    assert torch.allclose((found.table[found.codes.long()] - shares).abs(), least, atol=1e-7)
    again = expand(found.codes, found.largest, found.table, found.offset)
    assert (again - scales).abs().max() < 0.01 * 0.5
    assert nearest(torch.tensor([-2.0, 2.0, 0.0]), found.table).tolist() == [0, 255, 127]


def test_equal_scales_and_zeros_survive() -> None:
    layer = nf4_layer(torch.zeros(32, 64))
    assert not layer.dequantize().any() and layer.dequantize().shape == (32, 64)
    ones = nf4_layer(torch.ones(32, 64))
    assert torch.equal(ones.dequantize(), torch.ones(32, 64))
    zero_row = weights(8, 64)
    zero_row[3] = 0
    assert not int8_layer(zero_row).dequantize()[3].any() and bool(int8_layer(zero_row).dequantize().isfinite().all())


@pytest.mark.parametrize("rows", [1, 5])
def test_llm_int8_is_a_product_in_two_parts(rows: int) -> None:
    """Against the paper's equation 8 in float64: outlier columns with dequantized weights, the rest as integers."""
    weight, bias = weights(24, 64), torch.randn(24, generator=torch.Generator().manual_seed(1))
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(2))
    x[0, 5], x[-1, 40] = 60.0, -6.0
    layer = int8_layer(weight, bias)
    codes, step = layer.weight.double(), layer.SCB.double()[:, None] / 127
    outliers = (x.half().abs() >= 6).any(0)
    assert outliers.sum() == 2
    plain = x.half().double() * ~outliers
    kept = (x.half().double() * (x.half().abs() < 6)).abs().amax(1, keepdim=True)
    rounded = (plain * 127 / kept).round()
    expected = (rounded @ codes.t()) * (kept / 127) * step.t() + bias.double()
    expected += x.double()[:, outliers] @ (codes * step)[:, outliers].t()
    assert torch.allclose(layer(x).double(), expected, rtol=0, atol=5e-4)  # its 1 / 127² is 1.8e-5 too large
    exact = x.double() @ weight.double().t() + bias.double()
    assert (layer(x).double() - exact).norm() < 0.02 * exact.norm()
    without = int8_layer(weight, bias, threshold=0.0)(x).double()
    assert (without - exact).norm() > 1.5 * (layer(x).double() - exact).norm()


def test_the_layers_run_in_a_compiled_graph() -> None:
    x = torch.randn(5, 64)
    x[2, 7] = 11
    for layer in (nf4_layer(weights(32, 64), bias=True), int8_layer(weights(32, 64), torch.ones(32))):
        with torch.no_grad():
            compiled = torch.compile(layer, backend="eager", fullgraph=True)
            assert torch.equal(compiled(x), layer(x))


# numbers against bitsandbytes


def same(key: str, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two stored tensors are equal: bit for bit, the JSON by its contents. Codes of scales may be neighbours,
    where bitsandbytes' CPU code, which looks them up in a coarse table, does not take the nearest."""
    if "quant_state" in key:
        return bool(json.loads(bytes(ours.tolist())) == json.loads(bytes(theirs.tolist())))
    if key.endswith("weight.absmax"):
        apart = (ours.int() - theirs.int()).abs()
        return ours.dtype == theirs.dtype and int(apart.max()) <= 1 and int(apart.sum()) <= 0.1 * apart.numel()
    return ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_nf4_is_bitsandbytes_bit_for_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    weight = weights(*shape, dtype)
    packed, state = bnb.functional.quantize_4bit(weight.clone(), quant_type="nf4", compress_statistics=True)
    layer = nf4_layer(weight)
    ours = layer.state_dict()
    theirs = {"weight": packed, **{f"weight.{k}": v for k, v in state.as_dict(packed=True).items()}}
    assert set(ours) == set(theirs)
    for key, tensor in theirs.items():
        assert same(key, ours[key], tensor), key
    state_bytes = len(theirs["weight.quant_state.bitsandbytes__nf4"])
    layer = FourBitLinear.empty(*shape[::-1], FourBitScheme(state_bytes=state_bytes))
    layer.load_state_dict(theirs, assign=True)
    scales = bnb.functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    assert torch.equal(layer.group_scales(), scales)
    codes = torch.cat((packed >> 4, packed & 15), 1).view(-1)[: weight.numel()].long()
    values = state.code[codes] * scales.repeat_interleave(64)[: weight.numel()]
    assert torch.equal(layer.dequantize(), values.view(shape))
    if shape[1] % 64 == 0:  # else its CPU code takes other blocks' scales
        assert torch.equal(layer.dequantize().to(dtype), bnb.functional.dequantize_4bit(packed, state))
    assert layer.packed_nbytes == layer.scheme.nbytes(*shape, 2) == sum(t.nbytes for t in theirs.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_llm_int8_is_bitsandbytes_bit_for_bit(dtype: torch.dtype) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    weight, bias = weights(48, 96, dtype), torch.randn(48).to(dtype)
    layer = int8_layer(weight, bias)
    theirs = bnb.nn.Linear8bitLt(96, 48, bias=True, has_fp16_weights=False, threshold=6.0)
    theirs.weight = bnb.nn.Int8Params(weight.clone(), requires_grad=False, has_fp16_weights=False)
    theirs.bias = torch.nn.Parameter(bias.clone(), requires_grad=False)
    theirs = theirs.to("cpu").eval()
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(layer.state_dict()[key], tensor) and layer.state_dict()[key].dtype == tensor.dtype, key
    x = torch.randn(2, 7, 96, generator=torch.Generator().manual_seed(3)).to(dtype)
    for outlier in (0.0, 6.5, 70.0):
        x[1, 3, 17] = outlier
        for inputs in (x, x[1:, 3:4]):
            with torch.inference_mode():
                assert torch.equal(layer(inputs), theirs(inputs.clone()))


def test_the_maps_are_those_of_bitsandbytes() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    assert torch.equal(dynamic_map(), bnb.functional.create_dynamic_map())
    assert torch.equal(torch.tensor(NF4), bnb.functional.get_4bit_type("nf4", device="cpu"))


# folders


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
