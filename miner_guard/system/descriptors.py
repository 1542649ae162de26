"""Waits until descriptors are ready, wakes a thread that waits, and addresses Unix sockets of any
path.

It waits with `poll`, because `select` refuses descriptors of 1,024 and above, and a process
that inherits or opens many files has such descriptors.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections.abc import Iterator, Sequence
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


class WakePipe:
    """Ends a wait: after `wake`, `reading` is readable until `clear`."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def wake(self) -> None:
        """End the present wait or the next one. May be called from any thread and from a signal
        handler."""
        # A full pipe ends the wait too; a closed one means that nobody waits any more.
        with contextlib.suppress(OSError):
            os.write(self.writing, b"\0")

    def clear(self) -> None:
        """Forget the calls of `wake` so far."""
        with contextlib.suppress(OSError):
            os.read(self.reading, 65536)

    def close(self) -> None:
        """Close both ends; `wake` then does nothing."""
        os.close(self.reading)
        os.close(self.writing)


@contextlib.contextmanager
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
