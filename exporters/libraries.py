"""Entries of config.json for layers in the formats of bitsandbytes and torchao, which have one scheme a model."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, cast

from ..optimizer.errors import UsageError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from ..runtime.kernels.packed import QuantScheme


def library_config(model: PreTrainedModel) -> dict[str, Any] | None:
    """The `quantization_config` of a model with layers in bitsandbytes' or torchao's formats; None for any other.

    Raises UsageError where there are others beside them, because neither library's entry can express that.
    """
    from ..runtime.kernels.formats import LIBRARY_FORMATS
    from .bitsandbytes import bitsandbytes_config
    from .compressed_tensors import packed_modules
    from .torchao import torchao_config

    schemes = {cast("QuantScheme", module.scheme) for _, module in packed_modules(model)}
    formats = sorted({scheme.format for scheme in schemes})
    if not set(formats) & set(LIBRARY_FORMATS):
        return None
    if len(schemes) > 1:
        raise UsageError(f"the formats {', '.join(formats)} cannot stand in one config.json", what_to_do="Use one.")
    skip = skipped_names(model)
    return torchao_config(skip) if formats == ["torchao-int8"] else bitsandbytes_config(model, schemes.pop(), skip)


def format_name(config: dict[str, Any]) -> str:
    """What a manifest calls the format of an entry."""
    if config.get("load_in_8bit") or config.get("load_in_4bit"):
        return f"bitsandbytes-{'int8' if config['load_in_8bit'] else config['bnb_4bit_quant_type']}"
    return config.get("format") or str(config["quant_method"])


def skipped_names(model: nn.Module) -> list[str]:
    """The linear layers that are not quantized, by full name, and blocks of stacked experts.

    Readers take an entry for the end of a name or, as an expression, for its start. One that would so cover a
    quantized layer too (`gate` before `gate_proj`) is written as an expression that ends with the name.
    """
    from torch import nn

    from ..runtime.experts import plain_experts
    from .compressed_tensors import packed_modules

    quantized, kept = [name for name, _ in packed_modules(model)], plain_experts(model)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    names = [name for name in linear if not any(name.startswith(f"{experts}.") for experts in kept)] + kept
    return [f"{re.escape(name)}$" if _covers(name, quantized) else name for name in names]


def _covers(name: str, quantized: list[str]) -> bool:
    return any(re.match(name, other) or other.endswith(name) for other in quantized)
