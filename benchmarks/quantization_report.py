"""The table of `quantization.py` from its JSON: `python benchmarks/quantization_report.py out.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def markdown(result: dict[str, Any]) -> str:
    """One line a row, sorted by grid as first met, then by KL; then what failed, versions and commands."""
    windows = sorted(
        {w for row in result["rows"].values() for w in row.get("quality", {})}, key=lambda w: (w == "0", w)
    )
    lines = []
    for which in windows:
        measured = {k: r for k, r in result["rows"].items() if which in r.get("quality", {})}
        tokens = next(iter(measured.values()))["quality"][which]["tokens"]
        title = "the whole text" if which == "0" else f"the first {which} windows"
        lines += [f"{title}, {tokens:,} tokens scored:", "",
                  "| grid | method | perplexity | mean KL | p99 KL | top-1 | MB | quantize s | CPU s | peak RSS MB |",
                  "|---|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
        grids = list(dict.fromkeys(row.get("grid", "") for row in measured.values()))
        for grid in grids:
            own = [row for row in measured.values() if row.get("grid", "") == grid]
            lines += [line(row, which) for row in sorted(own, key=lambda row: row["quality"][which]["mean_kl"])]
        lines.append("")
    lines += [f"- {key}: failed, {row['skipped']}" for key, row in result["rows"].items() if "skipped" in row]
    versions = list(dict.fromkeys(row["version"] for row in result["rows"].values() if "version" in row))
    about = result["about"]
    machine = f"{about['cpu']}, {about['cores']} cores, Python {about['python']}, {about['date']}"
    lines += ["", f"Versions: {', '.join(versions)}. {machine}. Commands:", ""]
    lines += [*(f"    {command}" for command in dict.fromkeys(about["commands"])), ""]
    return "\n".join(lines)


def line(row: dict[str, Any], which: str) -> str:
    quality = row["quality"][which]
    cells = [row.get("grid", ""), row["name"], f"{quality['perplexity']:.3f}", f"{quality['mean_kl']:.4f}",
             f"{quality['p99_kl']:.3f}", f"{quality['top1']:.3f}"]  # fmt: skip
    for key, scale in (("bytes", 1e-6), ("quantize_s", 1), ("cpu_s", 1), ("peak_mb", 1)):
        value = row.get(key, 0) * scale
        cells.append(f"{value:,.0f}" if value else "")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(markdown(json.loads(Path(sys.argv[1]).read_text())))
