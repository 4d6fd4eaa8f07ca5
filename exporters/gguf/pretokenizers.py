"""The names of llama.cpp's pre-tokenizers, by the expressions with which a tokenizer splits its text.

llama.cpp has its pre-tokenizers compiled in and knows them by `tokenizer.ggml.pre`. A tokenizer of the `tokenizers`
library states its own as expressions, which are compared here; the proof of an export compares token ids besides.
"""

from __future__ import annotations

from typing import Any

from ...optimizer.errors import UsageError

DIGIT = r"\p{N}"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = _ENDINGS + _WORD + r"|\p{N}{1,3}" + _REST
QWEN2 = _ENDINGS + _WORD + r"|\p{N}" + _REST
QWEN35 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = f"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|" + DIGIT + _SLASH
GPT4O = f"{_LEAD}{_UPPER}*{_LOWER}+{_ENDINGS}?|{_LEAD}{_UPPER}+{_LOWER}*{_ENDINGS}?|" + r"\p{N}{1,3}" + _SLASH

NAMES: dict[tuple[tuple[str, ...], bool], str] = {
    ((GPT2,), False): "gpt-2",
    ((DIGIT, GPT2), False): "smollm",
    ((LLAMA3,), True): "llama-bpe",
    ((LLAMA3,), False): "dbrx",
    ((QWEN2,), False): "qwen2",
    ((QWEN35,), False): "qwen35",
    ((TEKKEN,), True): "tekken",
    ((GPT4O,), False): "gpt-4o",
}
"""(Expressions in the order in which they split, whole words taken before merges) → llama.cpp's name."""


def recognize(backend: dict[str, Any]) -> str:
    """llama.cpp's name of a byte-level tokenizer's pre-tokenizer; `backend`: the tokenizer's state as JSON holds it.

    Raises UsageError where it is none of those known here.
    """
    found = tuple(expressions(backend.get("pre_tokenizer")))
    name = NAMES.get((found, bool(backend["model"].get("ignore_merges"))))
    if name is None:
        shown = " then ".join(found) or "nothing"
        raise UsageError(
            f"llama.cpp's name for a pre-tokenizer that splits by {shown[:200]} is not known",
            "gguf.pre_tokenizer",
            "Name the right one with --set pre_tokenizer=NAME; the proof compares its token ids",
        )
    return name


def expressions(pre_tokenizer: dict[str, Any] | None) -> list[str]:
    """The expressions by which a pre-tokenizer splits, in order. Raises UsageError for a part that has none."""
    if pre_tokenizer is None:
        return []
    kind = pre_tokenizer["type"]
    if kind == "Sequence":
        return [e for part in pre_tokenizer["pretokenizers"] for e in expressions(part)]
    if kind == "ByteLevel" and not pre_tokenizer.get("add_prefix_space"):
        return [GPT2] if pre_tokenizer.get("use_regex", True) else []
    if kind == "Digits" and pre_tokenizer.get("individual_digits"):
        return [DIGIT]
    if kind == "Split" and "Regex" in pre_tokenizer["pattern"]:
        return [pre_tokenizer["pattern"]["Regex"]]
    raise UsageError(
        f"llama.cpp has no pre-tokenizer that works as {kind} does here",
        "gguf.pre_tokenizer",
        "Name one with --set pre_tokenizer=NAME; the proof compares its token ids",
    )
