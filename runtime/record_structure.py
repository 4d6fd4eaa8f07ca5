"""A decoder's structure as JSON and small tensors, and back again with weights that are read when they are packed.

`describe` takes apart what `kernels.recognize` found in a transformers model; `rebuild` makes the same ModelStructure
from that description and the model's weight files, one linear layer in memory at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from typing import Any, cast

import torch
from torch import nn

from ..optimizer.errors import RunError
from .kernels.recognize import Layer, LinearPart, ModelStructure, rope_table
from .load_record import Description
from .tensor_files import Stored, read_stored

CHECKED_POSITIONS = 4096
APART = ("layers", "linears", "embedding", "rotary", "dtype")
"""Fields of ModelStructure that are not described as they are."""
Tensors = dict[str, torch.Tensor]


class NotRecordable(ValueError):
    """A later load could not build this model from its files; the message says what is in the way."""


def describe(model: nn.Module, structure: ModelStructure, stored: Mapping[str, Stored]) -> Description:
    """Take a structure apart. `stored`: the tensors of the model's weight files. The model's linears may be released.

    Raises NotRecordable where a weight is not in the files under the module's name, or the rotary embedding is not
    `cos(position * frequency) * factor`.
    """
    found = Description({}, {}, _embedding_name(model, structure, stored), {})
    names = {id(module): name for name, module in model.named_modules()}

    def plain(value: Any, where: str) -> Any:
        if isinstance(value, LinearPart):
            name = names[id(value.module)]
            if name not in found.linears:
                tied = structure.head_tied and value is structure.head
                found.linears[name] = _linear(value.module, name, stored, found.embedding if tied else None)
            return {"linear": name, "called": value.name, "first": value.first, "rows": value.rows}
        if isinstance(value, torch.Tensor):
            found.tensors[where] = value.detach().clone()
            return {"tensor": where}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise NotRecordable(f"{where} is a {type(value).__name__}")

    for field in fields(ModelStructure):
        if field.name not in APART:
            found.structure[field.name] = plain(getattr(structure, field.name), field.name)
    found.structure["layers"] = [
        {f.name: plain(getattr(layer, f.name), f"layers.{i}.{f.name}") for f in fields(Layer)}
        for i, layer in enumerate(structure.layers)
    ]
    kinds = {layer.rope for layer in structure.layers if layer.rope is not None}
    found.structure["rope"] = {kind: _rope(structure.rotary, kind, found.tensors) for kind in sorted(kinds)}
    found.structure["dtype"] = str(structure.dtype).removeprefix("torch.")
    return found


def rebuild(description: Description, embedding: torch.Tensor, stored: Mapping[str, Stored]) -> ModelStructure:
    """The structure that was described, over weight files. embedding: the table, in the structure's dtype.

    Raises KeyError, TypeError or RunError where the files or the code are not those of the description.
    """
    given, tensors = description.structure, description.tensors

    def value(entry: Any) -> Any:
        if not isinstance(entry, dict):
            return entry
        if "tensor" in entry:
            return tensors[entry["tensor"]]
        made = description.linears[entry["linear"]]
        table = embedding if made.get("tied") else None
        return StoredPart(entry["called"], entry["first"], entry["rows"], made, stored, table)

    layers = [Layer(**{name: value(entry) for name, entry in layer.items()}) for layer in given["layers"]]
    rest = {name: value(entry) for name, entry in given.items() if name not in (*APART, "rope")}
    rotary = StoredRotary({kind: (tensors[name], factor) for kind, (name, factor) in given["rope"].items()})
    return ModelStructure(
        layers=layers, embedding=embedding, rotary=cast(nn.Module, rotary), dtype=getattr(torch, given["dtype"]), **rest
    )


@dataclass(frozen=True)
class StoredPart:
    """Stands for a LinearPart: each access of `module` reads the layer anew from the files, or for a tied head takes
    the table that is given."""

    name: str
    first: int
    rows: int
    made: Mapping[str, Any]
    stored: Mapping[str, Stored]
    table: torch.Tensor | None = None

    @property
    def module(self) -> nn.Module:
        made = self.made
        shape = made["in_features"], made["out_features"]
        if "class" in made:
            file, name, scheme = made["class"]
            code = import_module(f".kernels.{file}", __package__)
            scheme = getattr(code, scheme)(**made["scheme"])
            layer = cast(nn.Module, getattr(code, name).empty(*shape, scheme, bias="bias" in made["tensors"]))
        else:
            layer = nn.Linear(*shape, bias="bias" in made["tensors"], device="meta")
        for name, (source, dtype) in made["tensors"].items():
            tensor = self.table if source == "" else read_stored(self.stored[source]).to(getattr(torch, dtype))
            expected = layer._parameters[name]
            if tensor is None or expected is None or tensor.shape != expected.shape:
                raise RunError(f"{self.name}.{name} is not what an earlier load found in the files")
            layer._parameters[name] = nn.Parameter(tensor, requires_grad=False)
        return layer


class StoredRotary:
    """Stands for a model's rotary embedding: inverse frequencies [half] and a factor by layer type ("" for the one)."""

    def __init__(self, kinds: Mapping[str, tuple[torch.Tensor, float]]) -> None:
        self.kinds = dict(kinds)

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, layer_type: str = ""
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, float32 [1, length, 2 * half], of positions [1, length]."""
        frequencies, factor = self.kinds[layer_type]
        half = positions.float().unsqueeze(-1) * frequencies.float()
        angles = torch.cat((half, half), -1)
        return angles.cos() * factor, angles.sin() * factor


def _rope(rotary: nn.Module, kind: str, tensors: Tensors) -> tuple[str, float]:
    """Name of the frequencies, and their factor, after a comparison of whole tables."""
    prefix = f"{kind}_" if kind else ""
    frequencies = getattr(rotary, f"{prefix}inv_freq", None)
    factor = getattr(rotary, f"{prefix}attention_scaling", None)
    if not isinstance(frequencies, torch.Tensor) or not isinstance(factor, (int, float)):
        raise NotRecordable(f"{type(rotary).__name__} has no {prefix}inv_freq and {prefix}attention_scaling")
    again = cast(nn.Module, StoredRotary({kind: (frequencies, float(factor))}))
    pairs = zip(rope_table(rotary, kind, CHECKED_POSITIONS), rope_table(again, kind, CHECKED_POSITIONS))
    if not all(torch.equal(one, other) for one, other in pairs):
        raise NotRecordable(f"{type(rotary).__name__} is more than frequencies and a factor")
    name = f"rope.{kind}.inv_freq"
    tensors[name] = frequencies.detach().clone()
    return name, float(factor)


def _embedding_name(model: nn.Module, structure: ModelStructure, stored: Mapping[str, Stored]) -> str:
    """The table's name in the files; a tied one may be there under the head's."""
    names = [name for name, p in model.named_parameters(remove_duplicate=False) if p.shape == structure.embedding.shape]
    same = [n for n in names if model.get_parameter(n).data_ptr() == structure.embedding.data_ptr()]
    for name in same:
        if name in stored and stored[name].shape == tuple(structure.embedding.shape):
            return name
    raise NotRecordable("the embedding is not in the weight files under its module's name")


def _linear(module: Any, name: str, stored: Mapping[str, Stored], table: str | None) -> dict[str, Any]:
    """How to make a linear layer: its sizes, its class and scheme where it is packed, and its tensors as (name in the
    files, dtype in memory), with "" for the embedding table."""
    made: dict[str, Any] = {"in_features": module.in_features, "out_features": module.out_features, "tensors": {}}
    if hasattr(module, "quant_state"):
        cls, scheme = type(module), type(module.scheme)
        home, _, file = cls.__module__.rpartition(".")
        if home != f"{__package__}.kernels" or not hasattr(import_module(cls.__module__), scheme.__name__):
            raise NotRecordable(f"{name} is a {cls.__module__}.{cls.__name__}")
        made |= {"class": (file, cls.__name__, scheme.__name__), "scheme": asdict(module.scheme)}
    for leaf, parameter in module._parameters.items():
        if parameter is None:
            continue
        source = f"{name}.{leaf}"
        if leaf == "weight" and table is not None:
            made["tied"], source = True, ""
        elif source not in stored or (parameter.numel() and stored[source].shape != tuple(parameter.shape)):
            raise NotRecordable(f"{source} is not in the weight files as the module has it")
        made["tensors"][leaf] = (source, str(parameter.dtype).removeprefix("torch."))
    return made
