"""Host: samples host, GPUs and the guard itself, and logs a snapshot of everything regularly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from miner_guard.checks import faults
from miner_guard.checks.limits import HostLimits
from miner_guard.checks.nvml import NvmlSampler
from miner_guard.checks.samplers import HostSampler, OwnSampler, Samplers, Unreadable, host_figures
from miner_guard.checks.snapshot import assemble, summary
from miner_guard.rank.layout import Now
from miner_guard.record.events import Event, degraded, event
from miner_guard.watch.base import Context, Monitor

_GPU_DEADLINE_RATIO = 0.9
"""Fraction of the sampler's deadline after which the probe returns the results that it has
so far, so that one hung GPU does not hide the others."""


class HealthMonitor(Monitor):
    """Keeps the results of the samplers, which run in jobs."""

    name = "health"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        settings = context.config.health
        folders = {"state": context.state.root, "work": Path.cwd()}
        if settings.checkpoint_dir:
            folders["checkpoints"] = Path(settings.checkpoint_dir)
        self._host, self._own = HostSampler(folders), OwnSampler()
        self._limits = HostLimits(settings)
        self._nvml = NvmlSampler(settings.sampler_timeout_s * _GPU_DEADLINE_RATIO)
        self._nvml.on_end = self._probe_ended
        self.samplers = Samplers(
            context.clock,
            settings.sampler_timeout_s,
            {**self._host.reads, "gpus": self._gpus, "guard": self._own.sample},
        )
        self._dropped = 0
        self._lost = 0
        self._snapshots = 0
        first = min(1.0, settings.sample_every_s)
        context.jobs.every("samplers", settings.sample_every_s, self._sample, first_after_s=first)
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
            # Report the faults here, in every sample: other monitors read the status, which holds
            # only the latest one.
            for each in faults.of_events(sample["gpus"]):
                self.context.emit(each)
        if sample["state"] not in ("ok", "absent"):
            raise Unreadable(f"{sample['state']}: {sample['reason']}")
        return sample

    def _sample(self) -> None:
        for each in self.samplers.sample():
            self.context.emit(each)
        host = self._host_figures()
        if host is not None:
            for each in self._limits.observe(host):
                self.context.emit(each)

    def _host_figures(self) -> Mapping[str, Any] | None:
        return host_figures(self.samplers.reading(name).value for name in self._host.reads)

    def _log_snapshot(self) -> None:
        self.context.emit(self._event())

    def _event(self) -> Event:
        snapshot = self._document()
        self._snapshots += 1
        return event(
            "health_snapshot",
            "info",
            f"HEALTH {summary(snapshot)}",
            summary=summary(snapshot),
            snapshot=snapshot,
        )

    def _document(self) -> dict[str, Any]:
        readings = self.samplers.readings()
        unknown = {
            name: reading.reason for name, reading in readings.items() if reading.reason is not None
        }
        own = readings["guard"].value or dict.fromkeys(
            ("cpu_pct", "cpu_s", "helpers_cpu_s", "memory_bytes", "threads", "open_files")
        )
        guard = {**own, "events_dropped": self._dropped, "entries_lost": self._lost}
        return assemble(
            self.context.status(),
            host=self._host_figures(),
            gpus=readings["gpus"].value,
            guard=guard,
            unknown=unknown,
        )

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Event]:
        self._dropped = sum(header.dropped for header in ranks.values())
        self._lost = sum(header.lost for header in ranks.values())
        return ()

    def on_stop(self) -> Iterable[Event]:
        self._nvml.close()
        return (self._event(),)

    def snapshot(self) -> Mapping[str, Any]:
        readings = self.samplers.readings()
        return {
            "host": self._host_figures(),
            "gpus": readings["gpus"].value,
            "guard": readings["guard"].value,
            "unknown": {
                name: reading.reason
                for name, reading in readings.items()
                if reading.reason is not None
            },
            "snapshots": self._snapshots,
            "events_dropped": self._dropped,
            "entries_lost": self._lost,
        }
