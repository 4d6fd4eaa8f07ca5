"""Reads YAML and remembers on which line each key stands, so that errors can point at it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .errors import UsageError, did_you_mean

Location = tuple[Any, ...]


@dataclass
class YamlSource:
    """A parsed document: plain data, and the line of every key and item by its path in the data."""

    name: str
    data: Any
    lines: dict[Location, int] = field(default_factory=dict)
    overridden: dict[Location, str] = field(default_factory=dict)
    """Paths that `--set` changed, with the text that the user gave."""

    def where(self, location: Location) -> str:
        """`file:line: a.b.c`, with the line of the nearest enclosing key that the file has."""
        key = ".".join(str(part) for part in location)
        for length in range(len(location), 0, -1):
            if location[:length] in self.overridden:
                return f"--set {self.overridden[location[:length]]}: {key}"
        for length in range(len(location), -1, -1):
            if location[:length] in self.lines:
                return f"{self.name}:{self.lines[location[:length]]}" + (f": {key}" if key else "")
        return f"{self.name}: {key}" if key else self.name


def parse_yaml(text: str, name: str) -> YamlSource:
    """Parse one document. Raises UsageError with file and line on bad syntax, duplicate keys and unsafe tags."""
    source = YamlSource(name, None)
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        source.data = _construct(loader, node, (), source, set()) if node is not None else None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise UsageError(f"not valid YAML: {problem}", f"{name}{line}") from None
    except RecursionError:
        raise UsageError("not valid YAML: nested too deeply", name) from None
    except _BAD_SCALARS as error:
        raise UsageError(f"not valid YAML: a value cannot be read ({error})", f"{name}:{_last_line(source)}") from None
    return source


_BAD_SCALARS = (ValueError, KeyError, AttributeError, TypeError)
"""What PyYAML's constructors raise for values such as `2024-13-45` and `!!int abc`."""


def _last_line(source: YamlSource) -> int:
    """The line that was being read when an error came: lines are recorded before their values."""
    return max(source.lines.values(), default=1)


def read_yaml(path: Path) -> YamlSource:
    """Parse a file. Raises UsageError where it cannot be read or is not UTF-8 text."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError("not a UTF-8 text file", str(path), "Give a YAML recipe") from None
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", str(path)) from None
    return parse_yaml(text, str(path))


def _construct(loader: yaml.SafeLoader, node: yaml.Node, path: Location, source: YamlSource, open_: set[int]) -> Any:
    source.lines.setdefault(path, node.start_mark.line + 1)
    if id(node) in open_:
        raise UsageError("an alias contains itself", source.where(path))
    open_ = open_ | {id(node)}
    if isinstance(node, yaml.MappingNode):
        loader.flatten_mapping(node)
        out: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = loader.construct_object(key_node, deep=True)
            if not isinstance(key, (str, int, float, bool)) and key is not None:
                raise UsageError("a key must be a plain name", f"{source.name}:{key_node.start_mark.line + 1}")
            if key in out:
                raise UsageError(f"key {key!r} is given twice", f"{source.name}:{key_node.start_mark.line + 1}")
            source.lines[(*path, key)] = key_node.start_mark.line + 1
            out[key] = _construct(loader, value_node, (*path, key), source, open_)
        return out
    if isinstance(node, yaml.SequenceNode):
        return [_construct(loader, item, (*path, i), source, open_) for i, item in enumerate(node.value)]
    return loader.construct_object(node, deep=True)


def apply_override(source: YamlSource, assignment: str) -> None:
    """Apply one `--set a.b.c=value` to the data in place; the value is read as YAML.

    A component below a list of single-key mappings (`passes`, `export`) is the entry's name or its number:
    `passes.quantize.bits=8`, `passes.0.bits=8`. Raises UsageError where the path leads nowhere.
    """
    path_text, equals, value_text = assignment.partition("=")
    where = f"--set {assignment}"
    if not equals or not path_text.strip():
        raise UsageError("expected KEY=VALUE", where, "For example --set passes.quantize.bits=8")
    try:
        value = yaml.safe_load(value_text)
    except (yaml.YAMLError, RecursionError, *_BAD_SCALARS):
        raise UsageError(f"{value_text[:60]!r} is not a YAML value", where[:200]) from None
    parts = path_text.strip().split(".")
    location: Location = ()
    if not isinstance(source.data, dict):
        source.data = {}
    target: Any = source.data
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        if isinstance(target, list):
            location, target = _enter_entry(target, location, part, parts[: i + 1], where)
            if last:
                raise UsageError("names a whole entry", where, "Name one of its options")
            continue
        if last:
            target[part] = value
            source.overridden[(*location, part)] = assignment
            return
        if not isinstance(target.get(part), (dict, list)):
            target[part] = {}
        target, location = target[part], (*location, part)


def _enter_entry(
    items: list[Any], location: Location, part: str, so_far: list[str], where: str
) -> tuple[Location, Any]:
    names = [
        next(iter(item), "") if isinstance(item, dict) else item if isinstance(item, str) else "" for item in items
    ]
    matches = (
        [int(part)] if part.isdecimal() and part.isascii() else [i for i, name in enumerate(names) if name == part]
    )
    if len(matches) > 1:
        raise UsageError(f"{part!r} stands {len(matches)} times", where, f"Use its number, such as {matches[0]}")
    if not matches or matches[0] >= len(items):
        raise UsageError(f"the recipe has no {'.'.join(so_far)}", where, did_you_mean(part, [str(n) for n in names]))
    index = matches[0]
    name = names[index]
    options = items[index].get(name) if isinstance(items[index], dict) else None
    if not isinstance(name, str) or not name or not (options is None or isinstance(options, dict)):
        raise UsageError(
            f"entry {index} of the recipe has no options to set", where, "Write it as `- NAME: {option: value}`"
        )
    if isinstance(items[index], str) or items[index].get(name) is None:
        items[index] = {name: {}}
    return (*location, index, name), items[index][name]
