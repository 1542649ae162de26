"""Runs logs that once held up the guard through `explain` and through a running guard: MB per
CPU-second, and resident memory."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.benchmarks.bench_incidents import (
    hostile,
    long_tracebacks,
    ordinary,
    tracebacks,
    worded_tracebacks,
)
from tests.benchmarks.frame import Row

TITLE = "Hostile logs: `explain` and the running guard, by CPU time"

_SIZE = 24_000_000
_FIRST = 4_000_000
"""Bytes to process first, so that imports and loading the known errors do not count."""

_RESOLUTION_S = 0.05
"""Smaller differences in CPU time are not measured."""

_START_S = 4.0
"""More than the guard's own startup takes."""

_CLI = [sys.executable, "-c", "from miner_guard.cli.main import main; main()"]


class Cost(NamedTuple):
    """The resources that a process used."""

    cpu_s: float
    peak_mib: float
    """Resident memory."""


def run() -> list[Row]:
    """Run each kind of text through `explain` and the guard."""
    with tempfile.TemporaryDirectory(prefix="bench-hostile-") as folder:
        log = Path(folder) / "miner.log"
        rows: list[Row] = []
        log.write_bytes(b"RuntimeError: CUDA error: out of memory\n")
        idle = _guard(log)
        rows.append(Row("guard, engine loaded: resident", idle.peak_mib, "MiB", "<= 60 MiB"))
        texts = {
            "steps": ordinary(20_000),
            **hostile(),
            "long tracebacks": long_tracebacks(1000),
            "short tracebacks that differ in numbers": tracebacks(20_000),
            "short tracebacks that differ in words": worded_tracebacks(20_000),
        }
        for name, text in texts.items():
            text *= (_FIRST + _SIZE) // len(text) + 1
            log.write_bytes(text[:_FIRST] + b"\n")
            first = _explain(log)
            log.write_bytes(text[: _FIRST + _SIZE] + b"\n")
            rows += _rows(_explain(log), first, f"`explain`, {name}")
            log.write_bytes(text[:_SIZE] + b"\n")
            rows += _rows(_guard(log), idle, f"guard, {name}")
        return rows


def _rows(took: Cost, base: Cost, title: str) -> Iterator[Row]:
    seconds = max(took.cpu_s - base.cpu_s, _RESOLUTION_S)
    yield Row(title, _SIZE / 1e6 / seconds, "MB per CPU-second", ">= 50")
    yield Row(f"{title}: resident", took.peak_mib, "MiB", "<= 60 MiB")


def _explain(log: Path) -> Cost:
    process = subprocess.Popen([*_CLI, "explain", "--json", str(log)], stdout=subprocess.DEVNULL)
    return _cost(process)


def _guard(log: Path) -> Cost:
    """The supervisor alone, without its helper processes."""
    with tempfile.TemporaryDirectory(prefix="bench-guard-") as state:
        script = f"echo error; sleep {_START_S}; cat {log}; sleep 2"
        process = subprocess.Popen(
            [*_CLI, "run", "--no-preflight", "--no-restart", "--", "sh", "-c", script],
            env={**os.environ, "MINER_GUARD_STATE_DIR": state},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return _cost(process)


def _cost(process: subprocess.Popen[bytes]) -> Cost:
    """Sample until the process ends. Its rusage would include its children."""
    observed = psutil.Process(process.pid)
    cost = Cost(0.0, 0.0)
    while process.poll() is None:
        try:
            times, memory = observed.cpu_times(), observed.memory_info()
        except psutil.Error:
            break
        if memory.rss:
            cost = Cost(times.user + times.system, max(cost.peak_mib, memory.rss / 2**20))
        time.sleep(0.02)
    process.wait()
    return cost
