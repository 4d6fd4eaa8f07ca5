"""The gate: a graph that is not the model is refused, whatever part of it is wrong, and nothing is left behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import llmopt
import numpy as np
import pytest
from llmopt.exporters.onnx import OnnxExporter, attention, linear, operators
from llmopt.exporters.onnx.check import Meter, divergence
from llmopt.optimizer.export import export_artifact
from llmopt.tests.library_models import optimize
from llmopt.tests.onnx_models import save_family
from llmopt.tests.runs import leftovers

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def sliding(tmp_path_factory):
    return save_family("mistral", tmp_path_factory.mktemp("gate") / "mistral")


def wider_window(monkeypatch: Any) -> None:
    """Every query sees one key more than it should."""
    real = attention.AttentionLayer.__init__

    def init(self, index, scale, window=0, *rest, **more):
        real(self, index, scale, window + 1 if window else 0, *rest, **more)

    monkeypatch.setattr(attention.AttentionLayer, "__init__", init)


def other_epsilon(monkeypatch: Any) -> None:
    real = operators.Operators.__init__
    monkeypatch.setattr(operators.Operators, "__init__", lambda self, g, c, n, eps: real(self, g, c, n, eps + 0.01))


def swapped_rope(monkeypatch: Any) -> None:
    """Rotates backwards."""
    real = attention._Caches.__init__

    def init(self, ops, shape, tables):
        real(self, ops, shape, lambda kind: (tables(kind)[0], -tables(kind)[1]))

    monkeypatch.setattr(attention._Caches, "__init__", init)


@pytest.mark.parametrize("flavor", ["genai", "ort"])
@pytest.mark.parametrize("fault", [wider_window, other_epsilon, swapped_rope])
def test_a_planted_fault(fault, flavor, sliding, tmp_path, monkeypatch):
    fault(monkeypatch)
    out = tmp_path / "out"
    with pytest.raises(llmopt.RunError, match=r"out: the graph does not compute what the model does: .*_difference is"):
        export_artifact(sliding, OnnxExporter(flavor=flavor, gate_tokens=4), out)
    assert not out.exists() and not leftovers(tmp_path)


def test_one_wrong_code(tmp_path, monkeypatch):
    """A single code of one layer that is off by one."""
    source = save_family("llama", tmp_path / "llama", "bfloat16")
    optimize(source, tmp_path / "packed", method="rtn", bits=4, group_size=32)
    real, calls = linear.to_blocks, []

    def wrong(state):
        calls.append(state)
        codes = state.codes.clone()
        if len(calls) == 7:
            codes[0, 0] ^= 8
        return real(replace(state, codes=codes))

    monkeypatch.setattr(linear, "to_blocks", wrong)
    with pytest.raises(llmopt.RunError, match="does not compute what the model does"):
        export_artifact(tmp_path / "packed", OnnxExporter(activations="int8", gate_tokens=4), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_graph_that_does_not_run(sliding, tmp_path, monkeypatch):
    monkeypatch.setattr(attention, "MICROSOFT", "com.nobody")
    with pytest.raises(llmopt.RunError, match="the graph does not run in a fresh process"):
        export_artifact(sliding, OnnxExporter(gate_tokens=4), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_meter():
    meter = Meter(tolerance=1e-3)
    expected = np.array([[1.0, 2.0, 0.0]])
    meter.add("prefill", expected, expected + np.array([[0.0, 0.0, 3e-4]]))
    meter.add("decode", expected, np.array([[1.0, np.nan, 0.0]]))
    meter.token(expected[0], np.array([0.0, 1.0, 0.0]))
    meter.token(np.array([1.0, 1.001]), np.array([2.0, 1.0]))
    meter.token(expected[0], np.array([3.0, 1.0, 0.0]))
    found = meter.result()
    assert found["prefill_max_difference"] == pytest.approx(3e-4)
    assert found["prefill_mean_difference"] == pytest.approx(1e-4)
    assert found["decode_max_difference"] > 1e20  # not a number is never near
    assert (found["greedy_equal"], found["greedy_ties"], found["greedy_differing"]) == (1, 1, 1)


def test_divergence_is_that_of_torch():
    import torch

    a, b = torch.randn(3, 7, generator=torch.Generator().manual_seed(0)), torch.linspace(-1, 1, 21).view(3, 7)
    kl = torch.nn.functional.kl_div(b.log_softmax(-1), a.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    assert np.allclose(divergence(a.numpy(), b.numpy()), kl.numpy(), atol=1e-6)
