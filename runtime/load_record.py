"""What one load of a model found out, kept so that the next one is quick: a file in the cache folder for each model.

A record holds the structure that the native decoder was built from and the logits that transformers' own model gave for
the probe, so that a later load packs the weights straight from the safetensors files, without transformers' modeling
code. Every such load is proved against those logits again (`kernels/proof.py`); no weights are kept in a record.

A record belongs to one content of the model's files, one dtype, one version of torch, transformers and this code, and
one kind of processor: its name is the hash of all of them. `LLMOPT_LOAD_RECORDS=0` turns records off.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .artifact import sha256_file
from .kernels.build import cache_dir, cpu_features

if TYPE_CHECKING:
    import torch

LIBRARIES = ("torch", "transformers", "tokenizers")
SOURCES = (
    "load_record.py", "record_structure.py", "recorded_model.py", "packed_format.py", "packed_load.py",
    "gptq_format.py", "kernels/gptq_linear.py", "tokenizer_files.py", "kernels/recognize.py", "kernels/proof.py",
)  # fmt: skip
"""Code whose change makes earlier records useless."""
IGNORED = {"llmopt.json", "report.html", "readme.md", "license", "license.txt", ".gitattributes"}
"""Files of a model folder that nothing in a record depends on."""
HASHED_BYTES = 64 * 2**20
"""Larger files, and weights, are told apart by size, times and inode where the manifest has not vouched for them."""
MOST_RECORDS = 64


@dataclass
class Description:
    """A decoder's structure, see `record_structure.py`.

    structure: fields of ModelStructure, as JSON. linears: by module name, what to read and what to make of it.
    embedding: its tensor's name in the weight files. tensors: norms and rotary frequencies by name.
    """

    structure: dict[str, Any]
    linears: dict[str, Any]
    embedding: str
    tensors: dict[str, torch.Tensor]


@dataclass
class LoadRecord(Description):
    """Everything but weights that the native engine needs of a model.

    context_length: of the config. max_model_len and length_note: `longest_request`'s answer. tokenizer: `module:class`
    that opens it directly, or "" where only AutoTokenizer does. `tensors` has `expected` too, the model's own logits
    [tokens, vocab] for the probe.
    """

    architecture: str
    context_length: int | None
    max_model_len: int
    length_note: str
    eos_token_ids: list[int]
    tokenizer: str

    def save(self, path: Path) -> None:
        """Write it whole or not at all, and remove the records that were used longest ago. Raises OSError."""
        from safetensors.torch import save

        facts = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "tensors"}
        data = save({k: v.contiguous() for k, v in self.tensors.items()}, {"record": json.dumps(facts)})
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.write_bytes(data)
            os.replace(temporary, path)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        _prune(path.parent)

    @classmethod
    def read(cls, path: Path) -> LoadRecord | None:
        """The record in a file; None where there is none or it is damaged."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as opened:
                facts = json.loads((opened.metadata() or {})["record"])
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
            record = cls(**facts, tensors=tensors)
            os.utime(path)
            return record
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            return None


def records_wanted() -> bool:
    """Whether records are read and written, from `$LLMOPT_LOAD_RECORDS` (on unless it is `0`)."""
    return os.environ.get("LLMOPT_LOAD_RECORDS", "1") != "0"


def record_path(folder: Path, dtype: str, hashes: Mapping[str, str] | None = None) -> Path:
    """Where the record of a model folder lies, whether or not there is one.

    dtype: what decides the activations' type beside config.json. hashes: SHA-256 by relative path of files that were
    verified just now; other weight files are known by size, times and inode.
    """
    known = hashes or {}
    files = sorted(p for p in folder.iterdir() if p.is_file() and p.name.lower() not in IGNORED)
    parts = [*_surroundings(), dtype, *(f"{p.name} {known.get(p.name) or _identity(p)}" for p in files)]
    return cache_dir() / "loads" / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}.safetensors"


def _identity(path: Path) -> str:
    stat = path.stat()
    if path.suffix != ".safetensors" and stat.st_size <= HASHED_BYTES:
        return sha256_file(path)
    return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_dev}:{stat.st_ino}"


@lru_cache(maxsize=1)
def _surroundings() -> tuple[str, ...]:
    here = Path(__file__).parent
    code = hashlib.sha256(b"\0".join((here / name).read_bytes() for name in SOURCES)).hexdigest()
    return (code, cpu_features(), *(f"{name} {_version(name)}" for name in LIBRARIES))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def _prune(folder: Path) -> None:
    with suppress(OSError):
        records = sorted(folder.glob("*.safetensors"), key=lambda path: path.stat().st_mtime)
        for old in records[:-MOST_RECORDS]:
            old.unlink(missing_ok=True)
