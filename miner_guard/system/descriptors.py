"""Waits until descriptors are ready, and addresses Unix sockets of any path.

It waits with `poll`, because `select` refuses descriptors of 1,024 and above, and a process
that inherits or opens many files has such descriptors.
"""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

_MAX_PATH = 107
"""Maximum length of a socket's path in bytes: `sun_path` without its final null byte."""


File = TypeVar("File", int, socket.socket)


def ready(
    files: Sequence[File], seconds: float | None, events: int = selectors.EVENT_READ
) -> list[File]:
    """Wait at most `seconds` (None: no limit); return the files that can be read, or with
    `EVENT_WRITE` written. A file at EOF, or whose other end is closed, counts as ready."""
    with selectors.PollSelector() as selector:
        for file in files:
            selector.register(file, events)
        return [key.fileobj for key, _ in selector.select(seconds)]  # type: ignore[misc]


@contextmanager
def address(path: Path) -> Iterator[str]:
    """An address for binding or connecting to the socket at `path`, valid inside the `with` block.
    Raises OSError if the path is too long and its folder does not exist."""
    if len(os.fsencode(path)) <= _MAX_PATH:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
