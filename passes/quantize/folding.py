"""Which module's output channels feed which linear layers of a decoder block, and moving scales from one to the other.

A fold divides the channels that a source puts out (a norm's weight and bias, rows of a linear layer) by scales s > 0
and multiplies the input columns of everything that reads them by s, so that the block computes what it did. Candidates
come from the block's structure as one forward shows it: linear layers that are given the very tensor that a norm
returned, and linear layers of one parent called before. Whether a candidate is right is measured: the block runs with
scales of 1/2, 1 and 2, which move exactly in binary floating point, and must put out what it did before. What feeds
more than linear layers (a router, a residual), or passes through anything that scales do not pass (a GELU, a norm of
values), fails that and is reported, never folded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

BlockOutput = Callable[[], torch.Tensor]
"""Runs the block on a few tokens of hidden state and returns its output."""

EXACT = 1e-4
"""Largest share of an uncompensated scaling's effect that may be left after a fold."""


@dataclass(frozen=True)
class Fold:
    """Scales of C channels: `rows` int64 [C] are their places in the source's output, `channels` int64 [K] the channel
    that each of the consumers' K input columns reads. offset: 1 for a norm that multiplies by 1 + weight, else 0.
    Names are those within the block.
    """

    source: str
    consumers: tuple[str, ...]
    rows: torch.Tensor
    channels: torch.Tensor
    offset: int = 0

    def columns(self, scales: torch.Tensor) -> torch.Tensor:
        """The scale of every input column of the consumers, [K], from those of the channels, [C]."""
        return scales[self.channels]

    def pool(self, values: torch.Tensor) -> torch.Tensor:
        """Means over the columns that read one channel: [K] → [C], float32."""
        sums = torch.zeros(len(self.rows), device=values.device).index_add_(0, self.channels, values.float())
        return sums / torch.bincount(self.channels, minlength=len(self.rows)).clamp(min=1)


@dataclass
class Folds:
    """What can be folded in a block, and why the rest cannot: consumers' names → reason."""

    folds: list[Fold] = field(default_factory=list)
    refused: dict[tuple[str, ...], str] = field(default_factory=dict)


@dataclass
class _Call:
    """One call of a module with a weight during the traced forward."""

    name: str
    linear: bool
    weight: torch.Tensor
    inputs: torch.Tensor
    output: torch.Tensor


def find_folds(block: nn.Module, run: BlockOutput, shared: frozenset[str] = frozenset()) -> Folds:
    """The folds of a block's linear layers, each one verified by running the block.

    run: calls the block, always on the same input; shared: names within the block of modules whose weights other parts
    of the model use too, which are no sources. The block is left as it was.
    """
    calls = list(_trace(block, run))
    found, before = Folds(), run().float()
    groups: dict[int, list[_Call]] = {}
    for call in calls:
        if call.linear:
            groups.setdefault(id(call.inputs), []).append(call)
    for group in groups.values():
        names = tuple(dict.fromkeys(call.name for call in group))
        candidates = list(_candidates(block, group, calls))
        usable = [fold for fold in candidates if fold.source not in shared]
        right = next((fold for fold in usable if _is_exact(block, run, before, fold)), None)
        if right is not None:
            found.folds.append(right)
        else:
            found.refused[names] = _reason(candidates, usable)
    return found


def apply_fold(block: nn.Module, fold: Fold, scales: torch.Tensor) -> torch.Tensor:
    """Fold `scales` (float32 [C], positive) and return those in effect, float32 [C].

    A norm's weight is rounded to its dtype first, and the consumers get the scale that this rounded weight gives, so
    that rounding it costs nothing. Channels of a norm that are always zero are left alone.
    """
    parameters, rows = dict(block.get_submodule(fold.source).named_parameters(recurse=False)), fold.rows
    weight, bias = parameters["weight"], parameters.get("bias")
    if weight.dim() == 1:
        old = weight.detach()[rows].float() + fold.offset
        new = (old / scales - fold.offset).to(weight.dtype).float() + fold.offset
        usable = (old != 0) & (new != 0)
        scales = torch.where(usable, old / new, 1.0)
        _overwrite(weight, rows, torch.where(usable, new, old) - fold.offset)
    else:
        _overwrite(weight, rows, weight.detach()[rows].float() / scales[:, None])
    if bias is not None:
        _overwrite(bias, rows, bias.detach()[rows].float() / scales)
    scale_columns(block, fold, scales)
    return scales


def _overwrite(parameter: nn.Parameter, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Give the parameter these rows, in its dtype and in new memory: the old may belong to a file."""
    changed = parameter.detach().clone()
    changed[rows] = values.to(parameter.dtype)
    parameter.data = changed


def scale_columns(block: nn.Module, fold: Fold, scales: torch.Tensor) -> None:
    """Multiply the consumers' input columns by the scales of their channels."""
    columns = fold.columns(scales)
    for name in fold.consumers:
        weight = block.get_parameter(f"{name}.weight")
        weight.data = (weight.detach().float() * columns).to(weight.dtype)


def shared_modules(model: nn.Module, block_name: str) -> frozenset[str]:
    """Names within the block of the modules whose outputs or parameters other parts of the model use too: tied ones,
    and what makes keys and values where later blocks may read those of earlier ones.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.is_meta:
            names.setdefault(id(parameter), []).append(name)
    tied = {name for same in names.values() if len(same) > 1 for name in same}
    expanded = getattr(model, "get_expanded_tied_weights_keys", None)
    if expanded is not None:
        ties = expanded(all_submodels=True)
        tied |= {*ties.keys(), *ties.values()}
    prefix = f"{block_name}."
    found = {name[len(prefix) :].rpartition(".")[0] for name in tied if name.startswith(prefix)}
    config: Any = model.config
    if getattr(config.get_text_config(), "num_kv_shared_layers", None):
        block = model.get_submodule(block_name)
        attention = [name for name, module in block.named_modules() if _head_dim(module) is not None]
        found |= {f"{name}.{child}" for name in attention for child, _ in block.get_submodule(name).named_children()}
    return frozenset(found)


def _trace(block: nn.Module, run: BlockOutput) -> Iterator[_Call]:
    """The calls of modules with weights of their own, in order; tensors are kept, so that identities stay distinct."""
    calls: list[_Call] = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            weight = module.weight
            if args and isinstance(args[0], torch.Tensor) and isinstance(output, torch.Tensor):
                assert isinstance(weight, torch.Tensor)
                calls.append(_Call(name, isinstance(module, nn.Linear), weight, args[0], output))

        return hook

    watched = [(n, m) for n, m in block.named_modules() if isinstance(getattr(m, "weight", None), torch.Tensor)]
    handles = [module.register_forward_hook(watch(name)) for name, module in watched]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    yield from calls


def _candidates(block: nn.Module, group: Sequence[_Call], calls: Sequence[_Call]) -> Iterator[Fold]:
    """Folds that the structure allows for layers with the same input, the likeliest first."""
    names = tuple(dict.fromkeys(call.name for call in group))
    columns = group[0].weight.shape[1]
    device = group[0].inputs.device
    for call in calls:
        if call.output is group[0].inputs and call.weight.shape == (columns,):
            every = torch.arange(columns, device=device)
            for offset in (0, 1):
                yield Fold(call.name, names, every, every, offset)
            return
    parent = names[0].rpartition(".")[0]
    first = next(i for i, call in enumerate(calls) if call.inputs is group[0].inputs)
    earlier = [c for c in calls[:first] if c.linear and c.name.rpartition(".")[0] == parent]
    head_dim = _head_dim(block.get_submodule(parent))
    for call in reversed(earlier):
        for rows, channels in _layouts(len(call.weight), columns, head_dim):
            yield Fold(call.name, names, rows.to(device), channels.to(device))


def _head_dim(module: nn.Module) -> int | None:
    """The size of a head, where the module is an attention layer that tells."""
    found = getattr(module, "head_dim", getattr(module, "head_size", None))
    return found if isinstance(found, int) else None


def _layouts(rows: int, columns: int, head_dim: int | None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Ways in which `rows` outputs of a linear layer can become `columns` inputs of a later one of the same parent.

    One to one; the second or first half (fused gate and up); with heads: values that several query heads share, values
    at the end of fused queries, keys and values, and values at the end of each key head's share of them.
    """
    every = torch.arange(columns)
    if rows == columns:
        yield every, every
    if rows == 2 * columns:
        yield every + columns, every
        yield every, every
    if head_dim is None or columns % head_dim or rows % head_dim:
        return
    heads, total = columns // head_dim, rows // head_dim
    if total < heads and heads % total == 0:
        yield torch.arange(rows), _repeated(heads // total, total, head_dim)
    if total > heads and (total - heads) % 2 == 0:
        kv_heads = (total - heads) // 2
        if heads % kv_heads == 0:
            channels = _repeated(heads // kv_heads, kv_heads, head_dim)
            size = kv_heads * head_dim
            yield torch.arange(rows - size, rows), channels
            share = rows // kv_heads
            own = torch.arange(kv_heads)[:, None] * share + share - head_dim + torch.arange(head_dim)
            yield own.flatten(), channels


def _repeated(times: int, kv_heads: int, head_dim: int) -> torch.Tensor:
    """For every column of `times * kv_heads` heads the channel among `kv_heads` heads whose values it carries."""
    return torch.arange(kv_heads * head_dim).view(kv_heads, 1, head_dim).expand(-1, times, -1).flatten()


def _is_exact(block: nn.Module, run: BlockOutput, before: torch.Tensor, fold: Fold) -> bool:
    """Whether folding leaves the output `before` alone where scaling the consumers alone would change it."""
    generator = torch.Generator().manual_seed(0)
    powers = torch.randint(-1, 2, (len(fold.rows),), generator=generator)
    scales = torch.exp2(powers.float()).to(fold.rows.device)
    with _restored(block, fold):
        scale_columns(block, fold, scales)
        uncompensated = (run().float() - before).norm()
    with _restored(block, fold):
        apply_fold(block, fold, scales)
        left = (run().float() - before).norm()
    # Unlike a power of two times a weight, 1 + weight is not exact in the weight's dtype.
    rounding = 4 * torch.finfo(block.get_parameter(f"{fold.source}.weight").dtype).eps if fold.offset else 0.0
    return bool(uncompensated > 0) and bool(left <= (EXACT + rounding) * uncompensated)


@contextmanager
def _restored(block: nn.Module, fold: Fold) -> Iterator[None]:
    """Put every parameter that the fold touches back at the end."""
    modules = [block.get_submodule(name) for name in (fold.source, *fold.consumers)]
    saved = [(p, p.detach().clone()) for module in modules for p in module.parameters(recurse=False)]
    try:
        yield
    finally:
        for parameter, values in saved:
            parameter.data = values


def _reason(candidates: Sequence[Fold], usable: Sequence[Fold]) -> str:
    if not candidates:
        return "no norm or linear layer of the block hands its output straight to them"
    sources = ", ".join(dict.fromkeys(fold.source for fold in candidates))
    if not usable:
        return f"the weight of {sources} is used elsewhere in the model too"
    return f"the probe does not show that a scale can move out of {sources} without a change of the block's output"
