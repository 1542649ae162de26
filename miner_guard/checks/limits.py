"""Turns host samples into warnings: one when a limit is crossed, and another only after the problem
has cleared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from miner_guard.config import HealthSettings
from miner_guard.record.events import Event, event
from miner_guard.system.once import Once

_GIB = 1024**3
_MEMORY_WARN_RATIO = 0.95
_MEMORY_CLEAR_RATIO = 0.90
_DISK_CLEAR_FACTOR = 1.1


class HostLimits:
    """Watches disk, /dev/shm, memory and out-of-memory kills over successive samples."""

    def __init__(self, settings: HealthSettings) -> None:
        self._settings = settings
        self._crossed = Once()
        self._kills: int | None = None

    def observe(self, host: Mapping[str, Any]) -> Iterator[Event]:
        """The events for a new sample."""
        yield from self._disk(host)
        yield from self._shm(host)
        yield from self._memory(host)
        yield from self._oom_kills(host["oom_kills"])

    def _disk(self, host: Mapping[str, Any]) -> Iterator[Event]:
        minimum = self._settings.disk_min_free_gb
        for name, free in (host["disk_free_by_folder_bytes"] or {}).items():
            seen = free / _GIB
            if self._begins(f"disk {name}", seen < minimum, seen > minimum * _DISK_CLEAR_FACTOR):
                yield _warning(
                    f"disk of {name}",
                    seen=f"{seen:.1f} GB free",
                    limit=f"{minimum:g} GB",
                    next_step="free up disk space: checkpoints and logs stop when the disk is full",
                )

    def _shm(self, host: Mapping[str, Any]) -> Iterator[Event]:
        total, minimum = host["shm_total_bytes"], self._settings.shm_min_gb
        if total is not None and self._begins(
            "shm", total < minimum * _GIB, total >= minimum * _GIB
        ):
            yield _warning(
                "/dev/shm",
                seen=f"{total / 1024**2:.0f} MB",
                limit=f"{minimum:g} GB",
                next_step="start the container with --shm-size=16g: NCCL and dataloaders need it",
            )

    def _memory(self, host: Mapping[str, Any]) -> Iterator[Event]:
        used, limit = host["memory_used_bytes"], host["memory_limit_bytes"]
        if used is None or not limit:
            return
        ratio = used / limit
        if self._begins("memory", ratio > _MEMORY_WARN_RATIO, ratio < _MEMORY_CLEAR_RATIO):
            yield _warning(
                "memory",
                seen=f"{used / _GIB:.1f} of {limit / _GIB:.1f} GB",
                limit=f"{_MEMORY_WARN_RATIO:.0%} of the {host['memory_limit_by']}'s memory",
                next_step=(
                    "the kernel will kill a rank next; use fewer dataloader workers or a "
                    "larger machine"
                ),
            )

    def _oom_kills(self, kills: int | None) -> Iterator[Event]:
        before, self._kills = self._kills, kills if kills is not None else self._kills
        if kills is not None and before is not None and kills > before:
            yield _warning(
                "out-of-memory kill",
                level="error",
                seen=f"{kills - before} since the last sample",
                limit="0",
                next_step=(
                    "the kernel killed a process in this container: use fewer dataloader workers, "
                    "or raise the memory limit"
                ),
            )

    def _begins(self, what: str, bad: bool, good: bool) -> bool:
        if good:
            self._crossed.clear(what)
        return bad and self._crossed.first(what)


def _warning(what: str, *, seen: str, limit: str, next_step: str, level: str = "warning") -> Event:
    return event(
        "host_warning",
        level,
        f"HOST WARNING: {what}: {seen} (limit {limit}); {next_step}",
        what=what,
        seen=seen,
        limit=limit,
        next_step=next_step,
    )
