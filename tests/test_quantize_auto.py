"""`method: auto`: the knapsack, the sensitivities, limits kept, fused layers, trials, resume and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.evaluation.divergence import kl_rows
from llmopt.optimizer.base import Context, PassReport
from llmopt.optimizer.calibration import Calibration
from llmopt.optimizer.checkpoint import Checkpoint
from llmopt.optimizer.errors import RunError, UsageError
from llmopt.optimizer.events import Event
from llmopt.optimizer.model import LoadedModel, ModelInfo, SourceIdentity, TensorInfo
from llmopt.optimizer.source_model import load_source, open_source
from llmopt.optimizer.sources import describe, resolve
from llmopt.passes.quantize import Quantize
from llmopt.passes.quantize.auto import search as search_module
from llmopt.passes.quantize.auto.search import next_error
from llmopt.runtime.kernels.packed import PackedLinear
from llmopt.tests.runs import run

SOURCE = SourceIdentity("tiny", "folder", Path("."), "0" * 64)
LLAMA: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.1, "tie_word_embeddings": False,
}  # fmt: skip
AUTO: dict[str, Any] = {"method": "auto", "group_size": 32}


class Tokens:
    """Random calibration tokens."""

    def __init__(self, sequences: int = 8, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._batches = list(torch.randint(3, 96, (sequences, 1, 32), generator=generator))

    def batches(self) -> list[torch.Tensor]:
        return self._batches


def make(kind: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[LoadedModel, ModelInfo]:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**LLAMA, **changes})
    module = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    names = {torch.float32: "F32", torch.bfloat16: "BF16"}
    tensors = {
        name: TensorInfo(tuple(t.shape), names[dtype], t.nbytes, "model.safetensors")
        for name, t in module.state_dict().items()
    }
    return LoadedModel(module, None, SOURCE), ModelInfo(SOURCE, config, tensors)


def context(info: ModelInfo, calibration: Any = None, listener: Any = None) -> Context:
    return Context(info, calibration or Tokens(), 0, Path("."), "quantize", listener or (lambda event: None))


def bits_of(report: PassReport) -> dict[str, int]:
    return {line["name"].removeprefix("model.layers."): line["bits"] for line in report.layers}


def measured_kl(before: torch.nn.Module, after: torch.nn.Module, tokens: Tokens) -> float:
    with torch.no_grad():
        rows = [kl_rows(before(ids).logits[0], after(ids).logits[0])[0] for ids in tokens.batches()]
    return float(torch.cat(rows).mean())


def test_the_prediction_is_near_the_divergence_where_that_is_small() -> None:
    before, info = make()
    after, _ = make()
    auto = {"target_bits": 7.2, "bits": [6], "methods": ["rtn"]}
    report = Quantize(**AUTO, auto=auto, lm_head="quantize").run(after, context(info, Tokens(32)))
    kl = measured_kl(before.module, after.module, Tokens(32, seed=1))
    assert kl / 2 < report.details["auto"]["predicted_kl"] < kl * 2


@pytest.mark.parametrize("target", [3.0, 4.5, 5.21])
def test_target_bits_are_approached_and_never_exceeded(target: float) -> None:
    model, info = make(dtype=torch.bfloat16)
    quantize = Quantize(**AUTO, auto={"target_bits": target})
    plan = quantize.plan(info)
    assert not plan.refusals and len(plan.modules) == 21
    report = quantize.run(model, context(info))
    found, weights = report.details["auto"], sum(r * c for n, (r, c) in info.linear_shapes.items() if n != "lm_head")
    packed = {n: m for n, m in model.module.named_modules() if isinstance(m, PackedLinear)}
    kept = [n for n, m in model.module.named_modules() if type(m) is torch.nn.Linear and n != "lm_head"]
    nbytes = sum(m.packed_nbytes for m in packed.values())
    nbytes += sum(model.module.get_parameter(f"{name}.weight").nbytes for name in kept)
    assert nbytes == found["bytes"] <= target * weights / 8
    assert target - 0.25 < found["bits_per_weight"] <= target
    assert sum(m.bytes_after for m in plan.modules) <= target * weights / 8
    assert {line["name"] for line in report.layers} == set(packed)
    assert all(line["sensitivity"] > 0 and line["predicted_kl"] > 0 for line in report.layers)
    assert set(report.details["skipped"]) == {"lm_head", *kept}


def test_target_size_counts_all_of_the_model() -> None:
    model, info = make(dtype=torch.bfloat16)
    Quantize(**AUTO, auto={"target_size": "64 KB"}).run(model, context(info))
    size = sum(t.nbytes for t in model.module.state_dict().values())
    assert 62_500 < size <= 64_000


def test_a_planted_sensitive_layer_gets_more_bits() -> None:
    model, info = make(num_hidden_layers=4)
    with torch.no_grad():
        for index in range(4):
            model.module.model.layers[index].mlp.down_proj.weight.mul_(8.0 if index == 2 else 0.5)
    report = Quantize(**AUTO, auto={"target_bits": 4.5}).run(model, context(info))
    bits = bits_of(report)
    down = {index: bits[f"{index}.mlp.down_proj"] for index in range(4)}
    assert down[2] > max(down[1], down[3])
    kl = {
        unit["names"][0]: unit["candidates"]["gptq W4 g32 sym"]["predicted_kl"]
        for unit in report.details["auto"]["units"]
    }
    assert all(kl["model.layers.2.mlp.down_proj"] > 4 * kl[f"model.layers.{i}.mlp.down_proj"] for i in (1, 3))
    assert all(line["sensitivity"] > line["predicted_kl"] for line in report.layers if "down_proj" in line["name"])


@pytest.mark.parametrize("fused", ["share", "free"])
def test_fused_layers_share_bits_unless_they_are_free(fused: str) -> None:
    model, info = make()
    with torch.no_grad():
        model.module.model.layers[1].self_attn.v_proj.weight.mul_(6.0)
        model.module.model.layers[1].self_attn.q_proj.weight.mul_(0.2)
    auto = {"target_bits": 4.6, "fused": fused, "methods": ["rtn", "gptq"], "bits": [3, 4, 5, 6]}
    bits = bits_of(Quantize(**AUTO, auto=auto).run(model, context(info)))
    kinds = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))
    alike = [len({bits[f"{index}.{name}"] for name in kind}) == 1 for index in range(3) for kind in kinds]
    if fused == "share":
        assert all(alike)
    else:
        assert bits["1.self_attn.v_proj"] > bits["1.self_attn.q_proj"]


def test_max_mean_kl_holds_when_measured() -> None:
    sizes = []
    for limit in (0.2, 0.02):
        before, info = make()
        after, _ = make()
        tokens = Tokens(48)
        report = Quantize(**AUTO, auto={"max_mean_kl": limit}).run(after, context(info, tokens))
        trials = report.details["auto"]["trials"]
        assert 1 <= len(trials) <= 5
        assert measured_kl(before.module, after.module, Tokens(16, seed=5)) <= limit
        good = [trial["bytes"] for trial in trials if trial["measured_kl"] < trial["measured_bound"] <= limit]
        assert report.details["auto"]["bytes"] == min(good)
        sizes.append(min(good))
    assert sizes[0] < sizes[1]


def test_a_trial_leaves_the_model_as_it_was_and_measures_the_head_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, info = make()
    state = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    auto = {"max_mean_kl": 1e-9, "bits": [4, 8], "trials": 2}
    with pytest.raises(UsageError, match="no trial stayed within 1e-09: the least mean KL") as caught:
        Quantize(**AUTO, auto=auto, lm_head="quantize").run(model, context(info))
    assert caught.value.where == "quantize.auto.max_mean_kl"
    after = model.module.state_dict()
    assert after.keys() == state.keys() and all(torch.equal(state[name], after[name]) for name in state)
    with pytest.raises(RunError, match="4 calibration sequences"):
        Quantize(**AUTO, auto=auto).run(model, context(info, Tokens(3)))


def test_the_next_trial_follows_the_power_law_of_those_before() -> None:
    assert next_error([(0.1, 0.2)], 0.1) == pytest.approx(0.0475)
    wanted = next_error([(0.1, 0.2), (0.4, 1.6)], 0.1)  # measured = 0.2 * (predicted / 0.1)^1.5
    assert 0.2 * (wanted / 0.1) ** 1.5 == pytest.approx(0.095)
    assert next_error([(0.1, 100.0)], 0.1) == pytest.approx(0.1 / 8)


# resume, lazy models, the pipeline


def state(model: LoadedModel) -> dict[str, torch.Tensor]:
    names = model.module.state_dict()
    return {name: model.weights.read(name) for name in names} if model.weights is not None else dict(names)


def same(one: LoadedModel, other: LoadedModel) -> bool:
    a, b = state(one), state(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def prepared(model: LoadedModel, workdir: Path, listener: Any = None) -> Context:
    calibration = Calibration(model.tokenizer, "default", num_samples=6, sequence_length=64)
    made = Context(describe(model.source), calibration, 0, workdir, "quantize", listener or (lambda event: None))
    made.checkpoint = Checkpoint(workdir / "steps")
    return made


OPTIONS: dict[str, Any] = {"group_size": 32, "method": "auto", "auto": {"target_bits": 4.3, "tokens": 200}}


@pytest.fixture(scope="module")
def plain(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, PassReport]:
    """Quantized in memory, in one go."""
    model = load_source(resolve(tiny_model))
    return model, Quantize(**OPTIONS).run(model, prepared(model, tmp_path_factory.mktemp("plain")))


@pytest.mark.parametrize("where", ["memory", "files"])
def test_an_interrupted_run_resumes_after_the_search(
    where: str, plain: Any, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened() -> LoadedModel:
        if where == "memory":
            return load_source(resolve(tiny_model))
        model = open_source(resolve(tiny_model))
        assert isinstance(model, LoadedModel) and model.weights is not None
        return model

    def stop(event: Event) -> None:
        if event.kind == "progress" and event.message.startswith("block 1"):
            raise KeyboardInterrupt

    model = opened()
    with pytest.raises(KeyboardInterrupt):
        Quantize(**OPTIONS).run(model, prepared(model, tmp_path, stop))
    monkeypatch.setattr(search_module, "measure", None)  # the search is not repeated
    model = opened()
    report = Quantize(**OPTIONS).run(model, prepared(model, tmp_path))
    assert same(model, plain[0])
    assert report.details["auto"] | {"seconds": 0} == plain[1].details["auto"] | {"seconds": 0}
    assert bits_of(report) == bits_of(plain[1])


def test_an_artifact_with_mixed_bits_proves_itself_and_is_cached(tiny_model: Path, tmp_path: Path) -> None:
    passes = [{"quantize": {**OPTIONS, "auto": {"target_bits": 4.3, "methods": ["rtn", "awq", "gptq"]}}}]
    first = run(tiny_model, passes, tmp_path / "a")
    found = first.manifest.passes[0].details["auto"]
    assert found["bits_per_weight"] <= 4.3 and len({line["bits"] for line in first.manifest.passes[0].layers}) > 1
    again = run(tiny_model, passes, tmp_path / "b")
    assert again.manifest.passes[0].cached and again.manifest.files == first.manifest.files


# refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "auto"}, "belong together"),
        ({"auto": {"target_bits": 4}}, "belong together"),
        ({"method": "auto", "auto": {}}, "auto needs one limit"),
        ({"method": "auto", "auto": {"target_bits": 4, "max_mean_kl": 0.1}}, "not target_bits and max_mean_kl"),
        ({"method": "auto", "auto": {"target_bits": 4}, "bits": 4}, "chooses the bits"),
        ({"method": "auto", "auto": {"target_bits": 4}, "symmetric": False}, "have to be symmetric"),
        ({"method": "auto", "auto": {"target_bits": 4}, "activations": "int8"}, "have to be symmetric"),
        ({"method": "auto", "auto": {"target_bits": 4, "bits": [1, 4]}}, "bits must be 2 to 8"),
        ({"method": "auto", "auto": {"target_bits": 4, "bits": [16]}}, "16 alone"),
        ({"method": "auto", "auto": {"target_bits": 4, "group_sizes": [12]}}, "multiple of 8"),
        ({"method": "auto", "auto": {"target_bits": 4, "methods": ["fp8"]}}, "Input should be"),
        ({"method": "auto", "auto": {"target_bits": 4}, "overrides": {"*": {"bits": 8}}}, "needs a `method`"),
        ({"method": "auto", "auto": {"target_bits": 4, "group_sizes": [32]}, "group_size": 64}, "not both"),
        ({"method": "auto", "auto": {"target_bits": 4, "group_sizes": [True]}}, "not true"),
        ({"method": "auto", "auto": {"target_bits": 4, "group_sizes": ["12"]}}, "multiple of 8"),
        (
            {"method": "auto", "auto": {"target_bits": 4, "group_sizes": [32]}, "overrides": {"*": {"group_size": 64}}},
            "others",
        ),
        ({"method": "auto", "auto": {"target_size": "big"}}, "is not a size"),
    ],
)
def test_options_that_do_not_fit_together_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Quantize(**options)


@pytest.mark.parametrize(
    ("auto", "smallest"),
    [
        ({"target_bits": 2.2}, "the smallest reachable is 2.529 bits a weight"),
        ({"target_bits": 3.2, "bits": [3, 16]}, "the smallest reachable is 3.529 bits a weight"),
        ({"target_size": "20 KB"}, r"the limit is 0.020 MB, and the smallest reachable is 0.0\d\d MB"),
    ],
)
def test_a_limit_out_of_reach_names_the_smallest_that_is_not(auto: dict[str, Any], smallest: str) -> None:
    _, info = make(dtype=torch.bfloat16)
    with pytest.raises(UsageError, match=smallest) as caught:
        Quantize(**AUTO, auto=auto).plan(info)
    assert caught.value.where == f"quantize.auto.{next(iter(auto))}"


@pytest.mark.parametrize("auto", [{"target_bits": 16}, {"target_size": "1 TB"}])
def test_a_limit_that_every_layer_meets_as_it_is_is_refused_before_the_run(auto: dict[str, Any]) -> None:
    model, info = make(dtype=torch.bfloat16)
    option = next(iter(auto))
    for attempt in (lambda item: item.plan(info), lambda item: item.run(model, context(info))):
        with pytest.raises(UsageError, match=r"every layer stay as it is .*unquantized") as caught:
            attempt(Quantize(**AUTO, auto=auto))
        assert caught.value.where == f"quantize.auto.{option}"
    Quantize(**AUTO, auto={**auto, "bits": [4, 8]}).plan(info)  # all in 8 bits
    own = {"*.down_proj": {"method": "rtn"}}
    Quantize(**{**AUTO, "overrides": own}, auto=auto).plan(info)  # these are quantized whatever the limit


def test_other_refusals() -> None:
    model, info = make()
    with pytest.raises(UsageError, match="none of the group sizes 40 divides the 64"):
        Quantize(method="auto", auto={"target_bits": 4.6, "group_sizes": [40]}, indivisible="smaller_group").plan(info)
    half, half_info = make(dtype=torch.bfloat16)
    with pytest.raises(UsageError, match="every layer stay"):
        Quantize(**AUTO, auto={"max_mean_kl": 1e-12}).run(half, context(half_info))
    with pytest.raises(RunError, match="no tokens"):
        Quantize(**AUTO, auto={"target_bits": 5}).run(model, context(info, Tokens(0)))
    model.module.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")
    with pytest.raises(RunError, match="NaN or infinite"):
        Quantize(**AUTO, auto={"target_bits": 5}).run(model, context(info))


def test_where_every_layer_has_a_method_there_is_nothing_to_choose() -> None:
    _, info = make()
    overrides = {"*": {"method": "rtn", "bits": 4}}
    with pytest.raises(UsageError, match="has nothing to choose"):
        Quantize(**AUTO, auto={"target_bits": 5}, overrides=overrides).plan(info)


def test_group_sizes_that_do_not_divide_a_layer_are_left_out_for_it() -> None:
    model, info = make()
    quantize = Quantize(method="auto", auto={"target_bits": 5, "group_sizes": [24, 64, 32]})
    assert not quantize.plan(info).refusals
    report = quantize.run(model, context(info))
    units = {unit["names"][0].rpartition(".")[2]: unit for unit in report.details["auto"]["units"]}
    sizes = {name: {c.split()[2] for c in unit["candidates"] if c != "kept"} for name, unit in units.items()}
    assert sizes["q_proj"] == {"g64", "g32"} and sizes["down_proj"] == {"g24", "g32"}


def test_layers_with_a_method_of_their_own_are_left_to_it() -> None:
    model, info = make()
    overrides = {"*.v_proj": {"method": "rtn", "bits": 8}, "*.o_proj": {"skip": True}}
    quantize = Quantize(**AUTO, auto={"target_bits": 4.6}, overrides=overrides, ignore=["*.layers.0.*"])
    assert {m.action for m in quantize.plan(info).modules if "v_proj" in m.name} == {"rtn to W8 g32 sym"}
    report = quantize.run(model, context(info))
    lines = {line["name"]: line for line in report.layers}
    assert all((line["method"], line["bits"]) == ("rtn", 8) for name, line in lines.items() if "v_proj" in name)
    names = {name for unit in report.details["auto"]["units"] for name in unit["names"]}
    assert len(names) == 2 * 5 and not any("v_proj" in name or "o_proj" in name for name in names)
