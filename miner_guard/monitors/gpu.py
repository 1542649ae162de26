"""GPUs: reports faults while the miner runs, and checks the share of memory in use as source 002
does."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from miner_guard.checks.faults import Faults
from miner_guard.detectors.batch_argument import BatchChange, BatchPolicy, rewritten, value_of
from miner_guard.detectors.gpu_use import GpuUse, MemoryReading, Printed, parse
from miner_guard.detectors.model_sizes import size_of
from miner_guard.eventlog.catalog import Finding, make_finding
from miner_guard.eventlog.section import LastRead
from miner_guard.eventlog.status_document import GpusStatus, HealthStatus
from miner_guard.monitors.base import Context, Launch, Monitor
from miner_guard.rank.journal import DiagnosisEntry, JournalEntry, TrainingEntry, unpack
from miner_guard.rank.layout import Now
from miner_guard.system.once import Once

_GIB = 1024**3

_MAX_LINE_LENGTH = 4096
"""Longer lines of the miner's output are not GPU lines."""

_PRINTED = (b"GPU", b"Model: ")

_IDLE_BYTES = 300 * 1024**2
"""A GPU with less memory than this in use by all processes together is not used for training: even
a bare CUDA context takes more."""


class GpuMonitor(Monitor):
    """Reads the health monitor's NVML samples, the ranks' headers and the miner's lines; opens no
    device."""

    name = "gpu"
    words = frozenset(map(bytes.lower, _PRINTED))

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._settings = context.config.gpu
        self._policy = BatchPolicy(self._settings.max_relaunches)
        self._faults = Faults()
        self._nvml = GpusStatus()
        self._health = LastRead(HealthStatus)
        self._params: int | None = None
        self._model = self._settings.model_name
        self._last: Finding | None = None
        self._missing_argument = Once()
        self._forget_launch()

    def _forget_launch(self) -> None:
        self._use = GpuUse(self._settings)
        self._launch: Launch | None = None
        self._due: float | None = None
        self._first = True
        self._printed: Printed | None = None
        self._totals: dict[int, float] = {}
        self._busy_pct: list[float] = []
        """Utilization of the least busy GPU in each sample since the last check."""

    def on_launch(self, launch: Launch) -> Iterable[Finding]:
        self._forget_launch()
        self._launch = launch
        self._due = launch.started + self._settings.first_check_s
        return ()

    def on_entry(self, rank: int, entry: JournalEntry) -> Iterable[Finding]:
        if isinstance(entry, TrainingEntry):
            self._params = entry.params or self._params
            self._model = self._settings.model_name or entry.model_name or self._model
        elif isinstance(entry, DiagnosisEntry) and entry.report:
            reports = unpack([entry.report])
            self._totals |= {
                int(r["rank"]): float(r["total_bytes"]) for r in reports if r.get("total_bytes")
            }
        return ()

    def on_lines(self, lines: Sequence[bytes]) -> Iterable[Finding]:
        for line in lines:
            if len(line) <= _MAX_LINE_LENGTH and any(words in line for words in _PRINTED):
                self._read(parse(line.decode("utf-8", "replace")))
        return ()

    def _read(self, printed: Printed | None) -> None:
        if printed is None:
            return
        if printed.model is not None:
            self._model = self._settings.model_name or printed.model
        else:
            self._printed = printed

    def on_finding(self, finding: Finding) -> Iterable[Finding]:
        if (
            finding.event != "incident"
            or "oom" not in str(finding.fields.get("label"))
            or self._launch is None
        ):
            return ()
        if "host" in str(finding.fields.get("label")):
            # The host ran out of memory, not the GPU.
            return ()
        batch = self._batch()
        change = None if batch is None else self._policy.out_of_memory(batch)
        return () if change is None else self._apply(change)

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Finding]:
        yield from self._observe(now)
        if self._launch is None or self._due is None or now < self._due:
            return
        self._due = now + self._settings.check_every_s
        first, self._first = self._first, False
        readings = self._readings(ranks)
        self._busy_pct.clear()
        if not readings and not (first and self._is_due()):
            return
        step = max((r.inner_step for r in ranks.values() if r.inner_step is not None), default=None)
        if step is None and self._printed is not None:
            step = self._printed.step
        size = size_of(self._model, self._params, self._settings.large_model_params)
        for finding in self._use.check(
            readings, size=size, name=self._model, step=step, seconds=now - self._launch.started
        ):
            yield finding
            if finding.event == "gpu_usage":
                self._last = finding
                if first:
                    yield from self._relaunch(finding)

    def _observe(self, now: float) -> Iterator[Finding]:
        if self._settings.expect == 0:
            # The user chose the CPU: ignore the GPUs.
            return
        health = self._health.of(self.context.status().get("health"))
        if health.gpus.taken not in (None, self._nvml.taken):
            self._nvml = health.gpus
            busy = [row.get("utilization_ratio") for row in self._rows()]
            known = [100 * ratio for ratio in busy if ratio is not None]
            if known and len(known) == len(busy):
                self._busy_pct.append(min(known))
            yield from self._faults.observe([dict(row) for row in health.gpus.gpus], now)
        yield from self._faults.driver(health.unknown.get("gpus"), bool(self._rows()), now)

    def _is_due(self) -> bool:
        """Return True if the run should use a GPU: a setting says so, or the host has one."""
        if self._settings.expect != "auto":
            return self._settings.expect > 0
        return bool(self._nvml.gpus)

    def _readings(self, ranks: Mapping[int, Now]) -> list[MemoryReading]:
        """Readings from the best available source: the hook, the miner's lines, then NVML."""
        if not self._is_due():
            return []
        smallest = min(
            (r["memory_total_bytes"] for r in self._rows() if r.get("memory_total_bytes")),
            default=None,
        )
        mean_busy = statistics.fmean(self._busy_pct) if self._busy_pct else None
        hook = [
            MemoryReading(
                f"rank {rank}", header.allocated_bytes / _GIB, total / _GIB, "hook", mean_busy
            )
            for rank, header in sorted(ranks.items())
            if header.allocated_bytes and (total := self._totals.get(rank, smallest))
        ]
        if hook:
            return hook
        printed = self._printed
        if printed is not None and printed.used_gb is not None:
            total = printed.total_gb or (smallest / _GIB if smallest else None)
            if total:
                return [MemoryReading("miner", printed.used_gb, total, "printed", mean_busy)]
        return [
            MemoryReading(
                f"GPU {r['index']}",
                r["memory_used_bytes"] / _GIB,
                r["memory_total_bytes"] / _GIB,
                "nvml",
                mean_busy,
            )
            for r in self._rows()
            if r.get("memory_total_bytes") and (r.get("memory_used_bytes") or 0) >= _IDLE_BYTES
        ]

    def _rows(self) -> Sequence[Mapping[str, Any]]:
        return self._nvml.gpus

    def _batch(self) -> int | None:
        argument = self._settings.batch_argument
        return value_of(self._launch.command, argument) if argument and self._launch else None

    def _relaunch(self, usage: Finding) -> Iterator[Finding]:
        factor = usage.fields.get("factor") or 1.0
        if self._settings.on_underuse != "relaunch" or factor <= 1:
            return
        batch = self._batch()
        if batch is None:
            if self._missing_argument.first():
                argument = self._settings.batch_argument or "gpu.batch_argument (not set)"
                what = (
                    f"no relaunch with a larger batch: the miner's command does not set {argument} "
                    "to a whole number"
                )
                yield make_finding("guard_degraded", what=what)
            return
        change = self._policy.larger(
            batch, factor, f"GPU memory at {usage.fields['share_pct']:.0f}%"
        )
        if change is not None:
            yield from self._apply(change)
            self.context.control.relaunch(f"a larger batch: {change.old} -> {change.new}")

    def _apply(self, change: BatchChange) -> Iterator[Finding]:
        assert self._launch is not None
        argument = str(self._settings.batch_argument)
        self.context.control.use_command(rewritten(self._launch.command, argument, change.new))
        yield make_finding(
            "gpu_relaunch", argument=argument, old=change.old, new=change.new, why=change.why
        )

    def snapshot(self) -> Mapping[str, Any]:
        last = self._last.fields if self._last else {}
        return {
            "share_pct": last.get("share_pct"),
            "verdict": last.get("verdict"),
            "source": last.get("source"),
            "model_name": self._model,
            "params": self._params,
            "batch": self._batch(),
        }
