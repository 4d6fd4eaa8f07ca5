"""The command `llmopt bench`: a run over real processes, its document, and requests that are wrong."""

from __future__ import annotations

import json

import pytest
from llmopt.evaluation.bench.artifact_process import ArtifactProcess
from llmopt.evaluation.bench.lengths import Lengths
from llmopt.evaluation.bench.loads import LoadSettings
from llmopt.evaluation.bench.prompts import Request
from llmopt.evaluation.bench.run import Load
from llmopt.evaluation.bench.worker import Work
from llmopt.optimizer.bench import TargetName, check_room, target_names
from llmopt.optimizer.cli import main
from llmopt.optimizer.errors import RunError, UsageError


def bench(*arguments):
    with pytest.raises(SystemExit) as stop:
        main(["bench", *map(str, arguments)])
    return stop.value.code


@pytest.fixture(scope="module")
def document(tiny_model, tmp_path_factory):
    """Two targets over one model, two rounds."""
    path = tmp_path_factory.mktemp("bench") / "out.json"
    sizes = [
        "--rounds",
        "2",
        "--num-prompts",
        "3",
        "--input-len",
        "4-9",
        "--output-len",
        "3-5",
        "--seed",
        "7",
        "--log",
        "none",
    ]
    assert bench("serve", tiny_model, f"{tiny_model},engine=static,label=static", *sizes, "--request-rate", 200,
                 "--max-concurrency", 2, "--goodput", "ttft:100000", "--json", path) == 0  # fmt: skip
    return json.loads(path.read_text())


def test_the_document(document):
    assert (document["schema_version"], document["kind"], document["mode"]) == (1, "bench", "serve")
    names = ["tiny-llama", "static"]
    assert [target["name"] for target in document["targets"]] == names
    assert [target["engine"] for target in document["targets"]] == ["native", "static"]
    assert document["settings"]["request_rate"] == 200.0 and document["settings"]["input_len"] == "4-9"
    assert {"python", "torch", "cpu", "cores", "scheduling"} <= set(document["environment"])
    [case] = document["cases"]
    assert [result["target"] for result in case["results"]] == names and case["ratios"][0]["to"] == "tiny-llama"
    for result in case["results"]:
        metrics = result["summary"]["metrics"]
        assert metrics["completed"] == 6 and metrics["failed"] == 0
        assert metrics["request_goodput"] == metrics["request_throughput"] > 0
        assert result["summary"]["memory"]["rss_bytes"] > 50 * 2**20
        assert set(result["summary"]["energy"]) >= {"cpu", "gpu"} and len(result["rounds"]) == 2
        for one in result["rounds"]:
            assert [record["planned"] for record in one["records"]][-1] == pytest.approx(3 / 200, abs=1e-5)
            assert all(4 <= r["prompt_tokens"] <= 9 and 3 <= r["output_tokens"] <= 5 for r in one["records"])
    json.dumps(document, allow_nan=False)


def test_both_targets_got_the_same_requests(document):
    first, second = document["cases"][0]["results"]
    for one, other in zip(first["rounds"], second["rounds"]):
        for mine, theirs in zip(one["records"], other["records"]):
            assert [mine[k] for k in ("planned", "prompt_tokens", "output_tokens")] == [
                theirs[k] for k in ("planned", "prompt_tokens", "output_tokens")
            ]


def test_the_tables(document, capsys):
    from llmopt.optimizer.cli.bench_tables import show

    show(document)
    printed = capsys.readouterr().out
    for words in (
        "completed requests",
        "goodput",
        "time to first token",
        "median of the rounds",
        "not available",
        "static",
    ):
        assert words in printed
    assert "\x1b" not in printed
    sweep = {**document, "mode": "sweep"}
    sweep["cases"] = [{**document["cases"][0], "case": {"batch": 3, "context": 9}}]
    show(sweep)
    assert "TPOT (ms)" in capsys.readouterr().out


def test_targets_and_their_options():
    found = TargetName.parse("org/some-model,lm_head=int8,draft=ngram,kv_cache_memory=1024")
    assert found.place == "org/some-model" and not found.is_url
    assert found.options == {"lm_head": "int8", "draft": {"kind": "ngram"}, "kv_cache_memory": 1024}
    assert found.label == "some-model,lm_head=int8,draft=ngram,kv_cache_memory=1024"
    assert TargetName.parse("a,draft=none,label=x") == TargetName("a", "x", {"draft": False})
    assert [one.label for one in target_names(["a", "b/a", "a"])] == ["a", "a (2)", "a (3)"]
    with pytest.raises(UsageError, match="NAME=VALUE"):
        TargetName.parse("a,fast")
    with pytest.raises(UsageError, match="server takes no option"):
        TargetName.parse("http://h:1,engine=static")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no mode is named"),
        (["latency"], "Missing argument"),
        (["latency", "no-such-model"], "no-such-model"),
        (["serve", "MODEL", "--goodput", "tfft:3"], "Did you mean 'ttft'?"),
        (["serve", "MODEL", "--request-rate", "0"], "request rate"),
        (["latency", "MODEL", "--input-len", "9-3"], "--input-len"),
        (["sweep", "MODEL", "--batch", "1,x"], "--batch"),
        (["latency", "MODEL", "--json", "absent/out.json"], "folder does not exist"),
        (["latency", "MODEL", "--prompts", "absent.jsonl"], "absent.jsonl"),
        (["--techniques", "MODEL", "latency"], "unexpected extra argument"),
        (["--techniques", "no-such-model"], "no-such-model"),
    ],
)
def test_wrong_requests(tiny_model, capsys, arguments, words):
    assert bench(*[a.replace("MODEL", str(tiny_model)) for a in arguments]) == 2
    said = capsys.readouterr()
    assert words in said.err and "Traceback" not in said.err


def test_errors_of_the_process_are_those_of_the_run(tiny_model):
    """A request that is wrong, and a process that dies."""
    with ArtifactProcess(tiny_model, name="mine", options={"engine": "static"}) as target:
        with pytest.raises(UsageError, match="prompt 0: the prompt has"):
            target.run(Load([Request("word " * 600, 4)], [0.0]))
        scored = target.score([[5, 6, 7], [8, 9]])
        assert scored["num_tokens"] == 3 and scored["nll"] > 0
        target._process.kill()
        with pytest.raises(RunError, match="mine: the process that runs it ended"):
            target.score([[1, 2, 3]])


def test_lengths_that_do_not_fit_the_context():
    class Model:
        name = "mine"

        def about(self):
            return {"context_length": 100}

    check_room("serve", LoadSettings(input_len=Lengths(1, 90), output_len=Lengths(1, 10)), [Model()])
    for mode, load in (
        ("serve", LoadSettings(input_len=Lengths(1, 90), output_len=Lengths(1, 11))),
        ("serve", LoadSettings(input_len=Lengths(1, 90), output_len=Lengths(1, 5), prefix_len=6)),
        ("sweep", LoadSettings(contexts=(10, 99), output_len=Lengths(2, 2))),
    ):
        with pytest.raises(UsageError, match=r"mine: .* do not fit the context of 100"):
            check_room(mode, load, [Model()])


def test_an_option_that_loading_does_not_have(tiny_model):
    with pytest.raises(UsageError, match="no option 'no_such'"):
        Work({"model": str(tiny_model), "options": {"no_such": 1}, "sampling": {}})
