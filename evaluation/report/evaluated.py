"""The page of an evaluation, from the JSON object that `llmopt eval` writes."""

from __future__ import annotations

from typing import Any

from .artifact import histogram_chart
from .examples import pairs
from .page import Cell, Column, Missing, Page, Section, Table, Text, Tile, Tiles, shorten
from .records import facts
from .values import ABSENT, number, percent, ratio, seconds, short, size


def page(data: dict[str, Any]) -> Page:
    """data: see docs/evaluate.md. Parts that were not asked for are left out."""
    model, other = data.get("model") or {}, data.get("against") or {}
    name = str(model.get("id", "model"))
    lines = [f"beside {other['id']}"] if other.get("id") else []
    lines.append(
        f"measured {data.get('created', ABSENT)} in {seconds(data.get('seconds'))}"
        + (", from the cache" if data.get("cached") else "")
    )
    sections = [_figures(data, model, other)]
    divergence = data.get("divergence")
    if isinstance(divergence, dict):
        sections.append(_divergence(divergence))
    if isinstance(data.get("generation"), dict):
        sections.append(_generation(data["generation"]))
    if model.get("tasks"):
        sections.append(_tasks(model["tasks"], other.get("tasks") or {}))
    sections.append(_notes(model, other))
    sections.append(Section("Provenance", _provenance(data, model, other)))
    return Page(name.rstrip("/").rpartition("/")[2] or name, sections, lines, "llmopt evaluation")


def _figures(data: dict[str, Any], model: dict[str, Any], other: dict[str, Any]) -> Section:
    mine, theirs = model.get("text") or {}, other.get("text") or {}
    divergence = data.get("divergence") or {}
    tiles = []
    for label, key in (("perplexity", "perplexity"), ("bits per byte", "bits_per_byte")):
        if number(mine.get(key)) is not None:
            change = ratio(mine[key], theirs.get(key))
            before = f"beside {short(theirs[key])}" if change is not None else ""
            tone: Any = "" if change is None else "good" if change <= 1 else "bad"
            tiles.append(
                Tile(label, short(mine[key]), before, "" if change is None else percent(change - 1, 2, True), tone)
            )
    if number(divergence.get("mean_kl")) is not None:
        tiles.append(Tile("mean KL divergence", short(divergence["mean_kl"]), "nats a token"))
    if number(divergence.get("top1_agreement")) is not None:
        tiles.append(Tile("same top token", percent(divergence["top1_agreement"], 2), "of positions"))
    if number(model.get("weight_bytes")) is not None:
        tiles.append(Tile("weights in memory", size(model["weight_bytes"])))
    text = data.get("text") or {}
    counts = f"{short(mine.get('num_tokens'))} tokens in {short(mine.get('num_windows'))} windows"
    scored = f"“{text.get('name', ABSENT)}”: {counts}, {short(mine.get('num_bytes'))} bytes." if mine else ""
    return Section("Figures", [Tiles(tiles)] if tiles else [Text("No text was scored.")], scored)


def _divergence(divergence: dict[str, Any]) -> Section:
    chart = histogram_chart(divergence.get("histogram"), divergence)
    missing = Missing("The distribution of the divergence", "The result holds no histogram of it.")
    return Section("Divergence", [chart or missing, facts("Divergence from the other model", divergence)])


def _generation(generation: dict[str, Any]) -> Section:
    def side(key: str) -> list[dict[str, Any]]:
        return [
            {"prompt": row.get("prompt"), "text": row.get(key), "token_ids": row.get(f"{key}_token_ids")}
            for row in generation.get("prompts") or []
        ]

    within = generation.get("share_differing_within") or {}
    rows: list[list[str | Cell]] = [[str(n), percent(share)] for n, share in within.items()]
    table = Table("Prompts whose texts differ", [Column("within tokens"), Column("share of prompts", True)], rows)
    counts = f"{generation.get('num_differing', ABSENT)} of {generation.get('num_prompts', ABSENT)}"
    told = f"{counts} greedy texts of {generation.get('new_tokens', ABSENT)} tokens differ."
    return Section("Examples", [table, pairs(side("against"), side("model"), ("other model", "model"))], told)


def _tasks(mine: dict[str, Any], theirs: dict[str, Any]) -> Section:
    columns = [Column("task", code=True), Column("metric"), Column("items", True), Column("other model", True)]
    columns += [Column("model", True), Column("± standard error", True)]
    rows: list[list[str | Cell]] = []
    for name, result in mine.items():
        other = (theirs.get(name) or {}).get("metrics") or {}
        for metric, value in (result.get("metrics") or {}).items():
            error = (result.get("stderr") or {}).get(metric)
            rows.append(
                [name, metric, short(result.get("num_items")), short(other.get(metric)), short(value), short(error)]
            )
    return Section("Tasks", [Table("Results of tasks", columns, rows)])


def _notes(model: dict[str, Any], other: dict[str, Any]) -> Section:
    rows: list[list[str | Cell]] = [
        [side, str(note.get("stage")), str(note.get("kind")), shorten(str(note.get("message")), 2000)]
        for side, part in (("model", model), ("other model", other))
        for note in (part.get("notes") or [])[:200]
    ]
    fell = sum(str(row[2]) == "fallback" for row in rows)
    blocks: list[Any] = [
        Text(f"{fell} fallbacks, listed below." if fell else "Nothing fell back.", "warn" if fell else "good")
    ]
    if rows:
        blocks.append(
            Table(
                "Notes", [Column("side"), Column("stage", code=True), Column("kind"), Column("what", wrap=True)], rows
            )
        )
    return Section("What fell back", blocks)


def _provenance(data: dict[str, Any], model: dict[str, Any], other: dict[str, Any]) -> list[Any]:
    plain = ("id", "sha256", "engine", "runner", "device", "dtype", "kv_cache")
    blocks: list[Any] = []
    for title, part in (("Model", model), ("Other model", other)):
        if part:
            blocks.append(facts(title, {key: part.get(key) for key in plain if part.get(key) is not None}))
    for title, key in (("Text", "text"), ("Settings", "settings"), ("Versions and machine", "environment")):
        if isinstance(data.get(key), dict):
            blocks.append(facts(title, data[key]))
    return blocks
