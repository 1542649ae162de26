"""Queries over a million lines of guard.jsonl: `miner-guard logs` compared with `grep` and `jq` in
one run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.frame import Row

TITLE = "Queries over 1 million lines of guard.jsonl (one event in a hundred matches)"
_LINES = 1_000_000
_ROUNDS = 7


def _write(log: Path) -> None:
    with open(log, "w") as file:
        for number in range(_LINES):
            record = {
                "ts": "2026-01-02T03:04:05.678901Z",
                "level": "info",
                "event": "slow_step" if number % 100 == 0 else "inner_step",
                "msg": (
                    f"Outer Step: 56 | Inner Step: {number} | LR: 0.00002100 | Loss: 3.40 | "
                    "Step Time: 15.2s"
                ),
                "run_id": "0123456789ab",
                "host": "miner-host",
                "rank": number % 4,
                "outer_step": 56,
                "inner_step": number,
                "lr": 2.1e-05,
                "loss": 3.4,
                "step_time_s": 15.2,
                "gpu_mem_gb": 18.45,
            }
            file.write(json.dumps(record) + "\n")


def _seconds(command: list[str]) -> float:
    start = time.perf_counter()
    # Write to a pipe that someone reads: grep stops at its first match if its output is /dev/null.
    subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return time.perf_counter() - start


def run() -> list[Row]:
    """The time that each takes, and the ratios."""
    guard = str(Path(sys.executable).with_name("miner-guard"))
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "guard.jsonl"
        _write(log)
        query = [guard, "logs", "--state-dir", folder, "--event", "slow_step", "--json"]
        # Take turns, and keep the best of each: other work on the machine can only add time.
        rounds = [
            (_seconds(query), _seconds(["grep", '"event": "slow_step"', str(log)]))
            for _ in range(_ROUNDS)
        ]
        ours, grep = (min(times) for times in zip(*rounds, strict=True))
        rows = [
            Row(
                "miner-guard logs --event",
                ours,
                "s",
                note="the whole command, Python's start included",
            ),
            Row("grep", grep, "s"),
            Row("miner-guard logs / grep", ours / grep, "×", "<= 2"),
        ]
        if shutil.which("jq"):
            jq = _seconds(["jq", "-c", 'select(.event == "slow_step")', str(log)])
            rows += [Row("jq", jq, "s"), Row("jq / miner-guard logs", jq / ours, "×", ">= 5")]
        else:
            rows.append(Row("jq", None, "s", note="jq is not installed"))
    return rows
