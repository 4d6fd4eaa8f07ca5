"""Whether the fused decoder understands an architecture, from its config alone: no weights are loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from .kernels.recognize import UnsupportedModel, recognize, rope_table

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PROBED_ROWS = 8
"""Rows of the embedding that `recognize` looks at."""


def unsupported_config(config: PreTrainedConfig, trust_remote_code: bool = False) -> str | None:
    """Why the fused decoder does not understand a model of this config, or None.

    The model is built with its matrices on the meta device; norms, biases and a few rows of the embedding get made-up
    values, which is all that `recognize` runs. A model that passes here may still fail the decoder's proof at load.
    """
    from .packed_load import build_empty

    dtype = getattr(config, "dtype", None) or torch.float32
    model = build_empty(config, dtype, trust_remote_code).eval()
    for module in model.modules():
        rows = PROBED_ROWS if isinstance(module, nn.Embedding) else 0
        if rows:
            module.padding_idx = None  # may lie outside the rows that are kept
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            shape = (min(rows, parameter.shape[0]), *parameter.shape[1:]) if rows else tuple(parameter.shape)
            if rows or parameter.dim() == 1:
                values = torch.linspace(0.5, 1.5, torch.Size(shape).numel()).view(shape)
                module._parameters[name] = nn.Parameter(values.to(parameter.dtype), requires_grad=False)
    try:
        structure = recognize(model)
        for kind in {layer.rope for layer in structure.layers if layer.rope is not None}:
            rope_table(structure.rotary, kind, 2)
    except UnsupportedModel as error:
        return str(error)
    return None
