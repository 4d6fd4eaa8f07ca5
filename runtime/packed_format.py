"""Reading compressed-tensors' entries of config.json: which linears are quantized, and how.

`exporters/compressed_tensors.py` writes such entries; `kernels/formats.py` has the layers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..optimizer.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .kernels.packed import QuantScheme

FORMAT = "pack-quantized"
FORMATS = (FORMAT, "int-quantized", "float-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized")
GPTQ = "gptq"
"""The method of entries that `gptq_format.py` reads."""
MIXED = "mixed-precision"
"""What a model's entry says where its groups have several formats."""
DENSE_PACKING_SINCE = (0, 18)
"""From this version on compressed-tensors packs 3, 5, 6 and 7 bits without padding, as bitpack.py does."""

Arguments = Mapping[str, Any]


def runs_packed(config: Arguments) -> bool:
    """Whether this `quantization_config` is to be opened by `install_packed_linears`.

    True for GPTQ and pack-quantized, whose faults it reports; of the other formats for what it understands. The rest
    (four-bit activations, say) is for transformers, which decompresses and emulates it.
    """
    if config.get("quant_method") == GPTQ:
        return True
    if config.get("quant_method") != "compressed-tensors":
        return False
    if config.get("format") == FORMAT:
        return True
    try:
        _parse_groups(config)
    except UsageError:
        return False
    return True


def install_packed_linears(
    model: nn.Module, config: Arguments, dtype: torch.dtype | None = None, folder: Path | None = None
) -> list[str]:
    """Replace the nn.Linear modules that `config` quantizes by empty quantized layers; returns their names.

    model: on the meta device, as `from_config` makes it. config: the `quantization_config` of a checkpoint in one of
    `FORMATS` (llmopt's, llm-compressor's …) or of GPTQ. dtype: of scales and biases, by default the model's. folder:
    the checkpoint, in which GPTQ's layers are looked up. Afterwards `load_state_dict(..., assign=True)` takes the
    checkpoint's tensors. A quantized head is cut loose from the embeddings. Raises UsageError for a format, scheme or
    packing that no layer can run, RunError where a GPTQ entry and its folder contradict each other.
    """
    if config.get("quant_method") == GPTQ and folder is not None:
        from .gptq_format import install_gptq_linears

        return install_gptq_linears(model, folder, config, dtype)
    from torch import nn

    from .kernels.formats import empty_like

    groups = _parse_groups(config)
    ignore = list(config.get("ignore") or [])
    replaced: list[str] = []
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or any(_covers(pattern, name, module) for pattern in ignore):
            continue
        scheme = _scheme_for(name, module, groups)
        if scheme is None:
            continue
        try:
            layer = empty_like(module, scheme, dtype)
        except ValueError as error:
            raise UsageError(str(error), where=name, what_to_do="The checkpoint's config.json is damaged.") from None
        model.set_submodule(name, layer)
        replaced.append(name)
    if not replaced:
        raise UsageError(
            "the quantization_config matches no linear layer of the model",
            what_to_do="Check its targets and ignore list against the model's module names.",
        )
    return replaced


def _parse_groups(config: Arguments) -> list[tuple[list[str], QuantScheme]]:
    method = config.get("quant_method", "compressed-tensors")
    if method != "compressed-tensors":
        raise _unsupported(f"the quantization method is {method!r}")
    for key in ("sparsity_config", "transform_config", "kv_cache_scheme"):
        entry = config.get(key)
        if entry and not (key == "sparsity_config" and entry.get("format", "dense") == "dense"):
            raise _unsupported(f"the checkpoint has a {key}")
    status = config.get("quantization_status", "compressed")
    if status != "compressed":
        raise _unsupported(f"its quantization_status is {status!r}")
    groups = []
    for name, group in (config.get("config_groups") or {}).items():
        if not isinstance(group, Mapping):
            raise _unsupported(f"the preset {name!r} stands in place of a scheme")
        format_ = group.get("format") or config.get("format")
        if format_ not in FORMATS:
            raise _unsupported(f"the format of {name} is {format_!r}")
        scheme = _parse_scheme(name, str(format_), group, str(config.get("version") or ""))
        groups.append((list(group.get("targets") or []), scheme))
    if not groups:
        raise _unsupported("it has no config_groups")
    return groups


def _parse_scheme(name: str, format_: str, group: Arguments, version: str) -> QuantScheme:
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    if group.get("output_activations"):
        raise _unsupported(f"{name} quantizes output activations")
    if format_ in ("int-quantized", "float-quantized"):
        return _parse_scaled(name, format_, weights, inputs)
    if inputs:
        raise _unsupported(f"{name} quantizes input activations")
    if format_ == FORMAT:
        return _parse_integers(name, weights, version)
    from .kernels.float4 import Float4Scheme

    kind = format_.removesuffix("-pack-quantized")
    strategy = {"mxfp4": "group", "nvfp4": "tensor_group"}[kind]
    scheme = Float4Scheme.of(kind)
    expected = {"num_bits": 4, "type": "float", "strategy": strategy, "group_size": scheme.group_size}
    _require(f"the weights of {name}", weights, expected)
    return scheme


def _parse_integers(name: str, weights: Arguments, version: str) -> QuantScheme:
    from .kernels.packed import QuantScheme

    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    if strategy is None:
        strategy = "channel" if weights.get("group_size") == -1 else "group"
    if weights.get("type", "int") != "int" or not isinstance(bits, int) or not 2 <= bits <= 8:
        raise _unsupported(f"{name} has {bits}-bit weights of type {weights.get('type')!r}")
    if strategy not in ("group", "channel") or weights.get("dynamic"):
        raise _unsupported(f"{name} has the strategy {strategy!r}{', dynamic' if weights.get('dynamic') else ''}")
    number = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if bits not in (2, 4, 8) and number and number < DENSE_PACKING_SINCE:
        raise _unsupported(f"its {bits}-bit codes have the padded layout of compressed-tensors {version}")
    group_size = -1 if strategy == "channel" else int(weights.get("group_size") or 0)
    return QuantScheme(
        bits=bits,
        group_size=group_size,
        symmetric=bool(weights.get("symmetric", True)),
        g_idx=weights.get("actorder") in ("group", "dynamic", True),
    )


def _parse_scaled(name: str, format_: str, weights: Arguments, inputs: Arguments) -> QuantScheme:
    """W8A8: a channel and a token, a block and a token's columns, or (float) one scale each, fixed for inputs."""
    from .kernels.scaled import ScaledScheme

    kind = "int" if format_ == "int-quantized" else "float"
    strategy, block = weights.get("strategy"), -1
    expected = {"num_bits": 8, "type": kind, "symmetric": True}
    if strategy == "block":
        structure = list(weights.get("block_structure") or [])
        if len(structure) != 2 or structure[0] != structure[1]:
            raise _unsupported(f"{name} has blocks of {structure}, which are not square")
        block = int(structure[0])
    elif strategy not in ("channel", "tensor"):
        raise _unsupported(f"{name} has the strategy {strategy!r}")
    _require(f"the weights of {name}", {"symmetric": True, **weights}, {**expected, "dynamic": False})
    fixed = not inputs.get("dynamic")
    per: dict[str, Any] = {"strategy": "tensor"} if fixed else {"strategy": "token"}
    if block != -1:
        per = {"strategy": "group", "group_size": block}
    _require(f"the input activations of {name}", {"symmetric": True, **inputs}, {**expected, **per})
    try:
        return ScaledScheme(
            group_size=block,
            kind="int8" if kind == "int" else "float8",
            per_tensor=strategy == "tensor",
            static_input=fixed,
        )
    except ValueError as error:
        raise _unsupported(f"{name}: {error}") from None


def _require(what: str, arguments: Arguments, expected: Arguments) -> None:
    """Raise UsageError where an argument is not as expected."""
    for key, value in expected.items():
        if (arguments.get(key) or False) != value:
            raise _unsupported(f"{what} have {key} {arguments.get(key)!r}, not {value!r}")


def _unsupported(what: str) -> UsageError:
    return UsageError(
        f"this checkpoint cannot run packed: {what}",
        where="quantization_config",
        what_to_do="It runs compressed-tensors checkpoints of int weights of 2 to 8 bits, of int8 and float8 weights "
        "and inputs, and of mxfp4 and nvfp4 weights.",
    )


def _scheme_for(name: str, module: nn.Module, groups: list[tuple[list[str], QuantScheme]]) -> QuantScheme | None:
    """The scheme of the most specific target: a full name before an expression before a class."""
    targets = {target: scheme for names, scheme in groups for target in names}
    by_name = sorted((t for t in targets if _matches_name(t, name)), key=lambda t: (t.startswith("re:"), t))
    by_class = sorted(t for t in targets if t in _class_names(module))
    return next((targets[target] for target in by_name + by_class), None)


def _covers(pattern: str, name: str, module: nn.Module) -> bool:
    return _matches_name(pattern, name) or pattern in _class_names(module)


def _matches_name(pattern: str, name: str) -> bool:
    """compressed-tensors' rule: `re:` expressions match from the start of the name, anything else is the whole name."""
    return re.match(pattern[3:], name) is not None if pattern.startswith("re:") else pattern == name


def _class_names(module: nn.Module) -> set[str]:
    return {cls.__name__ for cls in type(module).__mro__}
