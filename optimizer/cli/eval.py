"""`llmopt eval`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ..errors import UsageError
from .report import check_report, draw_report, report_option


@click.command("eval")
@click.argument("model")
@click.option("--against", metavar="SOURCE", help="Model to compare with: divergence, agreement, texts side by side.")
@click.option("--text", type=click.Path(path_type=Path), metavar="FILE", help="Text to score; else one that ships.")
@click.option("--dataset", metavar="ID", help="Data set to score: hub id, local folder, JSONL, Parquet … file.")
@click.option("--dataset-config", metavar="NAME", help="Its configuration, such as wikitext-2-raw-v1.")
@click.option("--split", default="test", show_default=True, help="Its split.")
@click.option("--column", help="Its column of texts.")
@click.option("--tasks", metavar="A,B", help="Tasks of lm-evaluation-harness (extra `eval`), by comma.")
@click.option("--task-path", type=click.Path(path_type=Path), metavar="DIR", help="Folder of tasks of your own.")
@click.option("--limit", type=click.IntRange(1), help="Items of each task.")
@click.option("--num-fewshot", type=click.IntRange(0), help="Examples before each item.")
@click.option("--chat", is_flag=True, help="Put the tasks' prompts through the chat template.")
@click.option("--windows", type=int, default=16, show_default=True, help="Windows that are scored; 0: the whole text.")
@click.option("--window-length", type=int, metavar="L", help="Tokens a window. [default: 1024, or the whole context]")
@click.option("--stride", type=int, metavar="S", help="Tokens from one window to the next. [default: half a window]")
@click.option("--bos", type=click.Choice(["text", "each", "none"]), default="text", show_default=True,
              help="BOS before the text where the tokenizer puts it, before each window, or never.")  # fmt: skip
@click.option("--prompts", type=click.Path(path_type=Path), metavar="FILE", help="Prompts to continue, one a line.")
@click.option("--new-tokens", type=click.IntRange(0), default=32, show_default=True, help="Of each; 0: none.")
@click.option("--engine", type=click.Choice(["auto", "native", "static"]), default="auto", show_default=True,
              help="native: what serves prompts; static: transformers' modules; auto: native if it can.")  # fmt: skip
@click.option("--kv-dtype", metavar="NAME", help="KV cache of MODEL, in the place of its own setting.")
@click.option("--device", default="auto", show_default=True)
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto")
@click.option("--revision", help="Revision of a hub model.")
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that the model's folder carries.")
@click.option("--cache/--no-cache", default=True, help="Look the result up, and keep it.")
@click.option("--cache-dir", type=click.Path(path_type=Path), help="Folder of the cache.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON and nothing else.")
@click.option("--out", "-o", type=click.Path(path_type=Path), help="Write the result as JSON to this file.")
@report_option
@click.option("--log", type=click.Choice(["rich", "plain", "json", "none"]), default="rich", show_default=True)
def evaluate(
    model: str,
    tasks: str | None,
    windows: int,
    prompts: Path | None,
    task_path: Path | None,
    cache_dir: Path | None,
    as_json: bool,
    out: Path | None,
    report_file: Path | None,
    log: str,
    **options: Any,
) -> None:
    """Measure a model or an artifact: perplexity, bits per byte, divergence from its source, tasks.

    MODEL and SOURCE are folders, hub ids, .gguf files or short names.
    """
    from ...evaluation.generation import read_prompts
    from ..evaluate import evaluate as run
    from ..evaluate import write_json
    from .progress import listener

    if windows < 0:
        raise UsageError(f"{windows} windows measure nothing", "--windows", "Use 1 or more, or 0 for the whole text.")
    if prompts is not None:
        options["prompts"] = tuple(read_prompts(prompts))
    if out is not None and out.is_dir():
        raise UsageError("is a folder; --out names a file", str(out))
    check_report(report_file)
    with listener("none" if as_json and log == "rich" else log) as listen:
        result = run(
            model,
            tasks=[name.strip() for name in (tasks or "").split(",") if name.strip()],
            windows=windows or None,
            task_path=str(task_path) if task_path else None,
            cache_folder=cache_dir,
            listener=listen,
            **options,
        )
    if out is not None:
        write_json(out, result.data)
    draw_report(report_file, "evaluation", result.data)
    if as_json:
        click.echo(json.dumps(result.data, indent=2, ensure_ascii=False))
        return
    show(result.data)
    if out is not None:
        click.echo(f"Written: {out}")


def show(data: dict[str, Any]) -> None:
    """The tables of one evaluation."""
    from .tables import console

    out = console()
    other = data.get("against")
    for key, title in (("model", "model"), ("against", "against")):
        if key in data:
            part = data[key]
            cache = "" if part["kv_cache"] in ("auto", part["dtype"]) else f", KV cache {part['kv_cache']}"
            if part.get("kv_sliding"):
                cache += (
                    f", sliding KV cache of {part['kv_sliding']['sinks']} and {part['kv_sliding']['window']} tokens"
                )
            ran = f"{part['engine']} engine, {part['dtype']} on {part['device']}{cache}"
            out.print(f"{title}: {part['id']} ({ran})", highlight=False, markup=False)
            for note in part["notes"]:
                if note["kind"] == "fallback":
                    out.print(f"  fallback: {note['message']}", style="yellow", highlight=False, markup=False)
    if data["model"].get("text"):
        name, part = data["text"]["name"], data["model"]["text"]
        counts = f"{part['num_tokens']:,} tokens in {part['num_windows']:,} windows, {part['num_bytes']:,} bytes"
        out.print(f"{name}: {counts}", highlight=False, markup=False)
        out.print(_text_table(data))
    if data.get("generation"):
        part = data["generation"]
        differ = f"{part['num_differing']} of {part['num_prompts']} prompts differ"
        out.print(f"greedy texts of {part['new_tokens']} tokens: {differ}", highlight=False)
        out.print(_generation_table(part))
    if data["model"].get("tasks"):
        out.print(_tasks_table(data["model"]["tasks"], other["tasks"] if other else None))
    if data["cached"]:
        out.print(f"measured {data['created']}, from the cache (--no-cache measures again)", highlight=False)


def _text_table(data: dict[str, Any]) -> Any:
    from rich.table import Table

    mine = data["model"]["text"]
    theirs = (data.get("against") or {}).get("text")
    table = Table()
    columns = ["", "against", "model", "change"] if theirs else ["", "model"]
    for column in columns:
        table.add_column(column, justify="left" if not column else "right")
    for label, key, digits in (("perplexity", "perplexity", 4), ("bits per byte", "bits_per_byte", 4)):
        row = [f"{mine[key]:.{digits}f}"]
        if theirs:
            row = [f"{theirs[key]:.{digits}f}", *row, f"{mine[key] / theirs[key] - 1:+.2%}"]
        table.add_row(label, *row)
    divergence = data.get("divergence")
    if divergence:
        for label, key in (("mean", "mean_kl"), ("median", "median_kl"), ("p99", "p99_kl"), ("max", "max_kl")):
            table.add_row(f"{label} KL (nats/token)", "", f"{divergence[key]:.6f}", "")
        table.add_row("top-1 agreement", "", f"{divergence['top1_agreement']:.2%}", "")
    return table


def _generation_table(generation: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table()
    table.add_column("within tokens", justify="right")
    table.add_column("share that differ", justify="right")
    for n, share in generation["share_differing_within"].items():
        table.add_row(n, f"{share:.1%}")
    return table


def _tasks_table(mine: dict[str, Any], theirs: dict[str, Any] | None) -> Any:
    from rich.table import Table

    table = Table()
    for column in ["task", "items", "metric", *(["against"] if theirs else []), "model", "± standard error"]:
        table.add_column(column, justify="left" if column in ("task", "metric") else "right")
    for name, result in mine.items():
        for metric, value in result["metrics"].items():
            row = [name, str(result["num_items"] or ""), metric]
            if theirs:
                row.append(f"{theirs[name]['metrics'][metric]:.4f}")
            error = result["stderr"].get(metric)
            table.add_row(*row, f"{value:.4f}", "" if error is None else f"{error:.4f}")
    return table
