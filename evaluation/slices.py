"""Logits of windows in slices of few positions, from whatever runs the model.

All logits of a window are large (1,024 positions of 262,144 tokens are 1 GiB in float32), so a slice is made, measured
and dropped before the next. Every source here cuts the same windows into the same slices: two models are compared by
going through two of them side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..optimizer.errors import RunError
from ..runtime.cached_forward import vocabulary_size
from .logits import run_tokens, window_room
from .texts import check_vocabulary
from .windows import Window

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from ..optimizer.model import LoadedModel
    from ..runtime.engine.protocols import ModelRunner

SLICE_BYTES = 64 << 20
"""Bytes of a slice's float32 logits."""
MOST_ROWS = 256
CONTEXT = 256
"""Tokens a step of a window's context, whose logits nobody reads."""
Logits = Iterator["torch.Tensor"]


def slice_rows(vocab_size: int) -> int:
    """Positions a slice: as many as SLICE_BYTES hold, 16 at least."""
    return max(16, min(MOST_ROWS, SLICE_BYTES // (4 * vocab_size)))


def places(windows: Sequence[Window], rows: int) -> Iterator[tuple[int, int, int]]:
    """(window, start, end) of each slice: the scored tokens `start … end - 1` of that window."""
    for number, window in enumerate(windows):
        for start in range(window.first, len(window.ids), rows):
            yield number, start, min(start + rows, len(window.ids))


def runner_slices(runner: ModelRunner, windows: Sequence[Window], rows: int) -> Logits:
    """Each slice's logits, float32 `[n, vocab]`, through an engine's runner, which is what answers prompts.

    A window is one request: its context in steps of CONTEXT tokens, then a step a slice, over the first blocks of the
    pool. So each slice reads the KV cache that the tokens before it were written to, in the cache's own format. The
    tensor may be overwritten by the next slice. Raises RunError where a window does not fit the pool or a logit is not
    a number.
    """
    _check_ids(windows, runner.vocab_size)
    longest, room = max(len(window.ids) for window in windows), window_room(runner)
    if longest > room:
        raise RunError(f"a window of {longest} tokens does not fit the engine's {room}", "window length")
    for number, window in enumerate(windows):
        tokens = window.ids.tolist()
        for start in range(0, window.first - 1, CONTEXT):
            run_tokens(runner, number, tokens, start, min(start + CONTEXT, window.first - 1), False)
        for _, start, end in places([window], rows):
            logits = run_tokens(runner, number, tokens, start - 1, end - 1, True)
            yield _checked(logits, type(runner).__name__, number)


def module_slices(model: PreTrainedModel, windows: Sequence[Window], rows: int) -> Logits:
    """The same through transformers' own modules, in the model's dtype: the decoder once a window, the head a slice at
    a time. Where a model has no head apart from its decoder, all logits of a window are made at once."""
    import torch

    _check_ids(windows, vocabulary_size(model))
    head = head_of(model)
    for number, window in enumerate(windows):
        ids = window.ids.to(model.device)[None]
        with torch.inference_mode():
            if head is None:
                states = model(input_ids=ids, use_cache=False).logits
            else:
                states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        for _, start, end in places([window], rows):
            part = states[:, start - 1 : end - 1]
            with torch.inference_mode():
                logits = part if head is None else head(ids[:, start - 1 : end - 1], part)
            yield _checked(logits[0], type(model).__name__, number)


def streamed_slices(model: LoadedModel, windows: Sequence[Window], rows: int) -> Logits:
    """The same of a lazy model, one decoder block after another over all windows, one block in memory at a time.

    Held are one hidden state a window, and at the end what lies outside the blocks.
    """
    import torch

    from ..runtime.decoder_blocks import CapturedBatch, evaluation_mode, find_blocks, logits_after
    from ..runtime.embedding_rows import loaded_around
    from ..runtime.lazy import outside_blocks

    module = model.module
    _check_ids(windows, vocabulary_size(module))
    name, blocks = find_blocks(module)
    ids = [window.ids[None] for window in windows]
    batches = final_states(model, ids)
    with loaded_around(model, *outside_blocks(module, name)), evaluation_mode(module):
        for number, (window, batch) in enumerate(zip(windows, batches)):
            for _, start, end in places([window], rows):
                part = CapturedBatch(batch.hidden[:, start - 1 : end - 1], batch.calls, batch.extra)
                with torch.inference_mode():
                    logits = logits_after(module, blocks, ids[number][:, start - 1 : end - 1], part)
                yield _checked(logits[0], type(module).__name__, number)


def final_states(model: LoadedModel, ids: Sequence[torch.Tensor]) -> list[Any]:
    """A CapturedBatch of each of `ids` (int64 `[1, n]`) whose hidden state is the last block's output."""
    import torch

    from ..runtime.decoder_blocks import evaluation_mode, find_blocks

    module = model.module
    name, blocks = find_blocks(module)
    with torch.inference_mode(), evaluation_mode(module):
        captured = first_states(model, ids)
        for index, block in enumerate(blocks):
            with model.loaded(f"{name}.{index}"):
                for batch in captured:
                    batch.hidden = batch.calls[index].run(block, batch.hidden)
    return captured


def first_states(model: LoadedModel, ids: Sequence[torch.Tensor]) -> list[Any]:
    """A CapturedBatch of each of `ids` (int64 `[1, n]`) with the hidden state that enters the first block."""
    import torch

    from ..runtime.decoder_blocks import capture, evaluation_mode, find_blocks
    from ..runtime.embedding_rows import loaded_around
    from ..runtime.lazy import outside_blocks

    module = model.module
    name, blocks = find_blocks(module)
    head = module.get_output_embeddings()  # type: ignore[operator]
    around = [n for n in outside_blocks(module, name) if module.get_submodule(n) is not head]
    with torch.inference_mode(), evaluation_mode(module), loaded_around(model, *around, f"{name}.0"):
        captured = capture(module, blocks, list(ids))
    for batch in captured[1:]:
        batch.share_arguments(captured[0])
    return captured


Head = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]


def head_of(model: PreTrainedModel) -> Head | None:
    """What makes logits `[1, n, vocab]` of ids `[1, n]` and the decoder's last hidden states `[1, n, hidden]`.

    It is the model's own forward over a decoder that answers with these states, so that scaling and soft caps are
    kept. Tried with two tokens; None where that does not give the model's logits.
    """
    import torch

    base = model.base_model
    if base is model:
        return None

    def head(ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        with _answering(base, states):
            return model(input_ids=ids, use_cache=False).logits

    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    try:
        with torch.inference_mode():
            whole = model(input_ids=ids, use_cache=False).logits
            states = base(input_ids=ids, use_cache=False).last_hidden_state
            close = torch.equal(head(ids, states), whole)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None
    return head if close else None


@contextmanager
def _answering(base: torch.nn.Module, states: torch.Tensor) -> Iterator[None]:
    """While it lasts, `base` answers every call with `states`."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    before = base.__dict__.get("forward")
    base.forward = lambda *args, **kwargs: BaseModelOutputWithPast(last_hidden_state=states)  # type: ignore[assignment]
    try:
        yield
    finally:
        del base.forward
        if before is not None:
            base.forward = before  # type: ignore[assignment]


def _check_ids(windows: Sequence[Window], vocab_size: int) -> None:
    import torch

    check_vocabulary(torch.cat([window.ids for window in windows]), vocab_size)


def _checked(logits: torch.Tensor, name: str, window: int) -> torch.Tensor:
    """The logits. Raises RunError where none of the last position is a number."""
    import torch

    if not bool(torch.isfinite(logits[-1].float()).any()):
        raise RunError(
            f"the model's logits are not numbers (window {window})",
            name,
            "Look for NaN or infinite weights; in float16 try bfloat16.",
        )
    return logits
