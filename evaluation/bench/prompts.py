"""Prompts of a benchmark: random ones of exact lengths, behind shared prefixes or not, or those of a JSONL file."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...optimizer.errors import RunError, UsageError
from .lengths import Lengths

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ATTEMPTS = 100
"""Corrections of a text before its length is given up."""
POOL = 4096
"""Ordinary tokens that random prompts are drawn from."""


@dataclass(frozen=True)
class Request:
    """One request of a workload."""

    prompt: str | list[dict[str, str]] | list[int]
    """Text, chat messages, or token ids (for an engine in process)."""
    output_len: int
    """Tokens asked for."""
    prompt_len: int | None = None
    """Tokens of the text, special ones that the tokenizer adds included; None where nobody counted."""

    def as_dict(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "output_len": self.output_len, "prompt_len": self.prompt_len}


class RandomPrompts:
    """Texts of random tokens whose encoding has exactly the length that was drawn.

    Tokens do not survive decoding and encoding one by one (merges cross their borders, special tokens are added), so a
    text is corrected until its encoding has the length that was asked for.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> None:
        self._tokenizer, self._seed = tokenizer, seed
        self._pool = ordinary_tokens(tokenizer)

    def make(
        self,
        count: int,
        input_len: Lengths,
        output_len: Lengths,
        *,
        round_number: int = 0,
        prefix_len: int = 0,
        num_prefixes: int = 1,
    ) -> list[Request]:
        """`count` requests of one round: the same for the same seed and round, new ones in every other round.

        prefix_len: tokens that requests share beyond `input_len`; request i has prefix i % num_prefixes.
        Raises RunError where no text of a length can be found.
        """
        generator = random.Random(f"{self._seed} {round_number}")
        prefixes = [self._text(prefix_len, generator, "") for _ in range(num_prefixes)] if prefix_len else [""]
        requests = []
        for number in range(count):
            length = prefix_len + input_len.draw(generator)
            text = self._text(length, generator, prefixes[number % len(prefixes)])
            requests.append(Request(text, output_len.draw(generator), length))
        return requests

    def _text(self, length: int, generator: random.Random, prefix: str) -> str:
        """A text that begins with `prefix` and has `length` tokens."""
        missing = length - (self.count(prefix) if prefix else self.count(""))
        ids = generator.choices(self._pool, k=max(missing, 0))
        for _ in range(ATTEMPTS):
            text = prefix + str(self._tokenizer.decode(ids))
            excess = self.count(text) - length
            if excess == 0 and text:
                return text
            if excess > 0:
                del ids[max(0, len(ids) - excess) :]
            else:
                ids += generator.choices(self._pool, k=-excess)
        raise RunError(
            f"no random text of {length} tokens was found", "prompts", "Use another length, or a JSONL file."
        )

    def count(self, text: str) -> int:
        """Tokens of a prompt as the model gets it."""
        return len(self._tokenizer.encode(text))


def ordinary_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids that stand for themselves: they decode to printable text that encodes to the same one token."""
    special = set(tokenizer.all_special_ids)
    order = [i for i in range(len(tokenizer)) if i not in special]
    random.Random(0).shuffle(order)
    found: list[int] = []
    for token in order:
        text = str(tokenizer.decode([token]))
        if text.strip() and text.isprintable() and tokenizer.encode(text, add_special_tokens=False) == [token]:
            found.append(token)
            if len(found) == POOL:
                break
    if not found:
        raise RunError("the tokenizer has no token that encodes to itself", "prompts", "Give a JSONL file of prompts.")
    return found


def read_requests(path: Path, output_len: Lengths, seed: int = 0) -> list[Request]:
    """Requests of a JSONL file: objects with `prompt` (text) or `messages` (a chat), and maybe `output_len`.

    Raises UsageError that names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise UsageError("is not UTF-8 text", str(path)) from None
    except OSError as error:
        raise UsageError(f"cannot be read ({error.strerror})", str(path)) from None
    generator = random.Random(seed)
    requests = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            requests.append(_request(line, f"{path}:{number}", output_len.draw(generator)))
    if not requests:
        raise UsageError("holds no prompt", str(path), 'Write lines such as {"prompt": "Hello"}.')
    return requests


def _request(line: str, where: str, output_len: int) -> Request:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise UsageError(f"is not JSON ({error})", where) from None
    if not isinstance(data, dict):
        raise UsageError("is not a JSON object", where, 'Write {"prompt": "…"} or {"messages": […]}.')
    prompt: Any = data.get("prompt", data.get("messages"))
    chat = (
        isinstance(prompt, list)
        and bool(prompt)
        and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in prompt
        )
    )
    if not chat and not (isinstance(prompt, str) and prompt):
        raise UsageError("has neither a `prompt` text nor a list of chat `messages`", where)
    wanted = data.get("output_len", output_len)
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1:
        raise UsageError(f"output_len is {wanted!r}", where, "Use a positive number of tokens.")
    return Request(prompt, wanted)
