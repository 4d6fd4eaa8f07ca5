"""Sliding windows over a text: what `llmopt eval` scores.

The windows are those of transformers' guide "Perplexity of fixed-length models": each begins `stride` tokens after the
one before, and of each only the tokens that no earlier window held are scored, with the others as context.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from ..optimizer.errors import UsageError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

Bos = Literal["text", "each", "none"]
BOS_CHOICES = ("text", "each", "none")


@dataclass(frozen=True)
class Window:
    """`ids` int64 `[n]`; scored are those from index `first` (1 or more) on, each from all ids before it.

    weight: the guide's weight of the window's mean, its new tokens less one (0 for a last window of one new token).
    """

    ids: torch.Tensor
    first: int
    weight: int

    @property
    def num_scored(self) -> int:
        return len(self.ids) - self.first


@dataclass(frozen=True)
class TextWindows:
    """A text's windows. num_bytes: UTF-8 bytes of the scored tokens' text; num_tokens: tokens of the whole text."""

    windows: list[Window]
    num_bytes: int
    num_tokens: int

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def num_scored(self) -> int:
        return sum(window.num_scored for window in self.windows)


def sliding_windows(
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int = 1024,
    stride: int | None = None,
    limit: int | None = None,
    bos: Bos = "text",
    where: str = "text",
) -> TextWindows:
    """The first `limit` windows (None: all) of `length` tokens, `stride` apart (None: half a window).

    bos: `text` tokenizes as the tokenizer does by itself, so that one that adds BOS adds it once, before the text (the
    guide's way); `each` puts BOS before every window, in the place of one token of context; `none` adds nothing.
    Raises UsageError for an impossible number, an empty text, and one that does not fill a window.
    """
    stride = max(1, length // 2) if stride is None else stride
    _check_numbers(length, stride, limit, bos, where)
    if not text.strip():
        raise UsageError("the text is empty", where, "Name a file with text in it.")
    if bos == "each" and tokenizer.bos_token_id is None:
        raise UsageError("the tokenizer has no BOS token to start the windows with", where)
    ids, ends = _tokenize(text, tokenizer, bos == "text")
    room = length - 1 if bos == "each" else length
    if len(ids) < room:
        raise UsageError(
            f"the text has {len(ids)} tokens, one window needs {room}", where, "Use a longer text or a shorter window."
        )
    import torch

    head = [tokenizer.bos_token_id] if bos == "each" else []
    windows, num_bytes = [], 0
    for begin, end, done in spans(len(ids), room, min(stride, room), limit):
        first = max(done - begin, 0 if head else 1)
        if begin + first < end:
            found = torch.tensor([*head, *ids[begin:end]], dtype=torch.int64)
            windows.append(Window(found, first + len(head), max(end - done - 1, 0)))
            num_bytes += _bytes(text, tokenizer, ids, ends, begin + first, end)
    return TextWindows(windows, num_bytes, len(ids))


def spans(count: int, length: int, stride: int, limit: int | None = None) -> Iterator[tuple[int, int, int]]:
    """(begin, end, end of the window before) of each window over `count` tokens; the last may be shorter."""
    done = 0
    for number, begin in enumerate(range(0, count, stride)):
        if limit is not None and number >= limit:
            return
        end = min(begin + length, count)
        yield begin, end, done
        done = end
        if end == count:
            return


def _check_numbers(length: int, stride: int, limit: int | None, bos: str, where: str) -> None:
    if length < 2:
        raise UsageError(f"a window of {length} tokens scores none", where, "Use 2 or more.")
    if stride < 1:
        raise UsageError(f"a stride of {stride} does not move", where, "Use 1 or more.")
    if stride > length:
        what = f"a stride of {stride} is longer than the window of {length} tokens, so tokens between would be skipped"
        raise UsageError(what, where, f"Use {length} or less.")
    if limit is not None and limit < 1:
        raise UsageError(f"{limit} windows measure nothing", where, "Use 1 or more.")
    if bos not in BOS_CHOICES:
        raise UsageError(f"unknown bos {bos!r}", where, f"Use one of {', '.join(BOS_CHOICES)}.")


def _tokenize(text: str, tokenizer: PreTrainedTokenizerBase, special: bool) -> tuple[list[int], list[int] | None]:
    """Token ids, and for each the byte of the text at which it ends (None where the tokenizer does not tell)."""
    if not getattr(tokenizer, "is_fast", False):
        return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]), None
    encoded = tokenizer(text, add_special_tokens=special, verbose=False, return_offsets_mapping=True)
    ids = list(encoded["input_ids"])
    ascii_only = text.isascii()
    places = [] if ascii_only else [0, *accumulate(len(character.encode("utf-8")) for character in text)]
    ends, last = [], 0
    for _, end in encoded["offset_mapping"]:
        last = max(last, end if ascii_only else places[end])
        ends.append(last)
    return ids, ends


def _bytes(
    text: str, tokenizer: PreTrainedTokenizerBase, ids: list[int], ends: list[int] | None, start: int, end: int
) -> int:
    """UTF-8 bytes of the text of tokens `start … end - 1`."""
    if ends is None:
        return len(str(tokenizer.decode(ids[start:end])).encode("utf-8"))
    return ends[end - 1] - (ends[start - 1] if start else 0)
