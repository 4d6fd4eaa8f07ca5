"""Weights of a lazy model written to safetensors shards, one tensor in memory at a time, of a large one a part.

Names and bytes of the files are those of transformers' `save_pretrained`, which puts tensors in natural order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..runtime.checkpoint_names import CheckpointNames
from ..runtime.tensor_files import Spec, write_tensors
from ..runtime.weight_files import INDEX, SINGLE

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from ..optimizer.model import LoadedModel
    from ..runtime.lazy import LazyWeights


def plan_shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in files of at most `limit` bytes, in order; a larger tensor has a file of its own, before the one that
    was being filled."""
    shards: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if size > limit:
            shards.append([name])
            continue
        if filled + size > limit:
            shards.append(current)
            current, filled = [], 0
        current.append(name)
        filled += size
    return [*shards, current] if current else shards


def write_shards(module: PreTrainedModel, weights: LazyWeights, folder: Path, limit: int) -> None:
    """Write all weights of a lazy model, and the index where they take more than one file of `limit` bytes."""
    specs = {name: Spec.of(tensor) for name, tensor in stored_tensors(module, weights).items()}
    write_specs(specs, weights.parts, folder, limit, module.num_parameters(), weights.names)


def file_names(model: LoadedModel) -> CheckpointNames:
    """How the weight files of a model's source call its tensors."""
    if model.weights is not None:
        return model.weights.names
    return CheckpointNames.of_folder(model.module, model.source.folder)


def stored_tensors(module: PreTrainedModel, weights: LazyWeights | None) -> dict[str, torch.Tensor]:
    """The tensors of a model that weight files hold, tied ones once; those of a lazy model are on the meta device."""
    ignored = set(module._keys_to_ignore_on_save or ())
    tensors = module.state_dict()
    aliases = weights.aliases if weights is not None else _tied(module, tensors)
    return {n: t for n, t in tensors.items() if n not in ignored and aliases.get(n, n) == n}


def _tied(module: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Of a model in memory, names whose tensor is another's → the name that stands for both."""
    ties = module.get_expanded_tied_weights_keys(all_submodels=True)
    both = {target: source for target, source in ties.items() if target in tensors and source in tensors}
    return {t: s for t, s in both.items() if tensors[t].data_ptr() == tensors[s].data_ptr()}


def write_specs(
    specs: Mapping[str, Spec],
    read: Callable[[str], torch.Tensor | Iterable[torch.Tensor]],
    folder: Path,
    limit: int,
    parameters: int,
    names: CheckpointNames,
) -> None:
    """Write the tensors of these specs as `read` gives them, whole or in parts, in natural order, one at a time.

    limit: bytes of a file; where there are several, an index names them. parameters: how many the model has. names: how
    the files call the tensors.
    """
    own = {names.in_files(name): name for name in specs}
    specs = {name: specs[own[name]] for name in sorted(own, key=_natural)}
    shards = plan_shards({name: spec.nbytes for name, spec in specs.items()}, limit)
    files = (
        [SINGLE]
        if len(shards) == 1
        else [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    )
    for file, shard in zip(files, shards):
        write_tensors(folder / file, {name: specs[name] for name in shard}, lambda name: read(own[name]))
    if len(shards) > 1:
        index = {
            "metadata": {
                "total_parameters": parameters,
                "total_size": sum(spec.nbytes for spec in specs.values()),
            },
            "weight_map": {name: file for file, shard in zip(files, shards) for name in shard},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sorts `layers.2` before `layers.10`."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]
