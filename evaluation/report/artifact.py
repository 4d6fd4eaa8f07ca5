"""The page of an artifact, from its manifest as a dict (llmopt.json). Parts that an older one lacks are said to be."""

from __future__ import annotations

from typing import Any

import yaml

from . import charts, timeline_chart
from .examples import pairs
from .layer_section import layer_section
from .page import Cell, Chart, Code, Column, Details, Missing, Page, Section, Table, Text, Tile, Tiles, Tone, shorten
from .svg import draw
from .values import ABSENT, number, percent, ratio, seconds, short, size, times

FIGURES = (
    ("size on disk", "disk_bytes", size, False),
    ("weights in memory", "memory_bytes", size, False),
    ("peak memory", "peak_rss_bytes", size, False),
    ("perplexity", "perplexity", short, False),
    ("decode speed", "decode_tokens_per_second", lambda value: f"{short(value)} tok/s", True),
    ("prefill speed", "prefill_tokens_per_second", lambda value: f"{short(value)} tok/s", True),
)
"""Label, key in `measured`, how it is written, whether more is better."""
BUSY = 0.2
MOST_NOTES = 300


def page(data: dict[str, Any]) -> Page:
    """The whole page; `data` is a manifest."""
    source, recipe = _part(data, "source"), _part(data, "recipe")
    gates = data.get("gates") or []
    missed = [gate for gate in gates if not gate.get("passed")]
    verdict, tone = _verdict(gates, missed)
    revision = f" at {source['revision']}" if source.get("revision") else ""
    lines = [
        f"{source.get('id', 'unknown source')}{revision}, by recipe {recipe.get('name', ABSENT)}",
        f"made {data.get('created', ABSENT)} by llmopt {data.get('llmopt_version', ABSENT)}, "
        f"seed {data.get('seed', ABSENT)}",
    ]
    sections = [
        _headline(data),
        _quality(data),
        layer_section(data.get("passes") or []),
        _examples(data),
        _run(data),
        _fell_back(data),
        _recipe(recipe),
        _provenance(data),
    ]
    title = f"{str(source.get('id', 'artifact')).rstrip('/').rpartition('/')[2]} → {recipe.get('name', 'artifact')}"
    return Page(title, sections, lines, "llmopt report of an artifact", verdict, tone)


def _part(data: dict[str, Any], key: str) -> dict[str, Any]:
    found = data.get(key)
    return found if isinstance(found, dict) else {}


def _verdict(gates: list[dict[str, Any]], missed: list[dict[str, Any]]) -> tuple[str, Tone]:
    if not gates:
        return "No gates were set", "warn"
    if missed:
        return (
            f"{len(missed)} of {len(gates)} gates missed: {', '.join(str(gate.get('name')) for gate in missed)}",
            "bad",
        )
    return f"All {len(gates)} gates hold", "good"


def _headline(data: dict[str, Any]) -> Section:
    measured = _part(data, "measured")
    before, after, divergence = (_part(measured, key) for key in ("before", "after", "divergence"))
    tiles, rows, absent = [], [], []
    for label, key, show, more in FIGURES:
        value = ratio(after.get(key), before.get(key))
        if value is None:
            absent.append(label)
            continue
        better = value >= 1 if more else value <= 1
        tone: Tone = "good" if better else "bad"
        change = percent(value - 1, 2, signed=True) if key == "perplexity" else times(value)
        tiles.append(Tile(label, show(after[key]), f"from {show(before[key])}", change, tone))
        tip = f"{label}\nsource {show(before[key])}\nartifact {show(after[key])}"
        rows.append({"label": label, "ratio": value, "better": better, "tip": tip, "key": key})
    if number(divergence.get("mean_kl")) is not None:
        tiles.append(Tile("mean KL divergence", short(divergence["mean_kl"]), "nats a token"))
    if number(divergence.get("top1_agreement")) is not None:
        tiles.append(Tile("same top token", percent(divergence["top1_agreement"]), "of positions"))
    blocks: list[Any] = [Tiles(tiles)] if tiles else []
    if rows:
        blocks.append(_relative(rows, before, after))
    if absent:
        blocks.append(
            Missing(", ".join(absent), "It was not measured in this run (evaluate.speed: false measures no speed).")
        )
    busy = max((number(part.get("foreign_cpu")) or 0.0 for part in (before, after)), default=0.0)
    if busy > BUSY:
        blocks.append(Text(f"Other processes used {percent(busy, 0)} of the machine while speed was measured, so the "
                           "speeds are too low; their ratio is less exact.", "warn"))  # fmt: skip
    blocks.append(_gates(data.get("gates") or []))
    return Section("Before and after", blocks)


def _relative(rows: list[dict[str, Any]], before: dict[str, Any], after: dict[str, Any]) -> Chart:
    shows = {key: show for _, key, show, _ in FIGURES}
    table = Table(
        "Source and artifact",
        [Column("figure"), Column("source", True), Column("artifact", True), Column("ratio", True), Column("which is")],
        [
            [
                row["label"],
                shows[row["key"]](before[row["key"]]),
                shows[row["key"]](after[row["key"]]),
                times(row["ratio"]),
                Cell("better" if row["better"] else "worse", "good" if row["better"] else "bad"),
            ]
            for row in rows
        ],
    )
    told = ", ".join(f"{row['label']} {times(row['ratio'])}" for row in rows)
    alt = f"Bars of the artifact's figures over the source's: {told}."
    title = "Size, quality and speed beside the source"
    return Chart(title, draw(charts.relative(rows), alt), alt, table)


def _gates(gates: list[dict[str, Any]]) -> Any:
    if not gates:
        return Text("The recipe sets no gates.")
    rows: list[list[str | Cell]] = []
    for gate in gates:
        held = bool(gate.get("passed"))
        value = gate.get("value")
        rows.append([
            str(gate.get("name")),
            short(gate.get("limit")),
            "not measured" if value is None else short(value),
            Cell("holds" if held else "missed", "good" if held else "bad"),
        ])  # fmt: skip
    return Table(
        "Gates", [Column("gate", code=True), Column("limit", True), Column("value", True), Column("verdict")], rows
    )


def _quality(data: dict[str, Any]) -> Section:
    measured, certificate = _part(data, "measured"), _part(data, "certificate")
    divergence = _part(measured, "divergence")
    names = {
        "mean_kl": "mean KL, nats a token", "median_kl": "median KL", "p99_kl": "99th percentile of KL",
        "max_kl": "greatest KL", "top1_agreement": "positions with the same most likely token",
        "num_tokens": "positions compared", "perplexity_increase": "increase of perplexity",
    }  # fmt: skip
    shares = {"top1_agreement", "perplexity_increase"}
    rows: list[list[str | Cell]] = [
        [names.get(key, key.replace("_", " ")), percent(value, 2) if key in shares else short(value)]
        for key, value in divergence.items()
        if number(value) is not None and key not in ("compression", "decode_speedup")
    ]
    blocks: list[Any] = []
    histogram = certificate.get("kl_histogram")
    chart = histogram_chart(histogram, divergence)
    blocks.append(chart or Missing("The distribution of the divergence", "The manifest holds no histogram of it."))
    blocks.append(Table("Divergence from the source", [Column("figure"), Column("value", True)], rows))
    evaluate = _part(_part(data, "recipe"), "evaluate")
    windows = f"{evaluate.get('windows', ABSENT)} windows of {evaluate.get('window_length', ABSENT)} tokens"
    intro = (
        f"The artifact was reopened in a fresh process and compared with the source on {windows} "
        f"of the text “{evaluate.get('text', ABSENT)}”."
    )
    return Section("Quality", blocks, intro)


def histogram_chart(histogram: Any, divergence: dict[str, Any]) -> Chart | None:
    """The chart of `{"edges": …, "counts": …}` (see `DivergenceMeter.histogram`); None where it is not one."""
    if not isinstance(histogram, dict):
        return None
    edges, counts = histogram.get("edges"), histogram.get("counts")
    if not isinstance(edges, list) or not isinstance(counts, list) or len(edges) != len(counts) or len(edges) < 2:
        return None
    total = sum(counts) or 1
    labels = [charts.bin_label(edges, place) for place in range(len(counts))]
    marks = {name: found for name, key in (("median", "median_kl"), ("mean", "mean_kl"), ("99%", "p99_kl"))
             if (found := number(divergence.get(key))) is not None}  # fmt: skip
    columns = [Column("nats a token"), Column("positions", True), Column("share", True)]
    rows: list[list[str | Cell]] = [
        [label, f"{count:,}", percent(count / total, 2)] for label, count in zip(labels, counts)
    ]
    top = max(range(len(counts)), key=lambda place: counts[place])
    most = f"{percent(counts[top] / total)} have {labels[top]} nats"
    alt = f"Histogram of the divergence over {total:,} positions; most, {most}."
    svg = draw(charts.kl_histogram(edges, counts, marks), alt)
    title = "How far the predictions of single positions moved"
    return Chart(title, svg, alt, Table("Positions by divergence", columns, rows))


def _examples(data: dict[str, Any]) -> Section:
    certificate = _part(data, "certificate")
    mine, theirs = certificate.get("samples") or [], certificate.get("source_samples") or []
    intro = "Greedy continuations of the recipe's prompts. The first token that differs is marked."
    if mine and theirs:
        return Section("Examples", [pairs(theirs, mine, ("source", "artifact"))], intro)
    why = "The source's texts are made where its speed is measured (evaluate.speed: true), by llmopt 0.1 or newer."
    blocks: list[Any] = [Missing("The source's continuations", why)]
    if mine:
        rows: list[list[str | Cell]] = [[shorten(str(s.get("prompt"))), shorten(str(s.get("text")))] for s in mine]
        blocks.append(
            Table("Continuations by the artifact", [Column("prompt"), Column("continuation", wrap=True)], rows)
        )
    return Section("Examples", blocks)


def _run(data: dict[str, Any]) -> Section:
    passes = data.get("passes") or []
    rows: list[list[str | Cell]] = [
        [
            str(record.get("name")),
            shorten(str(record.get("summary")), 1000),
            seconds(record.get("seconds")),
            "from the cache" if record.get("cached") else "computed",
        ]
        for record in passes
    ]
    columns = [Column("pass", code=True), Column("what it did", wrap=True), Column("time", True), Column("result")]
    blocks: list[Any] = [_timeline(data.get("timeline"))]
    if rows:
        blocks.append(Table("Passes", columns, rows))
    return Section("The run", blocks)


def _timeline(timeline: Any) -> Any:
    if not isinstance(timeline, dict) or len(timeline.get("times") or []) < 2:
        return Missing("Memory over the run", "The manifest holds no samples of it; runs of this version record them.")
    names = {"rss": "this process", "children": "processes it started", "device": "device"}
    series = {name: timeline[key] for key, name in names.items() if any(timeline.get(key) or [])}
    stages = timeline.get("stages") or []
    rows: list[list[str | Cell]] = [
        [
            str(stage["name"]),
            f"{stage['start']:.1f} s",
            seconds(stage["end"] - stage["start"]),
            *(size(timeline_chart.stage_peak(stage, timeline["times"], values)) for values in series.values()),
        ]
        for stage in stages
    ]
    columns = [Column("stage", code=True), Column("began", True), Column("took", True)]
    columns += [Column(f"{name}, most", True) for name in series]
    peaks = "; ".join(f"{name} {size(max(values))} at most" for name, values in series.items())
    alt = f"Lines of memory over {seconds(timeline['times'][-1])} of the run: {peaks}."
    svg = draw(timeline_chart.memory_timeline({**timeline, "stages": stages}, series), alt)
    note = f"Physical memory, sampled every {short(timeline.get('interval'))} s."
    return Chart("Memory over the run", svg, alt, Table("Stages of the run", columns, rows), note)


def _fell_back(data: dict[str, Any]) -> Section:
    notes = [*(data.get("notes") or []), *(_part(data, "certificate").get("notes") or [])]
    fallbacks = [note for note in notes if note.get("kind") == "fallback"]
    others = [note for note in notes if note.get("kind") != "fallback"]
    blocks: list[Any] = [_notes("Fallbacks", fallbacks) if fallbacks else Text("Nothing fell back.", "good")]
    if others:
        blocks.append(_notes("Other notes of the run and of the load that was measured", others))
    return Section("What fell back", blocks)


def _notes(caption: str, notes: list[dict[str, Any]]) -> Table:
    rows: list[list[str | Cell]] = [
        [str(note.get("stage")), shorten(str(note.get("message")), 2000)] for note in notes[:MOST_NOTES]
    ]
    return Table(
        caption, [Column("stage", code=True), Column("what", wrap=True)], rows, more=max(0, len(notes) - MOST_NOTES)
    )


def _recipe(recipe: dict[str, Any]) -> Section:
    text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=100)
    intro = "As it ran, every option spelled out: saved as YAML, it repeats the run."
    return Section(
        "Recipe", [Details("Show the recipe", Code("Recipe, YAML", shorten(text, 100_000)), printed=True)], intro
    )


def _provenance(data: dict[str, Any]) -> Section:
    source, calibration = _part(data, "source"), _part(data, "calibration")
    certificate, exporter = _part(data, "certificate"), _part(data, "exporter")
    environment = {**_part(data, "environment"), **_part(certificate, "environment")}
    facts = {
        "source": source.get("id"), "kind": source.get("kind"), "revision": source.get("revision"),
        "license": source.get("license"), "SHA-256 of its model files": source.get("sha256"),
        "made": data.get("created"), "llmopt": data.get("llmopt_version"), "seed": data.get("seed"),
        "calibration": ", ".join(f"{key} {value}" for key, value in calibration.items()) or None,
        "written by": exporter.get("name"), "format": exporter.get("format"),
        "measured on": " ".join(str(certificate.get(key) or "") for key in ("device", "dtype", "backend")).strip(),
    }  # fmt: skip
    rows: list[list[str | Cell]] = [
        [key, shorten(str(value))] for key, value in facts.items() if value not in (None, "")
    ]
    machine: list[list[str | Cell]] = [
        [key, shorten(str(value))] for key, value in environment.items() if value is not None
    ]
    files: list[list[str | Cell]] = [[name, str(digest)] for name, digest in list(_part(data, "files").items())[:500]]
    columns = [Column("fact"), Column("value", wrap=True)]
    return Section(
        "Provenance",
        [
            Table("Where it comes from", columns, rows),
            Table("Versions and machine", columns, machine),
            Details(
                f"{len(_part(data, 'files'))} files and their SHA-256",
                Table("Files", [Column("file", code=True), Column("SHA-256", code=True, wrap=True)], files),
            ),
        ],
    )
