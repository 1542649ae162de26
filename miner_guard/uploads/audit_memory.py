"""Remembers, between audits, the gradients already inspected and the recent download volume."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miner_guard.validators.shapes import Shapes

_HOUR_S = 3600.0


@dataclass(frozen=True)
class Judged:
    """An inspected gradients file, identified by metadata that the storage returns without a
    download."""

    key: str
    size_bytes: int
    checksum: str
    model: Shapes | None
    """The shapes that the file was compared with."""

    report: Mapping[str, Any]


class AuditMemory:
    """Keeps scheduled audits within `bytes_per_hour` by not fetching an unchanged file again."""

    def __init__(self, bytes_per_hour: int) -> None:
        self._bytes_per_hour = bytes_per_hour
        self._fetched: deque[tuple[float, int]] = deque()
        self._judged: Judged | None = None

    def left(self, now: float) -> int:
        """Bytes that may be fetched at `now` (monotonic seconds)."""
        while self._fetched and now - self._fetched[0][0] >= _HOUR_S:
            self._fetched.popleft()
        return max(self._bytes_per_hour - sum(size for _, size in self._fetched), 0)

    def spent(self, now: float, size_bytes: int) -> None:
        """Record a download of `size_bytes` at `now` (monotonic seconds)."""
        self._fetched.append((now, size_bytes))

    def known(self, model: Shapes | None) -> dict[str, Any] | None:
        """Key, size and checksum of the file that the fetching child can skip."""
        judged = self._judged
        if judged is None or judged.model != model:
            return None
        return {"key": judged.key, "size_bytes": judged.size_bytes, "checksum": judged.checksum}

    def report(self) -> Mapping[str, Any]:
        """The report on the file that `known` identifies."""
        assert self._judged is not None
        return self._judged.report

    def judged(
        self, fetched: Mapping[str, Any], model: Shapes | None, report: Mapping[str, Any]
    ) -> None:
        """Remember the report on the fetched file, unless the inspection was inconclusive."""
        key, size, checksum = (fetched.get(n) for n in ("key", "size_bytes", "checksum"))
        if checksum is None or report.get("reason") is not None:
            return
        self._judged = Judged(str(key), int(size or 0), str(checksum), model, dict(report))
