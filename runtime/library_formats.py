"""Reading folders of bitsandbytes and torchao, as transformers saves them, without either library.

Which layers are quantized is told by the tensors of the weight files: the lists of skipped modules in config.json are
read differently by every version of transformers. `exporters/bitsandbytes.py` and `torchao.py` write such folders.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..optimizer.errors import RunError
from .checkpoint_names import CheckpointNames
from .weight_files import weight_files

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .kernels.packed import QuantScheme
    from .tensor_files import Stored

Arguments = Mapping[str, Any]
FOUR_BIT = ".weight.quant_state.bitsandbytes__"
INT8_SCALES = ".SCB"
INT8_DATA = "._weight_qdata"
NOT_DAMAGED = "config.json and the weight files do not belong together."


def runs_library_format(config: Arguments) -> bool:
    """Whether this `quantization_config` is for `install_library_layers`; other entries are for transformers.

    Of bitsandbytes all but other storage types than bytes; of torchao int8 weights with dynamic int8 inputs.
    """
    if config.get("quant_method") == "bitsandbytes" or config.get("load_in_8bit") or config.get("load_in_4bit"):
        storage = config.get("bnb_4bit_quant_storage") or "uint8"
        return storage == "uint8" and not config.get("llm_int8_has_fp16_weight")
    return config.get("quant_method") == "torchao" and _is_dynamic_int8(config.get("quant_type"))


def _is_dynamic_int8(quant_type: Any) -> bool:
    """Whether TorchAoConfig's quant_type is Int8DynamicActivationInt8WeightConfig with a scale a row on both sides."""
    entry = quant_type.get("default") if isinstance(quant_type, Mapping) else None
    if not isinstance(entry, Mapping) or entry.get("_type") != "Int8DynamicActivationInt8WeightConfig":
        return False
    data = entry.get("_data") or {}
    granularity, mapping = data.get("granularity"), data.get("act_mapping_type") or {"_data": "SYMMETRIC"}
    return (
        entry.get("_version") == 2
        and mapping.get("_data") == "SYMMETRIC"
        and (granularity is None or (isinstance(granularity, Mapping) and granularity.get("_type") == "PerRow"))
        and not data.get("reduce_range")
    )


def install_library_layers(
    model: nn.Module, folder: Path, config: Arguments, dtype: torch.dtype | None = None
) -> list[str]:
    """Replace the nn.Linear modules that the folder holds quantized by empty quantized layers; returns their names.

    model: on the meta device. config: the folder's `quantization_config`. dtype: of biases, by default the model's.
    Raises RunError where the files hold no quantized layer, or one that the model has no linear layer for.
    """
    from torch import nn

    from .kernels.formats import empty_like
    from .tensor_files import locate

    places = locate(weight_files(folder))
    names = CheckpointNames(model, places)
    stored = {names.in_module(name): place for name, place in places.items()}
    schemes = _schemes(stored, config, getattr(model, "config", None))
    if not schemes:
        raise RunError("config.json says that the model is quantized, and no weight is", str(folder), NOT_DAMAGED)
    modules = dict(model.named_modules())
    for name, scheme in schemes.items():
        linear = modules.get(name)
        if not isinstance(linear, nn.Linear):
            raise RunError(f"{name} is stored quantized, and is no linear layer of the model", str(folder), NOT_DAMAGED)
        model.set_submodule(name, empty_like(linear, scheme, dtype))
    return list(schemes)


def prepare_library_layers(model: nn.Module) -> None:
    """Let layers read what their tensors say beside numbers, which a compiled graph could not."""
    from .kernels.four_bit import FourBitLinear

    for module in model.modules():
        if isinstance(module, FourBitLinear):
            module.prepare()


def _schemes(stored: Mapping[str, Stored], config: Arguments, model_config: Any) -> dict[str, QuantScheme]:
    """Layer name → scheme, by the names of the stored tensors."""
    from .kernels.dynamic_int8 import DynamicInt8Scheme
    from .kernels.llm_int8 import LLMInt8Scheme

    found: dict[str, QuantScheme] = {}
    for key in sorted(stored):
        if FOUR_BIT in key:
            found[key.partition(FOUR_BIT)[0]] = _four_bit(key, stored, _compute_dtype(config, model_config))
        elif key.endswith(INT8_SCALES):
            threshold = config.get("llm_int8_threshold")
            name = key.removesuffix(INT8_SCALES)
            _require_rows(name, stored)
            found[name] = LLMInt8Scheme(threshold=6.0 if threshold is None else float(threshold))
        elif key.endswith(INT8_DATA):
            name = key.removesuffix(INT8_DATA)
            found[name] = DynamicInt8Scheme(zero_point=f"{name}._weight_zero_point" in stored)
    return found


def _four_bit(key: str, stored: Mapping[str, Stored], compute_dtype: str) -> QuantScheme:
    """The scheme that the layer's JSON tells of. Raises RunError where it is damaged or of another kind."""
    from .kernels.four_bit import ABSMAX, FourBitScheme
    from .tensor_files import read_stored

    name, _, kind = key.partition(FOUR_BIT)
    place = stored[key]
    try:
        state = json.loads(bytes(read_stored(place).tolist()))
        nested = "nested_offset" in state
        if nested and int(state["nested_blocksize"]) != 256:
            raise ValueError(f"its scales have blocks of {state['nested_blocksize']}, not of 256")
        if stored[f"{name}.{ABSMAX}"].dtype != ("U8" if nested else "F32"):
            raise ValueError("its scales and its quant_state do not fit")
        return FourBitScheme(
            group_size=int(state["blocksize"]), kind=kind, nested=nested, compute_dtype=compute_dtype,
            state_bytes=place.nbytes,
        )  # fmt: skip
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{key} cannot be read ({error})", str(place.file), NOT_DAMAGED) from None


def _compute_dtype(config: Arguments, model_config: Any) -> str:
    """The type that inputs of four-bit layers are converted to; empty where it is that of the model."""
    name = str(config.get("bnb_4bit_compute_dtype") or "float32").removeprefix("torch.")
    return "" if name == str(getattr(model_config, "dtype", None)).removeprefix("torch.") else name


def _require_rows(name: str, stored: Mapping[str, Stored]) -> None:
    """Raise RunError where an int8 weight has one of the layouts that bitsandbytes once had for some GPUs."""
    from .tensor_files import read_stored

    place = stored.get(f"{name}.weight_format")
    if place is None:
        raise RunError(f"{name} has no weight_format", str(stored[f"{name}{INT8_SCALES}"].file), NOT_DAMAGED)
    if bool(read_stored(place).any()):
        raise RunError(f"{name} is not stored row by row", str(place.file), "Quantize the model again.")
