"""`llmopt.evaluate`: sliding windows against transformers' documented loop, divergence, texts, cache, bad input."""

from __future__ import annotations

import json
import math
from pathlib import Path

import llmopt
import pytest
import torch
from llmopt.evaluation.generation import first_difference, read_prompts
from llmopt.evaluation.quality import QualitySettings
from llmopt.evaluation.scoring import score
from llmopt.evaluation.slices import head_of, module_slices, places, streamed_slices
from llmopt.evaluation.subject import Subject, open_subject, try_streamed
from llmopt.evaluation.windows import sliding_windows, spans
from llmopt.optimizer.errors import RunError, UsageError
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT = "It was the best of times — it was the worst of times; naïve 日本 😀 text, twice. " * 30
FAST = {"windows": 4, "window_length": 64, "stride": 24, "prompts": ("The capital", "Once"), "new_tokens": 6}


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path):
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "my.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def documented(model, ids: torch.Tensor, max_length: int, stride: int, windows: int | None = None) -> float:
    """The loop of transformers' guide "Perplexity of fixed-length models"; `windows` ends it early."""
    nll_sum, n_tokens, prev_end = 0.0, 0, 0
    for number, begin in enumerate(range(0, ids.shape[1], stride)):
        end = min(begin + max_length, ids.shape[1])
        target_length = end - prev_end
        inputs = ids[:, begin:end]
        targets = inputs.clone()
        targets[:, :-target_length] = -100
        with torch.inference_mode():
            loss = model(inputs, labels=targets).loss
        valid = int((targets != -100).sum()) - targets.shape[0]
        if valid:  # a last window of one new token has no weight
            nll_sum, n_tokens = nll_sum + loss.double().item() * valid, n_tokens + valid
        prev_end = end
        if end == ids.shape[1] or number + 1 == windows:
            break
    return math.exp(nll_sum / n_tokens)


@pytest.mark.parametrize(("stride", "windows"), [(24, 4), (64, 3), (24, None), (1, 3)])
@pytest.mark.parametrize("engine", ["native", "static"])
def test_perplexity_is_the_documented_one(tiny_model, tokenizer, text_file, stride, windows, engine):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    settings = {**FAST, "stride": stride, "windows": windows, "engine": engine, "dtype": "float32"}
    found = llmopt.evaluate(tiny_model, text=text_file, cache=False, **settings)
    assert found.perplexity == pytest.approx(documented(model, ids, 64, stride, windows), rel=1e-5)
    assert found.data["model"]["engine"] == engine


def test_windows_and_bytes(tokenizer):
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    whole = sliding_windows(TEXT, tokenizer, length=64, stride=24)
    assert whole.num_tokens == len(ids) and whole.num_scored == len(ids) - 1
    first = len(tokenizer.decode(ids[:1]).encode())
    assert whole.num_bytes == len(TEXT.encode()) - first
    scored = [token for w in whole.windows for token in w.ids[w.first :].tolist()]
    assert scored == ids[1:]
    apart = sliding_windows(TEXT, tokenizer, length=64, stride=64, limit=2)
    assert [(w.first, w.num_scored, w.weight) for w in apart.windows] == [(1, 63, 63)] * 2
    both = sliding_windows(TEXT, tokenizer, length=64, stride=24, limit=2)
    assert [(w.first, w.num_scored, w.weight) for w in both.windows] == [(1, 63, 63), (40, 24, 23)]
    each = sliding_windows(TEXT, tokenizer, length=64, stride=24, limit=2, bos="each")
    assert [(w.ids[0].item(), len(w.ids), w.first) for w in each.windows] == [(0, 64, 1), (0, 64, 40)]
    assert [token for w in each.windows for token in w.ids[w.first :].tolist()] == ids[: 63 + 24]
    assert list(spans(10, 4, 4)) == [(0, 4, 0), (4, 8, 4), (8, 10, 8)]


def test_bits_per_byte_is_the_sum_over_the_bytes(tiny_model, text_file):
    part = llmopt.evaluate(tiny_model, text=text_file, cache=False, **FAST).data["model"]["text"]
    assert part["bits_per_byte"] == pytest.approx(part["total_nll"] / math.log(2) / part["num_bytes"])
    assert part["num_tokens"] == 63 + 3 * 24


@pytest.mark.parametrize("rows", [7, 16, 300])
def test_slices_are_the_whole_logits_in_parts(tiny_model, tokenizer, rows):
    windows = sliding_windows(TEXT, tokenizer, length=64, stride=24, limit=3).windows
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    assert head_of(model) is not None
    with torch.inference_mode():
        whole = [model(w.ids[None]).logits[0] for w in windows]
    expected = [whole[n][start - 1 : end - 1] for n, start, end in places(windows, rows)]
    lazy = try_streamed(tiny_model, "float32")
    for slices in (module_slices(model, windows, rows), streamed_slices(lazy, windows, rows)):
        for one, other in zip(slices, expected, strict=True):
            assert torch.allclose(one, other, atol=1e-5)
    with open_subject(tiny_model, dtype="float32") as subject:
        assert subject.llm.runner is not None
        for one, other in zip(subject.slices(windows, rows), expected, strict=True):
            assert torch.allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("engine", ["native", "static"])
def test_a_model_beside_itself(tiny_model, text_file, engine):
    found = llmopt.evaluate(tiny_model, tiny_model, text=text_file, engine=engine, cache=False, **FAST)
    for key in ("mean_kl", "median_kl", "p99_kl", "max_kl", "perplexity_increase"):
        assert found.divergence[key] == 0.0, key
    assert found.divergence["top1_agreement"] == 1.0
    assert found.generation["num_differing"] == 0
    assert sum(found.divergence["histogram"]["counts"]) == found.divergence["num_tokens"]


def test_an_artifact_beside_its_source(packed_model, tiny_model, text_file):
    found = llmopt.evaluate(packed_model, tiny_model, text=text_file, cache=False, **FAST)
    kl = found.divergence
    assert 0 < kl["median_kl"] <= kl["p99_kl"] <= kl["max_kl"] and kl["mean_kl"] > 0
    mine, theirs = found.data["model"]["text"], found.data["against"]["text"]
    assert kl["perplexity_increase"] == pytest.approx(mine["perplexity"] / theirs["perplexity"] - 1)
    alone = llmopt.evaluate(tiny_model, text=text_file, cache=False, **FAST)
    assert alone.perplexity == theirs["perplexity"]
    for row in found.generation["prompts"]:
        place = row["first_difference"]
        assert place == first_difference(row["model_token_ids"], row["against_token_ids"])
        assert row["model"].startswith(row["same_text"].rstrip("�"))
    with llmopt.load(packed_model) as llm:
        said = [c.text for c in llm.generate(list(FAST["prompts"]), max_new_tokens=6)]
    assert [row["model"] for row in found.generation["prompts"]] == said


def test_a_model_beyond_the_memory_is_streamed(packed_model, tiny_model, text_file):
    whole = llmopt.evaluate(packed_model, tiny_model, text=text_file, engine="static", cache=False, **FAST)
    parts = llmopt.evaluate(packed_model, tiny_model, text=text_file, max_memory=1000, cache=False, **FAST)
    assert (parts.data["model"]["engine"], parts.data["against"]["engine"]) == ("streamed", "streamed")
    assert parts.generation is None
    assert parts.perplexity == pytest.approx(whole.perplexity, rel=1e-4)
    assert parts.divergence["mean_kl"] == pytest.approx(whole.divergence["mean_kl"], rel=0.02)


def test_a_quantized_cache_is_read(tiny_model, text_file):
    plain = llmopt.evaluate(tiny_model, text=text_file, cache=False, **FAST)
    coded = llmopt.evaluate(tiny_model, text=text_file, kv_dtype="int4", cache=False, **FAST)
    assert coded.data["model"]["kv_cache"] == "int4"
    assert coded.perplexity != plain.perplexity
    assert coded.perplexity == pytest.approx(plain.perplexity, rel=0.05)


def test_a_sliding_cache_is_read(tiny_model, tokenizer):
    windows = sliding_windows(TEXT, tokenizer, length=64, stride=64, limit=1).windows
    with open_subject(tiny_model, dtype="float32") as plain:
        expected = torch.cat([part.clone() for part in plain.slices(windows, 16)])
    llm = llmopt.load(tiny_model, dtype="float32", kv_sinks=2, kv_window=20)
    with Subject(tiny_model, llm=llm) as sliding:
        assert sliding.facts()["kv_sliding"] == {"sinks": 2, "window": 20}
        found = torch.cat([part.clone() for part in sliding.slices(windows, 16)])
    assert torch.allclose(found[:20], expected[:20], atol=1e-4)
    assert not torch.allclose(found[30:], expected[30:], atol=1e-4)


def test_results_are_cached_by_model_data_and_settings(tiny_model, packed_model, text_file, tmp_path):
    def run(model=tiny_model, text=text_file, **changes):
        return llmopt.evaluate(model, text=text, cache_folder=tmp_path, **{**FAST, **changes})

    first, again = run(), run()
    assert (first.cached, again.cached) == (False, True)
    assert again.data == {**first.data, "cached": True}
    assert not run(windows=3).cached and not run(model=packed_model).cached
    other = tmp_path / "my.txt"
    other.write_text(TEXT + "More.", encoding="utf-8")
    assert not run(text=other).cached
    assert not run(cache=False).cached
    for file in (tmp_path / "evaluations").iterdir():
        file.write_text("{broken")
    assert not run().cached


def test_a_data_set_is_its_rows(tiny_model, tmp_path):
    rows = [TEXT[:900], TEXT[900:1800], ""]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "rows.txt").write_text("\n\n".join(rows), encoding="utf-8")
    one = llmopt.evaluate(tiny_model, dataset=str(tmp_path / "rows.jsonl"), cache=False, **FAST)
    assert one.perplexity == llmopt.evaluate(tiny_model, text=tmp_path / "rows.txt", cache=False, **FAST).perplexity


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        (None, {}, "no such data set"),
        ('{"a": "x", "b": "y"}\n', {}, "--column"),
        ('{"text": "x"}\n', {"column": "none"}, "no column 'none'"),
        ('{"text": "  "}\n', {}, "text is empty"),
        ('{"messages": [{"role": "user", "content": "x"}]}\n', {}, "does not hold texts"),
        ("not json\n", {}, "not JSON"),
    ],
)
def test_data_sets_that_cannot_be_scored(tiny_model, tmp_path, content, options, words):
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=words):
        llmopt.evaluate(tiny_model, dataset=str(path), cache=False, **options)


def test_first_differences():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_prompt_files(tmp_path):
    (tmp_path / "p.txt").write_text("one\n\n  \ntwo\\nlines\n")
    assert read_prompts(tmp_path / "p.txt") == ["one", "two\nlines"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stride": 65}, "longer than the window"),
        ({"stride": 0}, "does not move"),
        ({"window_length": 1, "stride": 1}, "scores none"),
        ({"window_length": 4096}, "longer than the model's context of 512"),
        ({"engine": "vllm"}, "no engine"),
        ({"windows": 0}, "windows"),
        ({"window": 4}, "window"),
        ({"bos": "every"}, "bos"),
    ],
)
def test_impossible_settings(tiny_model, text_file, changes, words):
    with pytest.raises(UsageError, match=words):
        llmopt.evaluate(tiny_model, text=text_file, cache=False, **{**FAST, **changes})


def test_texts_that_cannot_be_scored(tiny_model, tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "short.txt").write_text("too short")
    for name, words in (("absent.txt", "no such"), ("empty.txt", "empty"), ("short.txt", "one window needs 64")):
        with pytest.raises(UsageError, match=words):
            llmopt.evaluate(tiny_model, text=tmp_path / name, cache=False, **FAST)
    with pytest.raises(UsageError, match="one of the two"):
        llmopt.evaluate(tiny_model, text=tmp_path / "a", dataset="b")


def test_models_that_do_not_compare(tiny_model, make_model, text_file):
    other = make_model()
    data = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    data["model"]["merges"] = data["model"]["merges"][:20]
    (other / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(UsageError, match="tokenizers of the two models differ"):
        llmopt.evaluate(other, tiny_model, text=text_file, cache=False, **FAST)
    wider = make_model(vocab_size=432)
    with pytest.raises(UsageError, match="vocabularies of 432 and 400"):
        llmopt.evaluate(wider, tiny_model, text=text_file, cache=False, **FAST)


def test_broken_weights_are_noticed(tiny_model, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    model.model.norm.weight.data.fill_(float("nan"))
    windows = sliding_windows(TEXT, tokenizer, length=64, limit=1)
    with pytest.raises(RunError, match="not numbers"):
        score(windows, 16, module_slices(model, windows.windows, 16))


def test_settings_are_explained():
    assert all(field.description for field in QualitySettings.model_fields.values())
