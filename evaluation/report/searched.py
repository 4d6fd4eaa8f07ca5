"""The page of a search over recipes: the trial that was chosen, pictures of all of them, and a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import search_charts
from .page import Cell, Chart, Code, Column, Page, Section, Table, Text, Tile, Tiles, Tone
from .svg import draw
from .values import ABSENT, BY_UNIT, number, seconds

BUSY = 0.2
"""Share of the machine that others used, from which on a measured speed is doubted."""
ENDS = {
    "budget": "the budget had no room for another trial",
    "trials": "as many trials had run as were asked for",
    "space": "every recipe of the space had been tried",
    "idle": "nothing was proposed any more that could meet the target",
    "interrupted": "it was interrupted",
}
QUALITY = ("mean_kl", "perplexity_increase", "top1_agreement", "perplexity", "median_kl", "p99_kl", "max_kl")
SPEED = ("decode_speedup", "decode_tokens_per_second", "prefill_speedup", "prefill_tokens_per_second")
BYTES = ("size", "memory", "folder_size", "peak_rss")
STATES: dict[str, Tone] = {"best": "good", "meets": "good", "misses": "bad", "failed": "bad", "refused": "warn"}


def page(data: dict[str, Any]) -> Page:
    """data: what `llmopt tune --json` prints; docs/tune.md describes it."""
    trials, target = data["trials"], data["target"]
    best = next((trial for trial in trials if trial["number"] == data.get("best")), None)
    counts = {
        name: sum(trial["state"] == name for trial in trials) for name in ("complete", "pruned", "refused", "failed")
    }
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "none"
    lines = [
        f"Target: {target['text']}",
        f"{len(trials)} trials ({told}) in {seconds(data.get('seconds'))}; the search ended as "
        f"{ENDS.get(data.get('ended') or '', ABSENT)}.",
        f"Source: {data['model'].get('id', ABSENT)}; space: {data.get('space', ABSENT)}; seed {data.get('seed')}",
    ]
    meet = sum(trial["verdict"] in ("best", "meets") for trial in trials)
    verdict = f"{meet} of {counts['complete']} measured trials meet the target" if meet else "No trial met the target"
    sections = [Section("The best trial", _best(data, best))]
    sections.append(Section("Pictures", _charts(data)))
    intro = (
        "Pruned trials were given up early, for the reason that stands there; figures after ≈ are from a plan or from "
        "a few windows. Refused ones are no valid recipe for this model."
    )
    sections.append(Section("Trials", [_table(data)], intro))
    if data.get("recipe"):
        sections.append(Section("Recipe", [Code("best.yaml, which llmopt optimize runs unchanged", data["recipe"])]))
    return Page("Search over recipes", sections, lines, "llmopt tune", verdict, "good" if meet else "bad")


def _shown(data: dict[str, Any], name: str, value: Any) -> str:
    return BY_UNIT[data["metrics"][name]["unit"]](value)


def _named(data: dict[str, Any]) -> list[str]:
    """The metrics that the target names, the one that decides first."""
    return list(dict.fromkeys([data["target"]["metric"], *(limit["metric"] for limit in data["target"]["limits"])]))


def _title(name: str) -> str:
    return name.replace("_", " ")


def _values(data: dict[str, Any], trial: dict[str, Any]) -> str:
    return ", ".join(f"{data['titles'].get(name, name)} {value}" for name, value in trial["values"].items())


def _best(data: dict[str, Any], best: dict[str, Any] | None) -> list[Any]:
    if best is None:
        return [Text("No trial met the target. The table below says what each of them misses.", "bad")]
    source = data.get("source") or {}
    names = [*_named(data), *(name for name in ("size", "mean_kl", "top1_agreement", "perplexity", "decode_speedup"))]
    tiles = [
        Tile(_title(name), _shown(data, name, best["figures"][name]), _before(data, name, source), tone="")
        for name in dict.fromkeys(names)
        if number(best["figures"].get(name)) is not None
    ]
    rows: list[list[str | Cell]] = [
        [data["titles"].get(name, name), str(value)] for name, value in best["values"].items()
    ]
    columns = [Column("option", code=True), Column("value", code=True)]
    blocks: list[Any] = [Tiles(tiles), Table(f"What trial {best['number']} drew", columns, rows)]
    share = number(best.get("foreign_cpu"))
    if share is not None and share > BUSY:
        blocks.append(Text(f"Its speed was measured while other processes used {share:.0%} of the machine.", "warn"))
    return blocks


def _before(data: dict[str, Any], name: str, source: dict[str, Any]) -> str:
    value = number(source.get(name))
    return "" if value is None else f"source {_shown(data, name, value)}"


def _charts(data: dict[str, Any]) -> list[Any]:
    """Size against quality, speed against quality, and size against speed, as far as trials have the figures."""
    named = _named(data)
    measured = [trial for trial in data["trials"] if trial["state"] == "complete"]

    def first(names: Sequence[str]) -> str:
        return next((name for name in named if name in names), names[0])

    size, quality, speed = first(BYTES), first(QUALITY), first(SPEED)
    blocks: list[Any] = []
    for across, up in ((size, quality), (speed, quality), (size, speed)):
        points = [t for t in measured if all(number(t["figures"].get(name)) is not None for name in (across, up))]
        if points:
            blocks.append(_chart(data, points, across, up))
    if not blocks:
        return [Text("No trial was measured, so there is no picture.")]
    if not any(speed in trial["figures"] for trial in measured):
        blocks.append(Text("Speed was not measured: the target names none."))
    return blocks


def _chart(data: dict[str, Any], trials: Sequence[dict[str, Any]], across: str, up: str) -> Chart:
    kinds = {"best": search_charts.KINDS[0], "meets": search_charts.KINDS[1], "misses": search_charts.KINDS[2]}
    titles = _title(across), _title(up)
    points = [
        {
            "x": _unit(data, across, trial["figures"][across]),
            "y": _unit(data, up, trial["figures"][up]),
            "kind": kinds[trial["verdict"]],
            "name": f"trial {trial['number']}" if trial["verdict"] == "best" else "",
            "tip": _tip(data, trial, across, up),
        }
        for trial in trials
    ]
    origin = [_origin(data, name) for name in (across, up)]
    if None not in origin:
        tip = f"source\n{titles[0]}: {_shown(data, across, origin[0])}\n{titles[1]}: {_shown(data, up, origin[1])}"
        x, y = (_unit(data, name, value) for name, value in zip((across, up), origin))
        points.append({"x": x, "y": y, "kind": search_charts.KINDS[3], "name": "source", "tip": tip})
    limits = [
        [_unit(data, name, limit["limit"]) for limit in data["target"]["limits"] if limit["metric"] == name]
        for name in (across, up)
    ]
    more = (data["metrics"][across]["more"], data["metrics"][up]["more"])
    heads = tuple(f"{title}, MiB" if _bytes(data, name) else title for name, title in zip((across, up), titles))
    spec = search_charts.scatter(points, heads, more, (limits[0], limits[1]))  # type: ignore[arg-type]
    best = next((t for t in trials if t["verdict"] == "best"), None)
    chosen = f" Chosen: trial {best['number']}, {_tip(data, best, across, up, ', ')}." if best else ""
    alt = f"{titles[1]} against {titles[0]} of {len(trials)} trials.{chosen}"
    columns = [Column("trial"), Column(titles[0], True), Column(titles[1], True), Column("verdict")]
    rows: list[list[str | Cell]] = [
        [str(t["number"]), *(_shown(data, name, t["figures"][name]) for name in (across, up)), t["verdict"]]
        for t in trials
    ]
    better = f"Better is {'right' if more[0] else 'left'} and {'up' if more[1] else 'down'}."
    note = f"{better} The line joins the trials that no other beats in both. Dashed: limits of the target."
    return Chart(f"{titles[1]} against {titles[0]}", draw(spec, alt), alt, Table("Points", columns, rows), note)


def _bytes(data: dict[str, Any], name: str) -> bool:
    return data["metrics"][name]["unit"] == "bytes"


def _unit(data: dict[str, Any], name: str, value: Any) -> float:
    return value / 2**20 if _bytes(data, name) else value


def _origin(data: dict[str, Any], name: str) -> float | None:
    """The source's own figure."""
    if name.endswith("_kl") or name == "perplexity_increase":
        return 0.0
    if name == "top1_agreement" or data["metrics"][name]["unit"] == "ratio":
        return 1.0
    return number((data.get("source") or {}).get(name))


def _tip(data: dict[str, Any], trial: dict[str, Any], across: str, up: str, joint: str = "\n") -> str:
    figures = [f"{_title(name)}: {_shown(data, name, trial['figures'][name])}" for name in (across, up)]
    head = [f"trial {trial['number']}", _values(data, trial)] if joint == "\n" else []
    missed = [f"misses {', '.join(trial['misses'])}"] if trial["misses"] else []
    return joint.join([*head, *figures, *missed])


def _table(data: dict[str, Any]) -> Table:
    """Every trial, with what it drew, its figures and why it went no further."""
    trials = data["trials"]
    drawn = list(dict.fromkeys(name for trial in trials for name in trial["values"]))
    always = ("size", "mean_kl", "top1_agreement", "decode_speedup")
    known = {name for trial in trials for name in (*trial["figures"], *trial["proxy"])}
    shown = [name for name in dict.fromkeys([*_named(data), *always]) if name in known]
    columns = [Column("trial"), Column("verdict"), Column("why", wrap=True)]
    columns += [Column(data["titles"].get(name, name), code=True) for name in drawn]
    columns += [*(Column(_title(name), True) for name in shown), Column("time", True)]
    rows: list[list[str | Cell]] = [
        [
            str(trial["number"]),
            Cell(trial["verdict"], STATES.get(trial["verdict"], "")),
            trial["reason"] or "; ".join(f"misses {limit}" for limit in trial["misses"]),
            *(str(trial["values"].get(name, ABSENT)) for name in drawn),
            *(_figure(data, trial, name) for name in shown),
            seconds(trial["seconds"]),
        ]
        for trial in trials
    ]
    return Table("Trials in the order in which they were tried", columns, rows)


def _figure(data: dict[str, Any], trial: dict[str, Any], name: str) -> str:
    """A measured figure; else what the cheap checks found, with ≈."""
    if name in trial["figures"] or trial["state"] == "complete":
        return _shown(data, name, trial["figures"].get(name))
    return f"≈{_shown(data, name, trial['proxy'][name])}" if name in trial["proxy"] else ABSENT
