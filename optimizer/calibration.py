"""Calibration: token sequences for passes that measure activations, made at first use.

No sequence holds tokens of two documents, so that no token attends to another document: windows lie inside one
document, and nothing is padded. That needs no masks, and so works with every architecture.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .errors import RunError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

LENGTH_STEP = 16
"""Sequences of short documents are cut to a multiple of this, so that many have the same length and run together."""


def read_text(name: str, kind: str) -> str:
    """The text of a path, or of the shipped file `kind` ("calibration", "evaluation") where the name is `default`."""
    path = Path(str(files("llmopt.data"))) / f"{kind}.txt" if name == "default" else Path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise RunError(f"the {kind} text is not UTF-8", str(path)) from None
    except OSError as error:
        raise RunError(f"the {kind} text cannot be read: {error.strerror}", str(path)) from None
    if not text.strip():
        raise RunError(f"the {kind} text is empty", str(path), "Give a text with at least one sequence of tokens")
    return text


def text_sha256(name: str, kind: str) -> str:
    """SHA-256 of a text, for cache keys."""
    return hashlib.sha256(read_text(name, kind).encode()).hexdigest()


@dataclass(frozen=True)
class BeginningOfSequence:
    """Whether a model was trained with a BOS token in front of its texts, and what says so.

    token: its id where sequences begin with it, else None; reason: one sentence part for the manifest.
    """

    token: int | None
    reason: str

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> BeginningOfSequence:
        """As the tokenizer encodes a text by itself: its post-processor is the trace of the model's training."""
        bos = tokenizer.bos_token_id
        if bos is None:
            return cls(None, "the tokenizer has no BOS token")
        if tokenizer("a")["input_ids"][:1] == [bos]:
            return cls(int(bos), "the tokenizer puts it in front of every text")
        return cls(None, "the tokenizer has one, but does not put it in front of texts")


class Source(Protocol):
    """Where calibration tokens come from."""

    kind: str
    """`text`, `chat`, `dataset` or `self`."""
    whole_windows: bool
    """Whether the documents are cut into windows of full length (else each gives its beginning, short ones all)."""

    @property
    def places_bos(self) -> bool:
        """Whether the documents come with whatever their model expects at the beginning."""

    def documents(self, tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> Iterable[list[int]]:
        """Documents as token ids, at least `num_tokens` tokens where there are that many. Raises RunError."""

    def identity(self) -> str:
        """What the tokens depend on, beside tokenizer and sizes; for cache keys."""

    def describe(self) -> dict[str, Any]:
        """What the manifest says of the source."""


class Further(Protocol):
    """What adds sequences to those of a source."""

    def sequences(self, given: Sequence[list[int]], head: list[int]) -> list[list[int]]:
        """Further sequences. given: those of the source, each beginning with `head`. Raises RunError."""


class TextSource:
    """A text file, or the shipped text under the name `default`: one document."""

    kind, whole_windows, places_bos = "text", True, False

    def __init__(self, name: str) -> None:
        self.name = name

    def documents(self, tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> list[list[int]]:
        text = read_text(self.name, "calibration")
        return [list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])]

    def identity(self) -> str:
        return text_sha256(self.name, "calibration")

    def describe(self) -> dict[str, Any]:
        return {"text": "default" if self.name == "default" else Path(self.name).name}


class Calibration:
    """`num_samples` sequences of at most `sequence_length` tokens, or as many tokens in shorter ones.

    source: where they come from; a string is the name of a text. The windows of a text are spread evenly over it. Each
    sequence begins with BOS where the tokenizer puts it in front of texts; chats begin as their template has it.
    further: adds sequences to these.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        source: str | Source,
        num_samples: int,
        sequence_length: int,
        further: Further | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.source: Source = TextSource(source) if isinstance(source, str) else source
        self.num_samples, self.sequence_length, self.further = num_samples, sequence_length, further

    @cached_property
    def bos(self) -> BeginningOfSequence:
        if self.source.places_bos:
            return BeginningOfSequence(None, f"as the {self.source.kind} source begins each document")
        return BeginningOfSequence.of(self._tokenizer)

    @cached_property
    def _sequences(self) -> list[list[int]]:
        if self.further is None:
            return self._given
        head = [] if self.bos.token is None else [self.bos.token]
        full = max(map(len, self._given))
        further = [text[: _even(len(text), full)] for text in self.further.sequences(self._given, head)]
        return sorted(self._given + further, key=len, reverse=True)

    @cached_property
    def _given(self) -> list[list[int]]:
        """The sequences of the source."""
        head = [] if self.bos.token is None else [self.bos.token]
        length, budget = self.sequence_length - len(head), self.num_samples * self.sequence_length
        documents = self.source.documents(self._tokenizer, budget)
        if self.source.whole_windows:
            cut = spread_windows(documents, length, self.num_samples)
        else:
            tokens = budget - len(head) * self.num_samples
            cut = beginnings(documents, length, tokens, further=not self.source.places_bos)
        if not cut:
            count = sum(len(document) for document in self.source.documents(self._tokenizer, budget))
            raise RunError(
                f"the calibration {self.source.kind} has {count} tokens, less than one sequence of {length}",
                next(iter(self.source.describe().values()), ""),
                "Give a longer text or a smaller calibration.sequence_length",
            )
        return [[*head, *window] for window in cut]

    def batches(self) -> list[torch.Tensor]:
        """The sequences as int64 tensors of shape [1, tokens], the longest first.

        Raises RunError where the source is empty, shorter than one sequence, or cannot be read.
        """
        import torch

        return [torch.tensor([sequence], dtype=torch.int64) for sequence in self._sequences]

    @property
    def used(self) -> bool:
        """Whether anything has asked for the sequences."""
        return "_sequences" in self.__dict__

    @property
    def num_tokens(self) -> int:
        """Tokens in all sequences together."""
        return sum(len(sequence) for sequence in self._sequences)

    @property
    def shortfall(self) -> int:
        """Full sequences that were asked for and that the source was too short to give."""
        given = sum(len(sequence) for sequence in self._given)
        return max(0, self.num_samples - -(-given // self.sequence_length))

    def describe(self) -> dict[str, Any]:
        """What the manifest records: source, tokens, sequences, their hash, and how many begin with BOS, and why."""
        flat = ",".join(str(token) for sequence in self._sequences for token in sequence)
        bos = self._tokenizer.bos_token_id
        starts = sum(bos is not None and sequence[0] == bos for sequence in self._sequences)
        return {
            "source": self.source.kind,
            **self.source.describe(),
            "num_samples": len(self._sequences),
            **({} if self.further is None else {"self_samples": len(self._sequences) - len(self._given)}),
            "sequence_length": self.sequence_length,
            "num_tokens": self.num_tokens,
            "bos": starts == len(self._sequences),
            "bos_sequences": starts,
            "bos_reason": self.bos.reason,
            "sha256": hashlib.sha256(flat.encode()).hexdigest(),
        }


def spread_windows(documents: Iterable[list[int]], length: int, count: int) -> list[list[int]]:
    """At most `count` windows of `length` tokens, spread evenly over all that lie inside one document."""
    windows = [d[start : start + length] for d in documents for start in range(0, len(d) - length + 1, length)]
    taken = min(count, len(windows))
    return [windows[i * len(windows) // taken] for i in range(taken)]


def _even(size: int, full: int) -> int:
    """`size`, or the multiple of LENGTH_STEP below it where it is less than `full`."""
    return size if size == full else size // LENGTH_STEP * LENGTH_STEP


def beginnings(documents: Iterable[list[int]], length: int, num_tokens: int, further: bool = False) -> list[list[int]]:
    """The first tokens of each document, at most `length`, until there are `num_tokens`; the longest first.

    A shorter window is cut to a multiple of LENGTH_STEP, one shorter than that is left out. further: where the
    documents run out, go on with the second window of each, and so forth.
    """
    cut: list[list[int]] = []
    left, smallest, start = num_tokens, min(LENGTH_STEP, length), 0
    current: Iterable[list[int]] = documents
    while left >= smallest:
        longer = []
        for document in current:
            if left < smallest:
                break
            size = _even(min(len(document) - start, length, left), length)
            if size > 0:
                cut.append(document[start : start + size])
                left -= size
            if len(document) - start > length:
                longer.append(document)
        if not further or not longer:
            break
        current, start = longer, start + length
    return sorted(cut, key=len, reverse=True)
