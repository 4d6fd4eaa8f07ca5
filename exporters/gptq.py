"""Writing the GPTQ checkpoint format: what it cannot hold, its entry of config.json, and packed layers laid out in it.

`runtime/kernels/gptq_linear.py` states the layout; `runtime/gptq_format.py` reads such folders, ours or another tool's.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..optimizer.errors import RunError, UsageError
from ..runtime.gptq_format import TWIN

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from ..optimizer.base import ModulePlan
    from ..optimizer.model import LoadedModel, ModelInfo
    from ..runtime.kernels.packed import PackedLinear, QuantScheme
    from ..runtime.tensor_files import Spec

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Layers that engines run as one, by the name that they give it; a pattern of `dynamic` has to match that too."""

Settings = tuple[int, int, bool]
"""bits, group_size, sym."""
Maker = Callable[[], "torch.Tensor"]


# -- what the format cannot hold


def plan_refusals(
    info: ModelInfo, schemes: Mapping[str, QuantScheme], dtype: str, open_modules: Sequence[ModulePlan] = ()
) -> list[str]:
    """Why a model cannot be written as a GPTQ checkpoint, from its description alone, in sentences.

    schemes: of the layers that are going to be quantized. dtype: the recipe's, `auto` for as stored. open_modules:
    those whose schemes are chosen later, so that every candidate has to fit.
    """
    from ..optimizer.runtime_spec import RuntimeSpec
    from ..runtime.expert_readers import single_shapes
    from ..runtime.open import resolve_dtype

    if not schemes and not open_modules:
        return ["nothing is quantized, so there is nothing that a GPTQ checkpoint could hold: add a `quantize` pass"]
    out = []
    if str(resolve_dtype(dtype, RuntimeSpec(), info.config)) == "torch.float32":
        out.append(
            "a GPTQ checkpoint has float16 scales, which do not hold those of a float32 model: set the recipe's "
            "`dtype: bfloat16` or `dtype: float16`"
        )
    shapes = info.linear_shapes | single_shapes(info.skeleton, info.tensors)
    return out + (_open_refusals(schemes, shapes, open_modules) or refusals(schemes, shapes))


def planned_bytes(info: ModelInfo, modules: Sequence[ModulePlan]) -> int:
    """Bytes of the modules' weights in a GPTQ checkpoint; modules: those that have a scheme."""
    from ..runtime.expert_readers import single_shapes
    from ..runtime.kernels.gptq_linear import GPTQScheme

    shapes, size = info.linear_shapes | single_shapes(info.skeleton, info.tensors), 0
    for name, scheme in ((module.name, module.scheme) for module in modules):
        if scheme is not None:
            size += GPTQScheme(scheme.bits, scheme.group_size, scheme.symmetric, True).nbytes(*shapes[name], 2)
    return size


def _open_refusals(
    schemes: Mapping[str, QuantScheme], shapes: Mapping[str, tuple[int, int]], open_modules: Sequence[ModulePlan]
) -> list[str]:
    """Refusals of what may be chosen for `open_modules`: any candidate that does not fit, and layers that engines run
    as one and that need not get the same."""
    from ..runtime.kernels.packed import QuantScheme

    for candidate in dict.fromkeys(scheme for module in open_modules for scheme in module.candidates):
        reasons = _unfit({m.name: candidate for m in open_modules if candidate in m.candidates}, shapes)
        if reasons:
            return [f"{reasons[0]} (`auto.bits` lists what may be chosen)"]
    later = {module.name: QuantScheme(bits=0, group_size=module.unit) for module in open_modules}
    return _split_products({**schemes, **later}, shapes) if later else []


def refusals(schemes: Mapping[str, QuantScheme], shapes: Mapping[str, tuple[int, int]]) -> list[str]:
    """The same from the schemes of the quantized layers and (out_features, in_features) of all linear ones."""
    return _unfit(schemes, shapes) or _split_products(schemes, shapes)


def _unfit(schemes: Mapping[str, QuantScheme], shapes: Mapping[str, tuple[int, int]]) -> list[str]:
    """Refusals of layers by themselves."""
    from ..runtime.kernels.gptq_linear import BITS

    other = sorted({s.format for s in schemes.values() if s.format != "pack-quantized"})
    if other:
        return [f"a GPTQ checkpoint holds integer weights alone, not {', '.join(other)}"]
    widths = sorted({s.bits for s in schemes.values()} - set(BITS))
    if widths:
        return [f"a GPTQ checkpoint holds 2, 3, 4 or 8 bits, not {', '.join(map(str, widths))}"]
    return _odd_shapes(schemes, shapes)


def _odd_shapes(schemes: Mapping[str, QuantScheme], shapes: Mapping[str, tuple[int, int]]) -> list[str]:
    """A refusal for layers whose codes do not fill whole words along both axes."""
    odd = []
    for name, scheme in schemes.items():
        unit = 32 if scheme.bits == 3 else 32 // scheme.bits
        if any(length % unit for length in shapes[name]):
            odd.append(f"{name} ({' x '.join(map(str, shapes[name]))}, not multiples of {unit})")
    if not odd:
        return []
    more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
    return [f"the codes of {odd[0]}{more} do not fill whole words of a GPTQ checkpoint: ignore such modules"]


def _split_products(schemes: Mapping[str, QuantScheme], shapes: Mapping[str, tuple[int, int]]) -> list[str]:
    """A refusal for layers that engines run as one, where they are not quantized alike."""
    for fused, members in FUSED.items():
        for parent in {name.rpartition(".")[0]: None for name in shapes if name.rpartition(".")[2] in members}:
            inside = [f"{parent}.{member}" for member in members if f"{parent}.{member}" in shapes]
            if len({_settings(schemes.get(name)) for name in inside}) > 1:
                return [
                    f"{', '.join(members)} of {parent} are not quantized alike: engines run them as one ({fused}) and "
                    "cannot open such a GPTQ checkpoint. Give them the same bits, group size and symmetry"
                ]
    return []


def _settings(scheme: QuantScheme | None) -> Settings | None:
    return None if scheme is None else (scheme.bits, scheme.group_size, scheme.symmetric)


# -- the entry


def gptq_config(model: nn.Module) -> dict[str, Any]:
    """The `quantization_config` of config.json for the packed layers of `model`.

    The most common bits, group size and symmetry are the entry's own; layers with others, and linear layers that are
    left as they are, stand under `dynamic`, as GPTQModel and vLLM read it. Symmetric models have the checkpoint format
    `gptq`, which every reader knows; with zero points of their own it is `gptq_v2`, because `gptq` cannot store a zero
    point 0. Raises UsageError where the format does not hold the model.
    """
    from torch import nn

    from .compressed_tensors import packed_modules

    layers = dict(packed_modules(model))
    schemes = {name: cast("PackedLinear", layer).scheme for name, layer in layers.items()}
    plain = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    linears = cast("dict[str, nn.Linear]", {**plain, **layers})
    for reason in refusals(schemes, {name: (m.out_features, m.in_features) for name, m in linears.items()}):
        raise UsageError(reason)
    base = Counter(_settings(scheme) for scheme in schemes.values()).most_common(1)[0][0]
    bits, group_size, sym = cast(Settings, base)
    head = cast("PreTrainedModel", model).get_output_embeddings()
    rest = [name for name, module in plain.items() if module is not head]
    config: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": sym,
        "desc_act": any(scheme.g_idx for scheme in schemes.values()),
        "lm_head": any(layer is head for layer in layers.values()),
        "checkpoint_format": checkpoint_format(schemes.values()),
        "format": checkpoint_format(schemes.values()),
        "pack_dtype": "int32",
        "meta": {"quantizer": [f"llmopt:{version('llmopt')}"]},
    }
    others = {name: _settings(scheme) for name, scheme in schemes.items() if _settings(scheme) != base}
    dynamic = _dynamic({**others, **dict.fromkeys(rest)})
    if dynamic:
        config["dynamic"] = dynamic
    inside = _inside_blocks(model, list(schemes), rest)
    if inside and not config["lm_head"]:
        config["modules_in_block_to_quantize"] = [inside]
    return config


def checkpoint_format(schemes: Iterable[QuantScheme]) -> str:
    """`gptq`, or `gptq_v2` where any of the schemes has zero points."""
    return "gptq" if all(scheme.symmetric for scheme in schemes) else "gptq_v2"


def _dynamic(modules: Mapping[str, Settings | None]) -> dict[str, dict[str, Any]]:
    """Patterns for modules with settings of their own; None: not quantized.

    Leaves of one parent with the same settings share a pattern, and so do parents with the same such leaves. Where all
    layers that engines fuse are there, the pattern matches the name of the fused one too.
    """
    leaves: dict[tuple[str, Settings | None], list[str]] = {}
    for name, settings in modules.items():
        parent, _, leaf = name.rpartition(".")
        leaves.setdefault((parent, settings), []).append(leaf)
    parents: dict[tuple[tuple[str, ...], Settings | None], list[str]] = {}
    for (parent, settings), found in leaves.items():
        fused = [name for name, members in FUSED.items() if set(members) <= set(found)]
        parents.setdefault((tuple(found + fused), settings), []).append(parent)
    out: dict[str, dict[str, Any]] = {}
    for (ends, settings), starts in parents.items():
        before = "|".join(re.escape(f"{parent}.") if parent else "" for parent in starts)
        pattern = f"^(?:{before})(?:{'|'.join(map(re.escape, ends))})$"
        if settings is None:
            out[f"-:{pattern}"] = {}
        else:
            out[f"+:{pattern}"] = dict(zip(("bits", "group_size", "sym"), settings))
    return out


def _inside_blocks(model: nn.Module, quantized: list[str], rest: list[str]) -> list[str]:
    """Names inside a block of the quantized layers, for transformers, where blocks have other linear layers too and all
    blocks are alike; else empty."""
    from ..runtime.decoder_blocks import find_blocks

    try:
        prefix, _ = find_blocks(model)
    except RunError:
        return []

    def by_block(names: list[str]) -> dict[str, list[str]]:
        blocks: dict[str, list[str]] = {}
        for name in names:
            if name.startswith(f"{prefix}."):
                number, _, own = name[len(prefix) + 1 :].partition(".")
                blocks.setdefault(number, []).append(own)
        return blocks

    packed, kept = by_block(quantized), by_block(rest)
    alike = len({tuple(names) for names in packed.values()}) == 1 and packed.keys() >= kept.keys()
    return next(iter(packed.values())) if kept and alike else []


def write_twin(config: Mapping[str, Any], folder: Path) -> None:
    """Write the entry as quantize_config.json too, where older readers look for it."""
    (folder / TWIN).write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")


# -- the tensors


def write_gptq(model: LoadedModel, folder: Path, limit: int) -> None:
    """Write all weights of a model, its packed layers as a GPTQ checkpoint has them, one tensor after another.

    limit: bytes of a weight file. Raises RunError where float16 does not hold a scale.
    """
    from ..runtime.tensor_files import Spec
    from .compressed_tensors import packed_modules
    from .shards import file_names, stored_tensors, write_specs

    module = cast("PreTrainedModel", model.module)
    layers = {name: cast("PackedLinear", layer) for name, layer in packed_modules(module)}
    read = model.weights.read if model.weights is not None else module.state_dict().__getitem__
    minus_one = checkpoint_format(layer.scheme for layer in layers.values()) == "gptq"
    specs: dict[str, Spec] = {}
    makers: dict[str, Maker] = {}
    for name, tensor in stored_tensors(module, model.weights).items():
        if name.rpartition(".")[0] not in layers or name.endswith(".bias"):
            specs[name] = Spec.of(tensor)
    for name, layer in layers.items():
        for leaf, (spec, maker) in gptq_tensors(name, layer, minus_one, read).items():
            specs[f"{name}.{leaf}"], makers[f"{name}.{leaf}"] = spec, maker

    def give(name: str) -> torch.Tensor | Iterable[torch.Tensor]:
        if name in makers:
            return makers[name]()
        return model.weights.parts(name) if model.weights is not None else read(name)

    write_specs(specs, give, folder, limit, module.num_parameters(), file_names(model))


def gptq_tensors(
    name: str, layer: PackedLinear, minus_one: bool, read: Callable[[str], torch.Tensor]
) -> dict[str, tuple[Spec, Maker]]:
    """Spec and maker of each tensor of a packed layer, by its name in a GPTQ checkpoint.

    layer: may be on the meta device. minus_one: for the checkpoint format `gptq`, of symmetric layers only. read: gives
    the layer's own tensors by their full names. A maker raises RunError where float16 does not hold a scale.
    """
    import torch

    from ..runtime.kernels.gptq_linear import (
        GPTQLinear,
        GPTQScheme,
        constant_zeros,
        half_scales,
        idle_groups,
    )
    from ..runtime.kernels.packed import fixed
    from ..runtime.tensor_files import Spec

    scheme, columns, rows = layer.scheme, layer.in_features, layer.out_features

    def filled() -> PackedLinear:
        whole = type(layer)(columns, rows, scheme)
        for leaf in ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"):
            if leaf in layer._parameters:
                setattr(whole, leaf, fixed(read(f"{name}.{leaf}")))
        return whole

    def qweight() -> torch.Tensor:
        return read(f"{name}.weight_packed").t().contiguous()

    def qzeros() -> torch.Tensor:
        if scheme.symmetric:
            middle = 2 ** (scheme.bits - 1)
            return constant_zeros(middle - minus_one, scheme.bits, scheme.num_groups(columns), rows)
        return read(f"{name}.weight_zero_point").t().contiguous()

    def scales() -> torch.Tensor:
        try:
            return half_scales(read(f"{name}.weight_scale"), lambda: idle_groups(filled()))
        except ValueError as error:
            raise RunError(
                f"{error}, and a GPTQ checkpoint has no other scales",
                where=name,
                what_to_do="Leave this module out by `ignore`, or set `quantization_format: compressed-tensors`.",
            ) from None

    def g_idx() -> torch.Tensor:
        if scheme.g_idx:
            return read(f"{name}.weight_g_idx").to(torch.int32)
        return torch.arange(columns, dtype=torch.int32) // scheme.columns_per_group(columns)

    target = GPTQScheme(scheme.bits, scheme.group_size, scheme.symmetric, True, minus_one)
    empty = GPTQLinear.empty(columns, rows, target)
    makers = {"qweight": qweight, "qzeros": qzeros, "scales": scales, "g_idx": g_idx}
    return {leaf: (Spec.of(getattr(empty, leaf)), maker) for leaf, maker in makers.items()}
