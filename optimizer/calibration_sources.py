"""Calibration from chats and data sets: JSON lines of messages through the chat template, rows of a data set."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .calibration import Source, TextSource
from .errors import RunError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .model import SourceIdentity
    from .recipe import CalibrationOptions

LINES = (".jsonl", ".ndjson")
BUILDERS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".txt": "text", ".arrow": "arrow"}
"""Ending of a file → the `datasets` builder that reads it."""
WHERE = "calibration.dataset"


def make_source(
    options: CalibrationOptions,
    model: SourceIdentity,
    seed: int,
    cache: Path | None,
    trust_remote_code: bool = False,
    progress: Callable[[int, int, float], None] | None = None,
) -> Source:
    """The source that a recipe's calibration section names. cache: where texts that the model writes are kept.

    progress: as the model writes, is told of texts written, of all texts, and of the seconds left.
    """
    if options.source == "chat":
        return ChatSource(Path(options.chat or ""), seed)
    if options.source == "dataset":
        return DatasetSource(
            options.dataset or "",
            seed,
            column=options.column,
            config=options.dataset_config,
            split=options.split,
            revision=options.dataset_revision,
        )
    if options.source == "self":
        from .self_text import SelfSource

        return SelfSource(
            model,
            seed=seed,
            num_samples=options.num_samples or 1,
            sequence_length=options.sequence_length or 2,
            cache=cache,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    return TextSource(options.text)


class ChatSource:
    """A JSONL file whose lines are conversations: a list of messages, or an object with `messages`.

    Each goes through the model's chat template, so that it begins and ends as the model was trained with it. The order
    is shuffled by the seed.
    """

    kind, whole_windows, places_bos = "chat", False, True

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.seed = path, seed

    def documents(self, tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> Iterator[list[int]]:
        rows = [(number, row) for number, row in read_lines(self.path)]
        random.Random(self.seed).shuffle(rows)
        for number, row in rows:
            messages = row.get("messages") if isinstance(row, dict) else row
            yield chat_tokens(messages, tokenizer, f"{self.path}:{number}")

    def identity(self) -> str:
        return f"chat {_file_sha256(self.path)} {self.seed}"

    def describe(self) -> dict[str, Any]:
        return {"chat": self.path.name}


class DatasetSource:
    """Rows of a data set: a hub id, or a local folder or file, through the library `datasets`; JSON lines without it.

    column: the column of texts, or of conversations (lists of messages, which go through the chat template); None takes
    `text`, else `messages`, else the only column of texts. Rows are shuffled by the seed; each row is a document.
    """

    kind = "dataset"
    whole_windows = False

    def __init__(
        self, name: str, seed: int, *, column: str | None, config: str | None, split: str, revision: str | None
    ) -> None:
        self.name, self.seed, self.column = name, seed, column
        self.config, self.split, self.revision = config, split, revision

    @property
    def places_bos(self) -> bool:
        return self._is_chat

    def documents(self, tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> Iterator[list[int]]:
        order = list(range(len(self._values)))
        random.Random(self.seed).shuffle(order)
        for index in order:
            value, where = self._values[index], f"{self.name}: row {index}"
            if self._is_chat:
                yield chat_tokens(value, tokenizer, where)
            elif isinstance(value, str):
                if not _encodes(value):
                    raise RunError(
                        "the text has half of a surrogate pair, which is no character", where, "Mend the row"
                    )
                if value.strip():
                    yield list(tokenizer(value, add_special_tokens=False, verbose=False)["input_ids"])
            else:
                raise RunError(f"the column {self._column!r} holds {type(value).__name__}, not text", where)

    def values(self) -> Sequence[Any]:
        """The column's texts or conversations, in the order of the rows. Raises RunError as `documents` does."""
        return list(self._values)

    def identity(self) -> str:
        path = Path(self.name)
        content = _file_sha256(path) if path.is_file() else ""
        return json.dumps([self.name, self.column, self.config, self.split, self.revision, self.seed, content])

    def describe(self) -> dict[str, Any]:
        path = Path(self.name)
        out: dict[str, Any] = {
            "dataset": path.name if path.exists() else self.name,
            "column": self._column,
            "split": self.split,
        }
        out.update(config=self.config, revision=self.revision, rows=len(self._values))
        return {key: value for key, value in out.items() if value is not None}

    @cached_property
    def _rows(self) -> Any:
        path = Path(self.name)
        if path.is_file() and path.suffix in LINES:
            return _Lines([row for _, row in read_lines(path)], path)
        return load_dataset(self.name, self.config, self.split, self.revision)

    @cached_property
    def _column(self) -> str:
        names = list(self._rows.column_names)
        if self.column is not None:
            if self.column not in names:
                raise RunError(f"has no column {self.column!r}", self.name, f"Its columns are {', '.join(names)}")
            return self.column
        for known in ("text", "messages"):
            if known in names:
                return known
        first = self._rows[0] if len(self._rows) else {}
        texts = [name for name in names if isinstance(first.get(name), str)]
        if len(texts) != 1:
            what = f"Name one by calibration.column: {', '.join(names)}"
            raise RunError("it is not clear which column holds the text", self.name, what)
        return texts[0]

    @cached_property
    def _values(self) -> Sequence[Any]:
        if not len(self._rows):
            raise RunError("the data set is empty", self.name, "Give another split or data set")
        values: Sequence[Any] = self._rows[self._column]
        return values

    @cached_property
    def _is_chat(self) -> bool:
        return isinstance(self._values[0], list)


class _Lines:
    """Rows of a JSONL file with the few members of a `datasets.Dataset` that are used here."""

    def __init__(self, rows: list[Any], path: Path) -> None:
        if not all(isinstance(row, dict) for row in rows):
            raise RunError("each line of the data set must be an object", str(path), 'Such as {"text": "…"}')
        self.rows = rows
        self.column_names = list(dict.fromkeys(name for row in rows for name in row))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: int | str) -> Any:
        return self.rows[key] if isinstance(key, int) else [row.get(key) for row in self.rows]


def load_dataset(name: str, config: str | None, split: str, revision: str | None) -> Any:
    """The split through `datasets`. Raises RunError without the library, the data set, or a way to reach it."""
    try:
        import datasets
    except ImportError:
        raise RunError(
            "reading a data set needs the library datasets",
            WHERE,
            "pip install 'llmopt[datasets]', or give a JSONL file, which needs no library",
        ) from None
    path = Path(name)
    try:
        if path.is_dir() and any((path / file).is_file() for file in ("state.json", "dataset_dict.json")):
            found = datasets.load_from_disk(name)
            return found[split] if isinstance(found, dict) else found
        if path.is_file():
            builder = BUILDERS.get(path.suffix)
            if builder is None:
                known = ", ".join([*LINES, *BUILDERS])
                raise RunError(f"a data set's file cannot end in {path.suffix!r}", name, f"Known endings: {known}")
            return datasets.load_dataset(builder, data_files=name, split="train")
        return datasets.load_dataset(name, config, split=split, revision=revision)
    except RunError:
        raise
    except Exception as error:  # the library raises many kinds
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise RunError(
            f"the data set cannot be loaded: {reason}",
            name,
            "Check its name, config and split; without a network give a local folder, Parquet or JSONL file",
        ) from None


def read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Line number and value of each line of a JSONL file that is not blank. Raises RunError that names the line."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, json.loads(line)
    except UnicodeDecodeError:
        raise RunError("the file is not UTF-8", str(path)) from None
    except OSError as error:
        raise RunError(f"the file cannot be read: {error.strerror}", str(path)) from None
    except (ValueError, RecursionError) as error:
        raise RunError(f"the line is not JSON ({error})", f"{path}:{number}", "Write one JSON value a line") from None


def chat_tokens(messages: Any, tokenizer: PreTrainedTokenizerBase, where: str) -> list[int]:
    """A conversation as the chat template renders it, in tokens. Raises RunError where it is none, or there is none."""
    if not tokenizer.chat_template:
        raise RunError("the model has no chat template", where, "Calibrate on text, or on what the model writes itself")
    fine = isinstance(messages, Iterable) and not isinstance(messages, (str, dict))
    if not fine or not messages or not all(isinstance(m, dict) and "role" in m and "content" in m for m in messages):
        what = 'Write {"messages": [{"role": "user", "content": "…"}, …]}'
        raise RunError("is no list of messages with role and content", where, what)
    try:
        return list(tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=False))
    except Exception as error:  # a template is a program of the model's author
        raise RunError(f"the chat template does not take the messages ({error})", where) from None


def _encodes(text: str) -> bool:
    """Whether it is all characters: a JSON escape can name half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _file_sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise RunError(f"the file cannot be read: {error.strerror}", str(path)) from None
