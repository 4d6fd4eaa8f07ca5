"""Logits of a lazy model: one decoder block after another over all windows, one block in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..optimizer.errors import RunError
from ..runtime.cached_forward import vocabulary_size
from .texts import check_vocabulary

if TYPE_CHECKING:
    import torch

    from ..optimizer.model import LoadedModel


def streamed_logits(
    model: LoadedModel, windows: torch.Tensor | Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For each row of `windows` (int64 `[length]`): its ids `[length]` and the logits `[length - 1, vocab]`.

    The values of `logits.window_logits`, bit for bit: every window runs by itself through the same operations (only
    those of a head of some 64 MiB and more may differ in last bits, see `head_parts.py`). Held are one hidden state a
    window, one block, and at the ends what lies outside the blocks, but rows and parts of large tables. Raises RunError
    where logits are not numbers.
    """
    import torch

    from ..runtime.decoder_blocks import capture, evaluation_mode, find_blocks, logits_after
    from ..runtime.embedding_rows import loaded_around
    from ..runtime.head_parts import head_by_parts
    from ..runtime.lazy import outside_blocks

    module = model.module
    check_vocabulary(torch.cat(list(windows)), vocabulary_size(module))
    name, blocks = find_blocks(module)
    around = outside_blocks(module, name)
    head = module.get_output_embeddings()  # type: ignore[operator]
    rows = [row[None] for row in windows]
    with torch.inference_mode(), evaluation_mode(module):
        with loaded_around(model, *(n for n in around if module.get_submodule(n) is not head), f"{name}.0"):
            captured = capture(module, blocks, rows)
        for batch in captured[1:]:
            batch.share_arguments(captured[0])
        for index, block in enumerate(blocks):
            with model.loaded(f"{name}.{index}"):
                for batch in captured:
                    batch.hidden = batch.calls[index].run(block, batch.hidden)
    with head_by_parts(model, *around) as filled, loaded_around(model, *filled):
        for index, (ids, batch) in enumerate(zip(rows, captured)):
            with torch.inference_mode(), evaluation_mode(module):
                logits = logits_after(module, blocks, ids, batch)[0, :-1]
            if not bool(torch.isfinite(logits[-1].float()).any()):
                what = f"the model's logits are not numbers (window {index})"
                raise RunError(what, type(module).__name__, "Look for NaN or infinite weights.")
            yield ids[0].to(logits.device), logits
