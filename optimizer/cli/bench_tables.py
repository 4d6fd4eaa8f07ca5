"""Tables of `llmopt bench`: a column a target, a row a figure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Summary = dict[str, Any]

LATENCIES = {
    "ttft_ms": "time to first token (ms)",
    "tpot_ms": "time per output token (ms)",
    "itl_ms": "inter-token latency (ms)",
    "e2el_ms": "end-to-end latency (ms)",
}
STATISTICS = ("mean", "median", "p90", "p99", "std")


def show(data: dict[str, Any]) -> None:
    """Everything that a person needs to see of a run; the rest is in the JSON."""
    from .tables import console

    out = console()
    for target in data["targets"]:
        out.print(_about(target), highlight=False, markup=False)
        for note in target.get("notes", ()):
            if note["kind"] == "fallback":
                out.print(f"  fallback: {note['message']}", style="yellow", highlight=False, markup=False)
    if data["mode"] == "sweep":
        out.print(sweep_table(data))
    else:
        for case in data["cases"]:
            out.print(case_table(case))
    for case in data["cases"]:
        if case["ratios"]:
            out.print(ratio_table(case))
    rounds = data["settings"]["rounds"]
    out.print(
        f"{rounds} {'round' if rounds == 1 else 'rounds'}, targets in turn; figures pool all of them", style="dim"
    )
    for warning in data["warnings"]:
        out.print(f"warning: {warning}", style="yellow", highlight=False, markup=False)


def _about(target: dict[str, Any]) -> str:
    if target["kind"] == "server":
        return f"{target['name']}: server at {target['url']}, model {target['model']}, {target['endpoint']}"
    runner = f", {target['runner']}" if target["runner"] else ""
    how = f"{target['engine']} engine{runner}, {target['threads']} threads"
    return f"{target['name']}: {how}, loaded in {target['load_s']} s"


def case_table(case: dict[str, Any]) -> Any:
    """Requests, throughputs, latencies, memory, energy."""
    from rich.table import Table

    summaries = [result["summary"] for result in case["results"]]
    table = Table()
    table.add_column("")
    for result in case["results"]:
        table.add_column(result["target"], justify="right", overflow="fold")
    for label, cell in _rows():
        cells = [cell(summary) for summary in summaries]
        if any(cells):
            table.add_row(label, *cells)
    for name, label in LATENCIES.items():
        table.add_section()
        table.add_row(label)
        for statistic in STATISTICS:
            table.add_row(f"  {statistic}", *(_statistic(summary, name, statistic) for summary in summaries))
    table.add_section()
    for label, cell in _machine_rows():
        table.add_row(label, *(cell(summary) for summary in summaries))
    return table


def _rows() -> list[tuple[str, Callable[[Summary], str]]]:
    def metric(name: str, form: str) -> Callable[[Summary], str]:
        return lambda summary: "" if summary["metrics"][name] is None else format(summary["metrics"][name], form)

    def drafts(name: str, form: str) -> Callable[[Summary], str]:
        return lambda summary: format(summary["speculation"][name], form) if summary["speculation"] else ""

    return [
        ("completed requests", metric("completed", ",")),
        ("failed requests", lambda s: f"{s['metrics']['failed']:,}" if s["metrics"]["failed"] else ""),
        ("duration (s)", metric("duration_s", ".2f")),
        ("input tokens", metric("total_input", ",")),
        ("output tokens", metric("total_output", ",")),
        ("requests/s", metric("request_throughput", ".2f")),
        ("goodput (requests/s)", metric("request_goodput", ".2f")),
        ("output tokens/s", metric("output_throughput", ",.1f")),
        ("total tokens/s", metric("total_token_throughput", ",.1f")),
        ("peak concurrent requests", metric("peak_concurrent_requests", ",")),
        ("tokens a chunk", metric("tokens_per_chunk", ".2f")),
        ("acceptance rate of drafts", drafts("acceptance_rate", ".1%")),
    ]


def _machine_rows() -> list[tuple[str, Callable[[Summary], str]]]:
    return [
        ("peak resident memory", lambda s: _bytes(s["memory"], "rss")),
        ("peak device memory", lambda s: _bytes(s["memory"], "device")),
        ("energy, CPU (J an output token)", lambda s: _joules(s["energy"], "cpu")),
        ("energy, GPU (J an output token)", lambda s: _joules(s["energy"], "gpu")),
        (
            "other processes' CPU share",
            lambda s: "not available" if s["foreign_cpu"] is None else f"{s['foreign_cpu']:.1%}",
        ),
    ]


def _statistic(summary: Summary, name: str, statistic: str) -> str:
    found = summary["metrics"][name]
    return "–" if found is None else f"{found[statistic]:,.2f}"


def _bytes(memory: dict[str, Any], kind: str) -> str:
    from .tables import mib

    count = memory.get(f"{kind}_bytes")
    return "not available" if count is None else mib(count)


def _joules(energy: dict[str, Any], kind: str) -> str:
    per_token = energy.get(f"{kind}_per_output_token")
    return "not available" if per_token is None else f"{per_token:.3f}"


def sweep_table(data: dict[str, Any]) -> Any:
    """A row a cell and target."""
    from rich.table import Table

    table = Table()
    for column in ("context", "batch", "target", "TTFT (ms)", "TPOT (ms)", "output tok/s", "total tok/s", "failed"):
        table.add_column(column, justify="left" if column == "target" else "right")
    for case in data["cases"]:
        for number, result in enumerate(case["results"]):
            summary = result["summary"]
            metrics = summary["metrics"]
            where = (f"{case['case']['context']:,}", str(case["case"]["batch"])) if number == 0 else ("", "")
            table.add_row(
                *where,
                result["target"],
                _statistic(summary, "ttft_ms", "median"),
                _statistic(summary, "tpot_ms", "median"),
                f"{metrics['output_throughput']:,.1f}",
                f"{metrics['total_token_throughput']:,.1f}",
                str(metrics["failed"] or ""),
            )
        table.add_section()
    return table


def ratio_table(case: dict[str, Any]) -> Any:
    """Targets over the first: median of the rounds' ratios, and their range."""
    from rich.table import Table

    base = case["ratios"][0]["to"]
    named = ", ".join(f"{key} {value}" for key, value in case["case"].items())
    table = Table(
        title=f"over {base}{f' ({named})' if named else ''}: median of the rounds' ratios (range)", title_justify="left"
    )
    table.add_column("")
    for ratio in case["ratios"]:
        table.add_column(ratio["target"], justify="right", overflow="fold")
    names = {"output_throughput": "output tokens/s", "total_token_throughput": "total tokens/s"}
    names |= {"request_throughput": "requests/s"} | {name: f"median {text}" for name, text in LATENCIES.items()}
    for name, label in names.items():
        cells = [_ratio(ratio["metrics"].get(name)) for ratio in case["ratios"]]
        table.add_row(label.removesuffix(" (ms)"), *cells)
    return table


def _ratio(found: dict[str, Any] | None) -> str:
    return "–" if found is None else f"{found['median']:.2f}× ({found['min']:.2f}–{found['max']:.2f})"
