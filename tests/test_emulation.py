"""Layers that quantize their inputs, asked to compute as compressed-tensors' emulation does in plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llmopt
import pytest
import torch
from llmopt.evaluation.logits import window_logits
from llmopt.optimizer.errors import UsageError
from llmopt.runtime import backends
from llmopt.runtime.kernels.scaled import FLOAT8, ScaledLinear, emulate_quantized

from .library_models import GREEDY, optimize

SCHEMES: dict[str, dict[str, Any]] = {
    "int8": {"method": "rtn", "bits": 8, "group_size": -1, "activations": "int8"},
    "smoothquant": {"method": "smoothquant", "bits": 8, "group_size": -1},
    "fp8": {"method": "fp8"},
    "fp8 in blocks": {"method": "fp8", "group_size": 32},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    from .conftest import build_tokenizer

    folder = tmp_path_factory.mktemp("emulation") / "llama"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, attention_bias=True,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_bits_and_texts_are_those_of_plain_transformers(scheme: str, dtype: str, source: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    optimize(source, tmp_path / "out", **SCHEMES[scheme])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=getattr(torch, dtype)).eval()
    windows = torch.randint(3, 400, (2, 40), generator=torch.Generator().manual_seed(1))
    prompts = [row[:7].tolist() for row in windows]
    options: dict[str, Any] = {"engine": "static", "dtype": dtype, "device": "cpu", "max_batch": 1}
    with llmopt.load(tmp_path / "out", **options, emulate=True) as llm:
        layers = [module for module in llm.module.modules() if isinstance(module, ScaledLinear)]
        assert len(layers) == 21 and any("21 layers compute as" in note["message"] for note in llm.notes)
        mine = [logits.clone() for _, logits in window_logits(llm.module, windows)]
        texts = [one.token_ids for one in llm.generate(prompts, max_new_tokens=8, ignore_eos=True, temperature=0.0)]
    expected = [logits for _, logits in window_logits(theirs, windows)]
    theirs.generation_config.eos_token_id = None
    for found, wanted, prompt, text in zip(mine, expected, prompts, texts, strict=True):
        assert torch.equal(found, wanted)
        greedy = theirs.generate(torch.tensor([prompt]), **GREEDY)
        assert greedy[0, len(prompt) :].tolist() == text
    if scheme in ("int8", "smoothquant") or dtype == "bfloat16":
        with llmopt.load(tmp_path / "out", **options) as llm:
            plain = [logits.clone() for _, logits in window_logits(llm.module, windows)]
        assert not all(map(torch.equal, plain, mine)), "by itself it takes vLLM's arithmetic"


def test_inputs_of_experts_stay_as_they_are(tmp_path: Path) -> None:
    """transformers stacks the experts' weights, and does not quantize what enters them."""
    from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

    from .conftest import build_tokenizer

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=400, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, initializer_range=0.2,
    )  # fmt: skip
    MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "source")
    build_tokenizer().save_pretrained(tmp_path / "source")
    optimize(tmp_path / "source", tmp_path / "out", method="fp8")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", experts_implementation="eager").eval()
    windows = torch.randint(3, 400, (2, 40), generator=torch.Generator().manual_seed(1))
    with llmopt.load(tmp_path / "out", engine="static", device="cpu", emulate=True) as llm:
        assert sum(isinstance(module, ScaledLinear) and module.inputs_kept for module in llm.module.modules()) == 24
        mine = [logits.clone() for _, logits in window_logits(llm.module, windows)]
    for found, (_, wanted) in zip(mine, window_logits(theirs, windows), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.int8, FLOAT8])
def test_rows_of_zeros_stay_zeros(dtype: torch.dtype) -> None:
    x = torch.zeros(2, 3, 64, dtype=torch.bfloat16)
    x[0, 1] = torch.linspace(-3, 3, 64)
    for group_size in (-1, 32):
        found = emulate_quantized(x, dtype, group_size)
        assert found.dtype == x.dtype and not found[1].any() and not found[0, [0, 2]].any()
        assert float((found[0, 1] - x[0, 1]).abs().max()) < (0.02 if dtype == torch.int8 else 0.13)


def test_a_fallback_to_the_static_engine_emulates_too(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`engine="auto"` must not drop what was asked for; the native engine, which has no such arithmetic, refuses it."""
    optimize(source, tmp_path / "out", method="fp8")
    with pytest.raises(UsageError, match="emulate"):
        llmopt.load(tmp_path / "out", engine="native", device="cpu", emulate=True)
    monkeypatch.setattr(backends, "why_not_native", lambda opened: "of this test")
    with llmopt.load(tmp_path / "out", device="cpu", emulate=True) as llm:
        assert llm.backend == "static"
        assert all(module.emulates for module in llm.module.modules() if isinstance(module, ScaledLinear))


def test_a_model_without_such_layers_says_so(source: Path) -> None:
    with pytest.raises(UsageError, match="no layers with int8 or e4m3 inputs"):
        llmopt.load(source, engine="static", emulate=True)
    with pytest.raises(UsageError, match=r"no option 'emulated'.*max_batch and emulate"):
        llmopt.load(source, engine="static", emulated=True)
