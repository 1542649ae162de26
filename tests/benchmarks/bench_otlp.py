"""The OTLP sender at 10,000 events a minute, against a receiver in another process."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from miner_guard.system.clock import iso_utc
from tests.benchmarks.frame import Row

TITLE = "OTLP export at 10,000 events a minute"
_PER_S = 10_000 / 60
_PACED_S = 30
_BACKLOG = 10_000
_RECEIVER = """
import sys, time
from tests.servers.otlp import Receiver
receiver = Receiver()
print(receiver.endpoint, flush=True)
seen = 0
while True:
    batch, receiver.logs = receiver.logs, []
    groups = [group for request in batch for group in request.resource_logs]
    seen += sum(len(scope.log_records) for group in groups for scope in group.scope_logs)
    print(seen, flush=True)
    time.sleep(0.1)
"""


def _line(number: int) -> str:
    record = {
        "ts": iso_utc(time.time()),
        "level": "info",
        "event": "inner_step",
        "msg": f"Outer Step: 56 | Inner Step: {number} | Loss: 3.40 | Step Time: 15.2s",
        "run_id": "r1",
        "host": "miner-host",
        "rank": number % 4,
        "outer_step": 56,
        "inner_step": number,
        "lr": 2.1e-05,
        "loss": 3.4,
        "step_time_s": 15.2,
        "gpu_mem_gb": 18.45,
    }
    return json.dumps(record) + "\n"


@contextmanager
def _sender(folder: Path) -> Iterator[tuple[psutil.Process, subprocess.Popen[str]]]:
    """The sender, and a receiver whose stdout counts the events that arrive."""
    receiver = subprocess.Popen(
        [sys.executable, "-c", _RECEIVER], stdout=subprocess.PIPE, text=True
    )
    assert receiver.stdout is not None
    order = {
        "state": str(folder),
        "run_id": "r1",
        "endpoint": receiver.stdout.readline().strip(),
        "min_level": "info",
        "metrics_every_s": 60,
        "guard_pid": 0,
    }
    sender = subprocess.Popen(
        [sys.executable, "-m", "miner_guard.reporting.otlp_sender"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert sender.stdin is not None
    sender.stdin.write(json.dumps(order) + "\n")
    sender.stdin.flush()
    try:
        yield psutil.Process(sender.pid), receiver
    finally:
        for process in (sender, receiver):
            process.kill()
            process.wait()


def _wait_for(receiver: subprocess.Popen[str], count: int) -> None:
    assert receiver.stdout is not None
    while int(receiver.stdout.readline()) < count:
        pass


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def run() -> list[Row]:
    """Measures the sender's CPU and memory while events arrive, then with a backlog."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = folder / "guard.jsonl"
        log.write_text(_line(0))
        with _sender(folder) as (sender, receiver), open(log, "a") as file:
            _wait_for(receiver, 1)
            started_s, begun, written = _cpu_s(sender), time.monotonic(), 0
            while (spent := time.monotonic() - begun) < _PACED_S:
                while written < spent * _PER_S:
                    file.write(_line(written))
                    written += 1
                file.flush()
                time.sleep(0.05)
            _wait_for(receiver, 1 + written)
            late_s = time.monotonic() - begun - _PACED_S
            busy = (_cpu_s(sender) - started_s) / _PACED_S
            memory = sender.memory_info().rss / 2**20
            begun = time.monotonic()
            file.writelines(_line(number) for number in range(_BACKLOG))
            file.flush()
            _wait_for(receiver, 1 + written + _BACKLOG)
            backlog_s = time.monotonic() - begun
    return [
        Row("sender, CPU of one core", 100 * busy, "%", "<= 5 %", f"{written} events"),
        Row("sender, resident memory", memory, "MiB", "<= 80 MiB"),
        Row("last event arrives after", late_s, "s", "<= 3 s"),
        Row("sender's CPU before the first event", started_s, "s", note="imports"),
        Row(f"backlog of {_BACKLOG} events", backlog_s, "s"),
    ]
