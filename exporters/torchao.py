"""torchao's entry in config.json, and the metadata of its safetensors files, as transformers' TorchAoConfig has them.

A quantized weight is stored in parts, `_weight_qdata` and so on; which of them make up which tensor is told by JSON in
the metadata of every weight file. No pickle is written. `runtime/library_formats.py` reads such folders.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

COPIED = 1 << 22
"""Bytes copied at once."""
PARTS = ("_weight_qdata", "_weight_scale", "_weight_zero_point")


def torchao_config(skip: list[str]) -> dict[str, Any]:
    """The `quantization_config` of a model with dynamic int8 layers, and plain ones named in `skip`."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig
    from transformers import TorchAoConfig

    config = TorchAoConfig(Int8DynamicActivationInt8WeightConfig(), modules_to_not_convert=skip)
    return {**config.to_dict(), "quant_method": "torchao"}


def torchao_metadata(model: PreTrainedModel) -> dict[str, str] | None:
    """What the metadata of every weight file of `model` has to say; None where no layer is torchao's."""
    from ..runtime.kernels.dynamic_int8 import DynamicInt8Linear

    layers = {name: module for name, module in model.named_modules() if isinstance(module, DynamicInt8Linear)}
    if not layers:
        return None
    found = {}
    for name in model.state_dict():
        owner, _, leaf = name.rpartition(".")
        if owner in layers and leaf in PARTS:
            found[f"{owner}.weight"] = _weight_metadata(layers[owner].in_features, model.dtype)
        else:
            found[name] = json.dumps({"_type": "Tensor"})
    return {"format": "pt", **found, "tensor_names": json.dumps(list(found))}


def add_metadata(model: PreTrainedModel, folder: Path) -> None:
    """Tell the weight files of a saved model which parts make up torchao's tensors, where it has any."""
    metadata = torchao_metadata(model)
    for file in sorted(folder.glob("*.safetensors")) if metadata else []:
        stamp(file, cast("dict[str, str]", metadata))


def stamp(file: Path, metadata: Mapping[str, str]) -> None:
    """Put `metadata` into the header of a safetensors file, which is written anew beside its place and renamed."""
    temporary = file.with_name(f".{file.name}.tmp-{os.getpid()}")
    try:
        with file.open("rb") as source, temporary.open("wb") as target:
            header = json.loads(source.read(int.from_bytes(source.read(8), "little")))
            text = json.dumps({**header, "__metadata__": dict(metadata)}, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
            target.write(len(text).to_bytes(8, "little") + text)
            while part := source.read(COPIED):
                target.write(part)
        os.replace(temporary, file)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@cache
def _weight_metadata(in_features: int, dtype: torch.dtype) -> str:
    """What torchao says of a weight with that many columns: it is asked for one of a single row."""
    import torch
    from torchao.prototype.safetensors.safetensors_utils import TensorSubclassAttributeJSONEncoder
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    with torch.no_grad():
        linear = torch.nn.Linear(in_features, 1, bias=False, dtype=dtype)
        quantize_(linear, Int8DynamicActivationInt8WeightConfig(set_inductor_config=False))
        return json.dumps(linear.weight.detach(), cls=TensorSubclassAttributeJSONEncoder)
