"""compressed-tensors' `pack-quantized` format: the config entry for a model's packed layers, and the way back.

`quantization_config` describes the PackedLinear modules of a model as `config.json` must, so that plain transformers
loads the folder; `install_packed_linears` reads such an entry, ours or another tool's, and prepares a model on the meta
device to take the checkpoint's state dict as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..optimizer.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..runtime.kernels.packed import QuantScheme

FORMAT = "pack-quantized"
DENSE_PACKING_SINCE = (0, 18)
"""From this version on compressed-tensors packs 3, 5, 6 and 7 bits without padding, as bitpack.py does."""


def quantization_config(model: nn.Module) -> dict[str, Any] | None:
    """The `quantization_config` of config.json for the PackedLinear modules of `model`; None where there are none.

    Linear layers left unquantized are listed under `ignore`. One scheme targets the class `Linear`; several name their
    modules one by one, so that readers that fuse layers find each. An asymmetric scheme adds `dequantize: true`, which
    lets transformers (5.23 and later) decompress while it loads: its other way expects zero points of another shape,
    and refuses the file. Raises UsageError where that way out is barred, see `check_loadable`.
    """
    import compressed_tensors
    from torch import nn

    from ..runtime.kernels.packed import PackedLinear

    schemes: dict[QuantScheme, list[str]] = {}
    ignore: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            schemes.setdefault(module.scheme, []).append(name)
        elif isinstance(module, nn.Linear):
            ignore.append(name)
    if not schemes:
        return None
    check_loadable(schemes)
    groups = {
        f"group_{i}": {
            "targets": ["Linear"] if len(schemes) == 1 else names,
            "weights": _weight_arguments(scheme),
            "input_activations": None,
            "output_activations": None,
            "format": FORMAT,
        }
        for i, (scheme, names) in enumerate(schemes.items())
    }
    config = {
        "quant_method": "compressed-tensors",
        "version": compressed_tensors.__version__,
        "format": FORMAT,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "config_groups": groups,
        "ignore": ignore,
    }
    if any(not scheme.symmetric for scheme in schemes):
        config["dequantize"] = True
    return config


def check_loadable(schemes: Iterable[QuantScheme]) -> None:
    """Raise UsageError where plain transformers could not load a folder with these schemes.

    While it decompresses at load, which asymmetric schemes need, transformers takes one scheme for all layers.
    """
    distinct = set(schemes)
    if len(distinct) > 1 and any(not scheme.symmetric for scheme in distinct):
        raise UsageError(
            f"{len(distinct)} schemes in one model, an asymmetric one among them, cannot be loaded by transformers",
            what_to_do="Use one scheme for all modules, or make every scheme symmetric.",
        )


def _weight_arguments(scheme: QuantScheme) -> dict[str, Any]:
    if scheme.g_idx:
        raise UsageError(
            "a group index per column (activation order without static groups) is no longer part of compressed-tensors",
            what_to_do="Quantize the original model again with static groups.",
        )
    channel = scheme.group_size == -1
    return {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": "channel" if channel else "group",
        "group_size": None if channel else scheme.group_size,
        "dynamic": False,
    }


def install_packed_linears(
    model: nn.Module, config: Mapping[str, Any], dtype: torch.dtype | None = None
) -> list[str]:
    """Replace the nn.Linear modules that `config` quantizes by empty PackedLinear ones; returns their names.

    model: on the meta device, as `from_config` makes it. config: the `quantization_config` of a `pack-quantized`
    checkpoint (llmopt's, llm-compressor's …). dtype: of scales and biases, by default the model's. Afterwards
    `load_state_dict(..., assign=True)` takes the checkpoint's tensors. A packed head is cut loose from the embeddings.
    Raises UsageError for a format, scheme or packing that a PackedLinear cannot run.
    """
    from torch import nn

    from ..runtime.kernels.packed import PackedLinear

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
            layer = PackedLinear.empty(
                module.in_features,
                module.out_features,
                scheme,
                bias=module.bias is not None,
                dtype=dtype or module.weight.dtype,
                device=module.weight.device,
            )
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


def _parse_groups(config: Mapping[str, Any]) -> list[tuple[list[str], QuantScheme]]:
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
        if format_ != FORMAT:
            raise _unsupported(f"the format of {name} is {format_!r}")
        for key in ("input_activations", "output_activations"):
            if group.get(key):
                raise _unsupported(f"{name} quantizes {key.replace('_', ' ')}")
        scheme = _parse_weights(name, group.get("weights") or {}, str(config.get("version") or ""))
        groups.append((list(group.get("targets") or []), scheme))
    if not groups:
        raise _unsupported("it has no config_groups")
    return groups


def _parse_weights(name: str, weights: Mapping[str, Any], version: str) -> QuantScheme:
    from ..runtime.kernels.packed import QuantScheme

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


def _unsupported(what: str) -> UsageError:
    return UsageError(
        f"this checkpoint cannot run packed: {what}",
        where="quantization_config",
        what_to_do="It runs compressed-tensors checkpoints of the format pack-quantized: int weights of 2 to 8 bits.",
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


def packed_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of every PackedLinear of `model`."""
    from ..runtime.kernels.packed import PackedLinear

    return ((name, module) for name, module in model.named_modules() if isinstance(module, PackedLinear))
