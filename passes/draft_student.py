"""A small draft model cut out of the target: some of its layers, with its embeddings, norm and head."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..optimizer.errors import RunError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def layer_sets(count: int, wanted: int) -> list[tuple[int, ...]]:
    """Sets of `wanted` layers out of `count`, ascending, to choose the student from: spread evenly with the first and
    the last among them (as in DistilBERT, Sanh et al. 2019), the first ones, and the first ones with the last."""
    wanted = max(1, min(wanted, count))
    if wanted == 1:
        return [(0,), (count - 1,)] if count > 1 else [(0,)]
    spread = tuple(round(i * (count - 1) / (wanted - 1)) for i in range(wanted))
    return list(dict.fromkeys([spread, tuple(range(wanted)), (*range(wanted - 1), count - 1)]))


def layers_of(module: Any) -> Any:
    """The decoder layers of a model. Raises RunError where it has none that can be left out."""
    layers = getattr(getattr(module, "base_model", None), "layers", None)
    if layers is None or len(layers) < 2:
        raise RunError(f"{type(module).__name__} has no layers that could be left out", "draft.distill")
    return layers


def prune(module: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A model of the same class with these layers, which shares its tensors with `module`.

    Raises RunError where the class cannot be built with fewer layers.
    """
    import torch
    from transformers import AutoModelForCausalLM

    count = len(layers_of(module))
    config = copy.deepcopy(module.config)
    text = config.get_text_config()
    text.num_hidden_layers = len(layers)
    for name, value in list(text.to_dict().items()):
        if isinstance(value, list) and len(value) == count and name.endswith(("_types", "_layers", "_pattern")):
            setattr(text, name, [value[i] for i in layers])
    with torch.device("meta"):
        student = AutoModelForCausalLM.from_config(config)
    prefix, state = f"{module.base_model_prefix}.layers.", {}
    places = {old: new for new, old in enumerate(layers)}
    for name, tensor in module.state_dict().items():
        if name.startswith(prefix):
            number, _, rest = name.removeprefix(prefix).partition(".")
            if int(number) not in places:
                continue
            name = f"{prefix}{places[int(number)]}.{rest}"
        state[name] = tensor
    found = student.load_state_dict(state, strict=False, assign=True)
    student.tie_weights()
    _carry_buffers(module, student)
    left = [name for name, tensor in student.named_parameters() if tensor.is_meta] + list(found.unexpected_keys)
    if left:
        raise RunError(f"{type(module).__name__} cannot be cut to {len(layers)} layers: {left[0]}", "draft.distill")
    return student.train(False)


def _carry_buffers(module: Any, student: Any) -> None:
    """Buffers that no state dict holds, such as rotary frequencies; those of the layers from the first layer."""
    known = dict(module.named_buffers())
    for name, tensor in list(student.named_buffers()):
        if tensor.is_meta and name in known:
            owner, _, last = name.rpartition(".")
            student.get_submodule(owner)._buffers[last] = known[name]


def set_trainable(student: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """Freeze the embeddings and the head, give the rest tensors of its own, and return that by name."""
    import torch

    fixed: set[int] = set()
    for part in (student.get_input_embeddings(), student.get_output_embeddings()):
        fixed |= {id(p) for p in part.parameters()} if part is not None else set()
    trained = {}
    for name, parameter in list(student.named_parameters()):
        if id(parameter) in fixed or not parameter.is_floating_point():
            parameter.requires_grad_(False)
            continue
        owner, _, last = name.rpartition(".")
        fresh = torch.nn.Parameter(parameter.detach().clone())
        setattr(student.get_submodule(owner), last, fresh)
        trained[name] = fresh
    return trained


def save(student: PreTrainedModel, tokenizer: Any, folder: Path, dtype: torch.dtype) -> None:
    """Write the student as a Hugging Face folder of its own, in `dtype`."""
    from ..runtime.open import quiet_transformers

    whole = copy.deepcopy(student).to(dtype)  # type: ignore[arg-type]  # transformers' decorator loses `self`
    whole.config.dtype = dtype
    with quiet_transformers():
        whole.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
