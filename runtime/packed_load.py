"""Opening a folder of quantized layers without unpacking it.

The model is built with its parameters on the meta device and its buffers real (so that non-persistent ones such as
rotary `inv_freq` hold what the model computes), the quantized linears are replaced by packed ones, and
the safetensors are assigned into it: every tensor is in memory once, in the dtype of the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..optimizer.errors import RunError
from .checkpoint_names import CheckpointNames
from .initialization import initializers
from .weight_files import weight_files

OWN_DTYPE = ("weight_global_scale", ".scales", ".absmax", ".nested_absmax", "quant_map", ".SCB", "._weight_scale")
"""Ends of names of tensors whose dtype is that of their format, whatever the model's."""

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel


def load_packed(
    folder: Path,
    config: PreTrainedConfig,
    quantization_config: dict[str, Any],
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The folder's model with packed linears, in eval mode, on `device`.

    dtype: of the activations. Where it is the config's own, every tensor keeps the dtype of the file; else the
        floating-point ones, scales among them, are converted. Codes stay packed. GPTQ checkpoints may hold other
        dtypes than the config's: all but their scales are converted.
    Raises RunError that names keys that are missing, unexpected or of the wrong shape.
    """
    import torch

    from .experts import find_stacked, split_experts, stored_singly
    from .gptq_format import check_gptq_linears
    from .library_formats import install_library_layers, runs_library_format
    from .packed_format import GPTQ, install_packed_linears

    gptq = quantization_config.get("quant_method") == GPTQ
    convert = gptq or dtype != getattr(config, "dtype", dtype)
    model = build_empty(config, dtype, trust_remote_code)
    names = CheckpointNames.of_folder(model, folder)
    split_experts(model, stored_singly((names.in_module(name) for name in names.stored), find_stacked(model)))
    if runs_library_format(quantization_config):
        install_library_layers(model, folder, quantization_config, dtype)
    else:
        install_packed_linears(model, quantization_config, dtype, folder)
    dtypes = own_dtypes(model, dtype)
    loaded: set[str] = set()
    unexpected: list[str] = []
    for file in weight_files(folder):
        for name, tensor in read_tensors(file, device):
            own = names.in_module(name)
            if own in dtypes and is_wide(own, tensor):
                tensor = tensor.to(dtypes[own])
            elif convert and is_wide(name, tensor):
                tensor = tensor.to(dtype)
            if assign(model, own, tensor, file):
                loaded.add(own)
            elif not ignorable(model, own):
                unexpected.append(name)
    tie(model, loaded)
    missing = [name for name, tensor in _stored_tensors(model) if tensor.is_meta]
    raise_on_keys(folder, missing, unexpected)
    if gptq:
        check_gptq_linears(model)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type != torch.device(device).type:
                module._buffers[name] = buffer.to(device)
    return model.eval()


def own_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Names of the tensors that transformers keeps in another dtype when it loads the model in `dtype`, and that dtype:
    what the architecture wants in float32 (a router), or makes so itself."""
    import torch

    patterns = set(getattr(model, "_keep_in_fp32_modules", None) or ()) if dtype == torch.float16 else set()
    if dtype in (torch.float16, torch.bfloat16):
        patterns |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    kept = re.compile("|".join(pattern.replace("*", ".*") for pattern in sorted(patterns))) if patterns else None
    found = {}
    for name, tensor in model.state_dict().items():  # with buffers, such as a router's correction
        if not is_wide(name, tensor):
            continue
        if kept is not None and kept.search(name):
            found[name] = torch.float32
        elif tensor.dtype != dtype:
            found[name] = tensor.dtype
    return found


def is_wide(name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor goes by the model's dtype: float8 codes and scales and those of `OWN_DTYPE` have their own."""
    return tensor.is_floating_point() and tensor.element_size() > 1 and not name.endswith(OWN_DTYPE)


def build_empty(config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model of `config` with parameters on the meta device and real buffers, untouched by random numbers."""
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    state = torch.get_rng_state()
    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
        _renew_buffers(model)
    finally:
        torch.set_rng_state(state)
    return model


def _renew_buffers(model: PreTrainedModel) -> None:
    """Compute buffers that no file holds anew, as transformers does after loading: while a model is built torch's
    default dtype is the model's, and a table made then (of GPT-J's sines, say) has frequencies rounded to bfloat16."""
    import torch

    with torch.no_grad():
        for _, module, initialize in initializers(model):
            if module._non_persistent_buffers_set:
                initialize(module)


def read_tensors(file: Path, device: str = "cpu") -> Iterable[tuple[str, torch.Tensor]]:
    """Name and tensor of everything in a safetensors file. Raises RunError where the file cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt", device=device) as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                yield name, opened.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise RunError(f"the file cannot be read ({error})", where=str(file), what_to_do="Fetch it again.") from None


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The deepest module on the way to a tensor of the state dict, and the rest of the name, which may have points."""
    module, rest = model, name
    while "." in rest:
        child, _, deeper = rest.partition(".")
        if module._modules.get(child) is None:
            break
        module, rest = cast("nn.Module", module._modules[child]), deeper
    return module, rest


def assign(model: nn.Module, name: str, tensor: torch.Tensor, file: Path) -> bool:
    """Make `tensor` the parameter or buffer `name` of the model; False where the model has none of that name.

    Raises RunError where the shapes differ.
    """
    from torch import nn

    module, leaf = owner_of(model, name)
    for table in (module._parameters, module._buffers):
        current = table.get(leaf)
        if current is None:
            continue
        if current.shape != tensor.shape:
            raise RunError(
                f"{name} has shape {tuple(tensor.shape)}, the model's config makes it {tuple(current.shape)}",
                where=str(file),
            )
        if table is module._parameters:
            tensor = nn.Parameter(tensor, requires_grad=False)
        cast("dict[str, torch.Tensor]", table)[leaf] = tensor
        return True
    return False


def tie(model: PreTrainedModel, loaded: set[str]) -> None:
    """Make tied parameters one tensor, from whichever name the file holds; a packed head has no `weight` to tie."""
    import torch

    parameters = dict(model.named_parameters(remove_duplicate=False))
    for target, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if target not in parameters or source not in parameters:
            continue
        if target in loaded and source in loaded:
            if not torch.equal(parameters[target], parameters[source]):
                continue
        elif target in loaded:
            target, source = source, target
        path, _, leaf = target.rpartition(".")
        model.get_submodule(path)._parameters[leaf] = parameters[source]


def raise_on_keys(folder: Path, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """Raise RunError where there are any, naming the first of them."""
    for fault, names in (("lack", sorted(missing)), ("have unknown tensors:", sorted(unexpected))):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise RunError(
                f"the weight files {fault} {', '.join(names[:3])}{more}",
                where=str(folder),
                what_to_do="config.json and the weight files do not belong together, or a shard is incomplete.",
            )


def _stored_tensors(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers: what a weight file has to hold (tied ones too)."""
    return model.state_dict(keep_vars=True).items()


def ignorable(model: PreTrainedModel, name: str) -> bool:
    """Whether transformers ignores this key too (old checkpoints carry buffers that the model computes itself)."""
    import re

    patterns = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or [])
    return any(re.search(p, name) for p in [*patterns, r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"])
