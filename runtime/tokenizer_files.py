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


def open_tokenizer_as(folder: Path, name: str) -> PreTrainedTokenizerBase:
    """The folder's tokenizer by its class, a `module:class` of transformers as `tokenizer_class` gave it.

    AutoTokenizer looks at config.json for the class, and so imports what models are made of. Raises RunError as
    `open_tokenizer` does.
    """
    from importlib import import_module

    module, _, cls = name.partition(":")
    require_tokenizer(folder)
    try:
        if not module.startswith("transformers."):
            raise ValueError(f"{name} is no class of transformers")
        return getattr(import_module(module), cls).from_pretrained(folder, local_files_only=True)
    except Exception as error:  # as above
        raise RunError(f"the tokenizer cannot be opened ({_first_line(error)})", where=str(folder)) from error


def tokenizer_class(tokenizer: PreTrainedTokenizerBase, folder: Path) -> str:
    """`module:class` by which `open_tokenizer_as` gives the same tokenizer as this one, "" where it would not."""
    name = f"{type(tokenizer).__module__}:{type(tokenizer).__qualname__}"
    try:
        return name if _facts(open_tokenizer_as(folder, name)) == _facts(tokenizer) else ""
    except (RunError, AttributeError):  # AttributeError: a tokenizer in Python has no backend
        return ""


def _facts(tokenizer: PreTrainedTokenizerBase) -> tuple[object, ...]:
    """What decides a tokenizer's answers."""
    names = ("chat_template", "special_tokens_map", "padding_side", "model_max_length", "clean_up_tokenization_spaces")
    return tokenizer.backend_tokenizer.to_str(), len(tokenizer), *(getattr(tokenizer, name, None) for name in names)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
