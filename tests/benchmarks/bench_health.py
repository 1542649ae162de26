"""The cost of a health snapshot with 0, 4 and 8 GPUs, of a /metrics scrape, and of a report
covering a week."""

from __future__ import annotations

import functools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miner_guard.checks.samplers import HostSampler, OwnSampler, Samplers, host_figures
from miner_guard.checks.snapshot import assemble, summary
from miner_guard.config import LogSettings
from miner_guard.eventlog import catalog
from miner_guard.eventlog.emitter import Emitter
from miner_guard.eventlog.jsonl import JsonlSink
from miner_guard.eventlog.rendering import json_line
from miner_guard.eventlog.status_document import StatusDocument
from miner_guard.record.redaction import Redactor
from miner_guard.reporting import metrics
from miner_guard.reporting.report import render
from miner_guard.state_dir import StateDir
from miner_guard.system.clock import FakeClock, SystemClock
from tests.benchmarks.frame import Row, per_call

TITLE = "Health: one snapshot, one scrape, one report"
_STATUS: dict[str, Any] = {
    "state": "running",
    "restarts": 0,
    "steps": {
        "outer_step": 56,
        "inner_step": 84,
        "loss": 3.4,
        "p50_s": 15.2,
        "steps": 900,
        "goodput": {"training": 0.9},
        "per_rank": {str(rank): {"step_time_s": 15.0, "last_step_age_s": 3.0} for rank in range(8)},
    },
    "uploads": {"repo": {"age_s": 600}},
    "costs": {"share_pct": 0.1},
}


def _gpus(count: int) -> dict[str, Any]:
    row = {
        "state": "ok",
        "uuid": "GPU-1",
        "memory_used_bytes": 2e10,
        "memory_total_bytes": 8e10,
        "utilization_ratio": 0.97,
        "temperature_c": 60,
        "power_w": 300.0,
        "unread": {},
    }
    return {"state": "ok", "gpus": [{**row, "index": index} for index in range(count)]}


def _week(folder: Path) -> StateDir:
    state, clock = StateDir(folder), FakeClock()
    emitter = Emitter(clock, "r1", Redactor(), [JsonlSink(state.log, LogSettings())])
    snapshot = {
        "uploads": {"repo": {"age_s": 600}},
        "miner": {"goodput": 0.9},
        "costs": {"share_pct": 0.1},
        "gpus": _gpus(4),
    }
    for step in range(7 * 86400 // 15):
        clock.advance(15)
        figures = {
            "outer_step": step // 500,
            "inner_step": step % 500,
            "lr": 1e-4,
            "loss": 3.0,
            "step_time_s": 15.0,
        }
        emitter.emit(catalog.make_finding("inner_step", **figures, gpu_mem_gb=18.4))
        if step % 4 == 0:
            emitter.emit(catalog.make_finding("health_snapshot", summary="x", snapshot=snapshot))
    return state


def _both(what: str, work: Callable[[], object], calls: int) -> list[Row]:
    """Milliseconds of CPU, and of wall time."""
    clocks = {"CPU": time.process_time, "wall": time.perf_counter}
    return [
        Row(f"{what}, {name}", 1000 * per_call(work, calls, clock=clock), "ms")
        for name, clock in clocks.items()
    ]


def run() -> list[Row]:
    """Measure the CPU and wall time of everything that recurs, in one row each."""
    own, redactor = OwnSampler(), Redactor()
    samplers = Samplers(
        SystemClock(), 5.0, {**HostSampler({"state": Path("/")}).reads, "guard": own.sample}
    )
    rows = _both("sampling the host and the guard", samplers.sample, 50)
    own_sample = own.sample()
    host_sample = host_figures(
        reading.value for name, reading in samplers.readings().items() if name != "guard"
    )

    def snapshot(gpus: dict[str, Any]) -> str:
        document = assemble(_STATUS, host=host_sample, gpus=gpus, guard=own_sample, unknown={})
        return json_line(redactor.value({"msg": summary(document), "snapshot": document}))

    for count in (0, 4, 8):
        made = functools.partial(snapshot, _gpus(count))
        rows += _both(f"a snapshot with {count} GPUs, to its line", made, 200)
    status = {**_STATUS, "health": {"gpus": _gpus(8), "host": host_sample}}
    scrape = per_call(
        lambda: metrics.text(
            StatusDocument.from_json(json.loads(json.dumps(status))), version="1", age_s=1.0
        ),
        50,
    )
    rows.append(Row("a scrape of /metrics, 8 GPUs", 1000 * scrape, "ms"))
    with tempfile.TemporaryDirectory() as folder:
        state = _week(Path(folder))
        start = time.perf_counter()
        page = render(state)
        rows.append(
            Row("report of a week (40 320 steps)", time.perf_counter() - start, "s", "<= 5")
        )
        rows.append(Row("its size", len(page.encode()) / 1e6, "MB", "<= 5"))
    return rows
