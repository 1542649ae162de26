"""Waits until files can be read or written.

It uses `poll`, because `select.select` refuses descriptors of 1,024 and above, and a process
that inherits or opens many files has such descriptors.
"""

from __future__ import annotations

import math
import select
from collections.abc import Sequence
from typing import Protocol, TypeVar


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
