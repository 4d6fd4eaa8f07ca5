"""Artifacts in formats that another library runs: told apart by their files, opened by a module of their own.

A format's module has `open_backend(model: ForeignModel, device, dtype, options) -> Backend`, which raises an error that
says what its library cannot do, and leaves its notes in `model.notes`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..optimizer.errors import UsageError
from .artifact import read_manifest
from .chat import context_length
from .completion import Backend
from .open import CheckedFolder, open_config, quiet_transformers, token_ids_of_end
from .tokenizer_files import open_tokenizer
from .weight_files import INDEX, SINGLE

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

    from ..optimizer.runtime_spec import RuntimeSpec

FORMATS: dict[str, tuple[str, str]] = {
    "onnx": ("model.onnx", ".ort.open"),
    "gguf": ("*.gguf", ".llamacpp.open"),
}
"""Format → (pattern of the file that its folders have, module that opens it)."""
WEIGHTS = (".onnx", ".onnx_data", ".data", ".gguf")
"""Suffixes of the files that hold weights."""
ENGINES = {"onnx": ("onnxruntime",), "gguf": ("llamacpp",)}
"""Format → names by which `load` may be asked for its engine, besides the format's own."""


def find_format(folder: Path) -> str | None:
    """The foreign format of a model folder; None where it holds safetensors, or nothing known."""
    if (folder / SINGLE).is_file() or (folder / INDEX).is_file():
        return None
    return next((name for name, (pattern, _) in FORMATS.items() if any(folder.glob(pattern))), None)


def why_not_runnable(folder: Path) -> str:
    """Why nothing on this machine runs a folder of a foreign format, "" where something does: only llama.cpp is a
    program that may be absent where its format is written."""
    if find_format(folder) != "gguf":
        return ""
    from .llamacpp.find import find_server

    return "" if find_server() is not None else "there is no llama-server here"


def weight_bytes(folder: Path) -> int:
    """Bytes of the files that hold the weights."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in WEIGHTS)


def written_folder(path: str | Path) -> Path | None:
    """The folder of a GGUF file, where llmopt wrote both; None for any other path."""
    file = Path(path)
    if file.suffix != ".gguf" or not file.is_file():
        return None
    manifest = read_manifest(file.parent)
    return file.parent if manifest is not None and manifest.get("exporter", {}).get("name") == "gguf" else None


@dataclass
class ForeignModel:
    """What there is of an opened model without torch modules; in the place of `OpenedModel` behind an LLM."""

    format: str
    folder: Path
    manifest: dict[str, Any] | None
    runtime: RuntimeSpec
    hashes: dict[str, str] = field(default_factory=dict)
    notes: list[dict[str, str]] = field(default_factory=list)

    @cached_property
    def config(self) -> PreTrainedConfig:
        return open_config(self.folder)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        with quiet_transformers():
            return open_tokenizer(self.folder)

    @cached_property
    def generation_config(self) -> GenerationConfig:
        from transformers import GenerationConfig

        if (self.folder / "generation_config.json").is_file():
            return GenerationConfig.from_pretrained(self.folder, local_files_only=True)
        return GenerationConfig()

    @property
    def architecture(self) -> str:
        return str((self.config.architectures or [self.config.model_type])[0])

    @property
    def context_length(self) -> int | None:
        """See `chat.context_length`."""
        return context_length(self.config)

    @property
    def eos_token_ids(self) -> list[int]:
        """See `open.token_ids_of_end`."""
        return token_ids_of_end(self.generation_config, self.config, self.tokenizer)

    @property
    def module(self) -> NoReturn:
        raise UsageError(
            f"a model in the format {self.format} has no torch module", str(self.folder), "Load the artifact it is from"
        )

    def weight_bytes(self) -> int:
        """Bytes of the files that hold the weights."""
        return weight_bytes(self.folder)

    def note(self, message: str, kind: str = "note") -> None:
        self.notes.append({"stage": "load", "kind": kind, "message": message})


def open_foreign(
    format_: str, checked: CheckedFolder, device: str, dtype: str, engine: str, options: dict[str, Any]
) -> tuple[ForeignModel, Backend]:
    """Open a folder of `find_format`. Raises UsageError for what only torch models have, else as the format's module.

    options: of the backend; `attention` and `draft` (None, True and False: nothing asked) are refused.
    """
    options = dict(options)
    if engine not in ("auto", format_, *ENGINES[format_]):
        raise UsageError(f"a model in the format {format_} does not run on engine {engine!r}", str(checked.path))
    for name in ("attention", "draft"):
        if options.pop(name, None) not in (None, True, False):
            raise UsageError(f"a model in the format {format_} takes no option {name!r}", str(checked.path))
    model = ForeignModel(format_, checked.path, checked.manifest, checked.runtime, checked.hashes)
    backend = import_module(FORMATS[format_][1], __package__).open_backend(model, device, dtype, options)
    return model, backend
