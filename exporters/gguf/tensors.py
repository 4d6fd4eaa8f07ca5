"""What is written of a model: one entry a tensor, with its type, how exact that is, and how to read its bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ...optimizer.errors import RunError, UsageError
from .blocks import BLOCK, FLOAT16_MAX, Codes, choose, encode, scale_error, value_error
from .families import Family, is_norm, row_order, tensor_names

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import nn
    from transformers import PreTrainedModel

    from .options import GGUFOptions

FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
STORED = {f"torch.{dtype}": kind for kind, dtype in FLOATS.items()}
EXACT, BOUNDED, ROUNDED = "exact", "bounded", "rounded"


@dataclass
class Entry:
    """One tensor of the file.

    name: llama.cpp's; source: transformers'. rule: `exact` where the stored values are the model's; `bounded` where
    they are but for scales rounded to float16, by at most `bound`; `rounded` where they are rounded to `kind` anew.
    read: the values to write, in the file's layout. expected: the model's values, float32 where it is quantized.
    requantized: why a quantized layer's own grid was not kept, else "".
    """

    name: str
    source: str
    kind: str
    shape: tuple[int, ...]
    read: Callable[[], NDArray[Any]]
    expected: Callable[[], torch.Tensor]
    rule: str = EXACT
    bound: float = 0.0
    scale_error: float = 0.0
    quantized: bool = False
    requantized: str = ""
    dense: bool = False
    """Whether the model holds it quantized; `expected` is then float32."""


def plan_entries(module: PreTrainedModel, family: Family, options: GGUFOptions) -> list[Entry]:
    """The entries of all tensors. Raises UsageError for a tensor that llama.cpp has no place for, or for quantized
    layers whose grid no type holds where they may not be rounded anew."""
    rename = tensor_names(family, module.config)
    entries = []
    for name, owner, tensor in sources(module):
        order = row_order(family, module.config, name)
        offset = family.norm_offset if is_norm(name) else 0.0
        target = rename(name)
        if target == "output.weight" and not family.head:
            raise UsageError(
                f"llama.cpp's {family.arch} has no head beside the embedding, and this model's are two", "gguf"
            )
        if tensor is not None:
            entries.append(_plain(target, name, tensor, order, offset, options))
        else:
            entries.append(_quantized(target, name, owner, order, options))
    refused = [entry for entry in entries if entry.requantized and not options.requantize]
    if refused:
        raise UsageError(
            f"{len(refused)} quantized layers have no type that holds their values, first {refused[0].source}: "
            f"{refused[0].requantized}",
            "gguf",
            "Pass --set requantize=true to round them anew, quantize in groups of a multiple of 32, or set type=BF16",
        )
    return entries


def sources(module: PreTrainedModel) -> Iterator[tuple[str, nn.Module, torch.Tensor | None]]:
    """Name, owner and value of every tensor; the value is None for the weight of a quantized layer. A tied head is
    left out."""
    from ...runtime.kernels.formats import PACKED_INTEGERS, QUANTIZED
    from ..shards import stored_tensors

    kinds = (*QUANTIZED, *PACKED_INTEGERS)
    layers: dict[str, nn.Module] = {name: layer for name, layer in module.named_modules() if isinstance(layer, kinds)}
    for name, layer in layers.items():
        yield f"{name}.weight", layer, None
    for name, tensor in stored_tensors(module, None).items():
        owner, _, leaf = name.rpartition(".")
        if owner not in layers or leaf == "bias":
            yield name, module.get_submodule(owner), tensor


def _plain(
    target: str, name: str, tensor: torch.Tensor, order: NDArray[Any] | None, offset: float, options: GGUFOptions
) -> Entry:
    stored = STORED.get(str(tensor.dtype))
    if stored is None:
        raise UsageError(f"{name} is stored in {tensor.dtype}, which is not written as GGUF", "gguf")
    kind = _kind(target, tensor, stored, options)

    def values() -> torch.Tensor:
        found = tensor.detach().cpu()
        found = found if order is None else found[_index(order)]
        return found.float() + offset if offset else found

    exact = kind in ("F32", stored)
    return Entry(
        target,
        name,
        kind,
        tuple(tensor.shape),
        lambda: convert(values(), kind, name),
        lambda: tensor.detach().cpu(),
        EXACT if exact and not offset else BOUNDED if offset else ROUNDED,
        bound=2.0**-20 if offset else 0.0,
    )


def _kind(target: str, tensor: torch.Tensor, stored: str, options: GGUFOptions) -> str:
    """The type of a tensor that is not quantized."""
    if tensor.dim() == 1:
        return "F32"
    wanted = options.type
    if target == "token_embd.weight" and options.embedding_type != "as-type":
        wanted = options.embedding_type
    if wanted == "auto" or (wanted not in FLOATS and tensor.shape[-1] % BLOCK):
        return stored
    return wanted


def _quantized(target: str, name: str, layer: nn.Module, order: NDArray[Any] | None, options: GGUFOptions) -> Entry:
    codes = codes_of(layer)
    kind, reason = choose(codes) if codes is not None else ("", f"{type(layer).__name__} has no grid of integers")
    shape = (int(cast(Any, layer).out_features), int(cast(Any, layer).in_features))

    def dense() -> torch.Tensor:
        import torch

        own = codes_of(layer)
        if own is None or own.scattered:
            return cast("torch.Tensor", cast(Any, layer).dequantize()).detach().float().cpu()
        return torch.from_numpy(own.dequantize())

    def permuted() -> torch.Tensor:
        return dense() if order is None else dense()[_index(order)]

    wanted = options.type
    if wanted in FLOATS:
        rule = EXACT if wanted == "F32" else ROUNDED
        return Entry(target, name, wanted, shape, lambda: convert(permuted(), wanted, name), dense, rule, dense=True)
    if kind and wanted in ("auto", kind):
        own = cast("Codes", codes)
        error, bound = scale_error(own, kind), value_error(own, kind)

        def blocks() -> NDArray[Any]:
            held = cast("Codes", codes_of(layer))
            return encode(held if order is None else held.rows(order), kind, name)

        rule = BOUNDED if bound else EXACT
        return Entry(target, name, kind, shape, blocks, dense, rule, bound, error, quantized=True, dense=True)
    if wanted == "auto":
        wanted = "Q8_0" if cast(Any, layer).scheme.bits > 4 else "Q4_1"
    else:
        reason = reason or f"its values are {kind} exactly, and {wanted} is asked for"
    if shape[1] % BLOCK:
        wanted = "F16"
    read = lambda: convert(permuted(), wanted, name)  # noqa: E731
    return Entry(target, name, wanted, shape, read, dense, ROUNDED, quantized=True, requantized=reason, dense=True)


def codes_of(layer: Any) -> Codes | None:
    """A quantized layer's integers and scales; None for a layer whose grid is no grid of integers."""
    from ...runtime.kernels.formats import PACKED_INTEGERS
    from ...runtime.kernels.scaled import Int8Linear

    if isinstance(layer, PACKED_INTEGERS):
        state = layer.quant_state()
        scales = state.scales.float().cpu().numpy()
        middle = np.full(scales.shape, 2 ** (state.bits - 1), dtype=np.int16)
        zeros = middle if state.zeros is None else state.zeros.cpu().numpy().astype(np.int16)
        codes = state.codes.cpu().numpy().astype(np.int16)
        return Codes(codes, scales, zeros, state.bits, state.zeros is None, state.g_idx is not None)
    if isinstance(layer, Int8Linear):
        scales = layer.weight_scale.detach().float().cpu().numpy().reshape(layer.out_features, -1)
        zeros = np.zeros(scales.shape, dtype=np.int16)
        return Codes(layer.weight.detach().cpu().numpy().astype(np.int16), scales, zeros, 8, True)
    return None


def convert(values: torch.Tensor, kind: str, where: str) -> NDArray[Any]:
    """Values in a type: float32, float16, bfloat16 as uint16, or bytes uint8 [N, bytes a row] of blocks.

    Raises RunError where float16 cannot hold one.
    """
    import torch

    if kind == "BF16":
        return values.to(torch.bfloat16).contiguous().view(torch.uint16).numpy()
    plain = values.float().numpy()
    if kind == "F32":
        return plain
    if kind == "F16":
        if plain.size and not np.abs(plain).max() <= FLOAT16_MAX:
            raise RunError("it has values beyond float16", where, "Export with type=BF16 or F32")
        return plain.astype(np.float16)
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    return quantize(np.ascontiguousarray(plain), GGMLQuantizationType[kind])


def _index(order: NDArray[Any]) -> torch.Tensor:
    import torch

    return torch.from_numpy(order)
