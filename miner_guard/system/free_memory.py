"""Returns memory that this process no longer needs to the system."""

from __future__ import annotations

import contextlib
import ctypes

_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
"""Options of glibc's `mallopt`."""

_RETAINED = 4 * 1024 * 1024


def retain() -> None:
    """Keep up to 4 MiB of free memory for the next allocations. By default glibc returns a large
    block as soon as it is free, and each page of the next block costs a page fault."""
    with contextlib.suppress(AttributeError):
        # Other C libraries lack this function.
        libc = ctypes.CDLL(None)
        libc.mallopt(_TRIM_THRESHOLD, _RETAINED)
        libc.mallopt(_MMAP_THRESHOLD, _RETAINED)


def give_back() -> None:
    """Return free memory after a burst or a large parse; glibc would otherwise keep it."""
    with contextlib.suppress(AttributeError):
        # Other C libraries lack this function and do not need it.
        ctypes.CDLL(None).malloc_trim(0)
