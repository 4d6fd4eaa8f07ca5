"""Token windows of a text: what perplexity and divergence are measured on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..optimizer.errors import RunError, UsageError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


def read_text(path: str | Path) -> str:
    """A text file as UTF-8. Raises UsageError where it is missing, not UTF-8 or empty."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError("there is no such text file", where=str(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the text cannot be read ({error})", where=str(path)) from None
    if not text.strip():
        raise UsageError("the text is empty", where=str(path), what_to_do="Name a file with text in it.")
    return text


def token_windows(
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    length: int = 1024,
    limit: int | None = None,
    *,
    add_bos: bool = False,
    where: str = "text",
) -> torch.Tensor:
    """The text's first windows of `length` tokens, one after the other without overlap: int64 `[windows, length]`.

    The text is tokenized as one piece without special tokens; what is left after the last full window is dropped.
    With `add_bos` every window starts with BOS, and holds `length - 1` tokens of the text. `limit` caps the number of
    windows. Raises UsageError where the text does not fill one window or a number is impossible.
    """
    import torch

    if length < 2:
        raise UsageError(f"a window of {length} tokens scores none", where=where, what_to_do="Use 2 or more.")
    if limit is not None and limit < 1:
        raise UsageError(f"{limit} windows measure nothing", where=where, what_to_do="Use 1 or more.")
    if add_bos and tokenizer.bos_token_id is None:
        raise UsageError("the tokenizer has no BOS token to start the windows with", where=where)
    if not text.strip():
        raise UsageError("the text is empty", where=where, what_to_do="Name a file with text in it.")
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    share = length - 1 if add_bos else length
    count = len(ids) // share
    if count == 0:
        raise UsageError(
            f"the text has {len(ids)} tokens, one window needs {share}",
            where=where,
            what_to_do="Use a longer text or a shorter window.",
        )
    count = min(count, limit or count)
    windows = torch.tensor(ids[: count * share], dtype=torch.int64).view(count, share)
    if add_bos:
        bos = torch.full((count, 1), tokenizer.bos_token_id, dtype=torch.int64)
        windows = torch.cat([bos, windows], dim=1)
    return windows


def check_vocabulary(windows: torch.Tensor, vocab_size: int, where: str = "text") -> None:
    """Raise RunError where a token id does not exist in the model: the tokenizer is another model's."""
    top = int(windows.max())
    if top >= vocab_size:
        raise RunError(
            f"token id {top} is outside the model's vocabulary of {vocab_size}",
            where=where,
            what_to_do="The tokenizer does not belong to this model.",
        )
