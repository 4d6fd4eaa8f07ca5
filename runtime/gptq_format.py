"""Reading a GPTQ checkpoint's entry of config.json: which linears are quantized, and how.

`exporters/gptq.py` writes such entries, and AutoGPTQ, GPTQModel and others do; `kernels/gptq_linear.py` has the layer.
Which layers are quantized is told by the weight files: no writer lists them in the entry.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..optimizer.errors import RunError, UsageError
from .checkpoint_names import CheckpointNames
from .kernels.gptq_linear import BITS, GPTQLinear, GPTQScheme
from .weight_files import read_json

if TYPE_CHECKING:
    import torch
    from torch import nn

METHOD = "gptq"
FORMATS = ("gptq", "gptq_v2")
"""Checkpoint formats: zero points minus one, and as they are."""
TWIN = "quantize_config.json"
"""The file that holds the entry beside config.json; old checkpoints have it only there."""
FIELDS = ("bits", "group_size", "sym", "desc_act")
"""What `dynamic` may override."""

Arguments = Mapping[str, Any]


def entry_of_twin(folder: Path) -> dict[str, Any] | None:
    """The entry in a folder whose config.json has none: that of quantize_config.json, where it is GPTQ's.

    Raises RunError where that file is not JSON.
    """
    if not (folder / TWIN).is_file():
        return None
    found = read_json(folder / TWIN)
    if not isinstance(found, dict) or "bits" not in found or found.get("quant_method", METHOD) != METHOD:
        return None
    return {**found, "quant_method": METHOD}


def install_gptq_linears(
    model: nn.Module, folder: Path, config: Arguments, dtype: torch.dtype | None = None
) -> list[str]:
    """Replace the nn.Linear modules that a folder holds quantized by empty GPTQLinear ones; returns their names.

    model: on the meta device. config: the folder's `quantization_config`. dtype: of the activations and biases, by
    default that of each layer's weight. Raises UsageError for a format, bits or module that no layer can run, RunError
    where entry and files contradict each other.
    """
    from torch import nn

    check_entry(config)
    format_ = checkpoint_format(config)
    stored = CheckpointNames.of_folder(model, folder)
    names = {stored.in_module(name) for name in stored.stored}
    quantized = sorted(name.removesuffix(".qweight") for name in names if name.endswith(".qweight"))
    if not quantized:
        raise RunError(
            "the weight files hold no quantized layer",
            where=str(folder),
            what_to_do="config.json and the weight files do not belong together.",
        )
    modules = dict(model.named_modules())
    for name in quantized:
        module = modules.get(name)
        if not isinstance(module, nn.Linear):
            what = "the model has no such layer" if module is None else f"a {type(module).__name__} is no linear layer"
            raise _unsupported(f"{name} is quantized, but {what}")
        settings = settings_of(config, name)
        scheme = GPTQScheme(
            bits=settings["bits"],
            group_size=settings["group_size"],
            symmetric=settings["sym"],
            g_idx=f"{name}.g_idx" in names,
            minus_one=format_ == "gptq",
        )
        if settings["desc_act"] and scheme.group_size != -1 and not scheme.g_idx:
            raise RunError(
                "the entry says that columns are in the order of activations (desc_act), but there is no g_idx",
                where=name,
                what_to_do="The weight files are incomplete: fetch them again.",
            )
        kept = dtype or module.weight.dtype
        layer = GPTQLinear.empty(
            module.in_features,
            module.out_features,
            scheme,
            bias=module.bias is not None or f"{name}.bias" in names,
            dtype=kept,
            device=module.weight.device,
        )
        model.set_submodule(name, layer.train(module.training))
    return quantized


def check_gptq_linears(model: nn.Module) -> None:
    """Raise RunError where the tensors of a GPTQLinear do not belong together."""
    for name, module in model.named_modules():
        if isinstance(module, GPTQLinear):
            try:
                module.check()
            except ValueError as error:
                raise RunError(str(error), where=name, what_to_do="The file is damaged: fetch it again.") from None


def check_entry(config: Arguments) -> None:
    """Raise UsageError for what no layer here can run."""
    checkpoint_format(config)
    pack = str(config.get("pack_dtype") or "int32").removeprefix("torch.")
    if pack != "int32":
        raise _unsupported(f"its codes are packed in {pack}")
    for key in ("is_marlin_format", "adapter", "rotation", "activation"):
        if config.get(key):
            raise _unsupported(f"it has {key} {config[key]!r}")
    dynamic = config.get("dynamic")
    if dynamic and not isinstance(dynamic, Mapping):
        raise _unsupported(f"its dynamic is {dynamic!r}")
    _checked({key: config.get(key) for key in FIELDS}, "quantization_config")


def checkpoint_format(config: Arguments) -> str:
    """`gptq` or `gptq_v2`. Raises UsageError for any other."""
    found = config.get("checkpoint_format") or config.get("format") or "gptq"
    if str(found).lower() not in FORMATS:
        raise _unsupported(f"its checkpoint_format is {found!r}")
    return str(found).lower()


def settings_of(config: Arguments, name: str) -> dict[str, Any]:
    """`bits`, `group_size`, `sym` and `desc_act` of a quantized layer: the first pattern of `dynamic` that matches the
    start of its name overrides the entry's own. Raises RunError where it says that the layer is not quantized.
    """
    settings = {key: config.get(key) for key in FIELDS}
    for pattern, overrides in (config.get("dynamic") or {}).items():
        if not re.match(pattern.removeprefix("-:").removeprefix("+:"), name):
            continue
        if pattern.startswith("-:"):
            raise RunError(
                f"the weight files have it quantized, `dynamic` says with {pattern!r} that it is not",
                where=name,
                what_to_do="config.json and the weight files do not belong together.",
            )
        settings |= {key: overrides[key] for key in FIELDS if key in overrides}
        break
    return _checked(settings, name)


def _checked(settings: dict[str, Any], where: str) -> dict[str, Any]:
    """The settings with their defaults. Raises UsageError for a value that there is not."""
    bits, size = settings["bits"], settings["group_size"]
    if bits not in BITS or isinstance(bits, bool):
        raise _unsupported(f"{where} has {bits!r} bits")
    if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
        raise _unsupported(f"{where} has the group size {size!r}")
    sym = True if settings["sym"] is None else bool(settings["sym"])
    return {"bits": bits, "group_size": size, "sym": sym, "desc_act": bool(settings["desc_act"])}


def _unsupported(what: str) -> UsageError:
    return UsageError(
        f"this GPTQ checkpoint cannot run packed: {what}",
        where="quantization_config",
        what_to_do="It runs linear layers of 2, 3, 4 and 8 bits in the checkpoint formats gptq and gptq_v2.",
    )
