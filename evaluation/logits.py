"""One forward pass a window: the logits that every measure of quality reads."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from ..optimizer.errors import RunError
from ..runtime.cached_forward import vocabulary_size
from .texts import check_vocabulary

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from ..runtime.engine.protocols import ModelRunner

CHUNK = 256
"""Tokens a step when a runner scores a window: what it writes to the KV cache is read by the next step."""


def window_logits(model: PreTrainedModel, windows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For each row of `windows` (int64 `[n, length]`): its ids `[length]` and the model's logits, both on the model's
    device; logits `[length - 1, vocab]` in the model's dtype, row i predicting token i + 1.

    Raises RunError where a logit is NaN or infinite in every position (the weights are broken).
    """
    import torch

    from ..runtime.kernels.wide_products import wide_products

    check_vocabulary(windows, vocabulary_size(model))
    for index, row in enumerate(windows):
        ids = row.to(model.device)
        with torch.inference_mode(), wide_products(ids.device):
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        if not bool(torch.isfinite(logits[-1].float()).any()):
            raise RunError(
                f"the model's logits are not numbers (window {index})",
                where=type(model).__name__,
                what_to_do="Look for NaN or infinite weights; in float16 try bfloat16.",
            )
        yield ids, logits


def window_room(runner: ModelRunner) -> int:
    """Tokens of the longest window that a runner without requests of its own can hold."""
    tail = getattr(runner, "tail_blocks", 0)
    return min((runner.num_blocks - tail) * runner.block_size, runner.max_model_len)


def run_tokens(runner: ModelRunner, number: int, tokens: list[int], start: int, end: int, scored: bool) -> torch.Tensor:
    """Compute tokens `start … end - 1` of a window whose earlier ones are computed, over the first blocks of the pool.

    number: the window's, as the request's id. Returns their logits, float32 `[end - start, vocab]`, or none of them
    where not `scored`; the next call may overwrite them.
    """
    import torch

    from ..runtime.engine.plan import Row, StepPlan

    size, tail = runner.block_size, getattr(runner, "tail_blocks", 0)
    border = -(-start // size) * size
    if tail and start < border < end:  # a row that begins inside a block ends in it
        own = run_tokens(runner, number, tokens, start, border, scored).clone()
        return torch.cat([own, run_tokens(runner, number, tokens, border, end, scored)])
    table = tuple(range(-(-end // size) + tail))
    row = Row(number, start, tuple(tokens[start:end]), table, end - start if scored else 0)
    return runner.execute(StepPlan((row,)))


def runner_logits(
    runner: ModelRunner, windows: torch.Tensor, first: int = CHUNK, chunk: int = CHUNK
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same through an engine's runner, which is what answers prompts: logits float32 `[length - 1, vocab]`, in one
    buffer that the next window overwrites, since with a vocabulary of 262,144 a window of 512 tokens takes 512 MiB.

    Each window is one request, its `first` tokens in one step and the others in steps of `chunk`, over the first blocks
    of the pool, so that the KV cache is read as it is in use. The runner must not have requests of its own. Raises
    RunError where a window does not fit the pool or a logit is not a number.
    """
    import torch

    check_vocabulary(windows, runner.vocab_size)
    length, room = windows.shape[1], window_room(runner)
    if length > room:
        raise RunError(f"a window of {length} tokens does not fit the engine's {room}", "evaluate.window_length")
    cuts = [0, *range(first, length, chunk), length]
    logits = torch.empty(0)
    for index, ids in enumerate(windows):
        tokens = ids.tolist()
        for start, end in pairwise(cuts):
            part = run_tokens(runner, index, tokens, start, end, True)
            if not len(logits):
                logits = part.new_empty(length - 1, part.shape[1])
            logits[start:end] = part[: length - 1 - start]
        if not bool(torch.isfinite(logits[-1]).all()):
            raise RunError(f"the model's logits are not numbers (window {index})", type(runner).__name__)
        yield ids.to(logits.device), logits
