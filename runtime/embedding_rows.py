"""The input embeddings of a lazy model, of which only the rows that tokens ask for are read.

A table of 262,144 tokens is larger than all else that has to be in memory to know what the first block is given. A
model that reads the table by itself, and not through its module, fails with an index beyond the rows for token 1, for
which `source_model.py` tries each; such a model is loaded whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..optimizer.model import LoadedModel
    from .lazy import LazyWeights


@contextmanager
def loaded_around(model: LoadedModel, *names: str) -> Iterator[None]:
    """`model.loaded(*names)`, but that the input embeddings of a lazy model, where they are named, stay in their file,
    and look up the rows of each call there. They are filled like the others where the head that is tied to them is
    named, too, and where they are no plain table.
    """
    weights = model.weights
    found = _table(model, names) if weights is not None else None
    if weights is None or found is None:
        with model.loaded(*names):
            yield
        return
    name, table = found
    with model.loaded(*(other for other in names if other != name)), _by_rows(weights, name, table):
        yield


def _table(model: LoadedModel, names: tuple[str, ...]) -> tuple[str, nn.Embedding] | None:
    """Name and module of the input embeddings, where they are named, empty, and a table whose rows can be read."""
    from torch import nn

    module: Any = model.module
    table, weights = module.get_input_embeddings(), model.weights
    name = next((name for name in names if module.get_submodule(name) is table), None)
    if name is None or weights is None or not isinstance(table, nn.Embedding) or table.max_norm is not None:
        return None
    if not table.weight.is_meta or set(table.state_dict()) != {"weight"}:
        return None
    key = weights.aliases.get(f"{name}.weight", f"{name}.weight")
    tied = {key, *(alias for alias, target in weights.aliases.items() if target == key)}
    others = tied - {f"{name}.weight"}
    return None if any(other.rpartition(".")[0] in names for other in others) else (name, table)


@contextmanager
def _by_rows(weights: LazyWeights, name: str, table: nn.Embedding) -> Iterator[None]:
    """While it lasts, the weight of `table` is the rows of the last call, and a call is given places among them.

    No row stands for padding then, which only matters to gradients.
    """
    import torch
    from torch import nn

    weight, padding = table.weight, table.padding_idx

    def take(indices: torch.Tensor) -> None:
        with torch.inference_mode(False):
            rows = weights.rows(f"{name}.weight", indices)
            table.weight = nn.Parameter(rows, requires_grad=False)

    def look_up(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        ids = args[0] if args else kwargs["input"]
        distinct, places = torch.unique(ids, return_inverse=True)
        take(distinct)
        return ((places, *args[1:]), kwargs) if args else ((), {**kwargs, "input": places})

    handle = table.register_forward_pre_hook(look_up, with_kwargs=True)
    table.padding_idx = None  # type: ignore[assignment]
    weights.by_rows.add(f"{name}.weight")
    try:
        take(torch.zeros(1, dtype=torch.long))
        yield
    finally:
        handle.remove()
        weights.by_rows.discard(f"{name}.weight")
        table.padding_idx, table.weight = padding, weight
