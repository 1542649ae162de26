"""Health through a real `miner-guard run`: snapshots on time, a GPU sampler that fails and hangs and recovers."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from miner_guard.clock import parse_iso_utc
from miner_guard.logquery import Query, search
from tests.fake_nvml import FakeNvml, fake_nvml, nvml_library

__all__ = ["fake_nvml", "nvml_library"]

SETTINGS = {
    "MINER_GUARD_HEALTH__SNAPSHOT_EVERY_S": "1",
    "MINER_GUARD_HEALTH__SAMPLE_EVERY_S": "1",
    "MINER_GUARD_HEALTH__SAMPLER_TIMEOUT_S": "2",
    "MINER_GUARD_GPU__PREFLIGHT": "false",
}


class Run:
    """A guard over a miner that only sleeps."""

    def __init__(self, state: Path, env: dict[str, str]) -> None:
        self.state = state
        program = Path(sys.executable).with_name("miner-guard")
        self.process = subprocess.Popen(
            [program, "run", "--state-dir", state, "--", "sleep", "600"], cwd=state.parent, stdout=subprocess.DEVNULL,
            env={**os.environ, **SETTINGS, **env},
        )  # fmt: skip

    def events(self, *names: str) -> list[dict[str, Any]]:
        return [hit.record() for hit in search(self.state / "guard.jsonl", Query(events=frozenset(names)))]

    def until(self, what: str, seconds: float, event: str, **fields: Any) -> dict[str, Any]:
        """The first event with these fields."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for record in self.events(event):
                if fields.items() <= record.items():
                    return record
            time.sleep(0.2)
        raise AssertionError(f"not within {seconds:.0f} s: {what}")

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(timeout=60)


@pytest.fixture
def run(tmp_path: Path, fake_nvml: FakeNvml) -> Iterator[Run]:
    fake_nvml.set(count=2)
    started = Run(tmp_path / "state", fake_nvml.env)
    yield started
    if started.process.poll() is None:
        started.stop()


def test_a_driver_that_fails_hangs_and_recovers_while_everything_else_is_read(run: Run, fake_nvml: FakeNvml) -> None:
    run.until("a first snapshot", 30, "health_snapshot")
    fake_nvml.set({"hang.nvmlSystemGetDriverVersion": 600, "fail.init": 999})
    run.until("the failing driver", 60, "sampler_failed", sampler="gpus")
    during = len(run.events("health_snapshot"))
    deadline = time.monotonic() + 30
    while len(run.events("health_snapshot")) < during + 3:
        assert time.monotonic() < deadline, "snapshots stopped with the driver"
        time.sleep(0.2)
    snapshot = run.events("health_snapshot")[-1]["snapshot"]
    assert snapshot["gpus"] is None
    assert snapshot["unknown"]["gpus"]
    assert snapshot["host"]["memory_used_bytes"] > 0
    fake_nvml.set({"hang.nvmlSystemGetDriverVersion": None, "fail.init": None})
    run.until("the recovery", 60, "sampler_recovered", sampler="gpus")
    assert run.stop() == 0


def test_snapshots_come_on_time_without_drift_and_once_more_at_the_end(run: Run) -> None:
    deadline = time.monotonic() + 60
    while len(run.events("health_snapshot")) < 12:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert run.stop() == 0
    times = [parse_iso_utc(record["ts"]) for record in run.events("health_snapshot")]
    assert times[-1] >= parse_iso_utc(run.events("miner_stopping")[0]["ts"]), "one at the end"
    assert run.events("health_snapshot")[-1]["msg"].startswith("HEALTH done"), "of how it ended, not of the last pulse"
    scheduled = times[:-1]
    # On average to ± 10 %: a single one may be late on a busy machine, but lateness must not add up.
    average = (scheduled[-1] - scheduled[0]) / (len(scheduled) - 1)
    assert average == pytest.approx(1.0, rel=0.1)
    assert all(later > earlier for earlier, later in itertools.pairwise(scheduled))
    gpus = run.events("health_snapshot")[-2]["snapshot"]["gpus"]
    assert [row["index"] for row in gpus["gpus"]] == [0, 1]


STEPS = """
import time
import miner_guard

guard = miner_guard.init()
start, step = time.monotonic(), 0
while time.monotonic() - start < 1200:
    time.sleep(0.5)
    step += 1
    guard.step(outer_step=1, inner_step=step, loss=3.0 - step / 10_000, lr=1e-4)
guard.close(finished=True)
"""


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_twenty_minutes_of_steps_leave_memory_flat_and_cost_next_to_nothing(tmp_path: Path) -> None:
    script, state = tmp_path / "train.py", tmp_path / "state"
    script.write_text(STEPS)
    program = Path(sys.executable).with_name("miner-guard")
    done = subprocess.run(
        [program, "run", "--state-dir", state, "--", sys.executable, script], cwd=tmp_path, timeout=1400,
        stdout=subprocess.DEVNULL, env={**os.environ, **SETTINGS, "MINER_GUARD_HEALTH__SNAPSHOT_EVERY_S": "10"},
    )  # fmt: skip
    assert done.returncode == 0
    records = [hit.record() for hit in search(state / "guard.jsonl", Query(events=frozenset({"health_snapshot"})))]
    snapshots = [record["snapshot"] for record in records]
    assert len(snapshots) == pytest.approx(120, rel=0.1)
    memory = [snapshot["guard"]["memory_bytes"] for snapshot in snapshots]
    # The first minutes fill windows and caches; from then on it stays as it is.
    assert memory[-1] - memory[30] < 3 * 1024**2
    assert snapshots[-1]["costs"]["share_pct"] < 0.5
    assert snapshots[-1]["guard"]["cpu_s"] / 1200 < 0.02
