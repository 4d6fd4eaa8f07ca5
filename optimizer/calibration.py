"""Calibration: token batches from a text, made at first use."""

from __future__ import annotations

import hashlib
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import RunError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


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


class Calibration:
    """Token sequences for passes that measure activations.

    The text is tokenized whole, without special tokens, and cut into `num_samples` sequences of `sequence_length`
    tokens spread evenly over it; each begins with the BOS token where the tokenizer adds one by itself.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str, num_samples: int, sequence_length: int) -> None:
        self._tokenizer = tokenizer
        self.text, self.num_samples, self.sequence_length = text, num_samples, sequence_length

    @cached_property
    def _sequences(self) -> list[list[int]]:
        tokens = self._tokenizer(read_text(self.text, "calibration"), add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
        probe = self._tokenizer("a")["input_ids"]
        bos = self._tokenizer.bos_token_id
        head = [bos] if bos is not None and probe[:1] == [bos] else []
        length = self.sequence_length - len(head)
        whole = len(tokens) // length
        if whole == 0:
            raise RunError(
                f"the calibration text has {len(tokens)} tokens, less than one sequence of {length}",
                self.text,
                "Give a longer text or a smaller calibration.sequence_length",
            )
        count = min(whole, self.num_samples)
        starts = [(i * whole // count) * length for i in range(count)]
        return [[*head, *tokens[s : s + length]] for s in starts]

    def batches(self) -> list[torch.Tensor]:
        """The sequences as int64 tensors of shape [1, sequence_length].

        Raises RunError where the text is empty or shorter than one sequence.
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
        """Sequences that were asked for and that the text was too short to give."""
        return self.num_samples - len(self._sequences)

    def describe(self) -> dict[str, Any]:
        """What the manifest records: tokens, sequences, their hash, and whether each begins with BOS."""
        flat = ",".join(str(token) for sequence in self._sequences for token in sequence)
        return {
            "text": "default" if self.text == "default" else Path(self.text).name,
            "num_samples": len(self._sequences),
            "sequence_length": self.sequence_length,
            "num_tokens": self.num_tokens,
            "bos": self._sequences[0][0] == self._tokenizer.bos_token_id,
            "sha256": hashlib.sha256(flat.encode()).hexdigest(),
        }


def text_sha256(name: str, kind: str) -> str:
    """SHA-256 of a text, for cache keys."""
    return hashlib.sha256(read_text(name, kind).encode()).hexdigest()
