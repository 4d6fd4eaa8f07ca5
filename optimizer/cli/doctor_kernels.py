"""`llmopt doctor --kernels`: the native library, and which kernel runs each kind of quantized linear layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ...runtime.kernels.linear_candidates import LinearCase


def show(model: str | None, allow_quantized: bool, as_json: bool) -> None:
    """Print the library's state and the choices: of the model's layers, or without a model all that are kept."""
    found: dict[str, Any] = {"native": native_state()}
    if model is None:
        found["cached"] = cached_choices()
    else:
        found["model"] = model
        found["linears"] = model_choices(model, allow_quantized)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    from .tables import console

    out = console()
    state = found["native"]
    built = f"built, {state['isa']}, {state['threads']} threads, {state['library']}"
    out.print(f"native kernels: {built if state['built'] else state['reason']}", highlight=False, markup=False)
    out.print(f"CUDA: {state['cuda'] or 'none'}; triton: {state['triton'] or 'not installed'}", highlight=False)
    linears = found.get("linears")
    if linears is None:
        out.print(f"choices kept in {found['cached']['file']}", highlight=False, markup=False)
        linears = found["cached"]["linears"]
        if not linears:
            out.print("none yet: name a model, or load one with runner='eager', linears='measured'", markup=False)
    elif not linears:
        out.print(f"{model} has no packed linear layers: float ones run torch's linear, or the fused decoder's kernels")
    print_table(linears)


def native_state() -> dict[str, Any]:
    """The native library: whether it is built, where, for which instructions; or why it is not."""
    import torch

    from ...runtime.kernels import build, native
    from ..environment import library_version

    reason = build.unavailable_reason()
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    state: dict[str, Any] = {"built": reason is None, "reason": reason, "cuda": cuda}
    state["triton"] = library_version("triton")
    if reason is None:
        state.update(library=str(build.build()), isa=native.instruction_set(), threads=native.get_num_threads())
    return state


def model_choices(model: str, allow_quantized: bool) -> list[dict[str, Any]]:
    """The choice for each kind of packed linear layer of a model, measured now where none is kept.

    The model is built from its config alone. Raises UsageError where there is no such model.
    """
    import torch

    from ...runtime.kernels.linear_choice import choose
    from ...runtime.kernels.linear_dispatch import cases_of
    from ...runtime.open import open_config
    from ...runtime.packed_format import FORMAT, install_packed_linears
    from ...runtime.packed_load import build_empty
    from ..sources import resolve

    folder = Path(model) if (Path(model) / "config.json").is_file() else resolve(model).folder
    config = open_config(folder)
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None and not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    if not quantization or quantization.get("format") != FORMAT:
        return []
    dtype = getattr(config, "dtype", None) or torch.float32
    module = build_empty(config, dtype)
    install_packed_linears(module, quantization, dtype)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for case, count in cases_of(module).items():
        case = on_device(case, device)
        choice = choose(case)
        line = entry(choice.microseconds, choice.refused, choice.table(allow_quantized))
        shape = f"{case.out_features}x{case.in_features}"
        dtype_name = str(case.dtype).removeprefix("torch.")
        more = {"layers": count, "origin": choice.origin}
        rows.append({"layer": f"{shape} {case.format} {dtype_name} {device}", **more, **line})
    return rows


def on_device(case: LinearCase, device: str) -> LinearCase:
    from dataclasses import replace

    return replace(case, device=device)


def cached_choices() -> dict[str, Any]:
    """Every choice that is kept for this machine's CPU and GPU."""
    import torch

    from ...runtime.kernels.linear_choice import Choice, choices_file, environment_key, read_choices

    file = choices_file()
    kept = read_choices(Path(file))
    rows = []
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        for name, found in kept.get(environment_key(device), {}).get("cases", {}).items():
            choice = Choice({int(r): t for r, t in found["microseconds"].items()}, found["refused"], cached=True)
            rows.append({"layer": f"{name} {device}", **entry(choice.microseconds, choice.refused, choice.table())})
    return {"file": str(file), "linears": rows}


def entry(times: dict[int, dict[str, float | None]], refused: dict[str, str], table: dict[int, str]) -> dict[str, Any]:
    """One kind of layer: for each bucket the chosen kernel and everybody's microseconds; who is refused, and why."""
    rows = [{"rows": r, "chosen": table[r], "microseconds": times[r]} for r in sorted(times)]
    return {"rows": rows, "unavailable": refused}


def print_table(linears: list[dict[str, Any]]) -> None:
    """A table a kind of layer: microseconds by rows, the chosen one marked, then the candidates that are refused."""
    from rich.markup import escape
    from rich.table import Table

    from .tables import console

    out = console()
    for line in linears:
        names = list(line["rows"][0]["microseconds"])
        count = f" ({line['layers']} layers, {line['origin']})" if "layers" in line else ""
        table = Table(title=escape(line["layer"] + count), title_justify="left")
        for column in ("rows up to", "chosen", *(f"{name} µs" for name in names)):
            table.add_column(column, justify="left" if column == "chosen" else "right")
        for row in line["rows"]:
            cells = []
            for name in names:
                time = row["microseconds"][name]
                shown = "-" if time is None else f"{time:,.0f}"
                cells.append(f"[bold green]{shown}[/]" if name == row["chosen"] else shown)
            table.add_row(str(row["rows"]), row["chosen"], *cells)
        out.print(table)
        for name, why in line["unavailable"].items():
            out.print(f"  {name}: {why}", style="dim", highlight=False, markup=False)
