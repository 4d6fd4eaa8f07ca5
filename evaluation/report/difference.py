"""The page of a difference between two models, from the JSON object that `llmopt diff` writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .bars import MOST_BARS, bars
from .page import Cell, Chart, Column, Details, Missing, Page, Section, Table, Text, Tile, Tiles, shorten
from .records import facts
from .svg import draw
from .values import ABSENT, number, percent, ratio, seconds, short, size, times

MOST_MODULES = 3000


def page(data: dict[str, Any]) -> Page:
    """data: see docs/evaluate.md."""
    a, b = data.get("a") or {}, data.get("b") or {}
    units = [unit for unit in data.get("units") or [] if isinstance(unit, dict)]
    lines = [f"a: {a.get('id', ABSENT)}", f"b: {b.get('id', ABSENT)}"]
    lines.append(
        f"measured {data.get('created', ABSENT)} in {seconds(data.get('seconds'))}; errors are b's, relative to a"
    )
    sections = [
        Section("Figures", [_tiles(data, a, b)]),
        _harm(units),
        _modules(units),
        _flips(data),
        _notes(data.get("notes") or []),
        Section("Provenance", _provenance(data, a, b)),
    ]
    return Page("What differs between two models", sections, lines, "llmopt difference")


def _tiles(data: dict[str, Any], a: dict[str, Any], b: dict[str, Any]) -> Tiles:
    tiles = []
    if (change := ratio(b.get("bytes"), a.get("bytes"))) is not None:
        tiles.append(
            Tile("stored", size(b["bytes"]), f"a: {size(a['bytes'])}", times(change), "good" if change <= 1 else "bad")
        )
    mine, theirs = b.get("text") or {}, a.get("text") or {}
    if (change := ratio(mine.get("perplexity"), theirs.get("perplexity"))) is not None:
        tone: Any = "good" if change <= 1 else "bad"
        before = f"a: {short(theirs['perplexity'])}"
        tiles.append(Tile("perplexity", short(mine["perplexity"]), before, percent(change - 1, 2, signed=True), tone))
    divergence = data.get("divergence") or {}
    if number(divergence.get("mean_kl")) is not None:
        tiles.append(Tile("mean KL divergence", short(divergence["mean_kl"]), "nats a token"))
    if number(divergence.get("top1_agreement")) is not None:
        tiles.append(Tile("same top token", percent(divergence["top1_agreement"], 2), "of positions"))
    if number(data.get("num_flips")) is not None:
        tiles.append(Tile("tokens that flip", short(data["num_flips"]), f"of {short(data.get('num_positions'))}"))
    return Tiles(tiles)


def _harm(units: Sequence[dict[str, Any]]) -> Section:
    intro = "Harm of a unit: mean KL of a with this unit alone taken from b, nats a token; the greatest stand first."
    if not units:
        return Section("Harm of each layer", [Missing("The units", "The result lists none.")])
    drawn = [unit for unit in units if number(unit.get("harm"))][:MOST_BARS]
    columns = [Column("unit", code=True), Column("harm", True), Column("share", True), Column("weight error", True)]
    columns += [
        Column("output error", True),
        Column("local error", True),
        Column("bytes a", True),
        Column("bytes b", True),
    ]
    rows: list[list[str | Cell]] = [
        [
            str(unit.get("name")),
            short(unit.get("harm"), 3),
            percent(unit.get("share")),
            *(short(unit.get(key), 3) for key in ("weight_error", "output_error", "local_error")),
            size(unit.get("bytes_a")),
            size(unit.get("bytes_b")),
        ]
        for unit in units[:MOST_MODULES]
    ]
    table = Table("Units by harm", columns, rows, more=max(0, len(units) - MOST_MODULES))
    if not drawn:
        return Section("Harm of each layer", [Text("No unit does any harm by itself.", "good"), table], intro)
    bar_rows = [
        {
            "label": str(unit["name"])[:40],
            "value": unit["harm"],
            "shown": short(unit["harm"], 3),
            "tip": f"{unit['name']}\nharm {short(unit['harm'], 3)}\noutput error {short(unit.get('output_error'), 3)}",
        }
        for unit in drawn
    ]
    alt = f"Bars of the harm of {len(drawn)} units, the greatest {short(drawn[0]['harm'], 3)} at {drawn[0]['name']}."
    note = f"The {len(drawn)} units with the most harm." if len(drawn) < len(units) else ""
    spec = bars(bar_rows, "mean KL of a with this unit from b, nats a token")
    return Section(
        "Harm of each layer", [Chart("Harm of each layer by itself", draw(spec, alt), alt, table, note)], intro
    )


def _modules(units: Sequence[dict[str, Any]]) -> Section:
    modules = [module for unit in units for module in unit.get("modules") or []]
    modules.sort(key=lambda module: -(number(module.get("weight_error")) or 0.0))
    columns = [Column("module", code=True), Column("a"), Column("b"), Column("weight error", True)]
    columns += [Column("output error", True), Column("bytes a", True), Column("bytes b", True)]
    rows: list[list[str | Cell]] = [
        [
            str(module.get("name")),
            *(_format(module.get(side)) for side in ("a", "b")),
            *(short(module.get(key), 3) for key in ("weight_error", "output_error")),
            *(size((module.get(side) or {}).get("bytes")) for side in ("a", "b")),
        ]
        for module in modules[:MOST_MODULES]
    ]
    if not rows:
        return Section("Modules", [Missing("The modules", "The result lists none.")])
    table = Table("Modules by weight error", columns, rows, more=len(modules) - len(rows))
    return Section("Modules", [Details(f"All {len(modules):,} modules, the greatest weight error first", table)])


def _format(side: Any) -> str:
    """What a module is stored as, in a few words."""
    if not isinstance(side, dict):
        return ABSENT
    return (
        shorten(", ".join(str(value) for key, value in side.items() if key != "bytes" and value is not None), 120)
        or ABSENT
    )


def _flips(data: dict[str, Any]) -> Section:
    flips = [flip for flip in data.get("flips") or [] if isinstance(flip, dict)]
    if not flips:
        return Section("Tokens that flip", [Text("No most likely token changed.", "good")])
    columns = [
        Column("before it", wrap=True),
        Column("text"),
        Column("a's choice"),
        Column("b's choice"),
        Column("KL", True),
    ]
    rows: list[list[str | Cell]] = [
        [
            shorten(str(flip.get("context", "")), 400),
            *(_choice(flip.get(key)) for key in ("actual", "a", "b")),
            short(flip.get("kl"), 3),
        ]
        for flip in flips[:500]
    ]
    counts = f"{short(data.get('num_flips'))} of {short(data.get('num_positions'))} positions"
    intro = f"{counts} have another most likely token; the greatest KL stands first. Probabilities: under a, under b."
    return Section("Tokens that flip", [Table("Flips", columns, rows, more=max(0, len(flips) - 500))], intro)


def _choice(choice: Any) -> str:
    if not isinstance(choice, dict):
        return ABSENT
    text = shorten(str(choice.get("text", "")), 60)
    return f"“{text}” ({percent(choice.get('probability_a'))}, {percent(choice.get('probability_b'))})"


def _notes(notes: Sequence[dict[str, Any]]) -> Section:
    if not notes:
        return Section("What fell back", [Text("Nothing fell back.", "good")])
    columns = [Column("stage", code=True), Column("kind"), Column("what", wrap=True)]
    rows: list[list[str | Cell]] = [
        [str(note.get("stage")), str(note.get("kind")), shorten(str(note.get("message")), 2000)] for note in notes[:300]
    ]
    return Section("What fell back", [Table("Notes", columns, rows, more=max(0, len(notes) - 300))])


def _provenance(data: dict[str, Any], a: dict[str, Any], b: dict[str, Any]) -> list[Any]:
    blocks: list[Any] = [
        facts(title, {key: value for key, value in part.items() if key != "text"})
        for title, part in (("a", a), ("b", b))
    ]
    for title, key in (("Text", "text"), ("Settings", "settings"), ("Versions and machine", "environment")):
        if isinstance(data.get(key), dict):
            blocks.append(facts(title, data[key]))
    return blocks
