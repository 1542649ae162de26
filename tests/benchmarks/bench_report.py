"""The report page: the CPU time to render it and to answer a scrape, its size, and the report on a
month."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

from miner_guard.cli import screen
from miner_guard.config import GateSettings
from miner_guard.reporting import metrics
from miner_guard.reporting.http_server import LiveReport, TimeRange
from miner_guard.reporting.report import render
from miner_guard.state_dir import StateDir
from miner_guard.system.clock import iso_utc
from tests.benchmarks.frame import Row, per_call
from tests.support.metric_sample import full_status
from tests.support.present_state import write_status

TITLE = "The page over a week, a month and a year (a step every 15 s, a snapshot a minute)"
_DAY_S = 86400
_BEGAN = 1_767_312_000.0
_SNAPSHOT_BYTES = 2500
"""The size of the parts of a snapshot (four ranks and GPUs) that the page does not read."""


def _log(folder: Path, days: int, step_s: int) -> StateDir:
    """The log of `days` days. With a step every 90 s, a year fits into 500 MB, the log's limit."""
    state = StateDir(folder)
    head = {"level": "info", "msg": "x", "run_id": "r1", "host": "h", "rank": 0}
    fields = {"outer_step": 1, "lr": 1e-4, "gpu_mem_gb": 18.4}
    filler = "x" * _SNAPSHOT_BYTES
    with state.log.open("w", encoding="utf-8") as log:
        for number, second in enumerate(range(0, days * _DAY_S, step_s)):
            begin = f'{{"ts": "{iso_utc(_BEGAN + second)}", "level": "info", "event": '
            numbers = {"inner_step": number % 100, "loss": 3.0 + number % 7, "step_time_s": 15.0}
            tail = json.dumps({**head, **fields, **numbers})[len('{"level": "info", ') :]
            log.write(f'{begin}"inner_step", {tail}\n')
            if number % max(1, 60 // step_s) == 0:
                snapshot = {
                    "uploads": {"repo": {"age_s": 1.0 * (number % 50)}},
                    "miner": {"goodput": 0.9},
                    "ranks": {str(rank): {"work_s": 9.0 + rank} for rank in range(4)},
                    "filler": filler if step_s < 60 else "",
                }
                tail = json.dumps({**head, "snapshot": snapshot})[len('{"level": "info", ') :]
                log.write(f'{begin}"health_snapshot", {tail}\n')
    return state


def run() -> list[Row]:
    """CPU seconds on this machine."""
    rows = []
    for name, days, step_s in (("week", 7, 15), ("month", 30, 15), ("year", 365, 90)):
        with tempfile.TemporaryDirectory() as folder:
            state = _log(Path(folder), days, step_s)
            start = time.process_time()
            page = render(state)
            report_s = time.process_time() - start
            if name == "week":
                rows.append(Row("a refresh of top", 1000 * _top_s(state), "ms CPU"))
            live = LiveReport(state, GateSettings())
            live.read()
            cpu = _render_s(live)
            target = "<= 5 s" if name == "month" else ""
            rows += [
                Row(f"a render of the live page over a {name}", 1000 * cpu, "ms CPU", "<= 50 ms"),
                Row(f"miner-guard report of a {name}", report_s, "s CPU", target),
                Row(f"the page of a {name}", len(page.encode()) / 1000, "KB", "<= 300 KB"),
            ]
    status = full_status()
    scrape = per_call(
        lambda: metrics.text(status, version="1", age_s=1.0), 20, clock=time.process_time
    )
    note = "reads the state, whatever the history"
    return [*rows, Row("a scrape of /metrics", 1000 * scrape, "ms CPU", note=note)]


def _top_s(state: StateDir) -> float:
    write_status(state.root, full_status().to_json())
    return per_call(lambda: screen.read(state, 120, 40), 20, clock=time.process_time)


def _render_s(live: LiveReport) -> float:
    def once() -> None:
        live._plots.clear()
        live.render(TimeRange())

    return per_call(once, 5, clock=time.process_time)
