"""A report's page as data: sections of blocks, rendered by `template.html.j2`.

Texts are plain text: the template escapes all of them. Only `Chart.svg` is markup, made and cleaned by `svg.py`.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

Tone = Literal["", "good", "bad", "warn"]
FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
"""Characters that a HTML or XML file may not hold: control characters, halves of surrogate pairs, non-characters."""


@dataclass(frozen=True)
class Tile:
    """One headline figure. before: what it was, or its unit; change: how they compare; tone: whether that is good."""

    label: str
    value: str
    before: str = ""
    change: str = ""
    tone: Tone = ""


@dataclass(frozen=True)
class Tiles:
    kind: ClassVar[str] = "tiles"
    tiles: list[Tile]


@dataclass(frozen=True)
class Column:
    """name: its header. numeric: aligned to the right. code: set in a fixed-width face. wrap: long words may break."""

    name: str
    numeric: bool = False
    code: bool = False
    wrap: bool = False


@dataclass(frozen=True)
class Cell:
    """A cell's text with a tone."""

    text: str
    tone: Tone = ""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Table:
    """Rows of texts; the first column is each row's header. more: rows that were left out, said below the table."""

    kind: ClassVar[str] = "table"
    caption: str
    columns: list[Column]
    rows: list[list[str | Cell]]
    more: int = 0


@dataclass(frozen=True)
class Chart:
    """svg: cleaned markup. alt: what a reader who does not see it needs to know. table: the figures behind it."""

    kind: ClassVar[str] = "chart"
    title: str
    svg: str
    alt: str
    table: Table
    note: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Text:
    kind: ClassVar[str] = "text"
    text: str
    tone: Tone = ""


@dataclass(frozen=True)
class Missing:
    """A part that cannot be shown, and why."""

    kind: ClassVar[str] = "missing"
    what: str
    why: str


@dataclass(frozen=True)
class Code:
    kind: ClassVar[str] = "code"
    label: str
    text: str


@dataclass(frozen=True)
class Marked:
    """A text of which `text[start:end]` is marked. ends: the text ends where the other goes on."""

    title: str
    text: str
    start: int | None = None
    end: int | None = None

    @property
    def parts(self) -> tuple[str, str, str]:
        """What stands before, in and after the mark."""
        if self.start is None or self.end is None:
            return self.text, "", ""
        return self.text[: self.start], self.text[self.start : self.end], self.text[self.end :]


@dataclass(frozen=True)
class Pair:
    """Two continuations of a prompt, side by side. verdict: whether and where they part."""

    prompt: str
    verdict: str
    left: Marked
    right: Marked


@dataclass(frozen=True)
class Pairs:
    kind: ClassVar[str] = "pairs"
    pairs: list[Pair]


@dataclass(frozen=True)
class Details:
    """A block behind a line that opens it; printed: on paper it is open."""

    kind: ClassVar[str] = "details"
    summary: str
    block: Any
    printed: bool = False


@dataclass
class Section:
    title: str
    blocks: list[Any] = field(default_factory=list)
    intro: str = ""

    @property
    def anchor(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


@dataclass
class Page:
    """title: the main heading. lines: what stands below it."""

    title: str
    sections: list[Section]
    lines: list[str] = field(default_factory=list)
    kind: str = "Report"
    verdict: str = ""
    tone: Tone = ""


def clean(value: Any) -> Any:
    """The value with every character that a page may not hold replaced by U+FFFD, in strings, lists and dicts."""
    if isinstance(value, str):
        return FORBIDDEN.sub("\ufffd", value)
    if isinstance(value, dict):
        return {clean(key): clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(item) for item in value]
    return value


def shorten(text: str, limit: int = 4000) -> str:
    """The text, cut where it is longer than `limit` characters; how many are left out is said."""
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit:,} more characters)"


def render(page: Page) -> str:
    """The whole HTML file, as text that encodes to UTF-8."""
    script = _file("script.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = _environment().get_template("template.html.j2")
    return clean(template.render(page=page, style=_file("style.css"), script=script, script_hash=f"sha256-{digest}"))


@cache
def _file(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


@cache
def _environment() -> Any:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        loader=FunctionLoader(_file), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment
