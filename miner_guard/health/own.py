"""The guard's own CPU and memory: this process and its long-lived children."""

from __future__ import annotations

import time
from typing import Any

import psutil


class OwnSampler:
    """Samples the supervisor process; CPU covers the time since the last sample, in per cent of one
    core."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._before: tuple[float, float] | None = None

    def sample(self) -> dict[str, Any]:
        """`cpu_pct`, `cpu_s`, `memory_bytes`, `threads`, `open_files`."""
        now, used = time.monotonic(), time.process_time()
        before, self._before = self._before, (now, used)
        share = None
        if before is not None and now > before[0]:
            share = 100 * (used - before[1]) / (now - before[0])
        with self._process.oneshot():
            return {
                "cpu_pct": share,
                "cpu_s": used,
                "memory_bytes": self._process.memory_info().rss,
                "threads": self._process.num_threads(),
                "open_files": self._process.num_fds(),
            }
