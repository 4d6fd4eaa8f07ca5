"""`llmopt diff`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ..errors import UsageError
from .report import check_report, draw_report, report_option


@click.command("diff")
@click.argument("a")
@click.argument("b")
@click.option("--text", type=click.Path(path_type=Path), metavar="FILE", help="Text to run; else one that ships.")
@click.option("--windows", type=click.IntRange(1), default=4, show_default=True, help="Windows of the text.")
@click.option("--window-length", type=int, default=256, show_default=True, help="Tokens a window.")
@click.option("--harm-tokens", type=click.IntRange(2), default=128, show_default=True,
              help="Tokens on which each layer of B alone is tried in A.")  # fmt: skip
@click.option("--flips", type=click.IntRange(0), default=100, show_default=True, help="Flipped tokens to keep.")
@click.option("--top", type=click.IntRange(1), default=10, show_default=True, help="Layers and flips to print.")
@click.option("--modules", is_flag=True, help="Print every module of these layers.")
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto")
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that the models' folders carry.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON and nothing else.")
@click.option("--out", "-o", type=click.Path(path_type=Path), help="Write the result as JSON to this file.")
@report_option
@click.option("--log", type=click.Choice(["rich", "plain", "json", "none"]), default="rich", show_default=True)
def diff(
    a: str,
    b: str,
    top: int,
    modules: bool,
    as_json: bool,
    out: Path | None,
    report_file: Path | None,
    log: str,
    **options: Any,
) -> None:
    """Compare two artifacts, or a model A and an artifact B of it, layer by layer; the most harmful first."""
    from ..diff import diff as run
    from ..evaluate import write_json
    from .progress import listener

    if out is not None and (out.is_dir() or out.suffix != ".json"):
        raise UsageError("--out names a file that ends in .json", str(out))
    check_report(report_file)
    with listener("none" if as_json and log == "rich" else log) as listen:
        found = run(a, b, listener=listen, **options)
    if out is not None:
        write_json(out, found.data)
    draw_report(report_file, "difference", found.data)
    if as_json:
        click.echo(json.dumps(found.data, indent=2, ensure_ascii=False))
        return
    show(found.data, top, modules)
    if out is not None:
        click.echo(f"Written: {out}")


def show(data: dict[str, Any], top: int, modules: bool) -> None:
    """The tables of one comparison."""
    from .tables import console, mib

    out = console()
    a, b = data["a"], data["b"]
    for key, model in (("A", a), ("B", b)):
        score = f"perplexity {model['text']['perplexity']:.4f}"
        out.print(f"{key}: {model['id']} ({mib(model['bytes'])}, {score})", highlight=False, markup=False)
    for note in data["notes"]:
        out.print(f"{note['kind']}: {note['message']}", style="yellow", highlight=False, markup=False)
    kl, share = data["divergence"], data["num_flips"] / data["num_positions"]
    tokens = f"{data['num_positions']:,} tokens of {data['text']['name']}"
    for line in (
        f"{tokens}: mean KL {kl['mean_kl']:.6f} nats, p99 {kl['p99_kl']:.6f}",
        f"{data['num_flips']:,} most likely tokens flip ({share:.2%})",
    ):
        out.print(line, highlight=False, markup=False)
    out.print(_units_table(data["units"][:top]))
    if modules:
        out.print(_modules_table(data["units"][:top]))
    if data["flips"]:
        out.print(_flips_table(data["flips"][:top]))


def _units_table(units: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    from .tables import mib

    table = Table()
    for column in (
        "layer",
        "harm (KL)",
        "share",
        "weight error",
        "output error",
        "by itself",
        "size of A",
        "size of B",
    ):
        table.add_column(column, justify="left" if column == "layer" else "right")
    for unit in units:
        errors = (_shown(unit[key]) for key in ("weight_error", "output_error", "local_error"))
        sizes = (mib(unit[key]) for key in ("bytes_a", "bytes_b"))
        table.add_row(unit["name"], f"{unit['harm']:.6f}", f"{unit['share']:.1%}", *errors, *sizes)
    return table


def _modules_table(units: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    from ...evaluation.layers import label

    table = Table()
    for column in ("module", "A", "B", "weight error", "largest", "output error"):
        table.add_column(column, justify="left" if column in ("module", "A", "B") else "right")
    for unit in units:
        for module in unit["modules"]:
            errors = (_shown(module[key]) for key in ("weight_error", "max_weight_error", "output_error"))
            table.add_row(module["name"], label(module["a"]), label(module["b"]), *errors)
    return table


def _shown(error: float | None) -> str:
    return "" if error is None else f"{error:.4f}"


def _flips_table(flips: list[dict[str, Any]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table()
    table.add_column("context", ratio=1, no_wrap=True, overflow="ellipsis")
    for column in ("A says", "B says"):
        table.add_column(column, no_wrap=True)
    table.add_column("KL", justify="right")
    for flip in flips:
        says = (Text(f"{flip[k]['text']!r} {flip[k][f'probability_{k}']:.0%}") for k in ("a", "b"))
        table.add_row(Text("…" + " ".join(flip["context"].split())[-48:]), *says, f"{flip['kl']:.4f}")
    return table
