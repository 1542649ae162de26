"""Limits the memory used by a child that reads a mapped file."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator


class MappedFile:
    """The pages of a mapped file that this process has read, released on request.

    torch maps the file privately and decoding changes nothing in place, so a released page is read
    again when it is needed. Without this, all of a 1 GB file counts as this child's memory.
    """

    def __init__(self, path: str) -> None:
        mapped = f" {os.path.realpath(path)}\n"
        with open("/proc/self/maps") as file:
            own = [line.split() for line in file if line.endswith(mapped)]
        bounds = [[int(edge, 16) for edge in fields[0].split("-")] for fields in own]
        self._ranges = [(first, last - first) for first, last in bounds]
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def released_after_each(self, names: Iterable[str]) -> Iterator[str]:
        """Yield the names, and release the pages read for each before the next."""
        for name in names:
            yield name
            self.release()

    def release(self) -> None:
        """Drop the pages from this process's memory."""
        for start, length in self._ranges:
            self._madvise(start, length, mmap.MADV_DONTNEED)
