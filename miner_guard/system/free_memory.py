"""Returns memory that this process no longer needs to the system."""

from __future__ import annotations

import contextlib
import ctypes


def give_back() -> None:
    """Return free memory after a burst or a large parse; glibc would otherwise keep it."""
    with contextlib.suppress(AttributeError):
        # Other C libraries lack this function and do not need it.
        ctypes.CDLL(None).malloc_trim(0)
