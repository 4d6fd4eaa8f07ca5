"""The techniques table: every row on a tiny model through its real engine, what is absent, the table, the picture."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest
import torch
from llmopt.evaluation.bench import techniques as module
from llmopt.evaluation.bench.chart import specification, standalone
from llmopt.evaluation.bench.lengths import Lengths
from llmopt.evaluation.bench.recompute import open_recomputing
from llmopt.evaluation.bench.records import RequestRecord
from llmopt.evaluation.bench.run import Load, Result
from llmopt.evaluation.bench.techniques import (
    Job,
    flash_backend,
    measure,
    same_answers,
    techniques,
    text_requests,
    windows,
)
from llmopt.evaluation.bench.worker import Work
from llmopt.optimizer.cli.bench_techniques import COLUMNS, cells, show, table_text
from llmopt.optimizer.errors import RunError
from llmopt.optimizer.events import silent
from llmopt.optimizer.sources import resolve
from llmopt.optimizer.techniques import TechniqueSettings, _artifacts
from llmopt.runtime.engine.sampling_params import SamplingParams
from transformers import AutoModelForCausalLM

from .conftest import ROOT, build_tokenizer

TEXT = (ROOT / "data" / "calibration.txt").read_text(encoding="utf-8")[:4000]


class Here:
    """In the place of `ArtifactProcess`: the worker's code in this process."""

    def __init__(self, folder, *, name, options, keep):
        sampling = {"temperature": 0.0, "ignore_eos": True, "keep": keep}
        self.work = Work({"model": str(folder), "options": options, "sampling": sampling})

    def run(self, load):
        return Result.from_dict(json.loads(json.dumps(self.work.run({"load": load.as_dict()}))))

    def score(self, ids):
        return self.work.score({"ids": ids})

    def pids(self):
        return []

    def about(self):
        return self.work.about

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.work.close()


@pytest.fixture(scope="module")
def rows(tiny_model, packed_model):
    tokenizer = build_tokenizer()
    job = Job(
        requests=text_requests(tokenizer, TEXT, 4, Lengths(4, 20), Lengths(3, 9), 0),
        warmup=text_requests(tokenizer, TEXT, 1, Lengths(4, 4), Lengths(2, 2), 1),
        scored=windows(tokenizer, TEXT, 2, 32),
        options={"dtype": "float32"},
    )

    def folder(name):
        if name == "int8":
            raise RunError("misses its gates", "recipe int8")
        return packed_model if name == "int4-flash" else tiny_model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ArtifactProcess", Here)
        return {row["key"]: row for row in measure(techniques(2, *flash_backend("cpu")), folder, job, rounds=2)}


def test_every_row_gives_the_same_answers_as_recomputing_everything(rows):
    source = [row for row in rows.values() if row["model"] == "source"]
    assert len(source) == 7
    for row in source:
        assert row["absent"] is None and row["same_answers"]["equal"] == row["same_answers"]["of"] == 4, row["key"]
        assert row["same_answers"]["mean_share_before_difference"] == 1.0
        assert row["perplexity"] == pytest.approx(rows["recompute"]["perplexity"], rel=1e-4)
    assert rows["int4"]["perplexity"] != pytest.approx(rows["recompute"]["perplexity"], rel=1e-4)


def test_what_rows_hold(rows):
    assert rows["recompute"]["speedup"]["median"] == 1.0 and rows["recompute"]["speedup_against"] is None
    for row in (row for row in rows.values() if not row["absent"]):
        assert (
            len(row["seconds"]["rounds"]) == len(row["cpu_seconds"]["rounds"]) == 2 and row["metrics"]["completed"] == 4
        )
        assert row["memory"]["rss_bytes"] > row["weight_bytes"] > 0
        assert row["scored_tokens"] == sum(len(one) - 1 for one in windows(build_tokenizer(), TEXT, 2, 32))
    slow, fast = rows["recompute"]["seconds"]["rounds"], rows["kv-cache"]["seconds"]["rounds"]
    assert rows["kv-cache"]["speedup_against"]["rounds"] == [a / b for a, b in zip(slow, fast)]
    assert rows["speculative"]["options"]["draft"] == {"kind": "ngram"}
    assert rows["dynamic-batching"]["metrics"]["peak_concurrent_requests"] == 4  # given at once
    assert rows["kv-cache"]["metrics"]["peak_concurrent_requests"] == 1


def test_a_row_that_cannot_be_had_says_why(rows):
    assert rows["int8"]["absent"] == "recipe int8: misses its gates" and "seconds" not in rows["int8"]
    with pytest.raises(RunError, match="no such folder"):
        measure(techniques(2, "sdpa"), lambda name: _raise(RunError("no such folder")), Job([], [], [], {}), 1)
    absent = [row for row in techniques(2, "flash_attn", "no GPU") if row.absent]
    assert [row.key for row in absent] == ["flash-attention"]


def _raise(error):
    raise error


def test_the_baseline_recomputes_and_its_logprobs_are_the_modules(tiny_model):
    llm = open_recomputing(str(tiny_model), dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    ids = [5, 9, 17, 33, 2]
    lengths = []
    note = lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1])  # noqa: E731
    llm._forward.model.register_forward_pre_hook(note, with_kwargs=True)
    params = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
    tokens = [token for chunk in llm.stream(ids, params) for token in chunk.token_ids]
    expected = model.generate(torch.tensor([ids]), max_new_tokens=4, min_new_tokens=4, do_sample=False)[0, 5:].tolist()
    assert tokens == expected and lengths == [5, 6, 7, 8]
    logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    assert llm.score(ids).total == pytest.approx(sum(logprobs[i, t].item() for i, t in enumerate(ids[1:])), rel=1e-5)


def test_same_answers():
    def result(*answers):
        return Result([RequestRecord(i, token_ids=list(ids)) for i, ids in enumerate(answers)], 1.0)

    found = same_answers(result([1, 2, 3, 4], [5, 6]), result([1, 2, 9, 4], [5, 6]))
    assert found == {"equal": 1, "of": 2, "mean_share_before_difference": 0.75}


def test_prompts_are_passages():
    tokenizer = build_tokenizer()
    ids = tokenizer.encode(TEXT)
    made = text_requests(tokenizer, TEXT, 5, Lengths(10, 30), Lengths(2, 4), 3)
    assert made == text_requests(tokenizer, TEXT, 5, Lengths(10, 30), Lengths(2, 4), 3)
    for one in made:
        start = next(i for i in range(len(ids)) if ids[i : i + len(one.prompt)] == one.prompt)
        assert start >= 0 and 10 <= len(one.prompt) <= 30 and 2 <= one.output_len <= 4
    with pytest.raises(RunError, match="too few"):
        text_requests(tokenizer, "a", 1, Lengths(10, 30), Lengths(2, 4), 3)
    assert Load(made, [0.0] * 5) == Load.from_dict(json.loads(json.dumps(Load(made, [0.0] * 5).as_dict())))


def test_the_table(rows, capsys):
    listed = list(rows.values())
    text = table_text(listed)
    assert text.count("\n") == len(listed) + 2 and "| 5 8-bit weights (recipe int8) | – |" in text
    assert cells(rows["kv-cache"], listed)[4].endswith("row 1") and len(cells(rows["int4"], listed)) == len(COLUMNS)
    for row in listed:
        row["divergence"] = {"mean_kl": 0.125} if row["key"] == "int4" else None
    settings = {"num_prompts": 4, "input_len": "4-20", "tokens": {"output": 20}, "rounds": 2}
    environment = {"cpu": "some processor", "cores": 2}
    show(
        {
            "model": {"id": "tiny"},
            "settings": settings,
            "environment": environment,
            "rows": listed,
            "warnings": ["mind"],
        }
    )
    printed = capsys.readouterr().out
    for words in (
        "continuous batching",
        "not on this machine: recipe int8",
        "0.1250",
        "warning: mind",
        "some processor",
    ):
        assert words in " ".join(printed.split())


def test_the_picture():
    drawn = standalone('<svg width="3" role="img"><text fill="var(--soft)" stroke="var(--other)">a</text></svg>')
    root = ET.fromstring(drawn)
    assert root.tag == "{http://www.w3.org/2000/svg}svg" and "var(" not in drawn
    data = [{"title": "a", "speedup": 2.0, "low": 1.5, "high": 3.0}]
    assert specification(data, "t")["layer"][0]["encoding"]["x"]["scale"]["domain"] == [0.5, 4.5]


def test_the_picture_drawn(rows):
    pytest.importorskip("vl_convert")
    from llmopt.evaluation.bench.chart import speedup_chart

    svg = speedup_chart(list(rows.values()), "tiny")
    texts = " ".join(element.text or "" for element in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"))
    assert "KV cache" in texts and "8-bit" not in texts and "tiny" in texts


def test_artifacts_are_made_once_without_gates_and_errors_are_kept(tiny_model, tmp_path, monkeypatch):
    calls = []

    def optimize(model, recipe, *, out, overrides, **more):
        calls.append((recipe, overrides))
        if recipe == "int4-flash":
            raise RunError("does not divide", "int4-flash")
        out.mkdir()
        (out / "llmopt.json").write_text("{}")

    monkeypatch.setattr("llmopt.optimizer.api.optimize", optimize)
    monkeypatch.setenv("LLMOPT_CACHE_DIR", str(tmp_path))
    source, names = resolve(tiny_model), ["source", "int8", "int4-flash", "int8"]
    first, again = (_artifacts(source, names, TechniqueSettings(), silent) for _ in range(2))
    assert first["source"] == source.folder and first["int8"] == again["int8"] and first["int8"].is_dir()
    assert str(first["int4-flash"]) == "int4-flash: does not divide"
    assert [recipe for recipe, _ in calls] == ["int8", "int4-flash", "int4-flash"] and "gates={}" in calls[0][1]
