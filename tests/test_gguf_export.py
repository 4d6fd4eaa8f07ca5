"""The exporter gguf: every family's tensors and metadata as transformers reads them back, its proof, its refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llmopt.exporters.gguf import GGUFExporter
from llmopt.exporters.gguf.check import check_metadata, check_tensors, read_model
from llmopt.exporters.gguf.families import find_family
from llmopt.exporters.gguf.gate import write_reference
from llmopt.exporters.gguf.options import GGUFOptions
from llmopt.exporters.gguf.pretokenizers import LLAMA3, QWEN2, recognize
from llmopt.exporters.gguf.tensors import plan_entries
from llmopt.exporters.gguf.tokens import scores
from llmopt.exporters.gguf.writer import write_file
from llmopt.optimizer.errors import RunError, UsageError
from llmopt.passes.quantize import Quantize

from .gguf_models import FAMILIES, VOCAB, open_family, save_family


def write(model: Any, context: Any, folder: Path, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """Write the folder as the exporter does, without its proof; returns the entries, and their rules."""
    from llmopt.exporters.companions import write_companions

    folder.mkdir()
    settings = GGUFOptions(**options)
    family = find_family(model.module.config)
    entries = plan_entries(model.module, family, settings)
    write_file(folder / "model.gguf", model, family, entries, settings, context)
    write_companions(model, folder)
    write_reference(entries, context.workdir / "reference.safetensors")
    return entries, {e.source: {"kind": e.kind, "rule": e.rule, "bound": e.bound} for e in entries}


def fields(path: Path) -> dict[str, Any]:
    from gguf import GGUFReader

    return {key: field.contents() for key, field in GGUFReader(path).fields.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_reads_back_equal(name: str, tmp_path: Path) -> None:
    model, context = open_family(save_family(name, tmp_path / "model"), tmp_path / "work")
    entries, rules = write(model, context, tmp_path / "out")
    assert check_metadata(tmp_path / "out" / "model.gguf") > 25
    figures = check_tensors(read_model(tmp_path / "out"), tmp_path / "work" / "reference.safetensors", rules)
    assert figures["tensors_rounded"] == 0
    assert figures["tensor_max_difference"] < 1e-6  # gemma's norms are stored with one added
    assert figures["tensors_exact"] + figures["tensors_bounded"] == len(entries)

    meta, config = fields(tmp_path / "out" / "model.gguf"), model.module.config
    arch = meta["general.architecture"]
    assert arch == {"mistral": "llama"}.get(name, name)
    assert meta[f"{arch}.block_count"] == config.num_hidden_layers
    assert meta[f"{arch}.attention.head_count_kv"] == 2 and meta[f"{arch}.attention.key_length"] == 16
    assert len(meta["tokenizer.ggml.tokens"]) == VOCAB
    assert meta["tokenizer.ggml.model"] == ("gpt2" if FAMILIES[name][1] == "bpe" else "llama")
    by_regex = "qwen2" if name == "qwen2" else "gpt-2"  # transformers gives qwen2 its own expressions
    assert meta["tokenizer.ggml.pre"] == (by_regex if FAMILIES[name][1] == "bpe" else "default")
    assert meta["tokenizer.ggml.add_bos_token"] == (FAMILIES[name][1] != "bpe")
    assert ("tokenizer.chat_template" in meta) == (FAMILIES[name][1] == "bpe")
    assert meta.get("tokenizer.ggml.add_space_prefix") == {"spm": True, "gemma": False}.get(FAMILIES[name][1])
    if name == "gemma3":
        assert meta["gemma3.attention.sliding_window"] == 32 and meta["gemma3.rope.freq_base_swa"] == 10000.0
    if name == "gemma2":
        assert meta["gemma2.attn_logit_softcapping"] == 50.0 and meta["gemma2.final_logit_softcapping"] == 30.0


def test_scaled_positions_become_divisors_of_frequencies(tmp_path: Path) -> None:
    from gguf import GGUFReader
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    model, context = open_family(save_family("llama", tmp_path / "model"), tmp_path / "work")
    write(model, context, tmp_path / "out")
    tensors = {t.name: t.data for t in GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    plain = 10000.0 ** -(np.arange(0, 16, 2) / 16)
    wanted = ROPE_INIT_FUNCTIONS["llama3"](model.module.config, "cpu")[0].numpy()
    np.testing.assert_allclose(plain / tensors["rope_freqs.weight"], wanted, rtol=1e-6)
    assert tensors["rope_freqs.weight"].max() == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({"bits": 4, "group_size": 32}, {"Q4_0"}),
        ({"bits": 4, "group_size": 64, "symmetric": False, "ignore": ["re:.*down_proj"]}, {"Q4_1"}),
        ({"bits": 8, "group_size": -1}, {"Q8_0"}),
        ({"bits": 5, "group_size": 32}, {"Q5_0"}),
    ],
)
def test_quantized_layers_keep_their_values(options: dict[str, Any], kinds: set[str], tmp_path: Path) -> None:
    model, context = open_family(save_family("llama", tmp_path / "model"), tmp_path / "work")
    Quantize(method="rtn", **options).run(model, context)
    entries, rules = write(model, context, tmp_path / "out")
    kept = [entry for entry in entries if entry.quantized]
    assert {entry.kind for entry in kept} == kinds and len(kept) >= 12
    assert not any(entry.requantized or entry.scale_error for entry in kept if entry.kind != "Q4_1")
    check_tensors(read_model(tmp_path / "out"), tmp_path / "work" / "reference.safetensors", rules)


def test_layers_without_a_type_are_refused_or_listed(tmp_path: Path) -> None:
    model, context = open_family(save_family("qwen3", tmp_path / "model"), tmp_path / "work")
    Quantize(method="rtn", bits=4, group_size=16).run(model, context)
    with pytest.raises(UsageError, match=r"14 quantized layers .* group size 16 .* requantize=true"):
        plan_entries(model.module, find_family(model.module.config), GGUFOptions())
    entries, rules = write(model, context, tmp_path / "out", requantize=True)
    assert sum(bool(entry.requantized) for entry in entries) == 14
    figures = check_tensors(read_model(tmp_path / "out"), tmp_path / "work" / "reference.safetensors", rules)
    assert figures["tensors_rounded"] == 14


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_other_types_round_within_their_grid(kind: str, tmp_path: Path) -> None:
    model, context = open_family(save_family("qwen2", tmp_path / "model", "float32"), tmp_path / "work")
    entries, rules = write(model, context, tmp_path / "out", type=kind)
    assert {entry.kind for entry in entries if len(entry.shape) == 2} == {kind}
    check_tensors(read_model(tmp_path / "out"), tmp_path / "work" / "reference.safetensors", rules)


def test_the_proof_finds_a_fault_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmopt.exporters.gguf import gate, tensors

    model, context = open_family(save_family("llama", tmp_path / "model"), tmp_path / "work")
    monkeypatch.setattr(gate, "find_server", lambda named: None)
    monkeypatch.setattr(tensors, "row_order", lambda family, config, name: None)  # q and k in transformers' order
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(RunError, match=r"not the model: .*[qk]_proj.weight.*are up to"):
        GGUFExporter().export(model, out, context)
    assert not list(out.iterdir())


def test_an_export_without_llama_cpp_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmopt.exporters.gguf import gate

    model, context = open_family(save_family("qwen3", tmp_path / "model"), tmp_path / "work")
    monkeypatch.setattr(gate, "find_server", lambda named: None)
    out = tmp_path / "out"
    out.mkdir()
    details = GGUFExporter().export(model, out, context)
    assert details["parity"]["llama_cpp"].startswith("not done")
    assert any(note["kind"] == "fallback" and "llama-server" in note["message"] for note in context.notes)
    assert details["tokenizer"] == {"model": "gpt2", "pre": "gpt-2", "tokens": VOCAB}
    assert {"model.gguf", "config.json", "tokenizer.json"} <= {path.name for path in out.iterdir()}


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    from gguf import GGUFReader

    model, context = open_family(save_family("llama", tmp_path / "model"), tmp_path / "work")
    Quantize(method="rtn", bits=4, group_size=32).run(model, context)
    _, rules = write(model, context, tmp_path / "out")
    file = tmp_path / "out" / "model.gguf"
    tensor = next(t for t in GGUFReader(file).tensors if t.name == "blk.1.ffn_up.weight")
    data = bytearray(file.read_bytes())
    data[int(tensor.data_offset) + 5] ^= 0x10  # one code of the first block, by one step
    file.write_bytes(data)
    with pytest.raises(RunError, match=r"layers\.1\.mlp\.up_proj\.weight: its values in the file, as Q4_0"):
        check_tensors(read_model(tmp_path / "out"), tmp_path / "work" / "reference.safetensors", rules)


def test_refusals(tmp_path: Path) -> None:
    from types import SimpleNamespace

    with pytest.raises(UsageError, match="'gpt2' are not written as GGUF"):
        find_family(SimpleNamespace(model_type="gpt2"))
    model, context = open_family(save_family("gemma2", tmp_path / "model", query_pre_attn_scalar=20), tmp_path / "work")
    with pytest.raises(UsageError, match="query_pre_attn_scalar 20"):
        write(model, context, tmp_path / "out")
    assert "llmopt export" in GGUFExporter().refusals(context.info, [], "auto")[0]


def test_pre_tokenizers_are_told_apart() -> None:
    def split(expression: str, ignore_merges: bool) -> dict[str, Any]:
        parts = [{"type": "Split", "pattern": {"Regex": expression}}, {"type": "ByteLevel", "use_regex": False}]
        return {
            "model": {"ignore_merges": ignore_merges},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts},
        }

    assert recognize(split(LLAMA3, True)) == "llama-bpe" and recognize(split(LLAMA3, False)) == "dbrx"
    assert recognize(split(QWEN2, False)) == "qwen2"
    digits = [{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel", "use_regex": True}]
    state = {"model": {}, "pre_tokenizer": {"type": "Sequence", "pretokenizers": digits}}
    assert recognize(state) == "smollm"
    with pytest.raises(UsageError, match=r"splits by \\w\+ is not known.*pre_tokenizer=NAME"):
        recognize(split(r"\w+", False))


def test_scores_are_ranks_of_merges() -> None:
    assert scores(["a", "b", "ab", "c", "abc"], [["a", "b"], ["ab", "c"]]) == [-2.0, -3.0, 0.0, -5.0, -1.0]


def test_rows_that_no_block_divides_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmopt.exporters.gguf import gate

    model, context = open_family(save_family("qwen3", tmp_path / "model", intermediate_size=80), tmp_path / "work")
    monkeypatch.setattr(gate, "prove_file", lambda *arguments: {})
    out = tmp_path / "out"
    out.mkdir()
    details = GGUFExporter(type="Q8_0").export(model, out, context)
    assert details["tensors"]["BF16"] == 2
    assert any("2 matrices have rows" in note["message"] and note["kind"] == "fallback" for note in context.notes)
