"""Measures of quality: against direct formulas in float64, and against transformers' own loss."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from llmopt.evaluation.divergence import DivergenceMeter, kl_rows
from llmopt.evaluation.logits import window_logits
from llmopt.evaluation.memory import peak_rss, weight_bytes
from llmopt.evaluation.perplexity import PerplexityMeter, perplexity, token_logprobs
from llmopt.evaluation.reference import Reference, write_reference
from llmopt.evaluation.speed import measure_speed
from llmopt.evaluation.texts import check_vocabulary, read_text, token_windows
from llmopt.optimizer.errors import RunError, UsageError
from llmopt.runtime.kernels.wide_products import wide_products
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 20


@pytest.fixture(scope="module")
def model(tiny_model: Path):
    return AutoModelForCausalLM.from_pretrained(tiny_model).eval()


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path):
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def windows(tokenizer) -> torch.Tensor:
    return token_windows(TEXT, tokenizer, 64, 3)


def test_windows_are_the_text_without_overlap(tokenizer):
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    windows = token_windows(TEXT, tokenizer, 50)
    assert windows.dtype == torch.int64
    assert windows.shape == (len(ids) // 50, 50)
    assert windows.flatten().tolist() == ids[: windows.numel()]
    assert token_windows(TEXT, tokenizer, 50, 2).tolist() == windows[:2].tolist()
    with_bos = token_windows(TEXT, tokenizer, 50, 2, add_bos=True)
    assert with_bos[:, 0].tolist() == [tokenizer.bos_token_id] * 2
    assert with_bos[:, 1:].flatten().tolist() == ids[:98]


@pytest.mark.parametrize(
    ("text", "length", "limit", "words"),
    [
        ("", 8, None, "empty"),
        (" \n", 8, None, "empty"),
        ("short", 64, None, "one window needs 64"),
        (TEXT, 1, None, "2 or more"),
        (TEXT, 8, 0, "1 or more"),
    ],
)
def test_texts_that_measure_nothing(tokenizer, text, length, limit, words):
    with pytest.raises(UsageError, match=words):
        token_windows(text, tokenizer, length, limit, where="my.txt")


def test_text_files(tmp_path: Path):
    (tmp_path / "a.txt").write_text("héllo", encoding="utf-8")
    assert read_text(tmp_path / "a.txt") == "héllo"
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "c.txt").write_text("")
    for name, words in (("b.txt", "cannot be read"), ("c.txt", "empty"), ("d.txt", "no such")):
        with pytest.raises(UsageError, match=words):
            read_text(tmp_path / name)


def test_another_vocabulary_is_noticed(windows, model):
    check_vocabulary(windows, 400)
    with pytest.raises(RunError, match="does not belong to this model"):
        check_vocabulary(windows, int(windows.max()))


def test_token_logprobs_equal_float64():
    logits = torch.randn(100, 50, generator=torch.Generator().manual_seed(0)) * 5
    targets = torch.arange(100) % 50
    truth = logits.double().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert torch.allclose(token_logprobs(logits, targets).double(), truth, atol=1e-5)


def test_perplexity_is_exp_of_transformers_loss(model, windows):
    model = model.float()
    with torch.inference_mode():
        losses = [model(input_ids=row[None], labels=row[None]).loss.item() for row in windows]
    found = perplexity(model, windows)
    assert found.mean_nll == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)
    assert (found.num_tokens, found.num_windows) == (3 * 63, 3)


def test_perplexity_of_nothing_and_of_broken_weights(model, windows):
    with pytest.raises(RunError, match="no token was scored"):
        PerplexityMeter().result()
    broken = AutoModelForCausalLM.from_config(model.config)
    broken.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(RunError, match="logits are not numbers"):
        perplexity(broken, windows)


def test_kl_equals_float64_and_is_zero_for_equals():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(90, 300, generator=generator) * 3 for _ in range(2))
    kl, agree = kl_rows(a, b)
    p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
    assert torch.allclose(kl.double(), (p.exp() * (p - q)).sum(-1), rtol=1e-4)
    assert agree.tolist() == (a.argmax(-1) == b.argmax(-1)).tolist()
    for dtype in (torch.float32, torch.bfloat16):
        same, agreed = kl_rows(a.to(dtype), a.to(dtype))
        assert torch.equal(same, torch.zeros(90))
        assert bool(agreed.all())


def test_tokens_that_the_reference_masks_add_nothing():
    a = torch.tensor([[1.0, 2.0, -torch.inf]])
    b = torch.tensor([[1.0, 2.0, -torch.inf]])
    assert kl_rows(a, b)[0].item() == 0.0
    c = torch.tensor([[1.0, 2.0, 0.0]])
    truth = -math.log((math.e + math.e**2) / (1 + math.e + math.e**2))
    assert kl_rows(a, c)[0].item() == pytest.approx(truth, rel=1e-5)


def test_divergence_statistics():
    meter = DivergenceMeter()
    meter.kls.append(torch.arange(1, 1001, dtype=torch.float32))
    meter.agrees.append(torch.tensor([True] * 750 + [False] * 250))
    found = meter.result()
    assert found.mean_kl == pytest.approx(500.5)
    assert found.p99_kl == 990
    assert found.max_kl == 1000
    assert found.top1_agreement == 0.75
    assert found.num_tokens == 1000


def test_divergence_that_means_nothing():
    with pytest.raises(RunError, match="no position"):
        DivergenceMeter().result()
    meter = DivergenceMeter()
    with pytest.raises(RunError, match="same vocabulary"):
        meter.update(torch.zeros(3, 10), torch.zeros(3, 11))
    meter.update(torch.zeros(3, 10), torch.full((3, 10), torch.nan))
    with pytest.raises(RunError, match="at 3 of 3 positions"):
        meter.result()


def test_reference_keeps_the_logits_exactly(model, tokenizer, windows, tmp_path: Path):
    model = model.bfloat16()
    path = tmp_path / "reference.safetensors"
    written = write_reference(model, tokenizer, windows, path, {"note": "x"})
    assert written == perplexity(model, windows)
    reference = Reference(path)
    assert len(reference) == 3
    assert torch.equal(reference.windows, windows)
    assert reference.metadata["note"] == "x"
    for kept, (_, logits) in zip(reference.logits(), window_logits(model, windows), strict=True):
        assert kept.dtype == torch.bfloat16
        assert torch.equal(kept, logits)
    with safe_open(path, framework="pt") as file:  # the format is plain safetensors
        assert sorted(file.keys()) == ["input_ids", "logits"]
    reference.check_tokenizer(tokenizer)


def test_reference_knows_another_tokenizer(model, tokenizer, windows, tmp_path: Path):
    path = tmp_path / "reference.safetensors"
    write_reference(model, tokenizer, windows, path)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["model"]["merges"] = state["model"]["merges"][:10]
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)))
    with pytest.raises(RunError, match=r"not the source model's: token \d+"):
        Reference(path).check_tokenizer(other)


def test_reference_that_was_cut(model, tokenizer, windows, tmp_path: Path):
    path = tmp_path / "reference.safetensors"
    write_reference(model, tokenizer, windows, path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(RunError, match="not whole"):
        Reference(path)


def test_a_failed_reference_leaves_no_file(model, tokenizer, tmp_path: Path):
    path = tmp_path / "reference.safetensors"
    with pytest.raises(RunError, match="outside the model's vocabulary"):
        write_reference(model, tokenizer, torch.full((1, 8), 400), path)
    assert not path.exists()
    with pytest.raises(RunError, match="cannot write"):
        write_reference(model, tokenizer, torch.zeros(1, 8, dtype=torch.int64), tmp_path / "no" / "folder")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_one_clear_error(model, tokenizer, windows, monkeypatch, tmp_path: Path):
    full = Path("/dev/full")
    monkeypatch.setattr(Path, "unlink", lambda self, missing_ok=False: None)
    with pytest.raises(RunError, match="no space left on the disk"):
        write_reference(model, tokenizer, windows, full)


def test_weight_bytes_count_every_storage_once():
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(10, 10, bias=False)
            self.b = torch.nn.Linear(10, 10, bias=False)
            self.b.weight = self.a.weight
            self.register_buffer("view", self.a.weight.data[:5])
            self.register_buffer("scale", torch.zeros(7, dtype=torch.int8))
            self.packed = (torch.zeros(3), "x")

    assert weight_bytes(Odd()) == 400 + 7 + 12
    assert peak_rss() > 10**7


def test_speed_is_measured_through_any_backend(tiny_model: Path):
    from llmopt.runtime.llm import load

    for engine in ("static", "native"):
        with load(tiny_model, engine=engine) as llm:
            found = measure_speed(llm, new_tokens=4, rounds=2, prefill_tokens=10_000)
            assert len(found.decode_rounds) == 2
            assert found.decode > 0
            assert found.prefill > 0
            assert found.prefill_tokens == 511
            with pytest.raises(UsageError, match="do not fit the context"):
                measure_speed(llm, new_tokens=600)


def test_real_model_has_the_perplexity_that_transformers_computes(smollm2: Path, wikitext: str):
    """Against the loss that transformers itself computes, with the same products of bfloat16 values."""
    model = AutoModelForCausalLM.from_pretrained(smollm2).eval()
    windows = token_windows(wikitext, AutoTokenizer.from_pretrained(smollm2), 256, 2)
    with torch.inference_mode(), wide_products():
        losses = [model(input_ids=row[None], labels=row[None]).loss.item() for row in windows]
    assert perplexity(model, windows).perplexity == pytest.approx(math.exp(sum(losses) / 2), rel=1e-4)
