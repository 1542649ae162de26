"""Turns successive samples of the GPUs into events about faults while the miner is running. Pure;
streaming."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from miner_guard.checks.check import Check
from miner_guard.checks.gpu import BAD_THROTTLE, links_down, of_row
from miner_guard.record.events import Event, event
from miner_guard.system.once import Once

Row = Mapping[str, Any]

THROTTLED_SAMPLES, THROTTLE_WINDOW_S = 6, 600.0
"""Six throttled samples in ten minutes count as degraded (gpud)."""

_WATCHED = frozenset(
    {
        "gpu.state",
        "gpu.ecc",
        "gpu.row_remap",
        "gpu.recovery_action",
        "gpu.temperature",
        "gpu.pcie",
        "gpu.nvlink",
        "gpu.compute_mode",
    }
)
"""All other checks are excluded: the preflight reports static modes and limits, and `_throttle`
judges throttling."""

_CONFIRM = frozenset({"gpu.pcie", "gpu.temperature"})
"""The checks reported only after two consecutive bad samples, because their readings vary with the
load."""


DRIVER_SILENT_S = 20.0
"""Two missed samples; a single missed one may only mean a busy machine."""


class Faults:
    """Reports each fault once when it appears and once when it clears."""

    def __init__(self) -> None:
        self._standing: dict[tuple[str, str], str] = {}
        self._suspected: set[tuple[str, str]] = set()
        self._throttled: dict[str, deque[float]] = {}
        self._silent_since: float | None = None
        self._silence = Once()

    def observe(self, rows: list[Row], now: float) -> Iterator[Event]:
        """Yield the events from one sample's rows; `now` is monotonic."""
        down = {c.gpu: c for c in links_down(rows)}
        for row in rows:
            gpu = str(row["index"])
            checks = {c.check: c for c in of_row(row)}
            if row["index"] in down:
                checks["gpu.nvlink"] = down[row["index"]]
            yield from self._throttle(gpu, row, now)
            for name in sorted(_WATCHED):
                yield from self._one(gpu, row, name, checks.get(name))

    def driver(self, reason: str | None, had_gpus: bool, now: float) -> Iterator[Event]:
        """Judge NVML as a whole. `reason` explains why there is no sample; None if there is one.
        Reports only on hosts that had GPUs, and only as a warning, because GPUs in an unknown state
        may be fine."""
        if reason is None:
            if self._silence.clear():
                yield event(
                    "gpu_recovered",
                    "info",
                    "GPU RECOVERED: GPU all NVML responds again",
                    gpu="all",
                    what="NVML responds again",
                )
            self._silent_since = None
            return
        if not had_gpus:
            return
        if self._silent_since is None:
            self._silent_since = now
        if now - self._silent_since >= DRIVER_SILENT_S and self._silence.first():
            step = "check dmesg; in a container, GPU access was probably revoked: restart it"
            yield event(
                "gpu_fault",
                "warning",
                f"GPU FAULT: GPU all can no longer be read: {reason}; {step}",
                gpu="all",
                what=f"can no longer be read: {reason}",
                next_step=step,
                check="driver.nvml",
            )

    def _one(self, gpu: str, row: Row, name: str, check: Check | None) -> Iterator[Event]:
        key = (gpu, name)
        if check is None or (check.level == "unknown" and row["state"] != "ok"):
            # An unreadable check keeps its last state.
            return
        bad = check is not None and check.level in ("warn", "critical")
        if bad and check is not None:
            if name in _CONFIRM and key not in self._suspected:
                self._suspected.add(key)
                return
            if self._standing.get(key) != check.level:
                self._standing[key] = check.level
                yield _fault(row, check)
            return
        self._suspected.discard(key)
        if self._standing.pop(key, None) is not None:
            well = f"{name.partition('.')[2]} is back to normal"
            yield event(
                "gpu_recovered",
                "info",
                f"GPU RECOVERED: GPU {row['index']} {well}",
                gpu=row["index"],
                uuid=row.get("uuid"),
                what=well,
            )

    def _throttle(self, gpu: str, row: Row, now: float) -> Iterator[Event]:
        times = self._throttled.setdefault(gpu, deque(maxlen=THROTTLED_SAMPLES))
        bits = row.get("throttle_bits")
        if bits is None:
            return
        key = (gpu, "gpu.throttle")
        if bits & BAD_THROTTLE:
            times.append(now)
        while times and now - times[0] > THROTTLE_WINDOW_S:
            times.popleft()
        if len(times) == THROTTLED_SAMPLES and key not in self._standing:
            self._standing[key] = "warn"
            by, seconds = ", ".join(row["throttle"]), now - times[0]
            seen = f"throttled ({by}) in {len(times)} samples over the last {seconds:.0f} s"
            step = "check cooling, power supply and power cables; it is slowing down all ranks"
            yield event(
                "gpu_fault",
                "warning",
                f"GPU FAULT: GPU {row['index']} {seen}; {step}",
                gpu=row["index"],
                uuid=row.get("uuid"),
                what=seen,
                next_step=step,
                check="gpu.throttle",
            )
        elif not times and self._standing.pop(key, None) is not None:
            yield event(
                "gpu_recovered",
                "info",
                f"GPU RECOVERED: GPU {row['index']} no longer throttled",
                gpu=row["index"],
                uuid=row.get("uuid"),
                what="no longer throttled",
            )


def of_events(rows: Iterable[Row]) -> Iterator[Event]:
    """Yield the Xid events of one sample. Each event appears in one sample only, so every sample
    must pass through here."""
    for row in rows:
        for check in of_row(row):
            if check.check == "gpu.xid":
                yield _fault(row, check)


def _fault(row: Row, check: Check) -> Event:
    what = check.seen.removeprefix(f"GPU {row['index']}").lstrip(": ")
    return event(
        "gpu_fault",
        {"ok": "info", "warn": "warning"}.get(check.level, "critical"),
        f"GPU FAULT: GPU {row['index']} {what}; {check.next_step or 'check dmesg'}",
        gpu=row["index"],
        uuid=row.get("uuid"),
        what=what,
        next_step=check.next_step or "check dmesg",
        check=check.check,
    )
