"""Reports the results of `guard.diagnose` on the ranks: the GPU DIAGNOSTICS block, red flags, and
findings that concern several ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from miner_guard.checks import ranks
from miner_guard.checks.preflight import PreflightRequest, expectation_of
from miner_guard.eventlog.catalog import Finding, make_finding
from miner_guard.monitors.base import Context, Exit, Launch, Monitor
from miner_guard.rank.journal import DiagnosisEntry, JournalEntry, unpack


class DiagnosisMonitor(Monitor):
    """Assembles the parts of a diagnosis and reports what is wrong."""

    name = "diagnosis"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._gathered: list[dict[str, Any]] = []
        self._reports: list[dict[str, Any]] | None = None
        self._expected: int | None = None
        self._command: Sequence[str] = ()

    def on_launch(self, launch: Launch) -> Iterable[Finding]:
        self._command = launch.command
        self._gathered = []
        self._reports = None
        return ()

    def on_entry(self, rank: int, entry: JournalEntry) -> Iterable[Finding]:
        if not isinstance(entry, DiagnosisEntry):
            return ()
        part = entry.report
        if part.get("part", 0) == 0:
            self._gathered = []
        self._gathered.append(dict(part))
        if len(self._gathered) < int(part.get("parts", 1)):
            return ()
        return self._complete()

    def on_exit(self, end: Exit) -> Iterable[Finding]:
        # If a rank died halfway through its entries, report what arrived.
        return self._complete() if self._gathered and self._reports is None else ()

    def _complete(self) -> list[Finding]:
        self._reports = unpack(self._gathered)
        self._gathered = []
        question = PreflightRequest(self.context.config, self.context.state, self._command, {})
        self._expected = expectation_of(question, None).count
        low = self.context.config.gpu.low_memory_gb * 1024**3
        found = list(ranks.findings(self._reports, self._expected, low))
        return [*found, *_resources(self._reports)]

    def snapshot(self) -> Mapping[str, Any]:
        return {"ranks": self._reports, "expected_gpus": self._expected}


def _resources(reports: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Source 002's line: CPU cores, batch size, GPU and dtype of the first rank without an
    error."""
    first = next((r for r in reports if not r.get("error")), None)
    if first is None:
        return []
    return [
        make_finding(
            "resources",
            cpu_cores=len(os.sched_getaffinity(0)),
            batch_size=first.get("batch_size"),
            gpu=first.get("device_name") if first.get("cuda_available") else "none",
            dtype=first.get("dtype"),
        )
    ]
