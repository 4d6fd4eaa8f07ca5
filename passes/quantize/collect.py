"""Gathering the Hessians of a block's layers while it runs over the calibration batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import nn

from ...runtime.decoder_blocks import BlockCall, CapturedBatch, StopForward, logits_after
from .hessian import HessianCollector, InputGroup

T = TypeVar("T")


def collect(
    block: nn.Module,
    index: int,
    layers: Mapping[str, nn.Module],
    captured: Sequence[CapturedBatch],
    original: nn.Module | None = None,
    whole: bool = True,
) -> list[InputGroup]:
    """Hessians of `layers` (by name) of `block`, which is number `index`, in the order in which they are called.

    original: an unquantized copy of the block, if the layers are to match its outputs; whole: run all of the block, and
    follow the original's hidden state; otherwise stop at the last of the layers.
    """
    originals: dict[str, nn.Module] = {}
    if original is not None:
        own = {module: name for name, module in block.named_modules()}
        originals = {name: original.get_submodule(own[layer]) for name, layer in layers.items()}
    collector = HessianCollector(layers, originals)
    with collector.hooks(), ExitStack() as stack:
        if not whole:
            for stopped in (layers, originals):
                if stopped:
                    stack.enter_context(stop_after_input(list(stopped.values())[-1]))
        for batch in captured:
            call = batch.calls[index]
            if original is not None:
                with suppress(StopForward):
                    batch.followed = call.run(original, batch.hidden if batch.original is None else batch.original)
            with suppress(StopForward):
                call.run(block, batch.hidden)
            collector.flush()
    return sorted(collector.groups, key=lambda group: group.first_call)


def call_order(block: nn.Module, index: int, layers: Mapping[str, nn.Module], batch: CapturedBatch) -> list[list[str]]:
    """The names of `layers` in the order in which the block calls them, those with the same input together; those that
    it does not call come last.
    """
    given: dict[str, list[torch.Tensor]] = {}
    with ExitStack() as stack:
        for name, layer in layers.items():

            def watch(module: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
                given.setdefault(name, []).append(args[0])

            stack.callback(layer.register_forward_pre_hook(watch).remove)
        batch.calls[index].run(block, batch.hidden)
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, inputs in given.items():
        groups.setdefault(tuple(map(id, inputs)), []).append(name)
    return [*groups.values(), *([name] for name in layers if name not in given)]


def on_one_sequence(batch: CapturedBatch, index: int, use: Callable[[BlockCall, torch.Tensor], T]) -> T:
    """`use` of how block number `index` is called for the batch's first sequence, and of that sequence's state; for all
    of the batch where its arguments cannot be divided.
    """
    call, hidden = batch.calls[index], batch.hidden
    rows = hidden.shape[0]

    def first(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value[:1] if value.dim() and value.shape[0] == rows else value
        return type(value)(map(first, value)) if type(value) in (tuple, list) else value

    kwargs = {name: first(value) for name, value in call.kwargs.items()}
    one = BlockCall(first(call.args), kwargs, call.by_keyword)
    try:
        return use(one, hidden[:1])
    except (RuntimeError, IndexError, ValueError):
        return use(call, hidden)


def collect_outside(
    model: nn.Module,
    blocks: nn.ModuleList,
    name: str,
    batches: Sequence[torch.Tensor],
    captured: Sequence[CapturedBatch],
) -> InputGroup:
    """The Hessian of one layer outside the blocks, whose states in `captured` are those after the last block.

    batches: the token ids, int64 [B, L]. No block computes, and the model runs only up to that layer.
    """
    layer = model.get_submodule(name)
    collector = HessianCollector({name: layer})
    with collector.hooks(), stop_after_input(layer):
        for ids, batch in zip(batches, captured):
            with suppress(StopForward):
                logits_after(model, blocks, ids, batch)
            collector.flush()
    return collector.groups[0]


@contextmanager
def stop_after_input(module: nn.Module) -> Iterator[None]:
    """End a forward pass once `module` has received its input; entered after the hooks that read it."""

    def stop(module: nn.Module, args: tuple[Any, ...]) -> None:
        raise StopForward

    handle = module.register_forward_pre_hook(stop)
    try:
        yield
    finally:
        handle.remove()
