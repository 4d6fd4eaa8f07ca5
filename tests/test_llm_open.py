"""open_model: what opens, what is refused, and with which words."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from llmopt.optimizer.errors import RunError, UsageError
from llmopt.runtime.open import open_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


@pytest.fixture
def copy(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may damage."""
    return Path(shutil.copytree(tiny_model, tmp_path / "copy"))


def as_artifact(folder: Path, runtime: dict | None = None) -> Path:
    files = {
        p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in folder.rglob("*")
        if p.is_file()
    }
    manifest = {"schema_version": 1, "files": files, "runtime": runtime or {}}
    (folder / "llmopt.json").write_text(json.dumps(manifest))
    return folder


def test_plain_folder_is_the_model_that_transformers_opens(tiny_model: Path):
    opened = open_model(tiny_model)
    theirs = AutoModelForCausalLM.from_pretrained(tiny_model)
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        assert torch.equal(opened.module(ids).logits, theirs(ids).logits)
    assert opened.module.dtype == torch.bfloat16
    assert opened.manifest is None
    assert not opened.module.training
    assert opened.generation_config.eos_token_id == 1
    assert any("attention" in note["message"] for note in opened.notes)


def test_dtype_is_the_argument_else_the_spec_else_the_config(copy: Path):
    assert open_model(copy, dtype="float32").module.dtype == torch.float32
    as_artifact(copy, {"dtype": "float16"})
    assert open_model(copy).module.dtype == torch.float16
    assert open_model(copy, dtype="float32").module.dtype == torch.float32


def test_sharded_weights_open(make_model):
    folder = make_model(shards="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert open_model(folder).module.dtype == torch.bfloat16
    next(iter(sorted(folder.glob("*.safetensors")))).unlink()
    with pytest.raises(RunError, match=r"shard model-00001-of-.*missing"):
        open_model(folder)


def test_artifact_is_verified(copy: Path):
    as_artifact(copy, {"kv_cache": {"kind": "paged", "block_size": 16}})
    opened = open_model(copy)
    assert opened.manifest is not None
    assert opened.runtime.kv_cache.block_size == 16
    config = copy / "config.json"
    config.write_text(config.read_text() + " ")
    with pytest.raises(RunError, match=r"config\.json.*changed or damaged"):
        open_model(copy)
    assert open_model(copy, verify=False).module is not None


@pytest.mark.parametrize("name", ["../outside.txt", "/etc/hostname", "a/../../b", "C:\\x", ""])
def test_manifest_paths_stay_inside(copy: Path, name: str):
    as_artifact(copy)
    manifest = json.loads((copy / "llmopt.json").read_text())
    manifest["files"][name] = "0" * 64
    (copy / "llmopt.json").write_text(json.dumps(manifest))
    with pytest.raises(RunError, match="leads out of the folder"):
        open_model(copy)


def test_weight_file_that_the_manifest_does_not_know(copy: Path):
    as_artifact(copy)
    save_file({"x": torch.zeros(1)}, copy / "extra.safetensors")
    with pytest.raises(RunError, match=r"extra\.safetensors.*does not know"):
        open_model(copy)


def test_bad_runtime_spec_names_its_key(copy: Path):
    as_artifact(copy, {"kv_cache": {"kind": "magic"}})
    with pytest.raises(RunError, match=r"llmopt\.json: runtime\.kv_cache\.kind"):
        open_model(copy)


@pytest.mark.parametrize("keep", [0, 5, 100, -40])
def test_truncated_weights_name_the_file(copy: Path, keep: int):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(RunError, match=r"model\.safetensors: the file is not whole"):
        open_model(copy)


def test_missing_unexpected_and_misshapen_tensors(copy: Path):
    file = copy / "model.safetensors"
    tensors = load_file(file)
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(RunError, match=r"lack model\.norm\.weight"):
        open_model(copy)
    save_file({**tensors, "model.norm.weight": norm, "model.extra": norm.clone()}, file, {"format": "pt"})
    with pytest.raises(RunError, match=r"unknown tensors: model\.extra"):
        open_model(copy)
    save_file({**tensors, "model.norm.weight": norm[:10].clone()}, file, {"format": "pt"})
    with pytest.raises(RunError, match=r"model\.norm\.weight has shape \(10,\).*\(64,\)"):
        open_model(copy)


def test_no_tokenizer_is_an_error(copy: Path):
    (copy / "tokenizer.json").unlink()
    with pytest.raises(RunError, match="no tokenizer"):
        open_model(copy)


def test_damaged_json_names_the_file(copy: Path):
    (copy / "tokenizer.json").write_text("{")
    with pytest.raises(RunError, match="tokenizer cannot be opened"):
        open_model(copy)
    (copy / "config.json").write_text("{")
    with pytest.raises(RunError, match=r"config\.json: the file cannot be read as JSON"):
        open_model(copy)


def test_wrong_folders(tmp_path: Path, tiny_model: Path):
    with pytest.raises(UsageError, match="no such folder"):
        open_model(tmp_path / "absent")
    with pytest.raises(UsageError, match="is a file"):
        open_model(tiny_model / "config.json")
    with pytest.raises(UsageError, match=r"no config\.json"):
        open_model(tmp_path)
    shutil.copy(tiny_model / "config.json", tmp_path)
    with pytest.raises(UsageError, match=r"neither model\.safetensors nor"):
        open_model(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"pytorch_model\.bin is not read"):
        open_model(tmp_path)


def test_wrong_arguments(tiny_model: Path):
    with pytest.raises(UsageError, match="dtype 'int3'"):
        open_model(tiny_model, dtype="int3")
    with pytest.raises(UsageError, match="device 'abacus'"):
        open_model(tiny_model, device="abacus")
    with pytest.raises(UsageError, match="attention backend 'quick'"):
        open_model(tiny_model, attention="quick")


def test_remote_code_needs_consent(copy: Path):
    config = json.loads((copy / "config.json").read_text())
    config.update(model_type="never_heard_of", auto_map={"AutoConfig": "configuration_x.Config"})
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"code that its folder carries.*trust_remote_code"):
        open_model(copy)


def test_attention_backend_is_applied_and_noted(copy: Path):
    opened = open_model(copy, attention="eager")
    assert opened.module.config._attn_implementation == "eager"
    as_artifact(copy, {"attention": {"backend": "auto", "chosen": "eager"}})
    assert open_model(copy).module.config._attn_implementation == "eager"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_flash_attn_without_cuda(copy: Path):
    as_artifact(copy, {"attention": {"backend": "auto", "chosen": "flash_attn"}})
    opened = open_model(copy)
    assert opened.module.config._attn_implementation == "sdpa"
    (note,) = [n for n in opened.notes if n["kind"] == "fallback"]
    assert "not flash_attn" in note["message"]
    as_artifact(copy, {"attention": {"backend": "flash_attn", "chosen": "flash_attn"}})
    with pytest.raises(RunError, match="flash_attn"):
        open_model(copy)
