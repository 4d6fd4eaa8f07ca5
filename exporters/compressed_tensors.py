"""compressed-tensors' `pack-quantized` format: the config entry for a model's packed layers.

`quantization_config` describes the PackedLinear modules of a model as `config.json` must, so that plain transformers
loads the folder. `runtime/packed_format.py` reads such entries, ours or another tool's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ..optimizer.errors import UsageError
from ..runtime.packed_format import FORMAT

if TYPE_CHECKING:
    from torch import nn

    from ..runtime.kernels.packed import QuantScheme


def quantization_config(model: nn.Module) -> dict[str, Any] | None:
    """The `quantization_config` of config.json for the PackedLinear modules of `model`; None where there are none.

    Linear layers left unquantized are listed under `ignore`. One scheme targets the class `Linear`; several name their
    modules one by one, so that readers that fuse layers find each. An asymmetric scheme adds `dequantize: true`, which
    lets transformers (5.23 and later) decompress while it loads: its other way expects zero points of another shape,
    and refuses the file. Raises UsageError where that way out is barred, see `check_loadable`.
    """
    import compressed_tensors
    from torch import nn

    from ..runtime.kernels.packed import PackedLinear

    schemes: dict[QuantScheme, list[str]] = {}
    ignore: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            schemes.setdefault(module.scheme, []).append(name)
        elif isinstance(module, nn.Linear):
            ignore.append(name)
    if not schemes:
        return None
    check_loadable(schemes)
    groups = {
        f"group_{i}": {
            "targets": ["Linear"] if len(schemes) == 1 else names,
            "weights": _weight_arguments(scheme),
            "input_activations": None,
            "output_activations": None,
            "format": FORMAT,
        }
        for i, (scheme, names) in enumerate(schemes.items())
    }
    config = {
        "quant_method": "compressed-tensors",
        "version": compressed_tensors.__version__,
        "format": FORMAT,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "config_groups": groups,
        "ignore": ignore,
    }
    if any(not scheme.symmetric for scheme in schemes):
        config["dequantize"] = True
    return config


def check_loadable(schemes: Iterable[QuantScheme]) -> None:
    """Raise UsageError where plain transformers could not load a folder with these schemes.

    While it decompresses at load, which asymmetric schemes need, transformers takes one scheme for all layers.
    """
    distinct = set(schemes)
    if len(distinct) > 1 and any(not scheme.symmetric for scheme in distinct):
        raise UsageError(
            f"{len(distinct)} schemes in one model, an asymmetric one among them, cannot be loaded by transformers",
            what_to_do="Use one scheme for all modules, or make every scheme symmetric.",
        )


def _weight_arguments(scheme: QuantScheme) -> dict[str, Any]:
    if scheme.g_idx:
        raise UsageError(
            "a group index per column (activation order without static groups) is no longer part of compressed-tensors",
            what_to_do="Quantize the original model again with static groups.",
        )
    channel = scheme.group_size == -1
    return {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": "channel" if channel else "group",
        "group_size": None if channel else scheme.group_size,
        "dynamic": False,
    }


def packed_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of every PackedLinear of `model`."""
    from ..runtime.kernels.packed import PackedLinear

    return ((name, module) for name, module in model.named_modules() if isinstance(module, PackedLinear))
