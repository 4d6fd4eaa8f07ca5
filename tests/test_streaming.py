"""Lazy models: weights left in their files, quantized block by block, resumed after a crash, written to shards."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from llmopt.evaluation.logits import window_logits
from llmopt.evaluation.perplexity import perplexity
from llmopt.evaluation.proof import ProofSettings, examine
from llmopt.evaluation.proof_streamed import too_large
from llmopt.evaluation.reference import write_reference
from llmopt.evaluation.streamed import streamed_logits
from llmopt.exporters.huggingface import HuggingFaceExporter
from llmopt.optimizer.base import Context
from llmopt.optimizer.calibration import Calibration
from llmopt.optimizer.checkpoint import Checkpoint
from llmopt.optimizer.errors import RunError
from llmopt.optimizer.events import Event
from llmopt.optimizer.model import LoadedModel
from llmopt.optimizer.source_model import load_source, open_source
from llmopt.optimizer.sources import describe, resolve
from llmopt.passes.quantize import Quantize
from llmopt.passes.quantize import preflight as preflight_module
from llmopt.runtime.decoder_blocks import capture, find_blocks
from llmopt.runtime.kernels import wide_products
from llmopt.runtime.lazy import LazyWeights, leading_blocks
from llmopt.runtime.open import open_model
from llmopt.runtime.tensor_files import Spec, locate, read_stored, write_tensors

GPTQ: dict[str, Any] = {"method": "gptq", "bits": 4, "group_size": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of four blocks in several shards."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("source") / "llama"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path, max_shard_size="100KB")
    byte_tokenizer().save_pretrained(path)
    assert AutoTokenizer.from_pretrained(path)("ab")["input_ids"] and len(list(path.glob("*.safetensors"))) > 3
    return path


def byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, "<eos>": len(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def lazy(folder: Path) -> LoadedModel:
    model = open_source(resolve(folder))
    assert isinstance(model, LoadedModel) and model.weights is not None
    return model


def context(model: LoadedModel, workdir: Path, checkpoint: Path | None = None, events: Any = None) -> Context:
    calibration = Calibration(model.tokenizer, "default", num_samples=6, sequence_length=32)
    made = Context(describe(model.source), calibration, 0, workdir, "quantize", events or (lambda event: None))
    made.checkpoint = Checkpoint(checkpoint) if checkpoint is not None else None
    return made


def state(model: LoadedModel) -> dict[str, torch.Tensor]:
    """All tensors of a model, lazy or not."""
    names = model.module.state_dict()
    return {name: model.weights.read(name) for name in names} if model.weights is not None else dict(names)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def quantized_in_memory(folder: Path, workdir: Path, **options: Any) -> tuple[dict[str, torch.Tensor], list[Any]]:
    model = load_source(resolve(folder))
    report = Quantize(**options).run(model, context(model, workdir))
    return state(model), [{k: v for k, v in line.items() if k != "seconds"} for line in report.layers]


# files of tensors


def test_written_files_are_those_of_the_safetensors_library(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {
        "b": torch.randn(3, 5), "a": torch.randn(4, 2).bfloat16(), "scalar": torch.tensor(1.5),
        "none": torch.empty(0, 3), "codes": torch.arange(6, dtype=torch.uint8).view(2, 3), "é": torch.arange(2),
        "flag": torch.tensor([True]), "small": torch.ones(8).to(torch.float8_e4m3fn),
        "int": torch.ones(2, dtype=torch.int32),
    }  # fmt: skip
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    write_tensors(tmp_path / "ours", {n: Spec.of(t) for n, t in tensors.items()}, lambda name: tensors[name])
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    for name, place in locate([tmp_path / "ours"]).items():
        assert torch.equal(read_stored(place).float(), tensors[name].float()), name


def test_a_write_that_fails_leaves_no_file(tmp_path: Path) -> None:
    def read(name: str) -> torch.Tensor:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="gone"):
        write_tensors(tmp_path / "x", {"a": Spec("F32", (2,))}, read)
    with pytest.raises(RunError, match="was planned"):
        write_tensors(tmp_path / "x", {"a": Spec("F32", (2,))}, lambda name: torch.zeros(3))
    assert not list(tmp_path.iterdir())


# lazy models


def test_modules_are_filled_and_emptied(folder: Path) -> None:
    model, whole = lazy(folder), load_source(resolve(folder))
    assert all(p.is_meta for p in model.module.parameters())
    with model.loaded("model.layers.1"):
        block = model.module.get_submodule("model.layers.1")
        assert same(block.state_dict(), whole.module.get_submodule("model.layers.1").state_dict())
        with model.loaded("model.layers.1.mlp"):
            pass
        assert not any(p.is_meta for p in block.parameters()), "what was filled before stays filled"
        assert sum(not p.is_meta for p in model.module.parameters()) == len(list(block.parameters()))
    assert all(p.is_meta for p in model.module.parameters())
    size = model.weights.nbytes
    model.materialize()
    assert same(state(model), state(whole)) and model.weights is None
    assert size == sum(t.nbytes for t in state(whole).values())


@pytest.mark.parametrize("wide", [True, False])
def test_streamed_logits_are_the_whole_models(folder: Path, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On processors with products of 16-bit floats, and on those without."""
    slow = frozenset({torch.float16, torch.bfloat16}) if wide else frozenset()
    monkeypatch.setattr(wide_products, "slow_dtypes", lambda: slow)
    windows = torch.randint(0, 256, (3, 20), generator=torch.Generator().manual_seed(1))
    whole = window_logits(load_source(resolve(folder)).module, windows)
    for (ids, logits), (expected_ids, expected) in zip(streamed_logits(lazy(folder), windows), whole, strict=True):
        assert torch.equal(ids, expected_ids) and torch.equal(logits, expected)


def test_a_tied_head_is_read_once(tiny_model: Path) -> None:
    model = lazy(tiny_model)
    with model.loaded("model.embed_tokens", "lm_head"):
        assert model.module.lm_head.weight is model.module.model.embed_tokens.weight
    assert model.module.lm_head.weight.is_meta


def test_what_cannot_stay_in_its_files_is_said(folder: Path, tmp_path: Path) -> None:
    """transformers adds the prefix that these names lack."""
    from safetensors.torch import save_file

    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    state = load_source(resolve(folder)).module.state_dict()
    tensors = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    reason = open_source(resolve(tmp_path))
    assert isinstance(reason, str) and "do not hold the model's tensors as they are" in reason
    assert torch.equal(load_source(resolve(tmp_path)).module.model.norm.weight, tensors["norm.weight"])


def test_a_lazy_model_runs_with_its_first_blocks(folder: Path) -> None:
    model = lazy(folder)
    ids = torch.arange(9)[None]
    with leading_blocks(model) as count, torch.no_grad():
        short = model.module(input_ids=ids).logits
        assert sum(not p.is_meta for p in model.module.parameters()) == 3 + 9
    assert count == 1
    whole = load_source(resolve(folder))
    whole.module.model.layers = whole.module.model.layers[:1]
    whole.module.config.num_hidden_layers = 1
    with torch.no_grad():
        assert torch.equal(short, whole.module(input_ids=ids).logits)


# quantizing block by block


@pytest.mark.parametrize(
    "options",
    [
        {"method": "rtn", "group_size": 32, "lm_head": "quantize"},
        GPTQ,
        {**GPTQ, "true_sequential": True, "symmetric": False},
        {**GPTQ, "match_original": 0.5, "lm_head": "quantize"},
        {**GPTQ, "learn_steps": 3, "lm_head": "quantize"},
        {**GPTQ, "ignore": ["*.layers.2.*", "*.layers.3.*"], "overrides": {"*.k_proj": {"method": "rtn"}}},
    ],
    ids=["rtn", "gptq", "sequential", "matched", "learned", "first-blocks"],
)
def test_a_lazy_model_is_quantized_to_the_same_bits(options: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    expected, lines = quantized_in_memory(folder, tmp_path, **options)
    model = lazy(folder)
    report = Quantize(**options).run(model, context(model, tmp_path, tmp_path / "steps"))
    assert same(state(model), expected)
    assert [{k: v for k, v in line.items() if k != "seconds"} for line in report.layers] == lines
    assert all(p.is_meta for p in model.module.parameters())


def test_one_block_at_a_time_is_in_memory(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most: list[int] = []
    original = LazyWeights.load

    def load(self: LazyWeights, *names: str) -> None:
        original(self, *names)
        blocks = find_blocks(self.module)[1]
        most.append(sum(any(not p.is_meta for p in block.parameters()) for block in blocks))

    monkeypatch.setattr(LazyWeights, "load", load)
    model = lazy(folder)
    Quantize(**GPTQ).run(model, context(model, tmp_path, tmp_path / "steps"))
    list(streamed_logits(model, torch.zeros(2, 8, dtype=torch.int64)))
    assert max(most) == 1 and len(most) > 12


class Interrupt:
    """A listener that interrupts the run after some blocks."""

    def __init__(self, after: int) -> None:
        self.after, self.steps = after, []  # type: ignore[var-annotated]

    def __call__(self, event: Event) -> None:
        if event.kind == "progress":
            self.steps.append(event.step)
            if len(self.steps) == self.after:
                raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("streamed", "offload", "more"),
    [
        (True, True, {"match_original": 0.3}),
        (False, False, {"match_original": 0.3}),
        (True, True, {"learn_steps": 3}),
    ],
)
def test_an_interrupted_run_goes_on_where_it_stopped(
    streamed: bool, offload: bool, more: dict[str, Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**GPTQ, **more, "lm_head": "quantize", "batch_tokens": 64}
    expected, lines = quantized_in_memory(folder, tmp_path, **options)
    if offload:
        monkeypatch.setattr(preflight_module, "ENOUGH", 1e9)
    steps: list[int] = []
    for after in (1, 3, 100):
        model = lazy(folder) if streamed else load_source(resolve(folder))
        listener = Interrupt(after)
        try:
            report = Quantize(**options).run(model, context(model, tmp_path, tmp_path / "steps", listener))
        except KeyboardInterrupt:
            assert after < 100
        steps += listener.steps
    assert steps == [1, 1, 2, 3, 3, 4, 5], "a resumed run first tells how many blocks were finished"
    assert same(state(model), expected)
    assert [line["error"] for line in report.layers] == [line["error"] for line in lines]


def test_the_time_left_counts_the_blocks_of_this_run_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that advances by ten seconds whenever it is read: at the start and the end of a block."""
    clock = itertools.count(0, 10)
    monkeypatch.setattr("llmopt.passes.quantize.driver.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    options = {**GPTQ, "ignore": ["*.layers.2.*"], "lm_head": "quantize"}
    events: list[Event] = []
    for listener in (Interrupt(1), events.append):
        model = lazy(folder)
        try:
            Quantize(**options).run(model, context(model, tmp_path, tmp_path / "steps", listener))
        except KeyboardInterrupt:
            continue
    steps = [event for event in events if event.kind == "progress"]
    assert [(event.step, event.data.get("left") is None) for event in steps[:2]] == [(1, True), (2, False)]
    assert steps[1].data["left"] == 20, "block 4 and the head"
    assert steps[3].data["left"] == 10


def test_the_preflight_counts_the_experts_behind_a_dense_block(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
        mlp_only_layers=[0], decoder_sparse_step=1,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "moe")
    byte_tokenizer().save_pretrained(tmp_path / "moe")
    model = load_source(resolve(tmp_path / "moe"))
    report = Quantize(**GPTQ).run(model, context(model, tmp_path))
    assert report.details["preflight"]["hessians"] == 4 * (2 * 64**2 + 4 * (64**2 + 32**2))


def test_progress_under_another_identity_or_with_a_torn_file_is_dropped(tmp_path: Path) -> None:
    made = Checkpoint(tmp_path / "c", {"threads": 1})
    for step in range(2):
        live = made.next_live()
        (live / "state").write_bytes(bytes(10 + step))
        made.commit({"x": torch.full((2,), float(step))}, [step], live)
    again = Checkpoint(tmp_path / "c", {"threads": 1})
    assert again.done == 2 and again.data(1) == [1] and again.live is not None
    assert [path.name for path in again.live.parent.glob("live-*")] == ["live-00001"]
    (again.live / "state").write_bytes(bytes(9))
    assert Checkpoint(tmp_path / "c", {"threads": 1}).done == 0
    made.commit({"x": torch.zeros(2)}, [0])
    assert Checkpoint(tmp_path / "c", {"threads": 2}).done == 0
    assert not list((tmp_path / "c").glob("step-*"))


def test_what_does_not_fit_is_refused_with_figures(folder: Path, tmp_path: Path) -> None:
    model = lazy(folder)
    run = context(model, tmp_path, tmp_path / "steps")
    run.max_memory = 1
    with pytest.raises(RunError, match=r"needs about [\d,]+ MiB \(weights .*hessians.*\) and 0 MiB are available"):
        Quantize(**GPTQ).run(model, run)


def test_damping_that_was_raised_is_noted(folder: Path, tmp_path: Path) -> None:
    model = load_source(resolve(folder))
    run = context(model, tmp_path)
    Quantize(**GPTQ, damping=1e-12).run(model, run)
    (note,) = [note for note in run.notes if note["kind"] == "fallback"]
    assert "did not factorize with damping 1e-12" in note["message"]


def test_equal_arguments_of_batches_are_kept_once(folder: Path) -> None:
    module = load_source(resolve(folder)).module
    module.set_attn_implementation("eager")
    blocks = find_blocks(module)[1]
    with torch.no_grad():
        one, two = capture(module, blocks, [torch.zeros(1, 8, dtype=torch.int64), torch.ones(1, 8, dtype=torch.int64)])
        hidden = two.calls[0].run(blocks[0], two.hidden)
        two.share_arguments(one)
        assert two.calls[3].kwargs["attention_mask"] is one.calls[0].kwargs["attention_mask"]
        assert torch.equal(two.calls[0].run(blocks[0], two.hidden), hidden)


# export


@pytest.mark.parametrize("limit", ["5GB", "60KB"])
def test_shards_are_those_of_save_pretrained(limit: str, folder: Path, tmp_path: Path) -> None:
    options = {"method": "rtn", "group_size": 32, "lm_head": "quantize"}
    model, whole = lazy(folder), load_source(resolve(folder))
    for name, loaded in (("streamed", model), ("whole", whole)):
        (tmp_path / name).mkdir()
        Quantize(**options).run(loaded, context(loaded, tmp_path, tmp_path / f"{name}-steps"))
        HuggingFaceExporter(max_shard_size=limit).export(loaded, tmp_path / name, context(loaded, tmp_path))
    files = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "streamed").iterdir()} == files
    assert (len([name for name in files if name.endswith(".safetensors")]) > 1) == (limit == "60KB")


def test_an_artifact_that_is_too_large_is_proved_in_parts(folder: Path, tmp_path: Path) -> None:
    windows = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(1))
    model, whole = lazy(folder), load_source(resolve(folder))
    write_reference(whole.module, whole.tokenizer, windows, tmp_path / "reference")
    out = tmp_path / "artifact"
    out.mkdir()
    Quantize(group_size=32, lm_head="quantize").run(model, context(model, tmp_path, tmp_path / "steps"))
    HuggingFaceExporter().export(model, out, context(model, tmp_path))
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    assert too_large(out, size) and not too_large(out, 10 * size)
    settings = ProofSettings(prompts=("ab", "The c"), new_tokens=9, max_memory=size)
    found = examine(out, tmp_path / "reference", settings)
    module = open_model(out, "cpu").module
    assert found["perplexity"] == perplexity(module, windows).as_dict()
    assert found["divergence"]["mean_kl"] > 0 and found["speed"] is None
    assert found["memory"]["weight_bytes"] < 0.6 * sum(t.nbytes for t in state(whole).values())
    assert found["certificate"]["backend"] == "streamed"
    for sample in found["certificate"]["samples"]:
        ids = model.tokenizer(sample["prompt"], return_tensors="pt")["input_ids"]
        with wide_products.wide_products():
            expected = module.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None, use_cache=False)
        assert sample["token_ids"] == expected[0, ids.shape[1] :].tolist()
