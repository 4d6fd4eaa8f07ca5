"""Reports of evaluations, differences, benchmarks and plain records: their figures, and that texts stay texts."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import pytest
from llmopt.evaluation.report import draw_report, records
from llmopt.evaluation.report.page import render
from llmopt.tests.test_report import HOSTILE, Reader

pytestmark = pytest.mark.skipif(find_spec("vl_convert") is None, reason="the extra report is not installed")

EDGES, COUNTS = [0.0, 1e-3, 1e-2, 0.1], [10, 20, 30, 40]


def evaluation() -> dict[str, Any]:
    text = {"perplexity": 33.0, "bits_per_byte": 1.1, "num_tokens": 100, "num_bytes": 400, "num_windows": 2}
    side = {"sha256": "a" * 64, "engine": "native", "device": "cpu", "dtype": "bfloat16", "weight_bytes": 2**20,
            "notes": [{"stage": "load", "kind": "fallback", "message": "no kernel"}], "text": text,
            "tasks": {"boolq": {"num_items": 20, "metrics": {"acc": 0.55}, "stderr": {"acc": 0.11}}}}  # fmt: skip
    row = {"prompt": "Once", "model": " upon a", "against": " more a", "first_difference": 0,
           "model_token_ids": [1, 2], "against_token_ids": [3, 2]}  # fmt: skip
    return {
        "kind": "evaluation",
        "created": "2026-01-02T03:04:05+00:00",
        "model": {"id": "models/int4", **side},
        "against": {"id": "org/source", **side, "text": {**text, "perplexity": 30.0}},
        "divergence": {"mean_kl": 0.25, "p99_kl": 2.0, "top1_agreement": 0.875,
                       "histogram": {"edges": EDGES, "counts": COUNTS}},
        "generation": {"new_tokens": 2, "num_prompts": 1, "num_differing": 1, "share_differing_within": {"1": 1.0},
                       "prompts": [row]},
        "text": {"name": "my.txt", "sha256": "b" * 64},
        "settings": {"windows": 2},
        "environment": {"torch": "2.13.0"},
        "seconds": 61.0,
    }  # fmt: skip


def difference() -> dict[str, Any]:
    units = [
        {"name": f"model.layers.{i}", "harm": 0.5 / (i + 1), "share": 0.5, "weight_error": 0.1, "output_error": 0.2,
         "local_error": 0.3, "bytes_a": 2**20, "bytes_b": 2**19,
         "modules": [{"name": f"model.layers.{i}.mlp.up_proj", "weight_error": 0.07, "output_error": 0.2,
                      "a": {"bytes": 2**20, "dtype": "bfloat16"}, "b": {"bytes": 2**19, "format": "packed"}}]}
        for i in range(3)
    ]  # fmt: skip
    choice = {"token_id": 3, "text": " it", "probability_a": 0.5, "probability_b": 0.25}
    flip = {"context": "It was", "actual": choice, "a": choice, "b": {**choice, "text": " and"}, "kl": 1.25}
    return {
        "kind": "difference",
        "a": {"id": "org/source", "bytes": 2**21, "text": {"perplexity": 30.0}},
        "b": {"id": "int4", "bytes": 2**20, "text": {"perplexity": 33.0}},
        "divergence": {"mean_kl": 0.25, "top1_agreement": 0.875},
        "num_flips": 7,
        "num_positions": 56,
        "units": units,
        "flips": [flip],
        "notes": [{"stage": "open", "kind": "fallback", "message": "in memory as a whole"}],
        "settings": {"windows": 4},
    }


def bench() -> dict[str, Any]:
    def metrics(rate: float) -> dict[str, Any]:
        spread = {"mean": 10.0, "median": 9.0, "std": 1.0, "min": 8.0, "max": 15.0, "p90": 12.0, "p99": 14.0}
        return {"completed": 20, "failed": 1, "output_throughput": rate, "request_throughput": None,
                "request_goodput": None, "total_token_throughput": 2 * rate, "ttft_ms": spread, "tpot_ms": None,
                "itl_ms": spread, "e2el_ms": spread}  # fmt: skip

    def result(name: str, rate: float) -> dict[str, Any]:
        rounds = [{"round": i, "metrics": metrics(rate + 10 * i), "foreign_cpu": 0.1} for i in range(3)]
        summary = {"metrics": metrics(rate), "speculation": None, "memory": {"rss_bytes": 2**30, "device_bytes": None},
                   "foreign_cpu": 0.3, "energy": {"cpu": None}}  # fmt: skip
        return {"target": name, "rounds": rounds, "summary": summary}

    ratio = {"output_throughput": {"median": 1.4, "min": 1.3, "max": 1.5}}
    return {
        "kind": "bench",
        "mode": "latency",
        "settings": {"rounds": 3},
        "targets": [{"name": "source", "kind": "artifact"}, {"name": "int4", "kind": "artifact"}],
        "cases": [
            {"case": {"input_len": 32}, "results": [result("source", 100.0), result("int4", 140.0)],
             "ratios": [{"target": "int4", "to": "source", "metrics": ratio}]}
        ],
        "warnings": ["the machine is noisy"],
    }  # fmt: skip


CASES = {
    "evaluation": (evaluation, 1, ["beside org/source", "33", "+10.00%", "87.50%", "boolq", "0.55",
                                   "1 of 1 greedy texts",
                                   "The first token differs.", "2 fallbacks", "no kernel", "my.txt", "1 min 01 s"]),
    "diff": (difference, 1, ["0.50×", "+10.00%", "7 of 56 positions", "model.layers.2", "bfloat16", "packed", "0.07",
                             "“ and” (50.0%, 25.0%)", "in memory as a whole"]),
    "bench": (bench, 2, ["the machine is noisy", "140", "1.4×", "1.3 to 1.5", "100 to 120", "1.00 GiB", "input len 32",
                         "30.0%", "failed requests"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(CASES))
def test_figures_are_shown(kind):
    make, charts, said = CASES[kind]
    page = Reader(draw_report(kind, make()))
    for text in said:
        assert text in page.text, text
    assert len(page.all("svg")) == charts


def poisoned(value: Any) -> Any:
    """The value with hostile text in the place of every string and beside every key of free choice."""
    if isinstance(value, str):
        return HOSTILE
    if isinstance(value, list):
        return [poisoned(item) for item in value]
    if isinstance(value, dict):
        return {key: poisoned(item) for key, item in value.items()}
    return value


@pytest.mark.parametrize("kind", sorted(CASES))
def test_hostile_texts_stay_texts(kind):
    data = poisoned(CASES[kind][0]())
    data["settings"] = {HOSTILE: HOSTILE}
    page = Reader(draw_report(kind, data))
    assert len(page.all("script")) == 1 and not page.all("img") and "alert" not in page.scripts[0]
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]


@pytest.mark.parametrize("kind", sorted(CASES))
def test_nearly_nothing_draws(kind):
    assert Reader(draw_report(kind, {})).all("h1")


def test_techniques_are_drawn():
    rows = [
        {"title": title, "absent": None, "speedup": {"median": speedup, "min": speedup, "max": 2 * speedup}}
        for title, speedup in (("no cache", 1.0), ("KV cache", 12.5))
    ]
    absent = {"title": "flash attention", "absent": "needs a GPU", "speedup": None}
    page = Reader(draw_report("bench", {"kind": "bench", "mode": "techniques", "rows": [*rows, absent]}))
    [svg] = page.all("svg")
    assert "no cache 1×, KV cache 12.5×" in svg["aria-label"] and "needs a GPU" in page.text


def test_records_show_every_key():
    data = {
        "kind": "trial",
        "title": "a search",
        "best": 3,
        "settings": {"bits": [3, 4], "nested": {"deep": {"deeper": {"deepest": {"x": 1}}}}},
        "trials": [{"bits": 4, "kl": 0.25, "why": {"stage": "proxy"}}, {"bits": 3, "kl": None, "extra": "yes"}],
        "names": ["one", "two"],
        "empty": [],
    }
    page = Reader(render(records.page(data)))
    for text in ("A search", "llmopt trial", "best", "3, 4", "deepest", "why stage", "proxy", "0.25", "extra", "one"):
        assert text in page.text, text


def test_records_say_what_they_leave_out():
    page = Reader(render(records.page({"rows": [{"n": n} for n in range(1500)], "long": "x" * 1000})))
    assert "500 more rows are left out" in page.text and "700 more characters" in page.text
    assert json.dumps({"n": 1}) not in page.text
