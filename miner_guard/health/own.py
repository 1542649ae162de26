"""The guard's own CPU and memory: the supervisor and every process that it started for itself."""

from __future__ import annotations

import time
from typing import Any

import psutil

from miner_guard.system.helpers import HelperCpu


class OwnSampler:
    """Samples the guard; CPU covers the time since the last sample, as a percentage of one core."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._helpers = HelperCpu()
        self._before: tuple[float, float] | None = None

    def sample(self) -> dict[str, Any]:
        """`cpu_pct` and `cpu_s` of the supervisor and its helpers (the HTTP port, the GPU sampler,
        senders, probes, including those that have exited); `helpers_cpu_s`: CPU seconds of
        the helpers only; `helpers`: CPU seconds of each running helper by its name; `memory_bytes`,
        `threads` and `open_files` of the supervisor. Raises OSError."""
        helpers_s, helpers = self._helpers.read()
        now, used = time.monotonic(), time.process_time() + helpers_s
        before, self._before = self._before, (now, used)
        share = None
        if before is not None and now > before[0]:
            share = 100 * (used - before[1]) / (now - before[0])
        with self._process.oneshot():
            return {
                "cpu_pct": share,
                "cpu_s": used,
                "helpers_cpu_s": helpers_s,
                "helpers": helpers,
                "memory_bytes": self._process.memory_info().rss,
                "threads": self._process.num_threads(),
                "open_files": self._process.num_fds(),
            }
