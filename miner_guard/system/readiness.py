"""Waits until files can be read or written.

`select.select` refuses descriptors from 1,024 on, which a process that inherits or opens many
files reaches; `poll` has no such limit.
"""

from __future__ import annotations

import math
import select
from collections.abc import Sequence
from typing import Protocol, TypeVar


class HasFileno(Protocol):
    """A file, socket or pipe."""

    def fileno(self) -> int:
        """Its descriptor."""
        ...


File = TypeVar("File", bound="HasFileno | int")


def ready(
    reading: Sequence[File], seconds: float | None, writing: Sequence[File] = ()
) -> tuple[list[File], list[File]]:
    """The files that can be read and those that can be written, after at most `seconds` (None:
    without limit). A file at its end, or whose other side is gone, is ready."""
    wanted: dict[int, int] = {}
    for files, event in ((reading, select.POLLIN), (writing, select.POLLOUT)):
        for file in files:
            wanted[_number(file)] = wanted.get(_number(file), 0) | event
    poll = select.poll()
    for number, events in wanted.items():
        poll.register(number, events)
    # Rounded up: a wait that ends a fraction of a millisecond early would be repeated in a spin.
    wait_ms = None if seconds is None else math.ceil(max(seconds, 0.0) * 1000)
    found = dict(poll.poll(wait_ms))
    other = ~(select.POLLIN | select.POLLOUT)
    return (
        [f for f in reading if found.get(_number(f), 0) & (select.POLLIN | other)],
        [f for f in writing if found.get(_number(f), 0) & (select.POLLOUT | other)],
    )


def _number(file: HasFileno | int) -> int:
    return file if isinstance(file, int) else file.fileno()
