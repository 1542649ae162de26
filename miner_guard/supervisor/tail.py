"""The last output of the miner, kept for the evidence."""

from __future__ import annotations

from collections import deque

_BYTES = 64 * 1024


class Tail:
    """At least the last 64 KiB that were added, and less than one chunk more."""

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()
        self._size = 0

    def add(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._size += len(chunk)
        while self._size - len(self._chunks[0]) >= _BYTES:
            self._size -= len(self._chunks.popleft())

    def text(self) -> bytes:
        """The last 64 KiB, or all that there was."""
        return b"".join(self._chunks)[-_BYTES:]
