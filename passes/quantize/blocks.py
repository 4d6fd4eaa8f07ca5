"""Running a decoder one block at a time: finding the blocks, capturing what they are called with, calling them.

Works on any transformers decoder whose layers sit in one ModuleList and pass the hidden state as their first argument;
no tracing. Keyword arguments (masks, rotary embeddings, whatever an architecture passes) are captured for every block,
because they differ between blocks in models that mix attention types.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...optimizer.errors import RunError


class StopForward(Exception):
    """Raised inside a hook to end a forward pass whose remainder is not needed."""


@dataclass
class BlockCall:
    """How the model calls one block for one batch, apart from the hidden state itself."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    by_keyword: bool

    def run(self, block: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """The block's output hidden state."""
        if self.by_keyword:
            output = block(*self.args, **{**self.kwargs, "hidden_states": hidden})
        else:
            output = block(hidden, *self.args, **self.kwargs)
        return output if isinstance(output, torch.Tensor) else output[0]


@dataclass
class CapturedBatch:
    """One batch on its way through the blocks: the current hidden state, and how each block is called.

    original: the hidden state in the unquantized model, where that is followed too; followed: the same after the
    current block.
    """

    hidden: torch.Tensor
    calls: list[BlockCall]
    original: torch.Tensor | None = None
    followed: torch.Tensor | None = None


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Name and list of the decoder's blocks: the ModuleList with the most parameters that is `num_hidden_layers` long.

    Raises RunError where there is none.
    """
    length = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == length]
    if not lists:
        raise RunError(
            f"no list of {length} decoder blocks was found in {type(model).__name__}",
            what_to_do="Use `method: rtn`, which needs no blocks.",
        )
    return max(lists, key=lambda pair: sum(p.numel() for p in pair[1].parameters()))


def join_batches(batches: Sequence[torch.Tensor], max_tokens: int) -> list[torch.Tensor]:
    """Stack sequences `[1, L]` of equal length that follow each other into batches of at most `max_tokens` tokens."""
    joined: list[list[torch.Tensor]] = []
    for batch in batches:
        rows = sum(b.shape[0] for b in joined[-1]) if joined else 0
        fits = joined and joined[-1][0].shape[1] == batch.shape[1] and (rows + 1) * batch.shape[1] <= max_tokens
        if fits:
            joined[-1].append(batch)
        else:
            joined.append([batch])
    return [torch.cat(rows) for rows in joined]


def capture(model: nn.Module, blocks: nn.ModuleList, batches: Sequence[torch.Tensor]) -> list[CapturedBatch]:
    """Run the model's own forward with blocks that hand their input on, and record every call.

    batches: token ids, int64 [B, L]. Costs little more than the embeddings: no block computes. Raises RunError where
    the model does not call its blocks once each, in order.
    """
    captured = []
    device = next(model.parameters()).device
    for batch in batches:
        record: list[BlockCall] = []
        order: list[int] = []
        hidden: list[torch.Tensor] = []
        with _pass_through(blocks, record, order, hidden), suppress(StopForward):
            model(input_ids=batch.to(device), use_cache=False)
        if order != list(range(len(blocks))):
            raise RunError(
                f"{type(model).__name__} does not call its decoder blocks once each, in order",
                what_to_do="Use `method: rtn`, which needs no calibration.",
            )
        captured.append(CapturedBatch(hidden[0], record))
    return captured


@contextmanager
def _pass_through(
    blocks: nn.ModuleList, record: list[BlockCall], order: list[int], hidden: list[torch.Tensor]
) -> Iterator[None]:
    """Replace each block's forward by one that records its call and returns its input; the last ends the pass.

    The first block does compute, to learn whether blocks return a tensor or a tuple that begins with it.
    """
    originals = [block.__dict__.get("forward") for block in blocks]
    first = blocks[0].forward
    extra: list[tuple[Any, ...] | None] = []

    def make(index: int) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            by_keyword = not args
            state = kwargs["hidden_states"] if by_keyword else args[0]
            if index == 0:
                hidden.append(state.detach())
                output = first(*args, **kwargs)
                extra.append(None if isinstance(output, torch.Tensor) else tuple(output[1:]))
            rest = {key: value for key, value in kwargs.items() if not by_keyword or key != "hidden_states"}
            record.append(BlockCall(args[1:], rest, by_keyword))
            order.append(index)
            if index == len(blocks) - 1:
                raise StopForward
            return state if extra[0] is None else (state, *extra[0])

        return forward

    for index, block in enumerate(blocks):
        block.forward = make(index)
    try:
        yield
    finally:
        for block, original in zip(blocks, originals):
            del block.forward
            if original is not None:
                block.forward = original


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch off dropout for the duration."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
