"""The head of a lazy model, computed in parts as they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.evaluation.logits import window_logits
from llmopt.evaluation.streamed import streamed_logits
from llmopt.optimizer.errors import RunError
from llmopt.optimizer.model import LoadedModel
from llmopt.runtime import tensor_files
from llmopt.runtime.head_parts import head_by_parts

from .test_embedding_rows import IDS, VOCAB, lazy, spoil


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "PART", 2 * 32 * 64)  # 64 rows of the head


def filled(model: LoadedModel) -> list[torch.Tensor]:
    """Logits of IDS by the whole model."""
    model.materialize()
    return [logits for _, logits in window_logits(model.module, IDS)]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "phi"])
def test_logits_are_those_of_the_whole_head(architecture: str, tied: bool, tmp_path: Path) -> None:
    """gemma2 caps its logits; phi's head has a bias."""
    changes: dict[str, Any] = {"tie_word_embeddings": tied} | ({"head_dim": 8} if architecture == "gemma2" else {})
    if architecture == "gemma2":
        changes |= {"final_logit_softcapping": 2.0, "layer_types": ["sliding_attention", "full_attention"]}
    model = lazy(tmp_path, architecture, torch.float32, **changes)
    head = model.module.get_output_embeddings()
    with head_by_parts(model, "lm_head", "model.norm") as others:
        assert others == ["model.norm"] and head.weight.is_meta
        states = torch.randn(2, 3, 32)
        found = head(states)
    assert "forward" not in head.__dict__ and head.weight.is_meta
    mine = [logits for _, logits in streamed_logits(model, IDS)]
    whole = lazy(tmp_path, architecture, torch.float32, **changes)
    for logits, expected in zip(mine, filled(whole), strict=True):
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found, whole.module.get_output_embeddings()(states), atol=1e-5, rtol=1e-5)


def test_no_more_than_a_part_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lazy(tmp_path, "llama")
    largest = []
    linear = torch.nn.functional.linear

    def watched(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        largest.append(len(weight))
        return linear(states, weight, bias)

    with head_by_parts(model, "lm_head"), monkeypatch.context() as patched:
        patched.setattr(torch.nn.functional, "linear", watched)
        model.module.get_output_embeddings()(torch.randn(1, 32).bfloat16())
    assert max(largest) == 64 and sum(largest) == VOCAB


def test_small_heads_and_those_in_memory_are_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lazy(tmp_path, "llama")
    with model.loaded("lm_head"), head_by_parts(model, "lm_head", "model.norm") as others:
        assert others == ["lm_head", "model.norm"]
    with head_by_parts(model, "model.norm") as others:
        assert others == ["model.norm"], "what is not named is left alone"
    monkeypatch.setattr(tensor_files, "PART", 1 << 20)
    with head_by_parts(model, "lm_head") as others:
        assert others == ["lm_head"]


def test_a_head_that_is_not_finite_is_named(tmp_path: Path) -> None:
    model = lazy(tmp_path, "llama")
    spoil(tmp_path, "lm_head.weight", (299, 3), float("inf"))
    with pytest.raises(RunError, match=r"lm_head.weight"):
        list(streamed_logits(model, IDS))
    assert all(parameter.is_meta for parameter in model.module.parameters())
    assert "forward" not in model.module.get_output_embeddings().__dict__
