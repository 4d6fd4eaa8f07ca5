"""Single tensors of safetensors files, read and written one at a time without mapping or holding a whole file.

Reading is by offset into memory of its own, so that nothing of the file counts as memory of the process afterwards.
Writing needs dtype and shape of every tensor first; the layout is that of the safetensors library (tensors sorted by
dtype, widest first, then by name; header padded to 8 bytes), so that the same tensors give the same bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ..optimizer.errors import RunError, WeightError
from .weight_files import read_header

if TYPE_CHECKING:
    import torch

DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
"""Name in the file → torch's name, in the order in which the safetensors library sorts them."""
ORDER = {name: number for number, name in enumerate(DTYPES)}
NAMES = {torch_name: name for name, torch_name in DTYPES.items()}

PART = 16 << 20
"""Bytes of a tensor that are in memory at a time where it is read or copied in parts."""


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies: `offset` bytes into `file`. `dtype` is the safetensors name, such as `BF16`.

    within: where it is a part of what lies there, the shape of that; transposed: which is first transposed; rows: and
    then these rows of it are taken, (start, stop, step).
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    within: tuple[int, ...] | None = None
    transposed: bool = False
    rows: tuple[int | None, int | None, int | None] = (None, None, None)

    def at(self, number: int) -> Stored:
        """Element `number` along the first axis."""
        size = self.nbytes // self.shape[0]
        return Stored(self.file, self.dtype, self.shape[1:], self.offset + number * size, size)

    def part(self, rows: slice, transposed: bool = False) -> Stored:
        """Rows of it, or of its transpose. What is read is no more than needed where they lie together."""
        shape = self.shape[::-1] if transposed else self.shape
        start, stop, step = rows.indices(shape[0])
        count = len(range(start, stop, step))
        if not transposed and step == 1:
            size = self.nbytes // shape[0]
            return Stored(self.file, self.dtype, (count, *shape[1:]), self.offset + start * size, count * size)
        own = (rows.start, rows.stop, rows.step)
        return Stored(self.file, self.dtype, (count, *shape[1:]), self.offset, self.nbytes, self.shape, transposed, own)

    def parts(self) -> Iterator[Stored]:
        """It in parts of at most PART bytes (one row at least), along the first axis; as one where rows do not lie
        together in the file."""
        if self.within is not None or not self.shape or self.nbytes <= PART:
            yield self
            return
        count = max(1, PART * self.shape[0] // self.nbytes)
        for start in range(0, self.shape[0], count):
            yield self.part(slice(start, start + count))


@dataclass(frozen=True)
class Spec:
    """Dtype (the safetensors name) and shape of a tensor that is to be written."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Spec:
        """Of a tensor on any device, meta included. Raises RunError for a dtype that safetensors does not have."""
        name = NAMES.get(str(tensor.dtype).removeprefix("torch."))
        if name is None:
            raise RunError(f"tensors of {tensor.dtype} cannot be stored as safetensors")
        return cls(name, tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        import torch

        size: int = getattr(torch, DTYPES[self.dtype]).itemsize
        for length in self.shape:
            size *= length
        return size


def locate(files: Iterable[Path]) -> dict[str, Stored]:
    """Name → place of every tensor in the files. Raises RunError naming a file that is cut short or malformed."""
    found: dict[str, Stored] = {}
    for path in files:
        header = read_header(path)
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            found[name] = Stored(path, entry["dtype"], tuple(entry["shape"]), start + begin, end - begin)
    return found


def read_stored(stored: Stored) -> torch.Tensor:
    """The tensor, on the CPU, in the dtype of the file. Raises RunError where the file cannot be read."""
    import torch

    if stored.dtype not in DTYPES:
        raise RunError(f"tensors of dtype {stored.dtype} cannot be read", str(stored.file))
    tensor = torch.empty(stored.within or stored.shape, dtype=getattr(torch, DTYPES[stored.dtype]))
    if tensor.nbytes != stored.nbytes:
        raise RunError("the header's shape and offsets do not agree", str(stored.file), "Fetch it again.")
    if not stored.nbytes:
        return tensor
    view = tensor.view(-1).view(torch.uint8).numpy().data
    try:
        with stored.file.open("rb", buffering=0) as file:
            file.seek(stored.offset)
            done = 0
            while done < stored.nbytes:
                count = file.readinto(view[done:])
                if not count:
                    raise RunError("the file ends early", str(stored.file), "Fetch it again.")
                done += count
    except OSError as error:
        raise RunError(f"the file cannot be read ({error.strerror})", str(stored.file)) from None
    if stored.within is None:
        return tensor
    return (tensor.t() if stored.transposed else tensor)[slice(*stored.rows)].contiguous()


def read_rows(stored: Stored, indices: Sequence[int]) -> torch.Tensor:
    """The elements at these places of the first axis, `[len(indices), ...]`. Raises RunError as `read_stored` does, and
    where an index lies outside."""
    import torch

    outside = next((index for index in indices if not 0 <= index < stored.shape[0]), None)
    if outside is not None:
        raise RunError(f"row {outside} was asked for of {stored.shape[0]}", str(stored.file))
    if stored.within is not None:
        return read_stored(stored)[list(indices)]
    rows = torch.empty(len(indices), *stored.shape[1:], dtype=getattr(torch, DTYPES[stored.dtype]))
    for number, index in enumerate(indices):
        rows[number] = read_stored(stored.at(index))
    return rows


def write_tensors(
    path: Path,
    specs: Mapping[str, Spec],
    read: Callable[[str], torch.Tensor | Iterable[torch.Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file, asking `read` for one tensor after another in the order of the file.

    read: gives a tensor, or its parts along the first axis. The file appears under its name when it is whole. Raises
    RunError where `read` gives a tensor other than its spec.
    """
    import torch

    names = sorted(specs, key=lambda name: (-ORDER[specs[name].dtype], name))
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(_header(names, specs, metadata or {"format": "pt"}))
            for name in names:
                given = read(name)
                _write_parts(file, path, name, specs[name], [given] if isinstance(given, torch.Tensor) else given)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _write_parts(file: BinaryIO, path: Path, name: str, spec: Spec, parts: Iterable[torch.Tensor]) -> None:
    """Write a tensor that comes in parts along its first axis; one of no axis comes whole."""
    rows, came = 0, None
    for part in parts:
        came = Spec.of(part)
        if came.shape and spec.shape and came.dtype == spec.dtype and came.shape[1:] == spec.shape[1:]:
            rows += came.shape[0]
            came = Spec(came.dtype, (rows, *came.shape[1:]))
        elif came != spec:
            break
        file.write(tensor_bytes(part))
    if came != spec:
        raise RunError(f"{name} came as {came}, {spec} was planned", str(path))


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite: either would show in the least or the greatest one."""
    import torch

    if not tensor.numel():
        return True
    low, high = torch.aminmax(tensor.float() if tensor.element_size() == 1 else tensor)
    return bool(torch.isfinite(low)) and bool(torch.isfinite(high))


def not_finite(name: str, tensor: torch.Tensor, source: str, stored: torch.Tensor | None = None) -> WeightError:
    """The error for a tensor with NaN or infinite values.

    stored: the same before its conversion, where that is at hand; it tells a damaged file from too narrow a dtype.
    """
    import torch

    dtype, limit = str(tensor.dtype).removeprefix("torch."), torch.finfo(tensor.dtype).max
    wider = "Give the recipe `dtype: bfloat16` or `dtype: float32`"
    if stored is not None and all_finite(stored):
        size = stored.abs() if stored.element_size() > 1 else stored.float().abs()
        what = f"has {int((size > limit).sum())} values beyond {dtype}'s {limit:,.0f}, up to {float(size.max()):,.0f}"
        return WeightError(f"{name} {what}", source, wider)
    mend, values = "Restore the weights", tensor if tensor.element_size() > 1 else tensor.float()
    if stored is None and tensor.dtype == torch.float16 and not bool(values.isnan().any()):
        mend = f"{wider} if the files hold larger values than float16's {limit:,.0f}, or restore the weights"
    count = int((~torch.isfinite(values)).sum())
    return WeightError(f"{name} has {count} values that are NaN or infinite", source, mend)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes in row-major order."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _header(names: list[str], specs: Mapping[str, Spec], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name in names:
        end = offset + specs[name].nbytes
        header[name] = {"dtype": specs[name].dtype, "shape": list(specs[name].shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
