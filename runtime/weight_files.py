"""Safetensors files of a model folder: which there are, and whether each is whole.

The format: 8 bytes of header length (little-endian), a JSON header of name → dtype, shape, data_offsets, then the data
(https://github.com/huggingface/safetensors#format). A file whose size is not what its header says was cut or padded.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from ..optimizer.errors import RunError, UsageError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HEADER_LIMIT = 100 * 2**20
"""Bytes of the longest header that the format allows."""


def confined(folder: Path, relative: str) -> Path:
    """`folder / relative`, where `relative` names something inside the folder. Raises RunError otherwise."""
    path = PurePosixPath(relative)
    escapes = path.is_absolute() or ".." in path.parts or "\\" in relative or PureWindowsPath(relative).drive
    if not relative or escapes:
        raise RunError(
            f"the path {relative!r} leads out of the folder", where=str(folder), what_to_do="Do not open this model."
        )
    return folder / path


def read_json(path: Path) -> Any:
    """The JSON of a small file. Raises RunError, naming the file, where it is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError("the file is missing", where=str(path)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"the file cannot be read as JSON ({error})", where=str(path)) from None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the model's weights: one file, or the shards of its index, each once.

    Raises UsageError where the folder has none, RunError where the index is bad or a shard is missing.
    """
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX)
        names = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(names, dict) or not names or not all(isinstance(n, str) for n in names.values()):
            raise RunError("the index has no weight_map", where=str(folder / INDEX))
        shards = [confined(folder, name) for name in dict.fromkeys(names.values())]
        for shard in shards:
            if not shard.is_file():
                raise RunError(f"the shard {shard.name} that {INDEX} names is missing", where=str(folder))
        return shards
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    others = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for p in folder.glob(pattern))
    if others:
        raise UsageError(
            f"the folder has no {SINGLE}; {others[0]} is not read",
            where=str(folder),
            what_to_do="Convert it to safetensors first (`llmopt optimize` also takes one .gguf file).",
        )
    raise UsageError(f"the folder has neither {SINGLE} nor {INDEX}", where=str(folder))


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Tensor name → {dtype, shape, data_offsets} of a whole safetensors file. Reads the header only.

    Raises RunError that names the file where it is cut short, has bytes left over, or is not safetensors.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(HEADER_LIMIT, size - 8):
                raise RunError(
                    f"the file is not whole: {size:,} bytes do not hold its header",
                    where=str(path),
                    what_to_do="Fetch it again.",
                )
            header = json.loads(file.read(length))
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"the file is not readable as safetensors ({error})", where=str(path)) from None
    if not isinstance(header, dict):
        raise RunError("the file is not safetensors: its header is no table", where=str(path))
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    try:
        end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        for entry in tensors.values():
            if not isinstance(entry["dtype"], str) or not all(isinstance(n, int) and n >= 0 for n in entry["shape"]):
                raise TypeError("dtype or shape")
    except (TypeError, KeyError, IndexError):
        raise RunError("the file is not safetensors: its header is malformed", where=str(path)) from None
    if size != 8 + length + end:
        raise RunError(
            f"the file is not whole: {size:,} bytes, its header promises {8 + length + end:,}",
            where=str(path),
            what_to_do="Fetch it again.",
        )
    return tensors
