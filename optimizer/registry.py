"""Finds passes and exporters: entry points, `module:Class` names, and classes registered in this process.

The built-in ones come through the same entry points as anybody's. A plugin that cannot be imported never breaks the
others: its error is kept and shown by `llmopt passes`, and raised only when a recipe names it.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import CodeType
from typing import Any, Literal

from .base import Exporter, Pass, Plugin
from .errors import UsageError, did_you_mean

Kind = Literal["passes", "exporters"]
_BASES: dict[Kind, type[Plugin]] = {"passes": Pass, "exporters": Exporter}
_registered: dict[Kind, dict[str, type[Plugin]]] = {"passes": {}, "exporters": {}}


@dataclass(frozen=True)
class Entry:
    """One known plugin: where it comes from, and its class or the reason why it cannot be used."""

    name: str
    origin: str
    cls: type[Plugin] | None
    error: str = ""


def register(cls: type[Plugin]) -> type[Plugin]:
    """Make a Pass or Exporter class known by its name in this process; usable as a decorator."""
    kind: Kind = "exporters" if issubclass(cls, Exporter) else "passes"
    _check(cls, kind, cls.__qualname__)
    _registered[kind][cls.name] = cls
    return cls


def entries(kind: Kind) -> dict[str, Entry]:
    """Every known plugin of that kind by name, broken ones included."""
    found: dict[str, Entry] = {}
    for point in sorted(entry_points(group=f"llmopt.{kind}"), key=lambda p: p.name):
        origin = f"{point.dist.name} {point.dist.version}" if point.dist else point.value
        if point.name in found and found[point.name].origin != origin:
            clash = f"the name is claimed by {found[point.name].origin} and by {origin}"
            found[point.name] = Entry(point.name, origin, None, clash)
            continue
        found[point.name] = _load(kind, point.name, point.value, origin)
    for name, cls in _registered[kind].items():
        found[name] = Entry(name, f"registered by {cls.__module__}", cls)
    return found


@cache
def _load(kind: Kind, name: str, value: str, origin: str) -> Entry:
    try:
        cls = _import(value)
        _check(cls, kind, value)
    except Exception as error:
        return Entry(name, origin, None, f"{type(error).__name__}: {error}")
    return Entry(name, origin, cls)


def _import(value: str) -> Any:
    module_name, _, attribute = value.partition(":")
    target: Any = importlib.import_module(module_name)
    for part in attribute.split("."):
        target = getattr(target, part)
    return target


def _check(cls: Any, kind: Kind, where: str) -> None:
    base = _BASES[kind]
    if not (inspect.isclass(cls) and issubclass(cls, base)):
        raise UsageError(f"{where} is not a subclass of llmopt.{base.__name__}")
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise UsageError(f"{where} does not implement {missing}")
    if not isinstance(getattr(cls, "name", None), str) or not cls.name:
        raise UsageError(f"{where} has no `name`", what_to_do="Set the class attribute `name`")


def find(kind: Kind, name: str, where: str = "") -> type[Plugin]:
    """The class behind a name of a recipe, or behind `module:Class`.

    Raises UsageError where nothing has that name (naming the nearest), or where the plugin is broken (saying why).
    """
    noun = "pass" if kind == "passes" else "exporter"
    if ":" in name:
        sys.path.insert(0, str(Path.cwd()))
        try:
            cls = _import(name)
        except Exception as error:
            raise UsageError(f"cannot import {noun} {name!r}: {type(error).__name__}: {error}", where) from None
        finally:
            sys.path.pop(0)
        _check(cls, kind, name)
        return cls
    known = entries(kind)
    if name not in known:
        raise UsageError(f"unknown {noun} {name!r}", where, did_you_mean(name, known))
    entry = known[name]
    if entry.cls is None:
        raise UsageError(f"{noun} {name!r} from {entry.origin} is broken: {entry.error}", where)
    return entry.cls


@cache
def code_hash(cls: type[Plugin]) -> str:
    """SHA-256 over the sources that make up a plugin: its module; in a package also its neighbours and the packages
    below.

    A class typed into an interactive session has no file: then the bytecode of its functions counts.
    """
    digest = hashlib.sha256(f"{cls.__module__}:{cls.__qualname__}:{cls.version}".encode())
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    if file:
        path = Path(file)
        package = (path.parent / "__init__.py").exists()
        for source in _sources(path.parent) if package else [path]:
            digest.update(source.relative_to(path.parent).as_posix().encode() + source.read_bytes())
    else:
        for name, member in sorted(vars(cls).items()):
            code = getattr(member, "__code__", None)
            if code is not None:
                digest.update(f"{name}:{_code_text(code)}".encode())
        digest.update(repr(cls.Config.model_json_schema()).encode())
    return digest.hexdigest()


def _sources(package: Path) -> list[Path]:
    """The package's source files and those of the packages below it."""
    found = sorted(package.glob("*.py"))
    for folder in sorted(package.iterdir()):
        if (folder / "__init__.py").is_file():
            found += _sources(folder)
    return found


def _code_text(code: CodeType) -> str:
    """Bytecode, names and constants of a function and of those nested in it, as text without memory addresses."""
    constants = [_code_text(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"
