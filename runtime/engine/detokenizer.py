"""Token ids to text, one token at a time, and stop strings.

Text is given out only when it is sure: an incomplete UTF-8 sequence waits for its other bytes, and a tail that could be
the beginning of a stop string waits until it is or is not. Joined, the pieces are the text that decoding prompt and
output together would add to the prompt's.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any


class Vocabulary:
    """A tokenizer's tokens as bytes, looked up on first use.

    Byte-level BPE and SentencePiece with byte fallback (as transformers' fast tokenizers declare them in their decoder)
    are lists of bytes; `exact` is false for any other kind, which is decoded through the tokenizer itself.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._kind = _decoder_kind(tokenizer)
        self._bytes: dict[int, bytes] = {}
        added = getattr(tokenizer, "added_tokens_decoder", None) or {}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)

    @property
    def exact(self) -> bool:
        return self._kind is not None

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; empty for ids that the tokenizer does not know. Only where `exact`."""
        value = self._bytes.get(token_id)
        if value is None:
            piece = self.tokenizer.convert_ids_to_tokens([token_id])[0]
            value = b"" if piece is None else (_byte_level if self._kind == "byte_level" else _sentencepiece)(piece)
            self._bytes[token_id] = value
        return value


def _decoder_kind(tokenizer: Any) -> str | None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    if decoder is None or getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return None
    state = json.loads(decoder.__getstate__())
    if state["type"] == "ByteLevel":
        return "byte_level"
    if state["type"] != "Sequence":
        return None
    parts = state["decoders"]
    kinds = [part["type"] for part in parts if part["type"] != "Strip"]
    spaces = [part for part in parts if part["type"] == "Replace"]
    if kinds == ["Replace", "ByteFallback", "Fuse"] and spaces[0] == {
        "type": "Replace",
        "pattern": {"String": "\u2581"},
        "content": " ",
    }:
        return "sentencepiece"
    return None


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """GPT-2's reversible map of bytes to printable characters, reversed."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in table)
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


def _byte_level(piece: str) -> bytes:
    table = _byte_of_char()
    try:
        return bytes(table[char] for char in piece)
    except KeyError:
        return piece.encode()


def _sentencepiece(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("\u2581", " ").encode()


class Detokenizer:
    """One request's incremental decoder. `prompt` gives the context in which the first tokens are read."""

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._vocabulary = vocabulary
        self._skipped = vocabulary.special_ids if skip_special_tokens else frozenset()
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._window = [] if vocabulary.exact else self._context(prompt)
        self._shown = len(self._window)
        """Tokens of the window whose text is out. The window begins where a piece of text began, hence with a whole
        character (generic path only)."""

    def push(self, token_id: int) -> str:
        """The text that this token makes sure; empty while a character is incomplete."""
        if self._vocabulary.exact:
            return "" if token_id in self._skipped else self._utf8.decode(self._vocabulary.token_bytes(token_id))
        self._window.append(token_id)
        return self._read(final=False)

    def flush(self) -> str:
        """What is left of an incomplete character, as U+FFFD. Ends the stream."""
        return self._utf8.decode(b"", final=True) if self._vocabulary.exact else self._read(final=True)

    def _read(self, final: bool) -> str:
        """Decode the window with and without its new tokens; the difference is the new text."""
        before = self._decode(self._window[: self._shown])
        after = self._decode(self._window)
        incomplete = after.endswith("\ufffd") and len(self._window) - self._shown < _LONGEST_CHARACTER
        if len(after) <= len(before) or (incomplete and not final):
            return ""
        del self._window[: self._shown]
        self._shown = len(self._window)
        return after[len(before) :]

    def _context(self, prompt: Sequence[int]) -> list[int]:
        """The end of the prompt, from the start of a character."""
        for start in range(max(0, len(prompt) - _CONTEXT), len(prompt)):
            window = list(prompt[start:])
            if not self._decode(window).startswith("\ufffd"):
                return window
        return []

    def _decode(self, token_ids: list[int]) -> str:
        return self._vocabulary.tokenizer.decode(
            token_ids, skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
        )


_CONTEXT = 6
"""Tokens of the prompt that are decoded with the first new ones, so that spacing rules see their surroundings."""
_LONGEST_CHARACTER = 8
"""Tokens after which a replacement character is taken for real: no character has more bytes than 4."""


class StopStrings:
    """Finds the first stop string to be complete, however the text is cut into pieces."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops, self._include, self._held = tuple(stops), include, ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that can no longer become part of a stop string. After a match: the text before (or with) it."""
        if not self._stops:
            return text
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return text[: end if self._include else start]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class TextStream:
    """A request's text: detokenizer and stop strings together."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt: Sequence[int] = (),
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = Detokenizer(vocabulary, prompt, skip_special_tokens)
        self._stops = StopStrings(stops, include_stop)

    @property
    def matched(self) -> str | None:
        """The stop string that has ended the text."""
        return self._stops.matched

    def push(self, token_id: int) -> str:
        return self._stops.push(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """The rest of the text, where no stop string has ended it."""
        if self.matched is not None:
            return ""
        text = self._stops.push(self._detokenizer.flush())
        return text if self.matched is not None else text + self._stops.flush()
