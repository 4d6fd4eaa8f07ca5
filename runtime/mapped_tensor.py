"""A tensor used where it lies in a file: pages come from the file as they are read, and can be given back."""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch

from ..optimizer.errors import RunError
from .tensor_files import DTYPES, Stored, read_stored


class MappedTensor:
    """`tensor`, in `dtype`, over a private mapping of its file; a copy in memory where the dtypes differ.

    The file must stay as it is, as for every memory-mapped model. Raises RunError where it cannot be read.
    """

    def __init__(self, stored: Stored, dtype: torch.dtype) -> None:
        self._map: mmap.mmap | None = None
        own = getattr(torch, DTYPES.get(stored.dtype, ""), None)
        if own != dtype or stored.offset % dtype.itemsize or not stored.nbytes:
            self.tensor = read_stored(stored).to(dtype)
            return
        start = stored.offset - stored.offset % mmap.ALLOCATIONGRANULARITY
        try:
            with stored.file.open("rb") as file:
                size = stored.offset - start + stored.nbytes
                self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY, offset=start)
        except (OSError, ValueError) as error:
            raise RunError(f"the file cannot be mapped ({error})", str(stored.file)) from None
        flat = torch.frombuffer(
            self._map, dtype=dtype, count=stored.nbytes // dtype.itemsize, offset=stored.offset - start
        )
        self.tensor = flat.view(stored.shape)

    def drop_pages(self) -> None:
        """Give the pages back that were read so far; the next access reads them again. Nothing may have been written
        to the tensor."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            with suppress(OSError):
                self._map.madvise(mmap.MADV_DONTNEED)


_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+\s*(.*)")


def drop_file_pages(files: Iterable[Path]) -> int:
    """Give back the resident pages of every mapping of these files that nothing was written to; returns how many
    mappings that were. They are read again when they are needed. Does nothing where the system has no /proc/self/smaps.
    """
    names = {str(file.resolve()) for file in files}
    found: list[tuple[int, int]] = []
    at: tuple[int, int] | None = None
    with suppress(OSError), open("/proc/self/smaps", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("Anonymous:") and at is not None and line.split()[1] == "0":
                found.append(at)
            elif match := _MAPPING.match(line):
                begin, end, name = int(match[1], 16), int(match[2], 16), match[3].rstrip()
                at = (begin, end - begin) if name in names else None
    if found and hasattr(mmap, "MADV_DONTNEED"):
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for address, size in found:
            madvise(address, size, mmap.MADV_DONTNEED)
    return len(found)
