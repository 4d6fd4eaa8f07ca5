"""The embedded real model through the shipped recipe: size, loss, and the same text as plain transformers."""

from __future__ import annotations

from pathlib import Path

import llmopt
import pytest

PROMPTS = [
    "The capital of France is",
    "Water boils when",
    "Once upon a time",
    "def fibonacci(n):",
    "The best way to learn a language is",
    "In 1969, humans",
    "My favourite recipe starts with",
    "Photosynthesis is the process",
]


def weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


@pytest.fixture(scope="module")
def artifact(smollm2, tmp_path_factory) -> Path:
    """SmolLM2 on int4-flash's grid, rounded to nearest so that it takes seconds; its gates are GPTQ's business."""
    out = tmp_path_factory.mktemp("real") / "smollm2-int4"
    overrides = ["passes.quantize.method=rtn", "evaluate.windows=2", "evaluate.speed=false"]
    overrides += [f"gates.{name}=null" for name in ("max_perplexity_increase", "max_mean_kl", "min_top1_agreement")]
    llmopt.optimize("smollm2-135m", "int4-flash", out=out, overrides=overrides, cache=False)
    return out


def test_size(artifact, smollm2):
    assert weight_bytes(artifact) <= 0.45 * weight_bytes(smollm2)
    records = sum(
        (artifact / name).stat().st_size for name in ("llmopt.json", "report.html") if (artifact / name).exists()
    )
    assert folder_bytes(artifact) <= 0.45 * folder_bytes(smollm2) + records


def transformers_tokens(folder: Path, dtype: str) -> list[list[int]]:
    """Greedy continuations by transformers alone, one prompt at a time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    out = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        tokens = model.generate(**inputs, max_new_tokens=32, do_sample=False)[0]
        out.append(tokens[inputs["input_ids"].shape[1] :].tolist())
    return out


def sums_as_torch() -> bool:
    """Whether the native kernels know in which order torch sums on this machine."""
    from llmopt.runtime.kernels.attention import matches_torch
    from llmopt.runtime.kernels.linear import torch_chunks

    return matches_torch() and torch_chunks(576) != (0, 0) and torch_chunks(1536) != (0, 0)


@pytest.mark.parametrize(("dtype", "engine"), [("auto", "native"), ("auto", "static"), ("float32", "native")])
def test_same_greedy_text_as_plain_transformers(artifact, dtype, engine):
    """bfloat16 makes ties between tokens common, so that only the same bits give the same text; float32 bears any
    order of its sums."""
    if (dtype, engine) == ("auto", "native") and not sums_as_torch():
        pytest.skip("torch on this machine sums bfloat16 products in an order that the native kernels do not know")
    with llmopt.load(artifact, dtype=dtype, engine=engine) as llm:
        ours = [completion.token_ids for completion in llm.generate(PROMPTS, max_new_tokens=32)]
    assert ours == transformers_tokens(artifact, dtype)


@pytest.mark.slow
def test_loss_of_the_shipped_recipe(wikitext, smollm2, tmp_path):
    """int4-flash as it ships: at most 8% more perplexity on the first 60 windows of WikiText-2's test split."""
    from llmopt.evaluation.logits import runner_logits
    from llmopt.evaluation.perplexity import PerplexityMeter
    from llmopt.evaluation.texts import token_windows

    made = llmopt.optimize("smollm2-135m", "int4-flash", out=tmp_path / "out", cache=False)
    perplexities = []
    for folder in (smollm2, made.path):
        with llmopt.load(folder) as llm:
            meter = PerplexityMeter()
            for ids, logits in runner_logits(llm.runner, token_windows(wikitext, llm.tokenizer, 1024, 60)):
                meter.update(ids, logits)
            perplexities.append(meter.result().perplexity)
    assert perplexities[0] == pytest.approx(25.14, abs=0.02)
    assert perplexities[1] <= 1.08 * perplexities[0]
