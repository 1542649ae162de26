"""Reports which files in a folder any process on this machine opens, using the kernel's inotify."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

_IN_OPEN = 0x20
_HEADER = struct.Struct("iIII")
"""The watch, the event, a cookie and the length of the name that follows: inotify(7)."""


class OpenedFiles:
    """Watches `folders`, not their subfolders."""

    def __init__(self, *folders: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._descriptor >= 0, os.strerror(ctypes.get_errno())
        for folder in folders:
            added = libc.inotify_add_watch(self._descriptor, os.fsencode(folder), _IN_OPEN)
            assert added >= 0, os.strerror(ctypes.get_errno())

    def names(self) -> list[str]:
        """The files opened since the last call, in order; "" is a folder itself."""
        names: list[str] = []
        while True:
            try:
                events = os.read(self._descriptor, 65_536)
            except BlockingIOError:
                return names
            while events:
                *_, length = _HEADER.unpack_from(events)
                end = _HEADER.size + length
                names.append(events[_HEADER.size : end].rstrip(b"\0").decode())
                events = events[end:]

    def close(self) -> None:
        os.close(self._descriptor)
