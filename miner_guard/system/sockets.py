"""Addresses of Unix sockets in directories whose path exceeds the kernel's limit (107 bytes)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MAX_LENGTH = 107


@contextmanager
def address(path: Path) -> Iterator[str]:
    """A name to bind or connect to `path`, valid inside the `with`. Raises OSError if its folder
    does not exist."""
    if len(os.fsencode(path)) <= _MAX_LENGTH:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
