"""Makes a finished model what the graph is written from: float32, with only layers that the graph has operators for.

The same module, called by torch, is then the reference that the graph is proved against.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from ...optimizer.base import Context
from ...optimizer.errors import UsageError
from ...runtime.kernels.formats import PACKED_INTEGERS, QUANTIZED
from ...runtime.kernels.packed import PackedLinear, QuantScheme
from ...runtime.kernels.scaled import Int8Linear
from .nbits import fits_blocks
from .settings import Choices

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from ...optimizer.runtime_spec import RuntimeSpec

HEADS = {"int8": QuantScheme(8, -1), "int4": QuantScheme(4, 32)}
"""Rounded heads; the grids are the RuntimeSpec's (`LinearSpec.lm_head`)."""


def prepare(model: nn.Module, choices: Choices, context: Context) -> None:
    """Change `model` in place. What is lost by it is noted as a fallback. Raises UsageError as `round_head`.

    float32 holds every value of float16 and bfloat16. Packed layers keep their codes; their weights are then
    `(code - zero) * scale` in float32, as MatMulNBits computes them, without torch's rounding to the scales' dtype.
    """
    unpack_others(model, context)
    unpack_unfit(model, context)
    turn_conv1d(model)
    model.float()
    cast("PreTrainedModel", model).set_attn_implementation("eager")
    if choices.share_head:
        require_one_matrix(model)
    if choices.lm_head != "stored":
        round_head(model, choices)
    if choices.dtype == "bfloat16":
        round_plain(model, choices, context)


def unpack_others(model: nn.Module, context: Context) -> None:
    """Replace quantized layers that are neither packed integers nor W8A8 int8 by plain ones with their values."""
    formats: dict[str, int] = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, QUANTIZED) and not isinstance(module, (PackedLinear, Int8Linear)):
            _make_plain(model, name, module)
            formats[module.scheme.format] = formats.get(module.scheme.format, 0) + 1
    for format_, count in formats.items():
        context.note(
            "fallback",
            f"{count} layers of the format {format_} are written as plain weights with the same values, inputs as they "
            "are: ONNX has no operator for it",
        )


def unpack_unfit(model: nn.Module, context: Context) -> None:
    """Replace packed layers by plain ones with their values, as the model computes with them, where their groups are no
    blocks of MatMulNBits."""
    found = []
    for name, module in list(model.named_modules()):
        if isinstance(module, PACKED_INTEGERS) and not fits_blocks(module.quant_state()):
            _make_plain(model, name, module)
            found.append(name)
    if found:
        context.note(
            "fallback",
            f"{len(found)} packed layers are written as plain weights with the same values, first {found[0]}: their "
            "groups are no blocks of MatMulNBits",
        )


def turn_conv1d(model: nn.Module) -> None:
    """Replace transformers' Conv1D (weight [inputs, outputs], as GPT-2 has them) by linear layers."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    for name, module in list(model.named_modules()):
        if not isinstance(module, Conv1D):
            continue
        columns, rows = module.weight.shape
        plain = nn.Linear(columns, rows, device="meta")
        plain.weight = nn.Parameter(module.weight.detach().t().contiguous(), requires_grad=False)
        plain.bias = nn.Parameter(module.bias.detach(), requires_grad=False)
        _replace(model, name, plain)


def unpack(model: nn.Module) -> None:
    """Replace packed layers by plain ones, so that the reference does not unpack them at every step."""
    for name, module in list(model.named_modules()):
        if isinstance(module, PACKED_INTEGERS):
            _make_plain(model, name, module)


def _make_plain(model: nn.Module, name: str, layer: Any) -> None:
    """Put a linear layer with the values of `layer` in its place, float32."""
    from torch import nn

    plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    plain.weight = nn.Parameter(layer.dequantize().detach().float(), requires_grad=False)
    if layer.bias is not None:
        plain.bias = nn.Parameter(layer.bias.detach().float(), requires_grad=False)
    _replace(model, name, plain)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def round_plain(model: nn.Module, choices: Choices, context: Context) -> None:
    """Round plain linear layers and the embedding to bfloat16, as they are going to be stored; noted where any value
    changes by it."""
    import torch
    from torch import nn

    changed = 0
    for module in model.modules():
        if type(module) is nn.Linear or (isinstance(module, nn.Embedding) and not choices.share_head):
            rounded = module.weight.detach().to(torch.bfloat16).float()
            changed += int(not torch.equal(rounded, module.weight))
            module.weight.data.copy_(rounded)
    if changed:
        context.note("fallback", f"the weights of {changed} layers were rounded to bfloat16, which they are stored in")


def round_head(model: nn.Module, choices: Choices) -> None:
    """Round the head to the grid that the choices name. Raises UsageError where it is quantized, or does not fit."""
    from torch import nn

    whole: Any = model
    head, scheme = whole.get_output_embeddings(), HEADS[choices.lm_head]
    if not isinstance(head, nn.Linear):
        raise UsageError("the head is quantized already", "onnx.lm_head", "Set `lm_head: stored`")
    try:
        packed = round_linear(head, scheme)
    except ValueError as error:
        raise UsageError(f"the head cannot be rounded: {error}", "onnx.lm_head", "Set `lm_head: stored`") from None
    whole.set_output_embeddings(packed)
    if choices.share_head:
        whole.get_input_embeddings().weight = nn.Parameter(packed.dequantize(), requires_grad=False)


def require_one_matrix(model: nn.Module) -> None:
    """Raise UsageError where the head and the embedding have other values than each other, so that the embedding cannot
    read the head's: they were never tied, or one was changed (rounded, or a norm folded into it) without the other."""
    import torch

    whole: Any = model
    head, own = whole.get_output_embeddings(), whole.get_input_embeddings().weight.detach()
    values = (head.dequantize() if isinstance(head, PACKED_INTEGERS) else head.weight).detach()
    if values.shape != own.shape or not torch.equal(values.float(), own.float()):
        raise UsageError("the embedding and the head are two matrices", "onnx.share_head", "Leave share_head off")


def round_linear(linear: nn.Linear, scheme: QuantScheme) -> PackedLinear:
    """The layer with each weight at the nearest point of a symmetric grid. Raises ValueError where the scheme's groups
    do not divide its columns."""
    from ...passes.quantize.grid import quantize_groups, search_grid, to_groups

    groups = to_groups(linear.weight.detach(), scheme.num_groups(linear.in_features))
    scales, _ = search_grid(groups, scheme.bits, True, linear.weight.dtype)
    codes = quantize_groups(groups, scales, None, scheme.bits).view_as(linear.weight)
    return PackedLinear.from_linear(linear, codes, scales, None, scheme)


def note_runtime(spec: RuntimeSpec, context: Context) -> None:
    """Note what of the RuntimeSpec has no place in a graph."""
    lost = []
    if spec.kv_cache.dtype != "auto" or spec.kv_cache.kind in ("sliding", "offloaded"):
        lost.append(f"the KV cache of kind {spec.kv_cache.kind} and dtype {spec.kv_cache.dtype}")
    if spec.draft.kind != "none":
        lost.append(f"drafts by {spec.draft.kind}")
    if spec.extra:
        lost.append(f"settings of {', '.join(sorted(spec.extra))}")
    if lost:
        context.note("fallback", f"the RuntimeSpec's {' and '.join(lost)} stay behind: a graph does not hold them")
