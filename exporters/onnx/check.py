"""The fresh process of the gate: `python -m llmopt.exporters.onnx.check FOLDER REFERENCE OUT`. Loads no torch."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ...optimizer.errors import LlmoptError, RunError
from ...runtime.ort.session import OnnxSession
from .graph import MODEL, onnx_library

TWIN = "twin.onnx"
"""The same graph with MatMulNBits at accuracy level 0, beside it for as long as it runs."""


class Meter:
    """Differences of logits, and of the tokens that they put first."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.largest, self.sums = {"prefill": 0.0, "decode": 0.0}, {"prefill": 0.0, "decode": 0.0}
        self.counts = {"prefill": 0, "decode": 0}
        self.kl: list[float] = []
        self.equal = self.ties = self.differing = 0

    def add(self, phase: str, expected: np.ndarray, found: np.ndarray) -> None:
        """expected, found: [positions, vocab]. Not-a-number counts as infinitely far."""
        difference = np.abs(np.nan_to_num(found.astype(np.float64), nan=np.inf) - expected)
        self.largest[phase] = max(self.largest[phase], float(difference.max()))
        self.sums[phase] += float(difference.sum())
        self.counts[phase] += difference.size
        self.kl += list(divergence(expected, found))

    def token(self, expected: np.ndarray, found: np.ndarray) -> None:
        """Compare what two rows of logits put first; nearer than the tolerance counts as a tie."""
        first, other = int(expected.argmax()), int(found.argmax())
        if first == other:
            self.equal += 1
        elif expected[first] - expected[other] <= 2 * self.tolerance:
            self.ties += 1
        else:
            self.differing += 1

    def result(self) -> dict[str, Any]:
        figures: dict[str, Any] = {}
        for phase in ("prefill", "decode"):
            figures[f"{phase}_max_difference"] = self.largest[phase]
            figures[f"{phase}_mean_difference"] = self.sums[phase] / max(1, self.counts[phase])
        figures.update(greedy_equal=self.equal, greedy_ties=self.ties, greedy_differing=self.differing)
        figures["mean_kl"] = float(np.mean(self.kl))
        return {name: _finite(value) for name, value in figures.items()}


def divergence(expected: np.ndarray, found: np.ndarray) -> np.ndarray:
    """KL(expected ‖ found) of each row of logits, in nats."""

    def log_softmax(logits: np.ndarray) -> np.ndarray:
        shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))

    p, q = log_softmax(expected), log_softmax(found)
    return (np.exp(p) * (p - q)).sum(-1)


def compare(session: OnnxSession, reference: Any, tolerance: float) -> dict[str, Any]:
    """Run all prompts and hold every step against the reference (see `gate.write_reference`)."""
    meter = Meter(tolerance)
    last = int(reference["count"]) - 1
    together = list(range(last))
    cache = session.new_cache(len(together))
    rows = session.run([reference[f"prompt_{n}"].tolist() for n in together], cache)
    _continue(session, reference, together, rows, cache, meter)
    prompt = reference[f"prompt_{last}"].tolist()
    cache, half = session.new_cache(1), len(prompt) // 2
    pieces = [session.run([piece], cache)[0] for piece in (prompt[:half], prompt[half:])]
    _continue(session, reference, [last], [np.concatenate(pieces)], cache, meter)
    return meter.result()


def _continue(
    session: OnnxSession, reference: Any, numbers: list[int], rows: list[np.ndarray], cache: Any, meter: Meter
) -> None:
    """Compare the prompts' logits, then those of the reference's tokens, one after another."""
    steps = [reference[f"steps_{number}"] for number in numbers]
    for number, expected, row in zip(numbers, steps, rows):
        meter.add("prefill", reference[f"prefill_{number}"], row[reference[f"positions_{number}"]])
        meter.token(expected[0], row[-1])
    tokens = np.stack([reference[f"tokens_{number}"] for number in numbers])
    for step in range(1, tokens.shape[1]):
        found = session.run(tokens[:, step - 1 : step].tolist(), cache)
        for expected, row in zip(steps, found):
            meter.add("decode", expected[step][None], row)
            meter.token(expected[step], row[-1])


@contextmanager
def float_twin(folder: Path) -> Iterator[str]:
    """Name of a graph beside model.onnx that differs in the accuracy level alone, removed on leaving."""
    onnx = onnx_library()
    model = onnx.load(str(folder / MODEL), load_external_data=False)
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "MatMulNBits" and attribute.name == "accuracy_level":
                attribute.i = 0
    try:
        (folder / TWIN).write_bytes(model.SerializeToString())
        yield TWIN
    finally:
        (folder / TWIN).unlink(missing_ok=True)


def examine(folder: Path, reference: Any, tolerance: float, twin: bool) -> dict[str, Any]:
    """Figures of the graph; with `twin` those of its float twin too, under names with `float_`."""
    onnx = onnx_library()
    try:
        onnx.checker.check_model(str(folder / MODEL))
    except onnx.checker.ValidationError as error:
        raise RunError(f"onnx.checker refuses it: {str(error).strip().splitlines()[0]}", str(folder)) from None
    threads = int(os.environ.get("OMP_NUM_THREADS") or 0) or None
    figures = compare(OnnxSession(folder, "cpu", threads), reference, tolerance)
    if twin:
        with float_twin(folder) as name:
            found = compare(OnnxSession(folder, "cpu", threads, name), reference, tolerance)
        figures.update({f"float_{key}": value for key, value in found.items()})
    import onnxruntime

    return {**figures, "onnx": onnx.__version__, "onnxruntime": onnxruntime.__version__}


def _finite(value: Any) -> Any:
    return 1e30 if isinstance(value, float) and not np.isfinite(value) else value


def main(arguments: list[str] | None = None) -> int:
    """Writes the figures to OUT; on failure one line to standard error and exit code 1."""
    parser = argparse.ArgumentParser(prog="llmopt.exporters.onnx.check", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("reference", type=Path, help="npz file of gate.write_reference")
    parser.add_argument("out", type=Path, help="JSON file to write")
    parser.add_argument("--tolerance", type=float, required=True)
    parser.add_argument("--twin", action="store_true", help="run the graph at accuracy level 0 too")
    options = parser.parse_args(arguments)
    try:
        with np.load(options.reference) as reference:
            figures = examine(options.folder, reference, options.tolerance, options.twin)
        options.out.write_text(json.dumps(figures), encoding="utf-8")
    except LlmoptError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
