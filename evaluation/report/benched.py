"""The page of a benchmark, from the JSON object that `llmopt bench` writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import records
from .bars import bars
from .page import Cell, Chart, Column, Details, Page, Section, Table, Text
from .svg import draw
from .values import ABSENT, number, percent, short, size

RATES = {
    "output_throughput": "output tokens a second",
    "total_token_throughput": "tokens a second, prompts counted",
    "request_throughput": "requests a second",
    "request_goodput": "requests a second within the objectives",
}
LATENCIES = {
    "ttft_ms": "time to first token, ms",
    "tpot_ms": "time per output token, ms",
    "itl_ms": "inter-token latency, ms",
    "e2el_ms": "end-to-end latency, ms",
}
STATISTICS = ("mean", "median", "p90", "p99", "std", "min", "max")
DRAWN = ("output_throughput", "ttft_ms", "tpot_ms")


def page(data: dict[str, Any]) -> Page:
    """data: see docs/bench.md. A document without `cases` of that form is drawn as plain tables."""
    cases = data.get("cases")
    if not isinstance(cases, list) or not all(isinstance(case, dict) and "results" in case for case in cases):
        return _other(data)
    warnings = [Text(str(text), "warn") for text in data.get("warnings") or []]
    sections = [Section("Warnings", warnings or [Text("None.", "good")])]
    for number_, case in enumerate(cases):
        sections.append(_case(case, f"Case {number_ + 1}" if len(cases) > 1 else "Figures"))
    sections.append(Section("Targets", records.blocks("targets", data.get("targets") or [])))
    known = [
        (title, data.get(key)) for title, key in (("Settings", "settings"), ("Versions and machine", "environment"))
    ]
    sections.append(
        Section("Provenance", [records.facts(title, part) for title, part in known if isinstance(part, dict)])
    )
    lines = [f"measured {data.get('created', ABSENT)} by llmopt {data.get('llmopt_version', ABSENT)}"]
    return Page(f"Benchmark: {data.get('mode', ABSENT)}", sections, lines, "llmopt benchmark")


def _other(data: dict[str, Any]) -> Page:
    """Plain tables of everything; where `rows` have a `speedup`, their picture first."""
    found = records.page(data)
    rows = [row for row in data.get("rows") or [] if isinstance(row, dict) and isinstance(row.get("speedup"), dict)]
    drawn = [
        {
            "label": str(row.get("title"))[:60],
            "value": row["speedup"]["median"],
            "low": row["speedup"].get("min"),
            "high": row["speedup"].get("max"),
            "shown": f"{short(row['speedup']['median'], 3)}×",
            "tip": f"{row.get('title')}\n{short(row['speedup']['median'], 3)} times as fast",
        }
        for row in rows
        if number(row["speedup"].get("median")) is not None
    ]
    if drawn:
        alt = "Bars of how many times as fast each is: " + ", ".join(f"{row['label']} {row['shown']}" for row in drawn)
        table = Table(
            "Speed-ups", [Column("row"), Column("times as fast", True)], [[row["label"], row["shown"]] for row in drawn]
        )
        chart = Chart("Speed-up", draw(bars(drawn, "times as fast as the first row", zero_line=1), alt), alt, table)
        found.sections.insert(0, Section("Speed-up", [chart]))
    return found


def _case(case: dict[str, Any], title: str) -> Section:
    results = case.get("results") or []
    about = ", ".join(f"{str(key).replace('_', ' ')} {short(value)}" for key, value in (case.get("case") or {}).items()
                      if not isinstance(value, (dict, list)))  # fmt: skip
    blocks: list[Any] = []
    if len(results) > 1:
        blocks += [chart for key in DRAWN if (chart := _bars(results, key))]
    blocks += [_table(results), _latencies(results)]
    ratios = case.get("ratios") or []
    if ratios:
        blocks.append(_ratios(ratios))
    rounds = [_round(result, one) for result in results for one in result.get("rounds") or []]
    if rounds:
        blocks.append(
            Details(
                "Every round",
                Table(
                    "Rounds",
                    [
                        Column("target", code=True),
                        Column("round", True),
                        *(Column(label, True) for label in (*RATES.values(), *LATENCIES.values())),
                        Column("other processes' CPU", True),
                    ],
                    rounds,
                ),
            )
        )
    return Section(title, blocks, about)


def _value(metrics: dict[str, Any], key: str) -> float | None:
    """A number, or the median of a distribution."""
    found = metrics.get(key)
    return number(found.get("median") if isinstance(found, dict) else found)


def _bars(results: Sequence[dict[str, Any]], key: str) -> Chart | None:
    """Bars of the targets' figure, with the range of its rounds; None where no target has it."""
    label = {**RATES, **LATENCIES}[key] + (" (median)" if key in LATENCIES else "")
    rows: list[dict[str, Any]] = []
    for result in results:
        value = _value((result.get("summary") or {}).get("metrics") or {}, key)
        if value is None:
            continue
        rounds = [
            found for one in result.get("rounds") or [] if (found := _value(one.get("metrics") or {}, key)) is not None
        ]
        spread = {"low": min(rounds), "high": max(rounds)} if len(rounds) > 1 else {}
        tip = f"{result.get('target')}\n{short(value)} {label}" + (
            f"\nrounds {short(min(rounds))} to {short(max(rounds))}" if spread else ""
        )
        rows.append(
            {"label": str(result.get("target"))[:40], "value": value, "shown": short(value), "tip": tip, **spread}
        )
    if not rows:
        return None
    alt = f"Bars of {label}: " + ", ".join(f"{row['label']} {row['shown']}" for row in rows) + "."
    columns = [Column("target", code=True), Column(label, True), Column("rounds")]
    table_rows: list[list[str | Cell]] = [
        [row["label"], row["shown"], f"{short(row['low'])} to {short(row['high'])}" if "low" in row else ABSENT]
        for row in rows
    ]
    note = "The line over a bar spans its rounds." if any("low" in row for row in rows) else ""
    return Chart(
        label[:1].upper() + label[1:], draw(bars(rows, label), alt), alt, Table(label, columns, table_rows), note
    )


def _table(results: Sequence[dict[str, Any]]) -> Table:
    """A row a figure, a column a target."""
    summaries = [result.get("summary") or {} for result in results]
    metrics = [summary.get("metrics") or {} for summary in summaries]
    rows: list[list[str | Cell]] = [["completed requests", *(short(each.get("completed")) for each in metrics)]]
    if any(each.get("failed") for each in metrics):
        rows.append(
            [
                "failed requests",
                *(Cell(short(each.get("failed")), "bad" if each.get("failed") else "") for each in metrics),
            ]
        )
    rows += [
        [label, *(short(each.get(key)) for each in metrics)]
        for key, label in RATES.items()
        if any(each.get(key) is not None for each in metrics)
    ]
    rows += _machine(summaries)
    columns = [Column("figure"), *(Column(str(result.get("target")), True) for result in results)]
    return Table("Figures over all rounds", columns, rows)


def _latencies(results: Sequence[dict[str, Any]]) -> Table:
    """A row a latency and target, a column a statistic."""
    rows: list[list[str | Cell]] = []
    for key, label in LATENCIES.items():
        for result in results:
            found = ((result.get("summary") or {}).get("metrics") or {}).get(key) or {}
            rows.append([label, str(result.get("target")), *(short(found.get(name)) for name in STATISTICS)])
    columns = [Column("latency"), Column("target", code=True), *(Column(name, True) for name in STATISTICS)]
    return Table("Latencies over all rounds", columns, rows)


def _machine(summaries: Sequence[dict[str, Any]]) -> list[list[str | Cell]]:
    memory = [summary.get("memory") or {} for summary in summaries]
    energy = [summary.get("energy") or {} for summary in summaries]
    drafts = [summary.get("speculation") or {} for summary in summaries]
    rows: list[list[str | Cell]] = [
        ["peak resident memory", *(size(each.get("rss_bytes")) for each in memory)],
        ["peak device memory", *(size(each.get("device_bytes")) for each in memory)],
        ["energy of the CPU, J an output token", *(short(each.get("cpu_per_output_token")) for each in energy)],
        ["energy of the GPU, J an output token", *(short(each.get("gpu_per_output_token")) for each in energy)],
        ["drafted tokens accepted", *(percent(each.get("acceptance_rate")) for each in drafts)],
        ["CPU share of other processes", *(percent(summary.get("foreign_cpu")) for summary in summaries)],
    ]
    return [row for row in rows if any(str(cell) != ABSENT for cell in row[1:])]


def _ratios(ratios: Sequence[dict[str, Any]]) -> Table:
    names = {**RATES, **LATENCIES}
    rows: list[list[str | Cell]] = [
        [str(each.get("target")), str(each.get("to")), names.get(key, key), f"{short(found.get('median'), 3)}×",
         f"{short(found.get('min'), 3)} to {short(found.get('max'), 3)}"]
        for each in ratios
        for key, found in (each.get("metrics") or {}).items()
    ]  # fmt: skip
    columns = [
        Column("target", code=True),
        Column("over", code=True),
        Column("figure"),
        Column("ratio, median of rounds", True),
        Column("range", True),
    ]
    return Table("Ratios, round by round", columns, rows)


def _round(result: dict[str, Any], one: dict[str, Any]) -> list[str | Cell]:
    metrics = one.get("metrics") or {}
    return [
        str(result.get("target")),
        short(one.get("round")),
        *(short(_value(metrics, key)) for key in (*RATES, *LATENCIES)),
        percent(one.get("foreign_cpu")),
    ]
