"""Waits until descriptors are ready, and addresses Unix sockets of any path.

It waits with `poll`, because `select.select` refuses descriptors of 1,024 and above, and a process
that inherits or opens many files has such descriptors.
"""

from __future__ import annotations

import math
import os
import select
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

_MAX_PATH = 107
"""Maximum length of a socket's path in bytes: `sun_path` without its final null byte."""


class HasFileno(Protocol):
    """A file, socket or pipe."""

    def fileno(self) -> int:
        """The file's descriptor."""
        ...


File = TypeVar("File", bound="HasFileno | int")


def ready(
    reading: Sequence[File], seconds: float | None, writing: Sequence[File] = ()
) -> tuple[list[File], list[File]]:
    """Wait at most `seconds` (None: no limit); return the files that can be read and those that can
    be written. A file at EOF, or whose other end is closed, counts as ready."""
    interests: dict[int, int] = {}
    for files, event in ((reading, select.POLLIN), (writing, select.POLLOUT)):
        for file in files:
            interests[_number(file)] = interests.get(_number(file), 0) | event
    poll = select.poll()
    for number, events in interests.items():
        poll.register(number, events)
    # Round up: if the wait ended a fraction of a millisecond early, the caller would spin until its
    # deadline.
    wait_ms = None if seconds is None else math.ceil(max(seconds, 0.0) * 1000)
    found = dict(poll.poll(wait_ms))
    other = ~(select.POLLIN | select.POLLOUT)
    return (
        [f for f in reading if found.get(_number(f), 0) & (select.POLLIN | other)],
        [f for f in writing if found.get(_number(f), 0) & (select.POLLOUT | other)],
    )


def _number(file: HasFileno | int) -> int:
    return file if isinstance(file, int) else file.fileno()


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
