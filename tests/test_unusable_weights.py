"""Weight files whose values cannot be used: each is named, with what to do."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from llmopt.evaluation.streamed import streamed_logits
from llmopt.optimizer.errors import RunError, WeightError
from llmopt.optimizer.model import LoadedModel
from llmopt.optimizer.source_model import load_source, open_source
from llmopt.optimizer.sources import resolve
from llmopt.runtime.tensor_files import locate, not_finite

from .test_streaming import folder, lazy

__all__ = ["folder"]


def test_weights_that_are_not_finite_are_named_as_they_are_read(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    name = "model.layers.2.mlp.up_proj.weight"
    file = locate(sorted(damaged.glob("*.safetensors")))[name].file
    tensors = load_file(file)
    tensors[name][3, 5] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(RunError, match=r"model\.layers\.2\.mlp\.up_proj\.weight has 1 values that are NaN"):
        list(streamed_logits(lazy(damaged), torch.zeros(1, 8, dtype=torch.int64)))


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "model.embed_tokens.weight"])
def test_weights_beyond_the_dtype_are_named_with_the_dtypes_that_hold_them(
    folder: Path, tmp_path: Path, name: str
) -> None:
    from safetensors.torch import load_file, save_file

    wide = tmp_path / "wide"
    shutil.copytree(folder, wide)
    file = locate(sorted(wide.glob("*.safetensors")))[name].file
    tensors = load_file(file)
    tensors[name] = tensors[name].float()
    tensors[name][3, 5] = -1e6
    save_file(tensors, file, metadata={"format": "pt"})
    message = re.escape(f"{name} has 1 values beyond float16's 65,504, up to 1,000,000. Give the recipe `dtype: bf")
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with pytest.raises(WeightError, match=message):
        model = open_source(resolve(wide), "float16")
        assert isinstance(model, LoadedModel)
        list(streamed_logits(model, tokens))
    with pytest.raises(WeightError, match=f"{name} has 1 values that are NaN or infinite.*float16's 65,504"):
        load_source(resolve(wide), "float16")
    opened = open_source(resolve(wide), "bfloat16")
    assert isinstance(opened, LoadedModel)
    assert all(bool(torch.isfinite(logits).all()) for _, logits in streamed_logits(opened, tokens))


def test_a_damaged_float8_tensor_is_named_too() -> None:
    tensor = torch.tensor([1.0, float("nan"), 2.0]).to(torch.float8_e4m3fn)
    expected = "m: layer.weight has 1 values that are NaN or infinite. Restore the weights"
    assert str(not_finite("layer.weight", tensor, "m")) == expected
