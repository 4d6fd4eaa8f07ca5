"""Comparing artifacts: dominance by hand, what is refused, what is said, the page and the console."""

from __future__ import annotations

import json
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from llmopt.evaluation.report.comparison_charts import _place_labels
from llmopt.evaluation.report.pareto import dominates, dominators
from llmopt.optimizer.cli import cli
from llmopt.optimizer.compare import compare
from llmopt.optimizer.errors import LlmoptError, RunError, UsageError
from llmopt.tests.manifests import manifest

drawing = pytest.mark.skipif(find_spec("vl_convert") is None, reason="the extra report is not installed")
MORE = (False, False, True)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((1, 1, 2), (2, 2, 1), True),
        ((1, 1, 1), (1, 1, 1), False),
        ((1, 1, 2), (1, 1, 1), True),
        ((1, 3, 2), (2, 2, 1), False),
        ((1, 1, 1), (2, 2, 2), False),
        ((1, 1, None), (2, 2, None), True),
        ((1, 1, None), (2, 2, 1), False),
        ((1, 1, 9), (2, 2, None), False),
    ],
)
def test_dominance(one, other, expected):
    assert dominates(one, other, MORE) is expected


def test_dominators_are_those_of_the_definition():
    import random

    generator = random.Random(0)
    rows = [[generator.randrange(4) for _ in range(3)] for _ in range(40)]

    def beats(a, b):
        as_good = a[0] <= b[0] and a[1] <= b[1] and a[2] >= b[2]
        return as_good and (a[0] < b[0] or a[1] < b[1] or a[2] > b[2])

    assert dominators(rows, MORE) == [[i for i, a in enumerate(rows) if beats(a, b)] for b in rows]
    assert any(not places for places in dominators(rows, MORE)) and any(dominators(rows, MORE))


def artifact(folder: Path, kl: float, size: int, speed: float | None, **changes: Any) -> Path:
    """A folder that holds a manifest with these figures."""
    data = manifest(**changes)
    data["recipe"]["evaluate"].setdefault("new_tokens", 8)
    data["measured"]["divergence"].update(mean_kl=kl, decode_speedup=speed)
    data["measured"]["after"]["disk_bytes"] = size
    if speed is None:
        del data["measured"]["divergence"]["decode_speedup"]
    folder.mkdir(parents=True)
    (folder / "llmopt.json").write_text(json.dumps(data))
    return folder


@pytest.fixture()
def three(tmp_path) -> list[Path]:
    """One that is small, one that is exact, and one that the exact one beats in everything."""
    return [
        artifact(tmp_path / "small", 0.20, 10**8, 1.4),
        artifact(tmp_path / "exact", 0.01, 2 * 10**8, 1.2),
        artifact(tmp_path / "beaten", 0.02, 3 * 10**8, 1.1),
    ]


def test_rows_say_who_beats_whom(three):
    data = compare(three)
    assert [(row["name"], row["dominated_by"]) for row in data["rows"]] == [
        ("small", []),
        ("exact", []),
        ("beaten", ["exact"]),
    ]
    assert data["rows"][0]["values"]["size"] == 10**8 and data["rows"][0]["gates_missed"] == ["min_top1_agreement"]
    assert not data["warnings"]
    assert [row["dominated_by"] for row in compare(three, ["size"])["rows"]] == [[], ["small"], ["small", "exact"]]


def test_other_sources_are_refused(three, tmp_path):
    other = artifact(tmp_path / "other", 0.1, 10**8, 1.0, source={"id": "org/other", "kind": "hub", "sha256": "e" * 64})
    with pytest.raises(UsageError, match=r"another source than .*org/other") as caught:
        compare([*three, other])
    assert str(other) in str(caught.value)


@pytest.mark.parametrize(
    ("folders", "by", "message"),
    [(1, ["size"], "compares with nothing"), (2, ["speeed"], "Did you mean 'speed'"), (2, [], "no figure")],
)
def test_wrong_requests(three, folders, by, message):
    with pytest.raises(UsageError, match=message):
        compare(three[:folders], by)


def test_the_same_folder_twice_and_no_artifact(three, tmp_path):
    with pytest.raises(UsageError, match="named twice"):
        compare([three[0], three[0]])
    with pytest.raises(RunError):
        compare([three[0], tmp_path])


def test_folders_of_one_name_are_told_apart(tmp_path):
    data = compare([artifact(tmp_path / "a" / "made", 0.1, 10, 1.0), artifact(tmp_path / "b" / "made", 0.1, 10, 1.0)])
    assert [row["name"] for row in data["rows"]] == ["a/made", "b/made"]


def test_what_does_not_compare_well_is_said(three, tmp_path):
    odd = artifact(tmp_path / "odd", 0.1, 10**8, None)
    data = json.loads((odd / "llmopt.json").read_text())
    data["recipe"]["evaluate"]["windows"] = 99
    data["measured"]["after"]["foreign_cpu"] = 0.6
    data["environment"]["platform"] = "Darwin arm64"
    (odd / "llmopt.json").write_text(json.dumps(data))
    warnings = "\n".join(compare([three[0], odd])["warnings"])
    assert "99 windows" in warnings and "60% of the machine" in warnings and "machines of different kinds" in warnings


def test_labels_do_not_lie_on_each_other():
    rows = [{"name": f"artifact-{n}", "x": 1.0 + n / 1000, "y": 2.0} for n in range(5)]
    _place_labels(rows, (0.0, 10.0), (0.0, 3.0))
    heights = sorted((3.0 - row["label_y"]) / 3.0 * 300 for row in rows)
    assert all(b - a > 12.9 for a, b in pairwise(heights))


@pytest.mark.parametrize(
    "command", [["eval", "a"], ["diff", "a", "b"], ["bench", "latency", "a"], ["compare", "a", "b"]]
)
def test_a_report_that_cannot_be_written_is_refused_before_the_run(command, tmp_path):
    option = "--out" if command[0] == "compare" else "--report"
    refused = CliRunner().invoke(cli, [*command, option, str(tmp_path)])
    assert isinstance(refused.exception, UsageError) and "is a folder" in str(refused.exception)


def test_console_table(three):
    result = CliRunner().invoke(cli, ["compare", *map(str, three)])
    assert result.exit_code == 0
    for said in ("small", "on the front", "dominated by", "95.4 MiB", "1.40×", "1 missed"):
        assert said in result.output
    found = json.loads(CliRunner().invoke(cli, ["compare", *map(str, three), "--json", "--by", "kl"]).output)
    assert found["by"] == ["kl"] and [row["dominated_by"] for row in found["rows"]] == [
        ["exact", "beaten"],
        [],
        ["exact"],
    ]
    refused = CliRunner().invoke(cli, ["compare", str(three[0])])
    assert isinstance(refused.exception, LlmoptError)


@drawing
def test_the_page(three, tmp_path):
    out = tmp_path / "compare.html"
    shown = CliRunner().invoke(cli, ["compare", *map(str, three), "--out", str(out)])
    assert shown.exit_code == 0 and str(out) in shown.output.replace("\n", "")
    html = out.read_text(encoding="utf-8")
    assert html.count("<svg") == 2 and html.count('data-tip="') >= 8
    assert "On the Pareto front: small, exact (2 of 3)" in html and "dominated by exact" in html


@drawing
def test_the_page_where_no_speed_was_measured(tmp_path):
    from llmopt.evaluation.report import draw_report

    pair = [artifact(tmp_path / name, 0.1, size, None) for name, size in (("a", 10**8), ("b", 10**7))]
    html = draw_report("comparison", compare(pair))
    assert html.count("<svg") == 1 and "not measured for any of them" in html
