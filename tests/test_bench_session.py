"""Targets side by side: turns, ratios with their spread, warnings, the machine's counters."""

from __future__ import annotations

import os
import threading
import time
from itertools import pairwise

import pytest
from llmopt.evaluation.bench import machine, session
from llmopt.evaluation.bench.in_process import InProcess
from llmopt.evaluation.bench.loads import LoadSettings, cases_of
from llmopt.evaluation.bench.prompts import Request
from llmopt.evaluation.bench.records import RequestRecord
from llmopt.evaluation.bench.run import Load, Result
from llmopt.evaluation.bench.session import Case, measure, plain, ratios, spread, warnings
from llmopt.optimizer.errors import RunError, UsageError
from llmopt.runtime.engine.engine import Engine
from llmopt.runtime.engine.fake_runner import FakeRunner, greedy_continuation
from llmopt.runtime.engine.loop import EngineLoop
from llmopt.runtime.engine.scheduler_config import SchedulerConfig


class Scripted:
    """A target whose tokens come every `step` seconds, times a factor for each round."""

    def __init__(self, name, step, log, factors=(1.0,), fails=()):
        self.name, self.step, self.log, self.factors, self.fails = name, step, log, factors, fails
        self.round = 0

    def run(self, load):
        self.log.append(self.name)
        step = self.step * self.factors[self.round % len(self.factors)]
        self.round += 1
        records = []
        for number, request in enumerate(load.requests):
            times = [step * (1 + i) for i in range(request.output_len)]
            one = RequestRecord(number, 0.0, 0.0, times, [1] * len(times), times[-1], 7, len(times), "engine", "length")
            if number in self.fails:
                one.fail("no luck")
            records.append(one)
        return Result(
            records,
            step * 10,
            {"num_drafts": 2, "num_draft_tokens": 8, "num_accepted_tokens": 4},
            {"rss_bytes": self.round, "device_bytes": None},
        )

    def pids(self):
        return []

    def about(self):
        return {}

    def close(self):
        pass


def load(number):
    return Load([Request("x", 5), Request("y", 3)], [0.0, 0.0])


def test_targets_take_turns_and_ratios_are_per_round():
    log = []
    slow, fast = Scripted("slow", 0.2, log, (1, 1, 2)), Scripted("fast", 0.1, log, (1, 1, 1))
    [case] = measure([slow, fast], [Case({"a": 1}, load)], rounds=3, warmup=0)
    assert log == ["slow", "fast", "fast", "slow", "slow", "fast"]
    assert [one["round"] for one in case["results"][0]["rounds"]] == [0, 1, 2]
    [ratio] = case["ratios"]
    assert (ratio["target"], ratio["to"], case["case"]) == ("fast", "slow", {"a": 1})
    throughput = ratio["metrics"]["output_throughput"]
    assert [throughput[name] for name in ("median", "min", "max")] == pytest.approx([2, 2, 4])
    assert throughput["rounds"] == pytest.approx([2, 2, 4])
    assert ratio["metrics"]["tpot_ms"]["rounds"] == pytest.approx([0.5, 0.5, 0.25])
    summary = case["results"][1]["summary"]
    assert summary["metrics"]["completed"] == 6 and summary["metrics"]["duration_s"] == pytest.approx(3.0)
    assert summary["metrics"]["output_throughput"] == pytest.approx(8.0)
    assert summary["metrics"]["peak_concurrent_requests"] == 2  # of one round, not of all at once
    assert summary["speculation"]["num_draft_tokens"] == 24 and summary["speculation"]["acceptance_rate"] == 0.5
    assert summary["memory"]["rss_bytes"] == 3


def test_failures_are_counted_and_said():
    log = []
    [case] = measure(
        [Scripted("a", 0.1, log), Scripted("b", 0.1, log, fails=(1,))], [Case({}, load)], rounds=2, warmup=0
    )
    assert case["results"][1]["summary"]["metrics"]["failed"] == 2
    assert case["results"][1]["summary"]["errors"] == {"no luck": 2}
    assert any("b: 2 of 4 requests failed, such as: no luck" in line for line in warnings([case]))
    with pytest.raises(RunError, match="first requests failed: no luck"):
        measure([Scripted("c", 0.1, log, fails=(0, 1))], [Case({}, load)], rounds=1)


def test_a_round_without_an_answer_gives_no_ratio():
    log = []
    base, other = Scripted("a", 0.1, log), Scripted("b", 0.1, log, fails=(0, 1))
    [case] = measure([base, other], [Case({}, load)], rounds=2, warmup=0)
    assert case["ratios"][0]["metrics"] == {}
    assert ratios(case["results"][:1]) == []
    assert spread([3.0, 1.0]) == {"median": 2.0, "min": 1.0, "max": 3.0, "rounds": [3.0, 1.0]}


def test_a_noisy_machine_is_warned_of():
    [case] = measure([Scripted("a", 0.1, [])], [Case({}, load)], rounds=1, warmup=0)
    summary = case["results"][0]["summary"]
    summary["foreign_cpu"] = 0.4
    assert "40%" in warnings([case])[0] and "quiet machine" in warnings([case])[0]
    summary["foreign_cpu"] = 0.01
    assert warnings([case]) == []
    summary["foreign_cpu"] = None
    assert "not known" in warnings([case])[0]
    assert isinstance(plain([case])[0]["results"][0]["rounds"][0]["records"][0], dict)


def test_foreign_share():
    assert machine.foreign_share((10.0, 4.0, 100.0), (16.0, 6.0, 110.0)) == 0.4
    assert machine.foreign_share((10.0, 4.0, 100.0), (10.0, 9.0, 110.0)) == 0.0
    assert machine.foreign_share(None, (1.0, 1.0, 1.0)) is None
    assert machine.foreign_share((1.0, 1.0, 1.0), (1.0, 1.0, 1.0)) is None


def test_own_cpu_time_is_not_foreign():
    before = machine.cpu_seconds([os.getpid()])
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    after = machine.cpu_seconds([os.getpid()])
    assert after[1] - before[1] >= 0.15 and machine.cpu_seconds([2**22 + 12345])[1] == 0.0


def rapl(folder, zones):
    for name, energy in zones.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "energy_uj").write_text(f"{energy}\n")
        (folder / name / "max_energy_range_uj").write_text("10000000\n")


def test_energy_of_packages_with_wrap_around(tmp_path):
    rapl(tmp_path, {"intel-rapl:0": 9_000_000, "intel-rapl:1": 1_000_000, "intel-rapl:0:0": 5})
    source = machine.Rapl(tmp_path)
    source.start()
    rapl(tmp_path, {"intel-rapl:0": 1_000_000, "intel-rapl:1": 3_500_000, "intel-rapl:0:0": 9_999_999})
    assert source.read() == (4.5, "")


def test_energy_that_is_not_there_is_said_to_be_so(tmp_path):
    source = machine.Rapl(tmp_path)
    source.start()
    assert source.read()[0] is None and source.read()[1].startswith("not available: no RAPL")
    found = machine.Meter().start().read()
    for name in ("cpu", "gpu"):
        assert found["energy"][name] is not None or found["energy"][f"{name}_note"].startswith("not available")
    memory = machine.process_memory([], "gone")
    assert memory["rss_bytes"] is None and memory["rss_note"] == "not available: gone"
    assert machine.process_memory([os.getpid()])["rss_bytes"] > 10 * 2**20


class FakeLLM:
    """An engine over `FakeRunner`, with what `InProcess` needs of an LLM."""

    context_length = 128
    tokenizer = None

    def __init__(self, **options):
        self.runner = FakeRunner(**options)
        scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
        self.loop = EngineLoop(Engine(self.runner, scheduler=scheduler))


@pytest.fixture
def llm():
    made = FakeLLM()
    yield made
    made.loop.close()


def requests(*pairs):
    return [Request(list(ids), count) for ids, count in pairs]


def test_the_engine_in_process(llm):
    result = InProcess(llm, keep=True).run(Load(requests(([1, 2], 5), ([3], 9), ([4, 5, 6], 1)), [0.0, 0.01, 0.02]))
    for one, (ids, count) in zip(result.records, [([1, 2], 5), ([3], 9), ([4, 5, 6], 1)]):
        assert one.completed and one.prompt_tokens == len(ids) and one.output_tokens == count == sum(one.chunk_tokens)
        assert one.token_ids == greedy_continuation(ids, count, 64)
        assert one.planned <= one.sent <= one.chunk_times[0] <= one.end <= result.duration
        assert one.chunk_times == sorted(one.chunk_times) and one.counted_by == "engine"
    assert result.speculation is None


def test_limit_of_concurrent_requests(llm):
    running = []
    execute = llm.runner.execute
    llm.runner.execute = lambda plan: running.append(len(plan.rows)) or execute(plan)
    result = InProcess(llm).run(Load(requests(*[([i], 6) for i in range(6)]), [0.0] * 6, 2))
    assert max(running) == 2 and all(one.completed for one in result.records)
    assert session.run_metrics(result.records, result.duration)["peak_concurrent_requests"] == 2
    alone = InProcess(llm).run(Load(requests(*[([i], 3) for i in range(3)]), [0.0] * 3, 1)).records
    assert all(one.end <= other.sent for one, other in pairwise(alone))


def test_a_request_that_fails_in_the_engine(llm):
    llm.runner.fault = lambda row: ValueError("bad row") if row.token_ids[0] == 13 else None
    result = InProcess(llm).run(Load(requests(([13], 4), ([14], 4)), [0.0, 0.0], 1))
    bad, good = result.records
    assert bad.error == "bad row" and not bad.completed and good.completed
    with pytest.raises(UsageError, match="prompt 0"):
        InProcess(llm).run(Load(requests(([1], 500)), [0.0]))
    assert threading.active_count() < 10


def test_cases_of_the_modes():
    class Prompts:
        def make(self, count, input_len, output_len, **more):
            return [Request("p", output_len.low, input_len.low)] * count

    settings = LoadSettings(num_prompts=4, request_rate=2.0, max_concurrency=3)
    [latency] = cases_of("latency", settings, Prompts())
    assert latency.make(0).max_concurrency == 1 and latency.make(0).arrivals == [0.0] * 4
    [throughput] = cases_of("throughput", settings, Prompts())
    assert throughput.make(0).max_concurrency is None and throughput.make(0).arrivals == [0.0] * 4
    [serve] = cases_of("serve", settings, Prompts())
    assert serve.make(1).max_concurrency == 3 and serve.make(1).arrivals[-1] == pytest.approx(2.0)
    assert serve.make(1).arrivals == serve.make(1).arrivals != serve.make(2).arrivals
    sweep = cases_of("sweep", LoadSettings(batches=(1, 2), contexts=(8, 16)), Prompts())
    assert [case.about for case in sweep] == [{"batch": b, "context": c} for c in (8, 16) for b in (1, 2)]
    assert len(sweep[1].make(0).requests) == 2 and sweep[2].make(0).requests[0].prompt_len == 16
    with pytest.raises(UsageError, match="request rate"):
        cases_of("serve", LoadSettings(request_rate=0.0), Prompts())
