"""Opening a tokenizer so that a folder without one is an error instead of an empty tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..optimizer.errors import RunError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer.model.v3",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "vocab.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "merges.txt",
)


def require_tokenizer(folder: Path) -> None:
    """Raise RunError where the folder has no file that could hold a tokenizer's vocabulary."""
    if any((folder / name).is_file() for name in VOCABULARY_FILES) or any(folder.glob("*.tiktoken")):
        return
    raise RunError(
        "the folder has no tokenizer (no tokenizer.json, tokenizer.model or vocabulary file)",
        where=str(folder),
        what_to_do="Copy the tokenizer's files of the source model into it.",
    )


def open_tokenizer(folder: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The folder's tokenizer. Raises RunError where its files are missing or cannot be read."""
    from transformers import AutoTokenizer

    require_tokenizer(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise many kinds here; all mean the same to a user
        raise RunError(f"the tokenizer cannot be opened ({_first_line(error)})", where=str(folder)) from error
    if len(tokenizer) == 0:
        raise RunError("the tokenizer has an empty vocabulary", where=str(folder))
    return tokenizer


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
