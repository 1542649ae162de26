"""Buffers the output that the monitors have not seen yet, and compresses bursts to save memory."""

from __future__ import annotations

import zlib
from collections import deque

PLAIN = 4 * 1024 * 1024
"""Number of bytes to keep uncompressed; ordinary output never exceeds it."""

_WORTH = 4
_DENSE_CHUNKS = 15
"""Number of chunks that stay uncompressed after one that does not shrink to a quarter of its size.
Log lines do shrink that much; compressing other data takes as long as the monitors need to read
it."""


class Backlog:
    """A queue of chunks that counts its bytes."""

    def __init__(self) -> None:
        self._chunks: deque[tuple[int, bytes]] = deque()
        """Each chunk with its size; a chunk shorter than its size is compressed."""

        self._dense = 0
        self.size = 0
        """Size of the queued output in bytes."""

        self.held = 0
        """Memory use in bytes."""

    def put(self, data: bytes) -> None:
        """Append a chunk."""
        kept = self._packed(data) if self.held > PLAIN else data
        self._chunks.append((len(data), kept))
        self.size += len(data)
        self.held += len(kept)

    def take(self, limit: int) -> bytes:
        """Remove and return the first chunk, plus those after it that fit in `limit` bytes. Raises
        IndexError if the backlog is empty."""
        taken = [self._first()]
        limit -= len(taken[0])
        while self._chunks and self._chunks[0][0] <= limit:
            taken.append(self._first())
            limit -= len(taken[-1])
        return taken[0] if len(taken) == 1 else b"".join(taken)

    def part(self, most: int) -> bytes:
        """Remove and return the first chunk, or the first `most` bytes of a longer one. Raises
        IndexError if the backlog is empty."""
        first = self._first()
        if len(first) <= most:
            return first
        self._put_back(first[most:])
        return first[:most]

    def skip(self, size: int) -> None:
        """Remove the first `size` bytes. Raises IndexError if there are fewer."""
        while size and self._chunks[0][0] <= size:
            skipped, kept = self._chunks.popleft()
            size -= skipped
            self.size -= skipped
            self.held -= len(kept)
        if size:
            self._put_back(self._first()[size:])

    def _first(self) -> bytes:
        size, kept = self._chunks.popleft()
        self.size -= size
        self.held -= len(kept)
        return kept if len(kept) == size else zlib.decompress(kept)

    def _put_back(self, rest: bytes) -> None:
        self._chunks.appendleft((len(rest), rest))
        self.size += len(rest)
        self.held += len(rest)

    def _packed(self, data: bytes) -> bytes:
        if self._dense:
            self._dense -= 1
            return data
        packed = zlib.compress(data, 1)
        if len(packed) > len(data) // _WORTH:
            self._dense = _DENSE_CHUNKS
            return data
        return packed
