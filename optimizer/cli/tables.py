"""Tables that the commands print: plain text when piped, styled on a terminal (`NO_COLOR` is honoured by rich)."""

from __future__ import annotations

from typing import Any

from ..manifest import Manifest
from ..model import ModelInfo
from ..planning import Plan
from .progress import duration


def console() -> Any:
    from rich.console import Console

    out = Console()
    return out if out.is_terminal else Console(width=110)


def mib(count: float) -> str:
    """Bytes as MiB or GiB."""
    return f"{count / 2**20:,.1f} MiB" if count < 2**30 else f"{count / 2**30:,.2f} GiB"


def before_after(manifest: Manifest) -> None:
    """The table of source and artifact side by side."""
    from rich.table import Table

    before, after = manifest.measured["before"], manifest.measured["after"]
    divergence = manifest.measured["divergence"]
    table = Table(title=f"{manifest.source.id} → {manifest.recipe['name']}", title_justify="left")
    for column in ("", "source", "artifact", "change"):
        table.add_column(column, justify="left" if not column else "right")

    def row(label: str, key: str, show: Any, ratio: Any) -> None:
        if before.get(key) is not None and after.get(key) is not None:
            table.add_row(label, show(before[key]), show(after[key]), ratio(before[key], after[key]))

    share = lambda a, b: f"{b / a:.1%}"  # noqa: E731
    rise = lambda a, b: f"{b / a - 1:+.2%}"  # noqa: E731
    times = lambda a, b: f"{b / a:.2f}×"  # noqa: E731
    row("size on disk", "disk_bytes", mib, share)
    row("weights in memory", "memory_bytes", mib, share)
    row("perplexity", "perplexity", "{:.3f}".format, rise)
    if "mean_kl" in divergence:  # an export of a plain model measures none
        table.add_row("top-1 agreement", "", f"{divergence['top1_agreement']:.1%}", "")
        table.add_row("mean KL (nats/token)", "", f"{divergence['mean_kl']:.4f}", "")
    row("decode tok/s", "decode_tokens_per_second", "{:.1f}".format, times)
    row("prefill tok/s", "prefill_tokens_per_second", "{:,.0f}".format, times)
    out = console()
    out.print(table)
    for gate in manifest.gates:
        mark = "[green]holds[/]" if gate.passed else "[red]missed[/]"
        value = "not measured" if gate.value is None else f"{gate.value:.4g}"
        out.print(f"gate {gate.name}: {value} (limit {gate.limit:.4g}) {mark}")
    for note in manifest.notes:
        if note.kind == "fallback":
            out.print(f"fallback in {note.stage}: {note.message}", style="yellow", markup=False)
    samples = manifest.certificate.get("samples") or []
    if samples:
        out.print(f"[bold]{samples[0]['prompt']}[/]{samples[0]['text']}", highlight=False)


def plan_table(plan: Plan, info: ModelInfo, show_all: bool) -> None:
    """What each pass will do."""
    out = console()
    layers = getattr(info.config.get_text_config(), "num_hidden_layers", "?")
    out.print(f"{info.source.id}: {info.config.model_type}, {layers} layers, {mib(info.weight_bytes)} of weights")
    for name, item in plan.items:
        out.print(f"\n[bold]{name}[/]: {item.summary}", highlight=False)
        shown = item.modules if show_all else item.modules[:4]
        for module in shown:
            out.print(
                f"  {module.name}: {module.action}, {mib(module.bytes_before)} → {mib(module.bytes_after)}",
                highlight=False,
                markup=False,
            )
        if len(item.modules) > len(shown):
            out.print(f"  … and {len(item.modules) - len(shown)} more (--all lists them)")
        for key, value in item.runtime.items():
            out.print(f"  runtime {key}: {value}", highlight=False, markup=False)
        for note in item.notes:
            out.print(f"  note: {note}", highlight=False, markup=False)
        for refusal in item.refusals:
            out.print(f"  refused: {refusal}", style="red", highlight=False, markup=False)
    ratio = plan.bytes_after / plan.bytes_before if plan.bytes_before else 1.0
    out.print(f"\nweights {mib(plan.bytes_before)} → {mib(plan.bytes_after)} ({ratio:.1%})", highlight=False)
    out.print(f"peak memory about {mib(plan.peak_memory)}, time about {duration(plan.seconds)}", highlight=False)


def shares_table(shares: list[tuple[str, float]]) -> None:
    """The layers that hurt most, worst first."""
    from rich.table import Table

    table = Table(title="Layers by their share of the error", title_justify="left")
    table.add_column("module")
    table.add_column("share", justify="right")
    for name, share in shares[:20]:
        table.add_row(name, f"{share:.1%}")
    console().print(table)
