"""What a run records for its report: memory over time, where tokens end, a histogram, the source's texts."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from llmopt.evaluation.divergence import DivergenceMeter
from llmopt.evaluation.report import draw_report
from llmopt.evaluation.token_ends import token_ends
from llmopt.optimizer.cli import cli
from llmopt.optimizer.manifest import Manifest, hash_files
from llmopt.optimizer.memory_timeline import MemoryTimeline
from llmopt.optimizer.pipeline import Run, Settings
from llmopt.tests.manifests import manifest
from llmopt.tests.runs import EVALUATE, run

drawing = pytest.mark.skipif(find_spec("vl_convert") is None, reason="the extra report is not installed")


def test_samples_stay_bounded():
    memory = MemoryTimeline(interval=0.001, most_samples=16)
    for _ in range(200):
        memory._sample()
    found = memory.result()
    assert 8 <= len(found.times) < 16 and found.times == sorted(found.times)
    assert found.interval > 0.001 and len(found.rss) == len(found.children) == len(found.device) == len(found.times)
    assert all(value > 2**20 for value in found.rss)


def test_stages_are_recorded_even_where_they_fail():
    with MemoryTimeline(interval=0.01) as memory:
        with memory.stage("load"):
            pass
        with pytest.raises(ValueError), memory.stage("quantize"):
            raise ValueError
    stages = memory.result().stages
    assert [stage.name for stage in stages] == ["load", "quantize"]
    assert all(stage.start <= stage.end for stage in stages)
    assert memory.result().times and not memory._thread.is_alive()


def test_memory_of_started_processes_is_seen():
    memory = MemoryTimeline()
    child = subprocess.Popen([sys.executable, "-c", "print(1, flush=True); input()"], stdin=-1, stdout=-1)
    try:
        assert child.stdout.readline()
        memory._sample()
        assert memory.result().children[-1] > 2**20
    finally:
        child.communicate(b"\n")
    memory._sample()
    assert memory.result().children[-1] == 0


class Bytes:
    """A tokenizer of single bytes; 0 is special."""

    def decode(self, ids, skip_special_tokens):
        return bytes(i for i in ids if i).decode("utf-8", "replace")


def test_token_ends():
    text = "aé😀b"
    ids = list(text.encode())
    ends = token_ends(Bytes(), ids, text)
    assert ends == [1, 1, 2, 2, 2, 2, 3, 4]
    assert token_ends(Bytes(), [*ids, 0], text)[-2:] == [4, 4]
    assert token_ends(Bytes(), [], "") == []


def test_histogram_counts_every_position():
    import torch

    meter = DivergenceMeter()
    logits = torch.randn(50, 11, generator=torch.Generator().manual_seed(0))
    meter.update(logits, logits * 1.3)
    found = meter.histogram()
    assert sum(found["counts"]) == 50 and len(found["edges"]) == len(found["counts"])
    kls = torch.cat(meter.kls)
    for place, count in enumerate(found["counts"]):
        low = found["edges"][place]
        high = found["edges"][place + 1] if place + 1 < len(found["edges"]) else float("inf")
        assert count == int(((kls >= low) & (kls < high)).sum())


def test_manifests_of_earlier_versions_open():
    data = manifest()
    del data["timeline"]
    assert Manifest.model_validate({**data, "runtime": {}}).timeline is None
    assert len(Manifest.model_validate(manifest()).timeline.stages) == 3


def drawn(tmp_path, monkeypatch, available: bool):
    """`Run._draw` on a made-up manifest; returns the manifest and the events."""
    monkeypatch.setattr("llmopt.evaluation.report.write.available", lambda: available)
    events: list = []
    stub = SimpleNamespace(settings=Settings(tmp_path, listener=events.append), notes=[], memory=MemoryTimeline())
    for name in ("_emit", "_note", "_stage"):
        setattr(stub, name, getattr(Run, name).__get__(stub))
    found = Manifest.model_validate(manifest())
    Run._draw(stub, found, tmp_path)
    return found, events


def test_a_report_that_cannot_be_written_is_a_note(tmp_path, monkeypatch):
    found, events = drawn(tmp_path, monkeypatch, available=False)
    assert "no report was written" in found.notes[-1].message and "llmopt[report]" in found.notes[-1].message
    assert [event.kind for event in events] == ["stage_started", "note", "stage_finished"]
    assert not list(tmp_path.iterdir())


@drawing
def test_the_report_is_written_into_the_artifact(tmp_path, monkeypatch):
    found, _ = drawn(tmp_path, monkeypatch, available=True)
    assert len(found.notes) == 1 and [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert hash_files(tmp_path) == {}  # it may be drawn anew, so no hash covers it


@drawing
def test_a_run_writes_its_report(tiny_model, tmp_path):
    out = tmp_path / "made"
    quantize = {"quantize": {"method": "rtn", "bits": 4, "group_size": 32}}
    artifact = run(tiny_model, [quantize], out, report=True, evaluate={**EVALUATE, "speed": True})
    certificate = artifact.manifest.certificate
    positions = artifact.manifest.measured["divergence"]["num_tokens"]
    assert sum(certificate["kl_histogram"]["counts"]) == positions
    assert [s["prompt"] for s in certificate["source_samples"]] == EVALUATE["prompts"]
    for sample in (*certificate["samples"], *certificate["source_samples"]):
        assert len(sample["token_ends"]) == len(sample["token_ids"]) and sample["token_ends"][-1] == len(sample["text"])
    stages = [stage.name for stage in artifact.manifest.timeline.stages]
    assert stages == ["load", "reference", "quantize", "huggingface", "prove"]
    html = (out / "report.html").read_text(encoding="utf-8")
    assert html == draw_report("artifact", json.loads((out / "llmopt.json").read_text(encoding="utf-8")))
    assert "not recorded" not in html and "report.html" not in artifact.manifest.files
    shown = CliRunner().invoke(cli, ["report", str(out), "--out", str(tmp_path / "again.html")])
    assert shown.exit_code == 0 and (tmp_path / "again.html").read_text(encoding="utf-8") == html
    (out / "report.html").unlink()
    assert CliRunner().invoke(cli, ["report", str(out)]).exit_code == 0
    assert hash_files(out) == artifact.manifest.files and (out / "report.html").is_file()
