"""Delays a relaunch until GPU memory is back to its level before the first launch.

It compares memory and ignores pids, because inside a container NVML shows pids from another
namespace, or none at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from miner_guard.record.events import Event, degraded
from miner_guard.system.clock import Clock

_SLACK_BYTES = 512 * 1024**2
"""Tolerance above the baseline, because drivers keep a little memory."""

_LOOK_EVERY_S = 0.5

Levels = Mapping[str, int]
"""Bytes in use, keyed by GPU UUID."""


def held(before: Levels, now: Levels) -> dict[str, int]:
    """Bytes above the baseline, for the GPUs whose memory is still in use."""
    over = {uuid: used - before[uuid] for uuid, used in now.items() if uuid in before}
    return {uuid: size for uuid, size in over.items() if size > _SLACK_BYTES}


class GpuMemoryWait:
    """Records the baseline before the first launch. Later it waits, in a separate thread, until
    memory use is back at that level."""

    def __init__(
        self,
        read: Callable[[], Levels | None],
        settle_s: float,
        clock: Clock,
        *,
        report: Callable[[Event], None],
        soon: Callable[[Callable[[], None]], None],
    ) -> None:
        """`read` returns the bytes in use, keyed by GPU UUID, or None without a GPU; it blocks for
        at most the sampler's deadline and never raises. The wait lasts at most `settle_s`
        seconds."""
        self._read, self._settle_s, self._clock = read, settle_s, clock
        self._report, self._soon = report, soon
        self._before: Levels | None = None
        self._closed = threading.Event()

    def remember(self) -> None:
        """Record the baseline. Runs in a job thread during the first launch, before any miner
        allocates GPU memory."""
        self._before = self._read()

    def wait(self, proceed: Callable[[], None]) -> None:
        """Call `proceed` on the supervisor's thread when the memory is free. After `settle_s`
        seconds, report an event and call `proceed` anyway."""
        if self._before is None:
            proceed()
            return
        arguments = (self._before, proceed)
        threading.Thread(target=self._wait, args=arguments, name="gpu-settle", daemon=True).start()

    def _wait(self, before: Levels, proceed: Callable[[], None]) -> None:
        deadline = self._clock.monotonic() + self._settle_s
        while over := held(before, self._read() or {}):
            if self._clock.monotonic() >= deadline:
                gpus = ", ".join(f"{u} {size / 1024**3:.1f} GB" for u, size in sorted(over.items()))
                what = (
                    f"{self._settle_s:.0f}s after the stop, GPU memory is still above its level "
                    f"before the first launch: {gpus}; starting the miner anyway"
                )
                self._report(degraded(what))
                break
            if self._closed.wait(_LOOK_EVERY_S):
                return
        self._soon(proceed)

    def close(self) -> None:
        """Stop waiting and never call `proceed`."""
        self._closed.set()
