"""The pass `activation`: what it records and refuses, that `load` applies it, that the proof measures with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import llmopt
import pytest
import torch
import transformers
from llmopt.evaluation.proof import ProofSettings, examine, proof_device
from llmopt.evaluation.reference import write_reference
from llmopt.evaluation.texts import token_windows
from llmopt.optimizer.base import Context
from llmopt.optimizer.calibration import Calibration
from llmopt.optimizer.errors import RunError, UsageError
from llmopt.optimizer.runtime_spec import LinearSpec
from llmopt.optimizer.source_model import load_source
from llmopt.optimizer.sources import describe, resolve
from llmopt.passes import Activation, KVCache, Quantize
from llmopt.runtime.kernels.build import unavailable_reason
from llmopt.runtime.linear_settings import applied
from llmopt.runtime.llm import load
from llmopt.runtime.open import open_model
from llmopt.runtime.recognize_config import unsupported_config

WHY = unavailable_reason()
needs_kernels = pytest.mark.skipif(WHY is not None, reason=str(WHY))
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 20
QUICK = {"windows": 1, "window_length": 64, "speed": False, "new_tokens": 4}


@pytest.fixture(scope="module")
def quantized(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An int4 artifact of the tiny model that asks for int8 activations and an int4 head."""
    out = tmp_path_factory.mktemp("activation") / "fast"
    passes = [Quantize(method="rtn", bits=4, group_size=32, symmetric=True), Activation(lm_head="int4")]
    llmopt.optimize(tiny_model, passes=passes, out=out, evaluate=QUICK)
    return out


def messages(llm: llmopt.LLM, kind: str) -> str:
    return "\n".join(n["message"] for n in llm.notes if n["kind"] == kind and n["message"].startswith("linears: "))


def greedy(llm: llmopt.LLM) -> torch.Tensor:
    """Logits of a short text, through the engine's runner."""
    from llmopt.evaluation.logits import runner_logits

    ((_, logits),) = runner_logits(llm.runner, token_windows(TEXT, llm.tokenizer, 32, 1))
    return logits.clone()


@needs_kernels
def test_load_applies_it_and_explicit_options_win(quantized: Path):
    with load(quantized) as llm:
        assert applied(llm.runner) == LinearSpec(activation="int8", lm_head="int4") == llm.runtime.linear
        formats = llm.runner.decoder.linear_formats
        assert set(formats) == {"int4/int8"}  # head included
        assert "activation int8, as the RuntimeSpec asks" in messages(llm, "note")
        assert messages(llm, "fallback") == ""
        fast = greedy(llm)
    with load(quantized, activation="none", lm_head="stored") as llm:
        assert applied(llm.runner) == LinearSpec()
        assert "activation none, as given to load; the RuntimeSpec asks for int8" in messages(llm, "note")
        assert messages(llm, "fallback") == ""
        plain = greedy(llm)
    with load(quantized, activation="none") as llm:
        assert applied(llm.runner) == LinearSpec(lm_head="int4")
    assert 0 < float((fast - plain).norm() / plain.norm()) < 0.5


@needs_kernels
@pytest.mark.parametrize(
    ("options", "engine"), [({"engine": "static"}, "static"), ({"runner": "eager"}, "EagerRunner")]
)
def test_what_does_not_apply_it_says_so(quantized: Path, options: dict[str, str], engine: str):
    with load(quantized, **options) as llm:
        said = messages(llm, "fallback")
        for part in ("activation int8 of the RuntimeSpec was not applied", "lm_head int4 of", engine):
            assert part in said


@needs_kernels
def test_the_proof_measures_with_it(quantized: Path, tiny_model: Path, tmp_path: Path):
    source = open_model(tiny_model)
    reference = tmp_path / "reference.safetensors"
    write_reference(source.module, source.tokenizer, token_windows(TEXT, source.tokenizer, 64, 2), reference)
    settings = ProofSettings(speed=False, new_tokens=2, prompts=("Hello",))
    assert proof_device(quantized, "auto") == "cpu"
    assert proof_device(tiny_model, "auto") == "auto"
    found = examine(quantized, reference, settings)
    assert found["certificate"]["linear"] == {"activation": "int8", "lm_head": "int4"}
    # The same weights without the settings are measured otherwise.
    copy = Path(shutil.copytree(quantized, tmp_path / "copy"))
    manifest = json.loads((copy / "llmopt.json").read_text())
    manifest["runtime"]["linear"] = {}
    (copy / "llmopt.json").write_text(json.dumps(manifest))
    plain = examine(copy, reference, settings)
    assert plain["certificate"]["linear"]["activation"] == "none"
    assert plain["divergence"]["mean_kl"] != found["divergence"]["mean_kl"]
    with pytest.raises(RunError, match="did not apply activation int8 and lm_head int4"):
        examine(quantized, reference, settings.model_copy(update={"engine": "static"}))


@needs_kernels
def test_float_weights_are_told(tiny_model: Path, tmp_path: Path):
    source = resolve(tiny_model)
    model = load_source(source)
    context = Context(describe(source), Calibration(model.tokenizer, "default", 4, 64), 0, tmp_path)
    report = Activation().run(model, context)
    assert report.details["integer_linears"] == 0 < report.details["float_linears"]
    assert "int8 activations change nothing" in context.notes[0]["message"]
    assert model.runtime.linear == LinearSpec(activation="int8")
    model.runtime.attention.backend = "sdpa"
    with pytest.raises(RunError, match="Set flash_attention's backend to auto"):
        Activation().run(model, context)


def test_an_architecture_that_the_decoder_does_not_know_is_refused(tiny_model: Path, tmp_path: Path, monkeypatch):
    info = describe(resolve(tiny_model))
    plan = Activation(lm_head="int8").plan(info)
    assert plan.refusals == []
    assert plan.runtime == {"linear": {"activation": "int8", "lm_head": "int8"}}
    info.config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=300)
    (refusal,) = Activation().plan(info).refusals
    assert "does not support this model" in refusal
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "cannot be built on this machine" in Activation().plan(info).refusals[0]


def test_options():
    with pytest.raises(UsageError, match="asks for nothing"):
        Activation(dtype="none")
    with pytest.raises(UsageError, match=r"activation\.dtype"):
        Activation(dtype="int4")
    assert KVCache.provides.isdisjoint(Activation.conflicts)


TINY = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)


@pytest.mark.parametrize(
    ("config", "known"),
    [
        (transformers.LlamaConfig(**TINY, num_key_value_heads=1, pad_token_id=63), True),
        (transformers.Qwen3Config(**TINY, num_key_value_heads=1, head_dim=16), True),
        (transformers.Gemma2Config(**TINY, num_key_value_heads=1, head_dim=16), True),
        (transformers.Phi3Config(**TINY, num_key_value_heads=1, pad_token_id=0), True),
        (transformers.GPTNeoXConfig(**TINY), False),
        (transformers.MixtralConfig(**TINY, num_key_value_heads=1, num_local_experts=2), False),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_what_is_known_by_its_config_is_what_is_known_by_its_weights(config, known: bool):
    from llmopt.runtime.kernels.recognize import UnsupportedModel, recognize

    reason = unsupported_config(config)
    try:
        recognize(transformers.AutoModelForCausalLM.from_config(config).eval())
        recognized = True
    except UnsupportedModel:
        recognized = False
    assert (reason is None) == known == recognized, reason
