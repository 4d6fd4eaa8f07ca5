"""`llmopt passes`, `llmopt exporters` and `llmopt recipes`: lists, and one entry's options from its Config class."""

from __future__ import annotations

import typing
from typing import Any

import click
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from ..errors import UsageError, did_you_mean


@click.command()
@click.argument("name", required=False)
def passes(name: str | None) -> None:
    """List the passes; with NAME, show its options."""
    _catalog("passes", name)


@click.command()
@click.argument("name", required=False)
def exporters(name: str | None) -> None:
    """List the exporters; with NAME, show its options."""
    _catalog("exporters", name)


@click.command()
@click.argument("name", required=False)
def recipes(name: str | None) -> None:
    """List the shipped recipes; with NAME, print it. `llmopt recipes keys` shows every key of the format."""
    from ..recipe import Recipe, shipped
    from .tables import console

    found = shipped()
    if name == "keys":
        _options(Recipe)
        return
    if name is not None:
        name = name.removesuffix(".yaml")
        if name not in found:
            raise UsageError(f"no shipped recipe is called {name!r}", "recipes", did_you_mean(name, found))
        click.echo(found[name].read_text(encoding="utf-8").rstrip())
        return
    out = console()
    for key in found:
        loaded = Recipe.load(key)
        first = loaded.recipe.description.strip().split(". ")[0].rstrip(".").replace("\n", " ")
        out.print(f"[bold]{key}[/]  {first}", highlight=False)


def _catalog(kind: Any, name: str | None) -> None:
    from ..registry import entries
    from .tables import console

    known = entries(kind)
    out = console()
    if name is not None:
        if name not in known:
            noun = "pass" if kind == "passes" else "exporter"
            raise UsageError(f"no {noun} is called {name!r}", kind, did_you_mean(name, known))
        entry = known[name]
        if entry.cls is None:
            raise UsageError(f"{name!r} from {entry.origin} is broken: {entry.error}", kind)
        out.print(f"[bold]{name}[/] (from {entry.origin})", highlight=False)
        out.print(_summary(entry.cls, whole=True), highlight=False, markup=False)
        for tag in ("requires", "provides", "conflicts"):
            if getattr(entry.cls, tag, None):
                out.print(f"{tag}: {', '.join(sorted(getattr(entry.cls, tag)))}", highlight=False)
        _options(entry.cls.Config)
        return
    for entry in known.values():
        if entry.cls is None:
            out.print(f"[red]{entry.name}[/]  broken ({entry.origin}): {entry.error}", highlight=False)
        else:
            out.print(f"[bold]{entry.name}[/]  {_summary(entry.cls)} ({entry.origin})", highlight=False)


def _summary(cls: type, whole: bool = False) -> str:
    import inspect

    text = inspect.cleandoc(cls.__doc__ or "").strip() or "no description"
    return text if whole else " ".join(text.split("\n\n")[0].split())


def _options(model: type[BaseModel], prefix: str = "") -> None:
    """Print every field: name, type, default, meaning; nested models are indented by their dotted name."""
    from .tables import console

    out = console()
    if not model.model_fields:
        out.print("No options.")
    for name, field in model.model_fields.items():
        annotation = field.annotation
        nested = annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
        default = field.get_default(call_default_factory=True) if not field.is_required() else PydanticUndefined
        shown = "required" if default is PydanticUndefined else "" if nested else f"default {default!r}"
        kind = "" if nested else _type_name(annotation)
        facts = ", ".join(part for part in (kind, shown) if part)
        out.print(f"  {prefix}{name}", style="bold", highlight=False, markup=False, end="")
        out.print(f"  {facts}", style="dim", highlight=False, markup=False)
        if field.description:
            out.print(f"      {field.description}", highlight=False, markup=False)
        if nested:
            _options(nested, f"{prefix}{name}.")


def _type_name(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return " | ".join(str(value) for value in typing.get_args(annotation))
    if origin is None:
        return getattr(annotation, "__name__", str(annotation)).replace("NoneType", "none")
    parts = [_type_name(part) for part in typing.get_args(annotation)]
    name = getattr(origin, "__name__", str(origin))
    return " | ".join(parts) if name in ("Union", "UnionType") else f"{name}[{', '.join(parts)}]"
