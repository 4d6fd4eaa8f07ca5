"""Kernels of packed linear layers: each against the exact product, their choice, its cache, the runner with them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import llmopt
import pytest
import torch
from llmopt.optimizer.errors import UsageError
from llmopt.passes import Quantize
from llmopt.runtime.kernels import linear_choice
from llmopt.runtime.kernels.build import unavailable_reason
from llmopt.runtime.kernels.linear_candidates import CANDIDATES, Candidate, LinearCase
from llmopt.runtime.kernels.linear_choice import Choice, bucket, choose, disagreement, measure
from llmopt.runtime.kernels.linear_dispatch import by_rows, install
from llmopt.runtime.kernels.packed import PackedLinear
from torch import nn

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INT4 = LinearCase(96, 128, 4, 32, True, False, False, torch.bfloat16, "cpu")
INT8 = replace(INT4, bits=8, group_size=-1)
CASES = {
    "int4": INT4,
    "int4 zeros": replace(INT4, symmetric=False, bias=True),
    "int4 row": replace(INT4, group_size=-1, dtype=torch.float32),
    "int4 odd": replace(INT4, out_features=57, group_size=64),
    "int8": INT8,
    "int8 float32": replace(INT8, dtype=torch.float32, bias=True),
    "int8 group": replace(INT8, group_size=64, symmetric=False),
    "int5": replace(INT4, bits=5, group_size=64),
    "int3 float32": replace(INT4, bits=3, dtype=torch.float32),
    "g_idx": replace(INT4, g_idx=True),
}


def exact(layer: PackedLinear, x: torch.Tensor) -> torch.Tensor:
    """The product in float64, from the codes."""
    state = layer.quant_state()
    index = torch.arange(layer.in_features) // state.group_size
    zeros = torch.full_like(state.scales, 2.0 ** (state.bits - 1)) if state.zeros is None else state.zeros
    weight = (state.codes.double() - zeros.double()[:, index]) * state.scales.double()[:, index]
    y = x.double() @ weight.T
    return y if layer.bias is None else y + layer.bias.double()


@pytest.mark.parametrize("name", CASES)
def test_every_candidate_computes_the_product(name: str):
    case = CASES[name]
    layer = case.synthetic(seed=3)
    ran = []
    for rows in (1, 7, 33):
        x = torch.randn(rows, case.in_features, generator=torch.Generator().manual_seed(rows)).to(case.dtype)
        want = exact(layer, x)
        for candidate in CANDIDATES.values():
            if candidate.unavailable(case, rows) is not None:
                continue
            got = candidate.prepare(layer)(x)
            assert (got.shape, got.dtype) == ((rows, case.out_features), case.dtype)
            error = float((got.double() - want).norm() / want.norm())
            limit = 0.03 if candidate.quantizes else 1e-5 if case.dtype == torch.float32 else 0.01
            assert error < limit, (candidate.name, error)
            ran.append(candidate.name)
    assert "dequantize" in ran
    if case.g_idx:
        assert set(ran) == {"dequantize"}
    elif unavailable_reason() is None:
        assert {"native", "native-int8"} <= set(ran)
    assert ("int8pack" in ran) == (case.bits == 8 and case.group_size == -1)
    assert ("int4pack" in ran) == (name in ("int4", "int4 zeros"))


def test_a_candidate_that_disagrees_or_fails_is_refused(monkeypatch: pytest.MonkeyPatch):
    def wrong(layer: PackedLinear):
        return lambda x: CANDIDATES["dequantize"].prepare(layer)(x) * 1.05

    def broken(layer: PackedLinear):
        raise RuntimeError("no such kernel")

    always = lambda case, rows: None  # noqa: E731
    monkeypatch.setitem(CANDIDATES, "wrong", Candidate("wrong", always, wrong))
    monkeypatch.setitem(CANDIDATES, "broken", Candidate("broken", always, broken))
    choice = measure(INT4, (1, 4))
    assert "differs from dequantize by 0.05" in choice.refused["wrong"]
    assert choice.refused["broken"] == "RuntimeError: no such kernel"
    assert set(choice.table(True).values()).isdisjoint({"wrong", "broken"})
    assert choice.microseconds[1]["dequantize"] > 0
    run = CANDIDATES["dequantize"].prepare(INT4.synthetic())
    assert disagreement(INT4, "dequantize", lambda x: run(x).float(), INT4.synthetic()) is not None  # another dtype


def test_the_fastest_is_chosen_with_one_copy_at_most():
    times = {
        1: {"dequantize": 100.0, "native": 10.0, "int4pack": 20.0, "triton": 30.0, "native-int8": 5.0},
        64: {"dequantize": 110.0, "native": 90.0, "int4pack": 30.0, "triton": None, "native-int8": 9.0},
        1024: {"dequantize": 200.0, "native": 900.0, "int4pack": 400.0, "triton": None, "native-int8": 90.0},
    }
    # native wins at one row, int4pack at 64; together int4pack is better, and at 1024 rows neither is
    assert Choice(times).table() == {1: "int4pack", 64: "int4pack", 1024: "dequantize"}
    assert set(Choice(times).table(allow_quantized=True).values()) == {"native-int8"}
    refused = {"int4pack": "differs", "native": "differs"}
    assert Choice(times, refused).table() == {1: "triton", 64: "dequantize", 1024: "dequantize"}
    assert by_rows({1: "triton", 64: "dequantize", 1024: "dequantize"}) == "triton up to 1 rows, dequantize above"
    assert [bucket(n) for n in (1, 2, 16, 17, 5000)] == [1, 4, 16, 64, 1024]


def test_choices_are_kept_and_hold_for_their_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file, calls = tmp_path / "deep" / "choices.json", []
    found = Choice({1: {"dequantize": 2.0, "native": 1.0}}, {"int8pack": "no"})

    def counted(case: LinearCase) -> Choice:
        calls.append(case)
        return found

    monkeypatch.setattr(linear_choice, "measure", counted)
    assert not choose(INT4, file).cached
    again = choose(INT4, file)
    assert (again.cached, again.microseconds, again.refused) == (True, found.microseconds, found.refused)
    choose(replace(INT4, in_features=256), file)
    assert len(calls) == 2
    monkeypatch.setattr(linear_choice, "device_name", lambda device: "another processor")
    choose(INT4, file)
    assert len(calls) == 3
    file.write_text("{damaged")
    choose(INT4, file)
    assert len(calls) == 4 and json.loads(file.read_text())
    found.foreign = 0.9
    busy = tmp_path / "busy.json"
    assert "not kept" in choose(INT4, busy).origin
    assert not busy.exists()


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = INT4.synthetic(1), replace(INT4, out_features=64, in_features=96).synthetic(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def fixed(name: str):
    """A `choose` without measurement: `name` for up to 16 rows, dequantize above."""
    others = {n: "not wanted" for n in CANDIDATES if n not in (name, "dequantize")}
    few: dict[str, float | None] = {name: 1.0, "dequantize": 2.0}
    many: dict[str, float | None] = {name: 2.0, "dequantize": 1.0}
    return lambda case: Choice({1: few, 4: few, 16: few, 64: many, 256: many, 1024: many}, others)


@pytest.mark.parametrize("rows", [1, 40])
def test_layers_run_what_was_chosen_also_in_a_compiled_graph(rows: int, monkeypatch: pytest.MonkeyPatch):
    model, x = Pair(), torch.randn(2, rows, 128).bfloat16()
    with torch.inference_mode():
        plain = model(x)
    monkeypatch.setattr("llmopt.runtime.kernels.linear_dispatch.choose", fixed("int4pack"))
    installed = install(model)
    assert installed.notes == ["linears: 2 × int4pack up to 16 rows, dequantize above"]
    with torch.inference_mode():
        got = model(x)
        graph = torch.compile(model, fullgraph=True, backend="eager")
        assert torch.equal(graph(x), got)
    assert torch.equal(got, plain) == (2 * rows > 16)
    torch.testing.assert_close(got.float(), plain.float(), atol=0.02, rtol=0.02)
    installed.remove()
    with torch.inference_mode():
        assert torch.equal(model(x), plain)


def test_a_layer_whose_kernel_is_wrong_on_its_own_weights_stays_plain(monkeypatch: pytest.MonkeyPatch):
    wrong = lambda layer: lambda x: torch.zeros(x.shape[0], layer.out_features, dtype=x.dtype)  # noqa: E731
    monkeypatch.setitem(CANDIDATES, "int4pack", replace(CANDIDATES["int4pack"], prepare=wrong))
    monkeypatch.setattr("llmopt.runtime.kernels.linear_dispatch.choose", fixed("int4pack"))
    model = Pair()
    installed = install(model)
    assert "first runs dequantized; on its weights int4pack differs from dequantize by 1" in installed.notes[0]
    assert installed.layers == [] and model.first.kernel is None


def test_the_eager_runner_with_measured_kernels(make_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    name = "native" if unavailable_reason() is None else "dequantize"
    monkeypatch.setattr("llmopt.runtime.kernels.linear_dispatch.choose", fixed(name))
    source = make_model(dtype="float32")
    out = tmp_path / "int4"
    evaluate = {"windows": 1, "window_length": 32, "speed": False, "new_tokens": 2}
    llmopt.optimize(source, passes=[Quantize(method="rtn", bits=4, group_size=32)], out=out, evaluate=evaluate)
    prompts = ["Hello", "The sky is", "It was the best of times, it was the worst of times"]
    texts = {}
    for linears in ("plain", "measured"):
        with llmopt.load(out, runner="eager", linears=linears) as llm:
            texts[linears] = [done.token_ids for done in llm.generate(prompts, max_new_tokens=8, ignore_eos=True)]
            said = [note["message"] for note in llm.notes if "linears: " in note["message"]]
            assert (said != []) == (linears != "plain")
    assert texts["measured"] == texts["plain"]
    with pytest.raises(UsageError, match="unknown linears"), llmopt.load(out, runner="eager", linears="fastest"):
        pass
    with pytest.raises(UsageError, match="need linears='plain'"):
        from llmopt.runtime.engine.runner_select import build_runner
        from llmopt.runtime.open import open_model

        build_runner(open_model(out).module, "eager", batch_invariant=True, linears="measured")


def test_doctor_shows_the_choice_for_a_model(tmp_path: Path):
    """The model is a config alone: no weights are read."""
    from transformers import LlamaConfig

    scheme = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}},
        "ignore": ["lm_head"],
    }
    size = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(**size, num_hidden_layers=2, vocab_size=32, quantization_config=quantization)
    config.save_pretrained(tmp_path)
    shown = subprocess.run(
        [sys.executable, "-m", "llmopt.optimizer.cli", "doctor", "--kernels", str(tmp_path), "--json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads(shown.stdout)
    assert found["native"]["built"] == (unavailable_reason() is None)
    assert sum(line["layers"] for line in found["linears"]) == 14
    for line in found["linears"]:
        assert [row["rows"] for row in line["rows"]] == list(linear_choice.ROWS)
        for row in line["rows"]:
            assert row["microseconds"][row["chosen"]] is not None
        assert line["unavailable"]["int8pack"] == "takes 8 bits, symmetric, one scale a row"


def test_doctor_shows_the_native_library():
    command = [sys.executable, "-m", "llmopt.optimizer.cli", "doctor"]
    shown = subprocess.run([*command, "--kernels"], capture_output=True, text=True, check=True).stdout
    assert "native kernels: " in shown and "choices kept in" in shown
    assert subprocess.run([*command, "a-model"], capture_output=True).returncode == 2


@pytest.mark.skipif(INTERPRETED, reason="already inside the interpreter")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_triton_kernel_in_the_interpreter():
    words = "the_triton_kernel_computes_the_product"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", words],
        capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(not INTERPRETED, reason="Triton is interpreted in a process of its own")
@pytest.mark.parametrize("name", ["int4", "int4 zeros", "int4 row", "int4 odd"])
def test_the_triton_kernel_computes_the_product(name: str):
    case = CASES[name]
    layer, triton = case.synthetic(seed=4), CANDIDATES["triton"]
    for rows in (1, 3):
        assert triton.unavailable(case, rows) is None
        x = torch.randn(rows, case.in_features).to(case.dtype)
        want = exact(layer, x)
        error = float((triton.prepare(layer)(x).double() - want).norm() / want.norm())
        assert error < (1e-5 if case.dtype == torch.float32 else 0.01)
    assert "at most 16 rows" in str(triton.unavailable(case, 17))
    assert "4 bits" in str(triton.unavailable(replace(case, bits=5), 1))
