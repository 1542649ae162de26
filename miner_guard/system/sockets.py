"""Addresses of Unix sockets whose path exceeds the kernel's limit of 107 bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAX_LENGTH = 107
"""Maximum length of a path in bytes: `sun_path` without its final null byte."""


@contextmanager
def address(path: Path) -> Iterator[str]:
    """An address for binding or connecting to the socket at `path`, valid inside the `with` block.
    Raises OSError if the path is too long and its folder does not exist."""
    if len(os.fsencode(path)) <= MAX_LENGTH:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
