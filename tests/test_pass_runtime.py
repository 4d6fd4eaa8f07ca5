"""The passes that write the RuntimeSpec: flash_attention, kv_cache, draft."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from llmopt.optimizer.base import Context
from llmopt.optimizer.calibration import Calibration
from llmopt.optimizer.errors import RunError, UsageError
from llmopt.optimizer.model import LoadedModel
from llmopt.optimizer.source_model import load_source
from llmopt.optimizer.sources import describe, resolve
from llmopt.passes.attention import FlashAttention
from llmopt.passes.draft import Draft
from llmopt.passes.kv_cache import KVCache, bytes_per_token
from llmopt.passes.tokenizer_match import first_mismatch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

needs_no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")


@pytest.fixture
def prepared(tiny_model: Path, tmp_path: Path) -> tuple[LoadedModel, Context]:
    source = resolve(tiny_model)
    model = load_source(source)
    return model, Context(describe(source), Calibration(model.tokenizer, "default", 4, 64), 0, tmp_path)


def test_importing_passes_imports_no_heavy_library():
    code = (
        "import sys, llmopt.passes.attention, llmopt.passes.draft, llmopt.passes.kv_cache, llmopt.runtime.llm, "
        "llmopt.runtime.open; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- flash_attention


@needs_no_cuda
def test_auto_takes_the_first_backend_that_agrees_with_eager(prepared):
    model, context = prepared
    item = FlashAttention(num_tokens=40)
    assert item.plan(context.info).refusals == []
    report = item.run(model, context)
    spec = model.runtime.attention
    assert (spec.backend, spec.chosen) == ("auto", "sdpa")
    assert "flash-attn needs CUDA" in spec.reason
    assert model.module.config._attn_implementation == "sdpa"
    assert report.details["tokens"] == 40
    assert report.details["trials"]["sdpa"]["mean_difference"] < 0.05
    assert "logits" not in json.dumps(report.details)
    (note,) = context.notes
    assert note["kind"] == "fallback"
    assert "flash_attn was passed over" in note["message"]


def test_explicit_eager_is_taken(prepared):
    model, context = prepared
    FlashAttention(backend="eager").run(model, context)
    assert model.runtime.attention.chosen == "eager"
    assert model.module.config._attn_implementation == "eager"
    assert context.notes == []


@needs_no_cuda
def test_explicit_flash_attn_is_refused_in_the_plan_and_in_the_run(prepared):
    model, context = prepared
    item = FlashAttention(backend="flash_attn")
    (refusal,) = item.plan(context.info).refusals
    assert "flash_attn cannot be used" in refusal
    with pytest.raises(RunError, match="no attention backend can be used"):
        item.run(model, context)
    assert model.runtime.attention.chosen is None
    assert model.module.config._attn_implementation == "sdpa"


def test_a_backend_that_disagrees_is_passed_over_or_an_error(prepared, monkeypatch: pytest.MonkeyPatch):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model, context = prepared
    right = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def wrong(module, query, key, value, mask, **kwargs):
        return right(module, query, key, value.flip(-2), mask, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", wrong)
    model.module.float()
    FlashAttention().run(model, context)
    assert model.runtime.attention.chosen == "eager"
    assert "allowed:" in model.runtime.attention.reason
    with pytest.raises(RunError, match=r"no attention backend can be used \(sdpa: .*differs from eager"):
        FlashAttention(backend="sdpa").run(model, context)


def test_an_architecture_without_the_interface_keeps_its_own_attention(tmp_path: Path, tiny_model: Path, prepared):
    import transformers

    config = transformers.MptConfig(vocab_size=400, d_model=32, n_layers=2, n_heads=4)
    transformers.MptForCausalLM(config).save_pretrained(tmp_path / "mpt")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, tmp_path / "mpt")
    source = resolve(tmp_path / "mpt")
    model, context = load_source(source), prepared[1]
    context.info = describe(source)
    assert FlashAttention(backend="sdpa").plan(context.info).refusals
    FlashAttention().run(model, context)
    assert model.runtime.attention.chosen == "eager"


# -- kv_cache


def test_the_cache_is_written_into_the_spec(prepared):
    model, context = prepared
    item = KVCache(kind="paged", block_size=16, prefix_caching=False)
    plan = item.plan(context.info)
    assert plan.refusals == []
    assert plan.runtime["kv_cache"]["block_size"] == 16
    item.run(model, context)
    assert model.runtime.kv_cache.block_size == 16
    assert model.runtime.kv_cache.prefix_caching is False
    # 2 layers, 2 KV heads of 16, keys and values, 2 bytes
    assert bytes_per_token(context.info.config, 2) == 2 * 2 * 2 * 16 * 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "sliding"}, "needs `window`"),
        ({"kind": "paged", "window": 5}, "belong to kind: sliding"),
        ({"kind": "dynamic", "sinks": 4}, "belong to kind: sliding"),
        ({"kind": "dynamic", "block_size": 16}, "belongs to kind: paged"),
        ({"block_size": 0}, "greater than or equal to 1"),
        ({"kind": "quick"}, "kv_cache.kind"),
        ({"blocks": 5}, "kv_cache.blocks"),
    ],
)
def test_impossible_caches_are_config_errors(options, words):
    with pytest.raises(UsageError, match=words):
        KVCache(**options)


@pytest.mark.parametrize("options", [{"kind": "static"}])
def test_caches_that_the_runtime_does_not_have_are_refused(prepared, options):
    model, context = prepared
    item = KVCache(**options)
    (refusal,) = item.plan(context.info).refusals
    assert "this version's runtime" in refusal
    with pytest.raises(RunError, match="this version's runtime"):
        item.run(model, context)
    assert model.runtime.kv_cache.kind == "dynamic"


# -- draft


def test_ngram_drafts(prepared):
    model, context = prepared
    item = Draft(num_tokens=4, max_ngram=2, measure=False)
    assert item.plan(context.info).refusals == []
    item.run(model, context)
    assert model.runtime.draft.model_dump(exclude_none=True) == {"kind": "ngram", "num_tokens": 4, "max_ngram": 2}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "model"}, "needs `model`"),
        ({"kind": "ngram", "model": "x"}, "belong to kind: model"),
        ({"kind": "model", "model": "x", "max_ngram": 2}, "belongs to kind: ngram"),
        ({"num_tokens": 0}, "greater than or equal to 1"),
    ],
)
def test_impossible_drafts_are_config_errors(options, words):
    with pytest.raises(UsageError, match=words):
        Draft(**options)


def test_a_draft_model_of_the_same_tokenizer(prepared, make_model):
    model, context = prepared
    draft = make_model(num_hidden_layers=1)
    item = Draft(kind="model", model=str(draft), measure=False)
    assert item.plan(context.info).refusals == []
    item.run(model, context)
    assert model.runtime.draft.kind == "model"
    assert model.runtime.draft.sha256 == resolve(draft).sha256


def altered(tokenizer, change) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    change(state)
    names = {k: getattr(tokenizer, k) for k in ("bos_token", "eos_token", "pad_token")}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), **names)


def swap(state) -> None:
    """Two tokens change places."""
    vocabulary = state["model"]["vocab"]
    a, b = sorted((i, t) for t, i in vocabulary.items() if i in (300, 301))
    vocabulary[a[1]], vocabulary[b[1]] = b[0], a[0]


def fewer_merges(state) -> None:
    """The same vocabulary, other merges."""
    state["model"]["merges"] = state["model"]["merges"][:5]


def test_tokenizers_are_compared_token_by_token(prepared, tmp_path: Path, make_model):
    model, context = prepared
    own = model.tokenizer
    assert first_mismatch(own, AutoTokenizer.from_pretrained(model.source.folder)) is None
    swapped = altered(own, swap)
    token = repr(own.convert_ids_to_tokens(300))
    assert first_mismatch(own, swapped).startswith(f"token 300 is {token} in the model's tokenizer")
    assert "in the draft's" in first_mismatch(own, swapped)
    assert "token 0 of" in first_mismatch(own, altered(own, fewer_merges))
    other_eos = AutoTokenizer.from_pretrained(model.source.folder)
    other_eos.eos_token = "<bos>"
    assert first_mismatch(own, other_eos).startswith("eos_token is '<eos>'")
    longer = AutoTokenizer.from_pretrained(model.source.folder)
    longer.add_tokens(["<extra>"])
    assert first_mismatch(own, longer) == "token 400 is absent in the model's tokenizer and '<extra>' in the draft's"
    draft = make_model()
    swapped.save_pretrained(draft)
    item = Draft(kind="model", model=str(draft))
    (refusal,) = item.plan(context.info).refusals
    assert "token 300" in refusal
    with pytest.raises(RunError, match=r"draft model's tokenizer is not the model's: token 300"):
        item.run(model, context)
    assert model.runtime.draft.kind == "none"


def test_a_draft_that_is_not_there_is_refused(prepared):
    (refusal,) = Draft(kind="model", model="./absent").plan(prepared[1].info).refusals
    assert "no such model folder" in refusal
