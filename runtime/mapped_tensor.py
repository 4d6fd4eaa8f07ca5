"""A tensor used where it lies in a file: pages come from the file as they are read, and can be given back."""

from __future__ import annotations

import mmap
from contextlib import suppress

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
