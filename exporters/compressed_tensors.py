"""compressed-tensors' formats: the config entry for a model's quantized layers.

`quantization_config` describes the quantized layers of a model (`runtime/kernels/formats.py`) as `config.json` must, so
that plain transformers loads the folder. `runtime/packed_format.py` reads such entries, ours or another tool's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ..optimizer.errors import UsageError
from ..runtime.packed_format import MIXED

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..runtime.kernels.packed import QuantScheme


EXPERT = re.compile(r"\.experts\.\d+\.")
EXPERTS = r"re:.*\.experts\.\d+\."
"""The target by which transformers finds the scheme of experts among several."""


def quantization_config(model: nn.Module) -> dict[str, Any] | None:
    """The `quantization_config` of config.json for the quantized layers of `model`; None where there are none.

    Linear layers left unquantized are listed under `ignore`. One scheme targets the class `Linear`; several name their
    modules one by one, so that readers that fuse layers find each. `dequantize: true` lets transformers (5.23 and
    later) decompress while it loads. It stands where its other way fails: that expects zero points of another shape,
    and makes four-bit floats bfloat16 whatever the model is. Raises UsageError where that way out is barred, see
    `check_loadable`.
    """
    import compressed_tensors
    from torch import nn

    from ..runtime.expert_readers import merged_leaves, unreadable_experts
    from ..runtime.experts import plain_experts
    from ..runtime.kernels.formats import QUANTIZED

    schemes: dict[QuantScheme, list[str]] = {}
    ignore: list[str] = []
    kept = plain_experts(model)
    for name, module in model.named_modules():
        if isinstance(module, QUANTIZED):
            schemes.setdefault(module.scheme, []).append(name)
        elif isinstance(module, nn.Linear) and not any(name.startswith(f"{experts}.") for experts in kept):
            ignore.append(name)
    if not schemes:
        return None
    ignore += [f"re:{re.escape(name)}(\\.|$)" for name in kept]
    dtype = getattr(model, "dtype", None)
    check_loadable(schemes, dtype)
    experts = {scheme for scheme, names in schemes.items() if any(EXPERT.search(name) for name in names)}
    reason = unreadable_experts(experts) if experts and merged_leaves(model) else ""
    if reason:
        raise UsageError(reason)
    groups = {
        f"group_{i}": {
            "targets": ["Linear"] if len(schemes) == 1 else names + [EXPERTS] * (scheme in experts),
            "weights": _weight_arguments(scheme),
            "input_activations": _input_arguments(scheme),
            "output_activations": None,
            "format": scheme.format,
        }
        for i, (scheme, names) in enumerate(schemes.items())
    }
    formats = {scheme.format for scheme in schemes}
    config = {
        "quant_method": "compressed-tensors",
        "version": compressed_tensors.__version__,
        "format": formats.pop() if len(formats) == 1 else MIXED,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "config_groups": groups,
        "ignore": ignore,
    }
    if _dequantized_at_load(schemes, dtype):
        config["dequantize"] = True
    return config


def check_loadable(schemes: Iterable[QuantScheme], dtype: torch.dtype | None = None) -> None:
    """Raise UsageError where plain transformers could not load a folder with these schemes.

    While it decompresses at load, which asymmetric schemes need, and four-bit floats in a model whose `dtype` is not
    bfloat16, transformers takes one scheme for all layers.
    """
    distinct = set(schemes)
    needing = _dequantized_at_load(distinct, dtype)
    if len(distinct) > 1 and needing:
        raise UsageError(
            f"{len(distinct)} schemes in one model, {needing} among them, cannot be loaded by transformers",
            what_to_do="Use one scheme for all modules, or make every scheme symmetric and the model bfloat16.",
        )


def _dequantized_at_load(schemes: Iterable[QuantScheme], dtype: torch.dtype | None) -> str:
    """Which of the schemes transformers has to decompress while it loads, in words; empty where there is none."""
    import torch

    from ..runtime.kernels.float4 import Float4Scheme

    if any(not scheme.symmetric for scheme in schemes):
        return "an asymmetric one"
    narrow = dtype in (None, torch.bfloat16)
    return "" if narrow or not any(isinstance(s, Float4Scheme) for s in schemes) else f"four-bit floats beside {dtype}"


def _weight_arguments(scheme: QuantScheme) -> dict[str, Any]:
    """compressed-tensors' QuantizationArgs of the weight."""
    from ..runtime.kernels.float4 import Float4Scheme
    from ..runtime.kernels.scaled import ScaledScheme

    if scheme.g_idx:
        raise UsageError(
            "a group index per column (activation order without static groups) is no longer part of compressed-tensors",
            what_to_do="Quantize the original model again with static groups.",
        )
    channel = scheme.group_size == -1
    arguments: dict[str, Any] = {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": "channel" if channel else "group",
        "group_size": None if channel else scheme.group_size,
        "dynamic": False,
    }
    if isinstance(scheme, Float4Scheme):
        scale_dtype = "torch.uint8" if scheme.kind == "mxfp4" else "torch.float8_e4m3fn"
        strategy = "group" if scheme.kind == "mxfp4" else "tensor_group"
        arguments.update(type="float", strategy=strategy, scale_dtype=scale_dtype, zp_dtype=scale_dtype)
    elif isinstance(scheme, ScaledScheme):
        arguments.update(type=_type(scheme), strategy="tensor" if scheme.per_tensor else arguments["strategy"])
        if not channel:
            size = scheme.group_size
            arguments.update(strategy="block", group_size=None, block_structure=[size, size])
    return arguments


def _input_arguments(scheme: QuantScheme) -> dict[str, Any] | None:
    """compressed-tensors' QuantizationArgs of what enters the layer; None where it is left as it is."""
    from ..runtime.kernels.scaled import ScaledScheme

    if not isinstance(scheme, ScaledScheme):
        return None
    token = "tensor" if scheme.static_input else "token"
    return {
        "num_bits": 8,
        "type": _type(scheme),
        "symmetric": True,
        "strategy": token if scheme.group_size == -1 else "group",
        "group_size": None if scheme.group_size == -1 else scheme.group_size,
        "dynamic": not scheme.static_input,
    }


def _type(scheme: Any) -> str:
    return "int" if scheme.kind == "int8" else "float"


def packed_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of every quantized layer of `model`."""
    from ..runtime.kernels.formats import QUANTIZED

    return ((name, module) for name, module in model.named_modules() if isinstance(module, QUANTIZED))
