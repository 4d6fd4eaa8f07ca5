"""`llmopt bench`."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..errors import RunError, UsageError
from .report import check_report, draw_report, report_option

Command = Callable[..., Any]

ENGINES = ("auto", "native", "static")
INPUT = {"latency": "128", "throughput": "16-256", "serve": "16-256"}
PROMPTS = {"latency": 5, "throughput": 32, "serve": 32}


def _options(*several: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def add(command: Command) -> Command:
        for option in reversed(several):
            command = option(command)
        return command

    return add


targets = click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
lengths = [
    click.option("--output-len", default="64", show_default=True, metavar="N|A-B", help="Tokens of each answer."),
    click.option("--seed", default=0, show_default=True, help="Of prompts, lengths and arrivals."),
]
prompts = [
    click.option("--num-prompts", type=click.IntRange(1), metavar="N", help="Requests a round. [default: 5 or 32]"),
    click.option("--input-len", metavar="N|A-B", help="Tokens of each random prompt. [default: 128 or 16-256]"),
    click.option("--prompts", type=click.Path(path_type=Path), metavar="FILE", help="JSONL: `prompt` or `messages`."),
    click.option("--prefix-len", type=click.IntRange(0), default=0, show_default=True, help="Shared tokens before it."),
    click.option("--num-prefixes", type=click.IntRange(1), default=1, show_default=True, help="Shared prefixes."),
]
common = [
    click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Targets take turns in each."),
    click.option("--warmup", type=click.IntRange(0), default=2, show_default=True, help="Requests not measured."),
    click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True),
    click.option("--ignore-eos/--stop-at-eos", default=True, show_default=True, help="Answers have the full length."),
    click.option("--goodput", multiple=True, metavar="NAME:MS", help="Objective for ttft, tpot or e2el; repeatable."),
    click.option("--engine", type=click.Choice(ENGINES), default="auto", show_default=True),
    click.option("--device", default="auto", show_default=True),
    click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto"),
    click.option("--num-threads", type=click.IntRange(1), metavar="N", help="Threads of each model."),
    click.option("--trust-remote-code", is_flag=True, help="Run Python code that the model's folder carries."),
    click.option("--tokenizer", metavar="MODEL", help="Makes prompts, counts answers. [default: the first folder's]"),
    click.option("--endpoint", type=click.Choice(["completions", "chat"]), default="completions", show_default=True,
                 help="Of servers."),
    click.option("--model", metavar="NAME", help="Model to ask servers for. [default: the first they list]"),
    click.option("--timeout", type=click.FloatRange(1), default=600.0, show_default=True,
                 help="Seconds that a server's stream may be silent."),
    click.option("--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write it all here."),
    report_option,
    click.option("--log", type=click.Choice(["rich", "plain", "json", "none"]), default="rich", show_default=True),
]  # fmt: skip


class Modes(click.Group):
    """The modes in the order in which they are written; `--techniques MODEL` is the mode of that name."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        parts = [part for arg in args for part in _split(arg)]
        if "--techniques" in parts:
            at = parts.index("--techniques")
            parts = ["techniques", *parts[:at], *parts[at + 1 :]]
        return super().parse_args(ctx, parts)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def _split(argument: str) -> list[str]:
    name, equals, value = argument.partition("=")
    return [name, value] if equals and name == "--techniques" else [argument]


@click.group("bench", cls=Modes, invoke_without_command=True, subcommand_metavar="MODE TARGET...")
@click.pass_context
def bench(context: click.Context) -> None:
    """Measure speed, latency and memory of models, artifacts and servers side by side.

    A TARGET is a folder, hub id or short name, perhaps with options of `llmopt.load` (my-int4,activation=int8,label=A),
    or the URL of a server that speaks OpenAI's API. docs/bench.md defines every figure.
    """
    if context.invoked_subcommand is None:
        raise UsageError("no mode is named", "bench", f"Use one of {', '.join(bench.commands)}.")


@bench.command()
@targets
@_options(*prompts, *lengths, *common)
def latency(**options: Any) -> None:
    """One request at a time: time to first token, time per token."""
    _run("latency", **options)


@bench.command()
@targets
@_options(*prompts, *lengths, *common)
def throughput(**options: Any) -> None:
    """All requests at once: tokens a second of an offline batch."""
    _run("throughput", **options)


@bench.command()
@targets
@click.option(
    "--request-rate", default=math.inf, show_default=True, metavar="R", help="Requests a second; inf: at once."
)
@click.option("--burstiness", default=1.0, show_default=True, metavar="B", help="Gamma shape; 1 is a Poisson process.")
@click.option("--max-concurrency", type=click.IntRange(1), metavar="N", help="Requests under way at once, at most.")
@_options(*prompts, *lengths, *common)
def serve(**options: Any) -> None:
    """Requests that arrive over time, on our engine or on any server with OpenAI's API."""
    _run("serve", **options)


@bench.command()
@targets
@click.option("--batch", default="1,4,16", show_default=True, metavar="N,N", help="Requests at once.")
@click.option("--context", default="128,1024", show_default=True, metavar="N,N", help="Tokens of each prompt.")
@_options(*lengths, *common)
def sweep(batch: str, context: str, **options: Any) -> None:
    """Every batch size with every context length."""
    sizes = {"batches": _numbers(batch, "--batch"), "contexts": _numbers(context, "--context")}
    _run("sweep", sizes=sizes, **options)


@bench.command()
@click.argument("model")
@click.option("--num-prompts", type=click.IntRange(1), default=16, show_default=True, metavar="N", help="Requests.")
@click.option("--input-len", default="32-256", show_default=True, metavar="N|A-B", help="Tokens of each prompt.")
@click.option("--output-len", default="16-96", show_default=True, metavar="N|A-B", help="Tokens of each answer.")
@click.option("--batch", type=click.IntRange(1), default=8, show_default=True, metavar="N", help="Requests of a batch.")
@click.option("--rounds", type=click.IntRange(1), default=2, show_default=True, help="Of all rows, in turn.")
@click.option("--seed", default=0, show_default=True, help="Of the prompts.")
@click.option("--num-threads", type=click.IntRange(1), metavar="N", help="Threads of each row.")
@click.option("--device", default="auto", show_default=True)
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto")
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that the model's folder carries.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="The picture, an SVG file.")
@click.option("--markdown", type=click.Path(path_type=Path), metavar="FILE", help="The table, for a document.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write it all here.")
@report_option
@click.option("--log", type=click.Choice(["rich", "plain", "json", "none"]), default="rich", show_default=True)
def techniques(
    model: str,
    input_len: str,
    output_len: str,
    plot: Path | None,
    markdown: Path | None,
    json_file: Path | None,
    report_file: Path | None,
    log: str,
    **settings: Any,
) -> None:
    """What each technique brings on one model: also `--techniques MODEL`.

    A row each, in a process of its own, on the same prompts: time, speed-up, memory, quality. Artifacts are made by the
    shipped recipes int8 and int4-flash at the first call and kept in the cache. docs/techniques.md explains the rows.
    """
    from ...evaluation.bench.lengths import Lengths
    from ..files import write_atomic
    from ..techniques import TechniqueSettings, compare_techniques
    from .bench_techniques import draw, require_charts, show, table_text
    from .progress import listener

    chosen = TechniqueSettings(
        input_len=Lengths.parse(input_len, "--input-len"),
        output_len=Lengths.parse(output_len, "--output-len"),
        **settings,
    )
    check_file(json_file)
    check_file(plot, "--plot")
    check_file(markdown, "--markdown")
    check_report(report_file)
    if plot is not None:
        require_charts()
    with listener(log) as listen:
        data = compare_techniques(model, chosen, listen)
    write(json_file, data)
    draw_report(report_file, "bench", data)
    show(data)
    if plot is not None:
        draw(plot, data)
    if markdown is not None:
        write_atomic(markdown, table_text(data["rows"]))
    for written in (json_file, plot, markdown):
        if written is not None:
            click.echo(f"Written: {written}")


def _run(
    mode: str,
    targets: tuple[str, ...],
    output_len: str,
    seed: int,
    goodput: tuple[str, ...],
    json_file: Path | None,
    report_file: Path | None,
    log: str,
    input_len: str | None = None,
    num_prompts: int | None = None,
    prompts: Path | None = None,
    prefix_len: int = 0,
    num_prefixes: int = 1,
    sizes: dict[str, Any] | None = None,
    request_rate: float = math.inf,
    burstiness: float = 1.0,
    max_concurrency: int | None = None,
    **settings: Any,
) -> None:
    from ...evaluation.bench.lengths import Lengths
    from ...evaluation.bench.loads import LoadSettings
    from ...evaluation.bench.metrics import parse_objectives
    from ..bench import BenchSettings
    from ..bench import bench as run
    from .bench_tables import show
    from .progress import listener

    load = LoadSettings(
        input_len=Lengths.parse(input_len or INPUT.get(mode, "128"), "--input-len"),
        output_len=Lengths.parse(output_len, "--output-len"),
        num_prompts=num_prompts or (None if prompts else PROMPTS.get(mode)),
        prefix_len=prefix_len,
        num_prefixes=num_prefixes,
        prompts=prompts,
        seed=seed,
        request_rate=request_rate,
        burstiness=burstiness,
        max_concurrency=max_concurrency,
        objectives=parse_objectives(goodput),
        **(sizes or {}),
    )
    check_file(json_file)
    check_report(report_file)
    with listener(log) as listen:
        data = run(mode, targets, load, BenchSettings(**settings), listen)
    write(json_file, data)
    draw_report(report_file, "bench", data)
    show(data)
    if json_file is not None:
        click.echo(f"Written: {json_file}")
    for case in data["cases"]:
        for result in case["results"]:
            if not result["summary"]["metrics"]["completed"]:
                raise RunError("every request failed", result["target"])


def check_file(path: Path | None, option: str = "--json") -> None:
    """Raise UsageError before the run for a file that could not be written after it."""
    if path is not None and path.is_dir():
        raise UsageError(f"is a folder; {option} names a file", str(path))
    if path is not None and not path.absolute().parent.is_dir():
        raise UsageError("its folder does not exist", str(path))


def write(path: Path | None, data: dict[str, Any]) -> None:
    """Write the document, whole or not at all."""
    if path is not None:
        from ..evaluate import write_json

        write_json(path, data)


def _numbers(text: str, where: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise UsageError(f"{text!r} is no list of positive numbers", where, "Write 1,4,16.")
    return found
