"""Metrics on recorded streams against values computed by hand; arrivals; lengths; objectives."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from llmopt.evaluation.bench.arrivals import arrival_times
from llmopt.evaluation.bench.lengths import Lengths
from llmopt.evaluation.bench.metrics import (
    acceptance,
    distribution,
    meets,
    parse_objectives,
    peak_concurrency,
    percentile,
    run_metrics,
)
from llmopt.evaluation.bench.records import RequestRecord
from llmopt.optimizer.errors import UsageError


def record(index, sent, chunks, end, prompt, error=None):
    times, tokens = [list(part) for part in zip(*chunks)] if chunks else ([], [])
    return RequestRecord(index, sent, sent, times, tokens, end, prompt, sum(tokens), "engine", "length", error)


STREAM = [
    record(0, 1.00, [(1.10, 1), (1.15, 1), (1.25, 2)], 1.25, 10),
    record(1, 1.05, [(1.35, 1)], 1.35, 20),
    record(2, 1.20, [(1.40, 3), (1.50, 3), (1.70, 3)], 1.72, 30),  # a closing piece without content comes at 1.72
    record(3, 1.30, [(1.31, 1)], None, 40, error="cut off"),
]
"""Three answers, of 4, 1 and 9 tokens, with chunks of several; and one that failed after a chunk. It took 2 seconds."""


def test_metrics_of_a_recorded_stream():
    found = run_metrics(STREAM, 2.0, {"ttft": 250.0, "tpot": 60.0})
    assert (found["completed"], found["failed"]) == (3, 1)
    assert (found["total_input"], found["total_output"]) == (60, 14)
    assert found["request_throughput"] == 1.5
    assert found["output_throughput"] == 7.0
    assert found["total_token_throughput"] == 37.0
    assert found["request_goodput"] == 1.0  # the second answer took 300 ms to its first token
    assert found["tokens_per_chunk"] == 2.0
    assert found["peak_concurrent_requests"] == 3
    ttft = {"mean": 200, "median": 200, "std": 100 * math.sqrt(2 / 3), "min": 100, "max": 300, "p90": 280, "p99": 298}
    tpot = {"mean": 45, "median": 45, "std": 5, "min": 40, "max": 50, "p90": 49, "p99": 49.9}  # 150/3 and 320/8
    itl = {"mean": 112.5, "median": 100, "std": math.sqrt(2968.75), "min": 50, "max": 200, "p90": 170, "p99": 197}
    e2el = {"mean": 1070 / 3, "median": 300, "std": math.sqrt(41266.6666667 / 3), "min": 250, "max": 520}
    assert found["ttft_ms"] == pytest.approx(ttft)
    assert found["tpot_ms"] == pytest.approx(tpot)
    assert found["itl_ms"] == pytest.approx(itl)
    assert found["e2el_ms"] == pytest.approx({**e2el, "p90": 476, "p99": 515.6})


def test_failed_requests_enter_no_average():
    one, failed = STREAM[0], STREAM[3]
    with_it, without = run_metrics([one, failed], 1.0), run_metrics([one], 1.0)
    assert with_it["failed"] == 1 and without["failed"] == 0
    assert {k: v for k, v in with_it.items() if k != "failed"} == {k: v for k, v in without.items() if k != "failed"}
    nothing = run_metrics([failed], 1.0)
    assert nothing["completed"] == 0 and nothing["ttft_ms"] is None and nothing["request_throughput"] == 0.0


def test_goodput_includes_the_limit_and_takes_one_token_as_tpot_zero():
    exact = record(0, 0.0, [(0.25, 1), (0.5, 1)], 0.5, 1)
    assert meets(exact, {"ttft": 250.0, "tpot": 250.0, "e2el": 500.0})
    assert not meets(exact, {"ttft": 249.0}) and not meets(exact, {"tpot": 249.0}) and not meets(exact, {"e2el": 499.0})
    assert meets(record(0, 0.0, [(0.25, 1)], 0.25, 1), {"tpot": 0.001})
    assert run_metrics([exact], 0.5)["request_goodput"] is None


def test_distribution_is_numpys():
    values = np.random.default_rng(0).gamma(2.0, 10.0, 137).tolist()
    for percent in (0, 1, 50, 90, 99, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))
    found = distribution(values)
    assert found["std"] == pytest.approx(np.std(values)) and found["median"] == pytest.approx(np.median(values))
    assert distribution([]) is None
    assert distribution([3.0]) == {"mean": 3, "median": 3, "std": 0, "min": 3, "max": 3, "p90": 3, "p99": 3}


def test_peak_concurrency_of_requests_that_meet():
    assert peak_concurrency([record(0, 0.0, [(1.0, 1)], 1.0, 1), record(1, 1.0, [(2.0, 1)], 2.0, 1)]) == 1
    assert peak_concurrency([]) == 0


def test_acceptance():
    found = acceptance(10, 40, 25)
    assert found["acceptance_rate"] == 0.625 and found["acceptance_length"] == 3.5
    assert acceptance(0, 0, 0) is None


def test_records_survive_json():
    for one in STREAM:
        assert RequestRecord.from_dict(one.as_dict()) == one


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 5.0, math.inf])
def test_arrivals_take_count_over_rate(burstiness):
    times = arrival_times(500, 20.0, burstiness, seed=3)
    assert times == arrival_times(500, 20.0, burstiness, seed=3)
    assert times == sorted(times) and times[0] > 0 and times[-1] == pytest.approx(25.0)
    if math.isfinite(burstiness):
        assert times != arrival_times(500, 20.0, burstiness, seed=4)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0, math.inf])
def test_gaps_vary_as_gamma_does(burstiness):
    times = arrival_times(20_000, 1.0, burstiness, seed=1)
    gaps = np.diff([0.0, *times])
    assert statistics.fmean(gaps) == pytest.approx(1.0)
    assert np.std(gaps) == pytest.approx(burstiness**-0.5, rel=0.05, abs=1e-9)
    if burstiness == 1.0:  # a Poisson process: the share of gaps above their mean is 1/e
        assert np.mean(gaps > 1.0) == pytest.approx(math.exp(-1), abs=0.02)


def test_all_at_once():
    assert arrival_times(3) == [0.0, 0.0, 0.0] and arrival_times(0, 5.0) == []


@pytest.mark.parametrize(("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (math.nan, 1.0)])
def test_wrong_arrivals(rate, burstiness):
    with pytest.raises(UsageError, match="positive"):
        arrival_times(2, rate, burstiness)


def test_objectives():
    assert parse_objectives(["ttft:200", "tpot:50.5"]) == {"ttft": 200.0, "tpot": 50.5}
    for wrong in ("tftt:200", "ttft", "ttft:x", "ttft:-1", "itl:5", "ttft:nan"):
        with pytest.raises(UsageError, match="--goodput"):
            parse_objectives([wrong])
    with pytest.raises(UsageError, match="twice"):
        parse_objectives(["ttft:1", "ttft:2"])


def test_lengths():
    assert Lengths.parse("128") == Lengths(128, 128) and str(Lengths.parse("16-256")) == "16-256"
    for wrong in ("", "0", "x", "9-3", "-5", "1-"):
        with pytest.raises(UsageError):
            Lengths.parse(wrong)
