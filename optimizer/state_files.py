"""The tensors of a cached result: saved from a model in memory, and brought back into a model, lazy or not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .model import LoadedModel


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def load_state(model: LoadedModel, folder: Path, aliases: dict[str, str]) -> set[str]:
    """Assign the tensors of an entry to a model in memory; returns their names. Raises KeyError for an unknown one."""
    from safetensors.torch import load_file

    state = {name: tensor for file in files(folder) for name, tensor in load_file(file).items()}
    state.update({alias: state[name] for alias, name in aliases.items()})
    unknown = model.module.load_state_dict(state, strict=False, assign=True).unexpected_keys
    if unknown:
        raise KeyError(unknown[0])
    model.module.tie_weights()  # type: ignore[operator]
    return set(state)


def check_complete(model: LoadedModel, known: set[str]) -> None:
    """Raise KeyError or ValueError where a tensor of the model has no value (in memory: not in `known`) or another
    shape than its file's.
    """
    for name, tensor in model.module.state_dict().items():
        if model.weights is None:
            if name not in known:
                raise KeyError(name)
        elif model.weights.place(name).shape != tuple(tensor.shape):
            raise ValueError(f"{name} is stored in another shape")
    if model.weights is not None:
        model.weights.forget()


def save_state(model: LoadedModel, path: Path) -> dict[str, str]:
    """Save the state dict; returns the names that share a tensor with another (tied weights) and which one."""
    from safetensors.torch import save_file

    seen: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    aliases, state = {}, {}
    for name, tensor in model.module.state_dict().items():
        identity = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
        if tensor.numel() and identity in seen:
            aliases[name] = seen[identity]
            continue
        seen[identity] = name
        state[name] = tensor.detach().contiguous()
    save_file(state, path)
    return aliases
