"""The end of the miner's output, kept as evidence."""

from __future__ import annotations

from collections import deque

_BYTES = 64 * 1024


class Tail:
    """Keeps the last 64 KiB added, and at most one more chunk."""

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._cut = False

    def add(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._size += len(chunk)
        while self._size - len(self._chunks[0]) >= _BYTES:
            self._size -= len(self._chunks.popleft())
            self._cut = True

    def text(self) -> bytes:
        """The last 64 KiB, or everything if less was added. Truncated text starts at a line
        boundary, because redaction would miss a key that was cut in half."""
        whole = b"".join(self._chunks)
        if not self._cut and len(whole) <= _BYTES:
            return whole
        last = whole[-_BYTES:]
        return last.partition(b"\n")[2] or last
