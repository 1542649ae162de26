"""Host: samples host, GPUs and the guard itself, warns when disk or memory runs short,
and logs a snapshot of everything regularly.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from miner_guard.checks.gpu import Faults, driver_problem
from miner_guard.checks.health import (
    OWN_FIGURES,
    HostSampler,
    OwnSampler,
    Samplers,
    Unreadable,
    assemble,
    host_figures,
    summary,
)
from miner_guard.checks.nvml import NvmlSampler
from miner_guard.config import HealthSettings
from miner_guard.rank.layout import Now
from miner_guard.record.events import Event, degraded, event
from miner_guard.system.clock import Once
from miner_guard.watch.base import Context, Monitor

_SAMPLE_EVERY_S = 10.0
_SAMPLER_TIMEOUT_S = 5.0
"""Deadline for one sampler."""

_GIB = 1024**3
_MEMORY_WARN_RATIO = 0.95
_MEMORY_CLEAR_RATIO = 0.90
_DISK_CLEAR_FACTOR = 1.1


class HostLimits:
    """Watches disk, memory and out-of-memory kills over successive samples."""

    def __init__(self, settings: HealthSettings) -> None:
        self._settings = settings
        self._crossed = Once()
        self._kills: int | None = None

    def observe(self, host: Mapping[str, Any]) -> Iterator[Event]:
        """The events for a new sample."""
        yield from self._disk(host)
        yield from self._memory(host)
        yield from self._oom_kills(host["oom_kills"])

    def _disk(self, host: Mapping[str, Any]) -> Iterator[Event]:
        minimum = self._settings.disk_min_free_gb
        for name, free in (host["disk_free_by_folder_bytes"] or {}).items():
            free_gb = free / _GIB
            if self._begins(
                f"disk {name}", free_gb < minimum, free_gb > minimum * _DISK_CLEAR_FACTOR
            ):
                yield _warning(
                    f"disk of {name}",
                    reading=f"{free_gb:.1f} GB free",
                    limit=f"{minimum:g} GB",
                    next_step="free up disk space: checkpoints and logs stop when the disk is full",
                )

    def _memory(self, host: Mapping[str, Any]) -> Iterator[Event]:
        used, limit = host["memory_used_bytes"], host["memory_limit_bytes"]
        if used is None or not limit:
            return
        ratio = used / limit
        if self._begins("memory", ratio > _MEMORY_WARN_RATIO, ratio < _MEMORY_CLEAR_RATIO):
            yield _warning(
                "memory",
                reading=f"{used / _GIB:.1f} of {limit / _GIB:.1f} GB",
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
                reading=f"{kills - before} since the last sample",
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


def _warning(
    what: str, *, reading: str, limit: str, next_step: str, level: str = "warning"
) -> Event:
    return event(
        "host_warning",
        level,
        f"HOST WARNING: {what}: {reading} (limit {limit}); {next_step}",
        what=what,
        seen=reading,
        limit=limit,
        next_step=next_step,
    )


_QUICK = ("cpu", "memory", "guard")
"""The samplers that share a job. The others have their own: a network folder or a driver may
hang."""


class HostMonitor(Monitor):
    """Samples host, GPUs and guard in jobs, and reports the faults that the samples show."""

    name = "health"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        settings = context.config.health
        folders = {"state": context.state.root, "work": Path.cwd()}
        if settings.checkpoint_dir:
            folders["checkpoints"] = Path(settings.checkpoint_dir)
        self._host, self._guard = HostSampler(folders), OwnSampler()
        self._limits, self._faults = HostLimits(settings), Faults(os.environ)
        every_s = min(_SAMPLE_EVERY_S, settings.snapshot_every_s)
        self._nvml = NvmlSampler(_SAMPLER_TIMEOUT_S)
        self._nvml.on_end = self._probe_ended
        self.samplers = Samplers(
            context.clock,
            every_s + _SAMPLER_TIMEOUT_S,
            {**self._host.reads, "gpus": self._gpus, "guard": self._guard.sample},
        )
        self._lost = 0
        first = min(1.0, every_s)
        for job, names in (("samplers", _QUICK), ("disk", ("disk",)), ("gpus", ("gpus",))):
            work = functools.partial(self._sample, *names)
            context.jobs.every(job, every_s, work, first_after_s=first)
        context.jobs.every("health", settings.snapshot_every_s, self._log_snapshot)

    def _probe_ended(self, how: str) -> None:
        what = f"the process that reads the GPUs exited ({how}); restarting it"
        self.context.emit(degraded(what))

    def gpu_memory_levels(self) -> Mapping[str, int] | None:
        """The GPU memory currently in use, in bytes by UUID; None without a GPU. Blocks for at most
        the sampler's deadline."""
        return self._nvml.memory_levels()

    def _gpus(self) -> Mapping[str, Any]:
        sample = self._nvml.sample()
        if self.context.config.gpu.expect != 0:
            for each in self._faults.observe(sample["gpus"], self.context.clock.monotonic()):
                self.context.emit(each)
        if sample["state"] not in ("ok", "absent"):
            raise Unreadable("; ".join(driver_problem(sample)))
        return sample

    def _sample(self, *names: str) -> None:
        for each in self.samplers.sample(*names):
            self.context.emit(each)
        host = self._host_figures()
        if "memory" in names and host is not None:
            for each in self._limits.observe(host):
                self.context.emit(each)

    def _host_figures(self) -> Mapping[str, Any] | None:
        return host_figures(self.samplers.value(name) for name in self._host.reads)

    def _log_snapshot(self) -> None:
        self.context.emit(self._event())

    def _event(self) -> Event:
        guard = self.samplers.value("guard") or dict.fromkeys(OWN_FIGURES)
        snapshot = assemble(
            self.context.status(),
            host=self._host_figures(),
            gpus=self.samplers.value("gpus"),
            guard={**guard, "entries_lost": self._lost},
            unknown=self.samplers.unknown(),
        )
        words = summary(snapshot)
        return event("health_snapshot", "info", f"HEALTH {words}", summary=words, snapshot=snapshot)

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Event]:
        self._lost = sum(header.lost for header in ranks.values())
        return ()

    def on_stop(self) -> Iterable[Event]:
        self._nvml.close()
        return (self._event(),)

    def snapshot(self) -> Mapping[str, Any]:
        return {
            "host": self._host_figures(),
            "gpus": self.samplers.value("gpus"),
            "guard": self.samplers.value("guard"),
            "unknown": self.samplers.unknown(),
        }
