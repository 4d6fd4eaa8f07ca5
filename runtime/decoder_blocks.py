"""Running a decoder one block at a time: finding the blocks, capturing what they are called with, calling them.

Works on any transformers decoder whose layers sit in one ModuleList and pass the hidden state as their first argument;
no tracing. Keyword arguments (masks, rotary embeddings, whatever an architecture passes) are captured for every block,
because they differ between blocks in models that mix attention types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..optimizer.errors import RunError
from .kernels.wide_products import wide_products
from .tensor_files import Stored, read_stored


class StopForward(Exception):
    """Raised inside a hook to end a forward pass whose remainder is not needed."""


@dataclass
class BlockCall:
    """How the model calls one block for one batch, apart from the hidden state itself."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    by_keyword: bool

    def run(self, block: Callable[..., Any], hidden: torch.Tensor) -> torch.Tensor:
        """The block's output hidden state."""
        with wide_products(hidden.device):
            if self.by_keyword:
                output = block(*self.args, **{**self.kwargs, "hidden_states": hidden})
            else:
                output = block(hidden, *self.args, **self.kwargs)
        return output if isinstance(output, torch.Tensor) else output[0]


class CapturedBatch:
    """One batch on its way through the blocks: its states, and how each block is called.

    hidden: the current hidden state [B, L, H]. original: the same in the unquantized model, where that is followed too;
    followed: that after the current block. extra: what blocks return beside the hidden state, where they return a
    tuple. `hidden` and `original` may be left in a file, which is then read at each access.
    """

    def __init__(self, hidden: torch.Tensor, calls: list[BlockCall], extra: tuple[Any, ...] | None = None) -> None:
        self.calls, self.extra, self.device = calls, extra, hidden.device
        self.followed: torch.Tensor | None = None
        self._states: dict[str, torch.Tensor | Stored | None] = {"hidden": hidden, "original": None}

    @property
    def hidden(self) -> torch.Tensor:
        state = self._state("hidden")
        assert state is not None
        return state

    @hidden.setter
    def hidden(self, state: torch.Tensor) -> None:
        self._states["hidden"] = state

    @property
    def original(self) -> torch.Tensor | None:
        return self._state("original")

    @original.setter
    def original(self, state: torch.Tensor | None) -> None:
        self._states["original"] = state

    def leave_in_file(self, name: str, place: Stored) -> None:
        """Let the state `hidden` or `original` be what lies at `place`."""
        self._states[name] = place

    def _state(self, name: str) -> torch.Tensor | None:
        state = self._states[name]
        return read_stored(state).to(self.device) if isinstance(state, Stored) else state

    def share_arguments(self, other: CapturedBatch) -> None:
        """Take the tensors of another batch's calls (masks, rotary embeddings) where this one's are equal to them."""
        same: dict[int, torch.Tensor] = {}

        def shared(mine: Any, theirs: Any) -> Any:
            if isinstance(mine, (tuple, list)) and type(mine) is type(theirs) and len(mine) == len(theirs):
                return type(mine)(shared(m, t) for m, t in zip(mine, theirs))
            if not isinstance(mine, torch.Tensor) or not isinstance(theirs, torch.Tensor):
                return mine
            if id(mine) not in same:
                alike = mine.shape == theirs.shape and mine.dtype == theirs.dtype and torch.equal(mine, theirs)
                same[id(mine)] = theirs if alike else mine
            return same[id(mine)]

        for call, others in zip(self.calls, other.calls):
            call.args = shared(call.args, others.args)
            call.kwargs = {key: shared(value, others.kwargs.get(key)) for key, value in call.kwargs.items()}


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Name and list of the decoder's blocks: the ModuleList with the most parameters that is `num_hidden_layers` long.

    Raises RunError where there is none.
    """
    config: Any = model.config
    length = getattr(config.get_text_config(), "num_hidden_layers", None)
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


def capture(
    model: nn.Module, blocks: nn.ModuleList, batches: Sequence[torch.Tensor], plain: bool = False
) -> list[CapturedBatch]:
    """Run the model's own forward with blocks that hand their input on, and record every call.

    batches: token ids, int64 [B, L]. Costs little more than the embeddings and the first block, which does compute, to
    show whether blocks return a tensor or a tuple that begins with it; no other weight is needed. plain: they are
    known to return a tensor, so that none computes. Raises RunError where the model does not call its blocks once
    each, in order.
    """
    device = next(blocks[0].parameters()).device
    return [_capture_one(model, blocks, batch.to(device), plain) for batch in batches]


def _capture_one(model: nn.Module, blocks: nn.ModuleList, ids: torch.Tensor, plain: bool) -> CapturedBatch:
    record: list[BlockCall] = []
    order: list[int] = []
    hidden: list[torch.Tensor] = []

    def visit(index: int, state: torch.Tensor, call: BlockCall) -> torch.Tensor:
        if index == 0:
            hidden.append(state.detach())
        record.append(call)
        order.append(index)
        if index == len(blocks) - 1:
            raise StopForward
        return state

    with (
        _handing_on(blocks, visit, first_computes=not plain) as extra,
        suppress(StopForward),
        wide_products(ids.device),
    ):
        model(input_ids=ids, use_cache=False)
    if order != list(range(len(blocks))):
        raise RunError(
            f"{type(model).__name__} does not call its decoder blocks once each, in order",
            what_to_do="Use `method: rtn`, which needs no calibration.",
        )
    return CapturedBatch(hidden[0], record, extra=extra[0] if extra else None)


def logits_after(model: nn.Module, blocks: nn.ModuleList, ids: torch.Tensor, captured: CapturedBatch) -> torch.Tensor:
    """The logits [B, L, vocab] that the model makes of `captured.hidden` as the last block's output.

    ids: the batch's token ids, int64 [B, L]. No block computes: what lies outside them is all that has to be in memory.
    """

    def visit(index: int, state: torch.Tensor, call: BlockCall) -> torch.Tensor:
        return captured.hidden if index == len(blocks) - 1 else state

    with _handing_on(blocks, visit, captured.extra, first_computes=False), wide_products(captured.hidden.device):
        logits: torch.Tensor = model(input_ids=ids.to(captured.hidden.device), use_cache=False).logits
    return logits


@contextmanager
def only_first(blocks: nn.ModuleList, count: int) -> Iterator[None]:
    """While it lasts, only the first `count` blocks (1 or more) compute; the others hand their input on."""
    forwards = [block.forward for block in blocks]
    shape: list[tuple[Any, ...] | None] = []

    def make(index: int) -> Callable[..., Any]:
        def compute(*args: Any, **kwargs: Any) -> Any:
            output = forwards[index](*args, **kwargs)
            shape[:] = [_beside(output)]
            return output

        def hand_on(*args: Any, **kwargs: Any) -> Any:
            state = args[0] if args else kwargs["hidden_states"]
            return state if shape[0] is None else (state, *shape[0])

        return compute if index < count else hand_on

    with _replaced(blocks, make):
        yield


Visit = Callable[[int, torch.Tensor, BlockCall], torch.Tensor]


@contextmanager
def _handing_on(
    blocks: nn.ModuleList,
    visit: Visit,
    extra: tuple[Any, ...] | None = None,
    first_computes: bool = True,
) -> Iterator[list[tuple[Any, ...] | None]]:
    """Replace each block's forward by `visit`, which is given the block's number, its input and its call and returns
    its output. Yields a list whose only entry is what blocks return beside that (None for a plain tensor): `extra`, or,
    where `first_computes`, what the first block's own forward does.
    """
    first = blocks[0].forward
    shape: list[tuple[Any, ...] | None] = [] if first_computes else [extra]

    def make(index: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            by_keyword = not args
            state = kwargs["hidden_states"] if by_keyword else args[0]
            if index == 0 and first_computes:
                shape[:] = [_beside(first(*args, **kwargs))]
            rest = {key: value for key, value in kwargs.items() if not by_keyword or key != "hidden_states"}
            result = visit(index, state, BlockCall(args[1:], rest, by_keyword))
            return result if shape[0] is None else (result, *shape[0])

        return forward

    with _replaced(blocks, make):
        yield shape


def _beside(output: Any) -> tuple[Any, ...] | None:
    """What a block returned beside the hidden state; None where it returned a plain tensor."""
    return None if isinstance(output, torch.Tensor) else tuple(output[1:])


@contextmanager
def _replaced(blocks: nn.ModuleList, make: Callable[[int], Callable[..., Any]]) -> Iterator[None]:
    """Let block number i run `make(i)` instead of its forward for the duration."""
    originals = [block.__dict__.get("forward") for block in blocks]
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
