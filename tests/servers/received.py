"""The requests that a test's server received."""

from __future__ import annotations

import threading


class Requests(list[str]):
    """The requests that a server received, numbered from one. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._mutex = threading.Lock()

    def note(self, request: str) -> int:
        """Add a request; returns its number."""
        with self._mutex:
            self.append(request)
            return len(self)
