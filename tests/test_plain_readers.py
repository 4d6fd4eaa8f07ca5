"""Whether plain transformers opens what is exported, told before the run; and what it must not be asked to open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from llmopt.exporters.huggingface import HuggingFaceExporter
from llmopt.optimizer.base import Context
from llmopt.optimizer.calibration import Calibration
from llmopt.optimizer.errors import UsageError
from llmopt.optimizer.source_model import load_source
from llmopt.optimizer.sources import describe, resolve
from llmopt.passes.quantize import Quantize
from llmopt.runtime.open import open_model
from llmopt.runtime.packed_load import build_empty
from llmopt.runtime.plain_readers import asks_for_weight

from .conftest import build_tokenizer

SMALL: dict[str, Any] = {"vocab_size": 400, "num_hidden_layers": 2, "hidden_size": 64, "bos_token_id": 0,
                         "eos_token_id": 1, "pad_token_id": 1}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "falcon": {"num_attention_heads": 4},
    "mamba": {"time_step_rank": 32},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "rwkv": {},
    "gpt_bigcode": {"n_head": 4},
    "recurrent_gemma": {"num_hidden_layers": 3, "num_attention_heads": 4, "lru_width": 64, "intermediate_size": 128},
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128},
    "phi": {"num_attention_heads": 4, "intermediate_size": 128},
    "gptj": {"n_head": 4, "rotary_dim": 8, "n_positions": 256},
    "codegen": {"n_head": 4, "rotary_dim": 8, "n_positions": 256},
}
OPENED = ("llama", "phi", "gptj", "codegen")
NOTE = "plain transformers does not open packed layers"


def save(folder: Path, kind: str, **changes: Any) -> Path:
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **FAMILIES.get(kind, {}), **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def export(source: Path, out: Path, **options: Any) -> list[str]:
    """Quantize and export; returns the plan's notes."""
    identity = resolve(source)
    info, model = describe(identity), load_source(identity)
    context = Context(info, Calibration(model.tokenizer, "default", 4, 64), 0, out)
    stage = Quantize(method="rtn", **options)
    item = stage.plan(info)
    assert not item.refusals
    stage.run(model, context)
    assert {note["message"] for note in context.notes} >= set(item.notes), "the manifest says what the plan says"
    out.mkdir()
    HuggingFaceExporter().export(model, out, context)
    return item.notes


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_plan_says_whether_transformers_opens_packed_layers(kind: str, tmp_path: Path) -> None:
    notes = export(save(tmp_path / "source", kind), tmp_path / "out", bits=4, group_size=32)
    told = [note for note in notes if note.startswith(NOTE)]
    ours: Any = open_model(tmp_path / "out", "cpu").module
    try:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    except AttributeError as error:
        assert "'weight'" in str(error)
        assert told and kind not in OPENED
        return
    assert not told and kind in OPENED
    ids = torch.randint(3, 400, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        # gptj and codegen: a table of sines that was made in bfloat16 would be far off at the end of the sequence
        assert torch.equal(ours(ids).logits, theirs(ids).logits)


@pytest.mark.parametrize("kind", FAMILIES)
def test_buffers_that_no_file_holds_are_transformers_own(kind: str, tmp_path: Path) -> None:
    source = save(tmp_path / "source", kind)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source)
    empty = build_empty(theirs.config, torch.bfloat16)
    stored = theirs.state_dict()
    expected = {name: buffer for name, buffer in theirs.named_buffers() if name not in stored}
    made = {name: buffer for name, buffer in empty.named_buffers() if name not in stored}
    assert expected.keys() == made.keys()
    assert all(made[n].dtype == b.dtype and torch.equal(made[n], b) for n, b in expected.items())
    assert all(parameter.is_meta for parameter in empty.parameters())


def test_layers_that_keep_a_weight_open_everywhere(tmp_path: Path) -> None:
    notes = export(save(tmp_path / "source", "falcon"), tmp_path / "out", activations="int8")
    assert not any(note.startswith(NOTE) for note in notes)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits
        ours = open_model(tmp_path / "out", "cpu").module(ids).logits
    assert torch.allclose(theirs, ours, atol=0.02) and float(ours.abs().max()) > 0.1


def test_the_skeleton_is_whole_again_and_random_numbers_go_on(tmp_path: Path) -> None:
    info = describe(resolve(save(tmp_path / "source", "mamba")))
    before = [(name, id(tensor)) for name, tensor in info.skeleton.named_parameters()]
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    assert asks_for_weight(info.skeleton, list(info.linear_shapes)) == "MambaMixer"
    assert torch.equal(torch.rand(1), expected)
    assert [(name, id(tensor)) for name, tensor in info.skeleton.named_parameters()] == before
    assert asks_for_weight(info.skeleton, ["no.such.layer"]) is None


@pytest.mark.parametrize("is_decoder", [False, True])
def test_an_encoder_is_no_causal_model(is_decoder: bool, tmp_path: Path) -> None:
    source = save(tmp_path / "bert", "bert", num_attention_heads=4, intermediate_size=64, is_decoder=is_decoder)
    if is_decoder:
        describe(resolve(source))
        return
    with pytest.raises(UsageError, match="bert model predicts masked tokens") as caught:
        describe(resolve(source))
    assert caught.value.where.endswith("config.json")


def test_a_sequence_to_sequence_model_is_refused_in_one_line(tmp_path: Path) -> None:
    config = transformers.T5Config(vocab_size=400, d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    build_tokenizer().save_pretrained(tmp_path / "t5")
    with pytest.raises(UsageError, match="no causal language model") as caught:
        describe(resolve(tmp_path / "t5"))
    assert len(str(caught.value)) < 600 and "\n" not in caught.value.what
