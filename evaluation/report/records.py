"""A page of any JSON object of figures: scalars as facts, lists of records and dicts of records as tables.

This draws benchmarks and differences: whatever keys their documents have, all of them are shown.
"""

from __future__ import annotations

import json
from typing import Any

from .page import Cell, Code, Column, Details, Page, Section, Table, Text, shorten
from .values import ABSENT, short

MOST_ROWS = 1000
MOST_COLUMNS = 24
LONG = 300


def page(data: dict[str, Any]) -> Page:
    """`title`, `kind` and `created` head the page; every other key becomes a section or a line of the first one."""
    heads = {"title", "kind", "created"}
    scalars = {key: value for key, value in data.items() if not isinstance(value, (dict, list)) and key not in heads}
    sections = [Section("Summary", [facts("Summary", scalars)])] if scalars else []
    sections += [
        Section(_title(key), blocks(key, value)) for key, value in data.items() if isinstance(value, (dict, list))
    ]
    kind = str(data.get("kind") or "report")
    title = str(data.get("title") or kind)
    lines = [f"made {data['created']}"] if data.get("created") else []
    return Page(title[:1].upper() + title[1:], sections, lines, f"llmopt {kind}")


def blocks(name: str, value: Any, depth: int = 0) -> list[Any]:
    """What shows a value: a table where it is regular, else its parts, at last its JSON."""
    if value in ([], {}, None):
        return [Text("Nothing.")]
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        return _records(name, value, depth)
    if isinstance(value, list):
        return [
            Table(
                _title(name),
                [Column("value")],
                [[_cell(item)] for item in value[:MOST_ROWS]],
                max(0, len(value) - MOST_ROWS),
            )
        ]
    if isinstance(value, dict):
        flat = {key: item for key, item in value.items() if not isinstance(item, (dict, list)) or _small(item)}
        out: list[Any] = [facts(_title(name), flat)] if flat else []
        for key, item in value.items():
            if key not in flat:
                out += blocks(f"{name} {key}", item, depth + 1) if depth < 3 else [_json(key, item)]
        return out
    return [Text(_cell(value))]


def facts(caption: str, values: dict[str, Any]) -> Table:
    """A row a key."""
    rows: list[list[str | Cell]] = [
        [_title(key), _cell(value)] for key, value in list(values.items())[:MOST_ROWS] if not _large(value)
    ]
    return Table(caption, [Column("name"), Column("value", wrap=True)], rows, max(0, len(values) - MOST_ROWS))


def _records(name: str, records: list[dict[str, Any]], depth: int) -> list[Any]:
    keys: list[str] = []
    for record in records[:MOST_ROWS]:
        keys += [key for key in _flat(record) if key not in keys]
    flat = [_flat(record) for record in records[:MOST_ROWS]]
    shown = [key for key in keys if not all(_large(record.get(key)) or record.get(key) is None for record in flat)][
        :MOST_COLUMNS
    ]
    if not shown:
        return [_json(name, records)]
    numeric = {key: all(isinstance(record.get(key), (int, float, type(None))) for record in flat) for key in shown}
    columns = [Column(_title(key), numeric[key]) for key in shown]
    rows: list[list[str | Cell]] = [[_cell(record.get(key)) for key in shown] for record in flat]
    out: list[Any] = [Table(_title(name), columns, rows, more=len(records) - len(flat))]
    left = [key for key in keys if key not in shown]
    if left and depth < 3:
        out.append(
            Details(
                f"More of {_title(name)}: {', '.join(map(_title, left))}",
                _json(name, [{k: r.get(k) for k in left} for r in flat]),
            )
        )
    return out


def _flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The record with its inner records' keys joined to theirs."""
    out: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, dict) and value and prefix.count(" ") < 2:
            out.update(_flat(value, f"{prefix}{key} "))
        else:
            out[f"{prefix}{key}"] = value
    return out


def _json(name: str, value: Any) -> Code:
    return Code(_title(name), shorten(json.dumps(value, indent=1, ensure_ascii=False, default=str), 50_000))


def _small(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 12 and not any(isinstance(item, (dict, list)) for item in value)


def _large(value: Any) -> bool:
    return isinstance(value, (dict, list)) and bool(value) and not _small(value)


def _cell(value: Any) -> str:
    if value is None:
        return ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(_cell(item) for item in value) or ABSENT
    if isinstance(value, (int, float)):
        return short(value)
    return shorten(str(value), LONG)


def _title(key: Any) -> str:
    return str(key).replace("_", " ")
