"""Input embeddings of a lazy model looked up in their file; tensors read and written in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.evaluation.logits import window_logits
from llmopt.evaluation.streamed import streamed_logits
from llmopt.exporters.shards import write_shards
from llmopt.optimizer.errors import RunError
from llmopt.optimizer.model import LoadedModel
from llmopt.optimizer.source_model import _why_not_by_block
from llmopt.runtime import tensor_files
from llmopt.runtime.decoder_blocks import capture, find_blocks
from llmopt.runtime.embedding_rows import loaded_around
from llmopt.runtime.lazy import LazyWeights, open_lazy, outside_blocks
from llmopt.runtime.tensor_files import Spec, locate, read_rows, read_stored, write_tensors

VOCAB = 300
IDS = torch.tensor([[5, 1, 0, 299, 5, 7], [3, 3, 96, 2, 0, 1]])
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False, "pad_token_id": 299},
    "qwen2": {"tie_word_embeddings": True, "pad_token_id": 0},
    "gemma3_text": {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16, "num_key_value_heads": 4},
    "bloom": {"n_layer": 2, "n_head": 4, "hidden_size": 32},
}


def lazy(folder: Path, architecture: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> LoadedModel:
    """A tiny random model of the architecture, left in `folder`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3,
    }  # fmt: skip
    config = AutoConfig.for_model(architecture, **{**sizes, **ARCHITECTURES.get(architecture, {}), **changes})
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    opened = open_lazy(folder, config, dtype, architecture)
    assert not isinstance(opened, str), opened
    return LoadedModel(opened[0], None, None, weights=opened[1])  # type: ignore[arg-type]


def spoil(folder: Path, name: str, place: tuple[int, int], value: float) -> None:
    """Give one weight of the folder that value."""
    path = folder / "model.safetensors"
    tensors = {each: read_stored(where) for each, where in locate([path]).items()}
    tensors[name][place] = value
    write_tensors(path, {each: Spec.of(t) for each, t in tensors.items()}, tensors.__getitem__)


def around(model: LoadedModel, head: bool) -> list[str]:
    own = model.module.get_output_embeddings()
    names = outside_blocks(model.module, find_blocks(model.module)[0])
    return [name for name in names if head or model.module.get_submodule(name) is not own]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_states_are_those_of_a_filled_table(architecture: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = lazy(tmp_path, architecture, dtype)
    table = model.module.get_input_embeddings()
    padding = table.padding_idx
    name, blocks = find_blocks(model.module)
    names = [*around(model, head=False), f"{name}.0"]
    with torch.no_grad():
        with model.loaded(*names):
            expected = capture(model.module, blocks, [IDS, IDS[:1]])
        with loaded_around(model, *names):
            found = capture(model.module, blocks, [IDS, IDS[:1]])
            assert len(table.weight) == len(IDS[0].unique()), "no more than the last batch's rows are in memory"
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine.hidden, other.hidden)
    assert all(parameter.is_meta for parameter in model.module.parameters())
    assert table.weight.shape[0] == VOCAB and table.padding_idx == padding
    assert _why_not_by_block(model) is None


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_has_all_rows(tied: bool, tmp_path: Path) -> None:
    model = lazy(tmp_path, "llama", tie_word_embeddings=tied)
    table, head = model.module.get_input_embeddings(), model.module.get_output_embeddings()
    with loaded_around(model, *around(model, head=True)):
        assert len(head.weight) == VOCAB and len(table.weight) == (VOCAB if tied else 1)
    with loaded_around(model, *around(model, head=False)):
        assert len(table.weight) == 1
        with model.loaded("lm_head"):
            assert len(head.weight) == VOCAB, "a head is not made of the few rows that the table has"
    whole = lazy(tmp_path, "llama", tie_word_embeddings=tied)
    whole.materialize()
    ((_, expected),) = window_logits(whole.module, IDS[:1])
    ((_, logits),) = streamed_logits(model, IDS[:1])
    assert torch.equal(logits, expected)


def test_a_model_that_reads_its_table_by_itself_is_found_out(tmp_path: Path) -> None:
    model = lazy(tmp_path, "llama")
    table = model.module.get_input_embeddings()
    table.forward = lambda ids: torch.nn.functional.embedding(ids, table.weight)
    assert _why_not_by_block(model) is None  # the hook sees this call
    base = model.module.model
    inner = base.forward

    def forward(input_ids: torch.Tensor, **options: Any) -> Any:
        return inner(inputs_embeds=torch.nn.functional.embedding(input_ids, table.weight), **options)

    base.forward = forward
    assert "IndexError" in str(_why_not_by_block(model))


def test_an_embedding_that_is_not_finite_is_named_as_ever(tmp_path: Path) -> None:
    model = lazy(tmp_path, "llama")
    spoil(tmp_path, "model.embed_tokens.weight", (200, 3), float("nan"))
    with (
        pytest.raises(RunError, match=r"model.embed_tokens.weight has 1 values that are NaN"),
        loaded_around(model, *around(model, head=False)),
    ):
        pass
    assert all(parameter.is_meta for parameter in model.module.parameters())


def test_rows_and_parts_are_those_of_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"a": torch.randn(7, 3), "b": torch.randn(5, 2, 2).bfloat16(), "c": torch.tensor(2.0), "d": torch.ones(0)}
    path = tmp_path / "x.safetensors"
    write_tensors(path, {name: Spec.of(t) for name, t in tensors.items()}, tensors.__getitem__)
    places = locate([path])
    assert torch.equal(read_rows(places["a"], [6, 0, 6]), tensors["a"][[6, 0, 6]])
    turned = places["a"].part(slice(None), transposed=True)
    assert torch.equal(read_rows(turned, [2, 1]), tensors["a"].t()[[2, 1]]) and list(turned.parts()) == [turned]
    for index in (7, -1):
        with pytest.raises(RunError, match=f"row {index} was asked for of 7"):
            read_rows(places["a"], [0, index])
    for size, count in ((24, 4), (1, 7), (1000, 1)):
        monkeypatch.setattr(tensor_files, "PART", size)
        assert len(list(places["a"].parts())) == count
        for name, place in places.items():
            flat = torch.cat([read_stored(part).reshape(-1) for part in place.parts()])
            assert torch.equal(flat, tensors[name].reshape(-1))
        again = tmp_path / f"{size}.safetensors"
        specs = {name: Spec.of(t) for name, t in tensors.items()}
        write_tensors(again, specs, lambda name: [read_stored(part) for part in places[name].parts()])
        assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("parts", [[(2, 3)], [(2, 3), (3, 3)], [(2, 3), (2, 2)], [(2, 2), (2, 3)], [], [(4,)]])
def test_parts_that_do_not_make_the_tensor_leave_no_file(parts: list[tuple[int, ...]], tmp_path: Path) -> None:
    with pytest.raises(RunError, match="was planned"):
        write_tensors(tmp_path / "x", {"a": Spec("F32", (4, 3))}, lambda name: [torch.zeros(shape) for shape in parts])
    assert not list(tmp_path.iterdir())


def test_a_written_table_is_never_whole_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lazy(tmp_path / "source", "llama", torch.float32)
    weights = model.weights
    assert weights is not None
    whole = {name: weights.read(name) for name in model.module.state_dict()}
    monkeypatch.setattr(tensor_files, "PART", 1 << 10)
    largest = 0
    parts = LazyWeights.parts

    def watched(self: LazyWeights, name: str) -> Any:
        nonlocal largest
        for part in parts(self, name):
            largest = max(largest, part.nbytes)
            yield part

    monkeypatch.setattr(LazyWeights, "parts", watched)
    (tmp_path / "out").mkdir()
    write_shards(model.module, weights, tmp_path / "out", 1 << 30)
    assert 0 < largest <= 2 << 10  # a part of the file in bfloat16, twice that in float32
    for name, place in locate([tmp_path / "out" / "model.safetensors"]).items():
        assert torch.equal(read_stored(place), whole[name]), name
