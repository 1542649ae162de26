"""Health in a real `miner-guard run`: snapshots on time; each sampler fails, hangs and recovers
without affecting the others."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from miner_guard.record.store import RunReader
from miner_guard.system.clock import parse_iso_utc
from tests.support.fake_nvml import FakeNvml, fake_nvml, nvml_library
from tests.support.faulty_files import FaultyFiles, faulty_files, faulty_library

__all__ = ["fake_nvml", "faulty_files", "faulty_library", "nvml_library"]

SETTINGS = {"MINER_GUARD_HEALTH__SNAPSHOT_EVERY_S": "1", "MINER_GUARD_GPU__PREFLIGHT": "false"}


class Run:
    """A guard over a miner that only sleeps."""

    def __init__(self, state: Path, env: dict[str, str]) -> None:
        self.state = state
        program = Path(sys.executable).with_name("miner-guard")
        self.process = subprocess.Popen(
            [program, "run", "--state-dir", state, "--", "sleep", "600"],
            cwd=state.parent,
            stdout=subprocess.DEVNULL,
            env={**os.environ, **SETTINGS, **env},
        )

    def events(self, *names: str) -> list[dict[str, Any]]:
        return [hit.record() for hit in RunReader(self.state / "run.db").events(names)]

    def until(
        self, what: str, seconds: float, event: str, since: str = "", **fields: Any
    ) -> dict[str, Any]:
        """The first event with these fields, after the time `since`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for record in self.events(event):
                if fields.items() <= record.items() and record["ts"] > since:
                    return record
            time.sleep(0.2)
        raise AssertionError(f"not within {seconds:.0f} s: {what}")

    def snapshot(self, what: str, since: str, true: Callable[[dict[str, Any]], bool]) -> None:
        """Wait for a snapshot after `since` that meets the condition; it shows the run as of the
        last tick."""
        deadline = time.monotonic() + 30
        while not any(
            true(r["snapshot"]) for r in self.events("health_snapshot") if r["ts"] > since
        ):
            assert time.monotonic() < deadline, f"not within 30 s: {what}"
            time.sleep(0.2)

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


def test_a_driver_may_fail_hang_and_recover_while_everything_else_is_read(
    run: Run, fake_nvml: FakeNvml
) -> None:
    run.until("a first snapshot", 30, "health_snapshot")
    fake_nvml.set({"hang.nvmlSystemGetDriverVersion": 600, "fail.init": 999})
    run.until("the failing driver", 60, "guard_degraded", sampler="gpus", level="warning")
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
    run.until("the recovery", 60, "guard_degraded", sampler="gpus", level="info")
    assert run.stop() == 0


def test_snapshots_come_on_time_without_drift_and_once_more_at_the_end(run: Run) -> None:
    deadline = time.monotonic() + 60
    while len(run.events("health_snapshot")) < 12:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert run.stop() == 0
    times = [parse_iso_utc(record["ts"]) for record in run.events("health_snapshot")]
    assert times[-1] >= parse_iso_utc(run.events("miner_stopping")[0]["ts"]), "one at the end"
    assert run.events("health_snapshot")[-1]["msg"].startswith("HEALTH stopped"), (
        "of how it ended, not of the last pulse"
    )
    scheduled = times[:-1]
    # On average to ± 10 %: a single one may be late on a busy machine, but lateness must not add
    # up.
    average = (scheduled[-1] - scheduled[0]) / (len(scheduled) - 1)
    assert average == pytest.approx(1.0, rel=0.1)
    assert all(later > earlier for earlier, later in itertools.pairwise(scheduled))
    gpus = run.events("health_snapshot")[-2]["snapshot"]["gpus"]
    assert [row["index"] for row in gpus["gpus"]] == [0, 1]


FAULTS = {
    "cpu": "/proc/stat",
    "memory": "/proc/meminfo",
    "shm": "/dev/shm",
    "network": "/proc/net/dev",
    "guard": "/proc/*/statm",
    "disk": "*/network-folder",
}
"""For each sampler, the path that it reads and that the tests make fail or hang."""

ONE_FIGURE = {
    "cpu": "cpu_pct",
    "memory": "memory_used_bytes",
    "shm": "shm_used_bytes",
    "network": "network_sent_bytes",
    "disk": "disk_free_bytes",
}


def _unknown_figures(snapshot: dict[str, Any]) -> set[str]:
    """The samplers whose figure is null in a snapshot, whatever reasons the snapshot gives."""
    nulls = {name for name, figure in ONE_FIGURE.items() if snapshot["host"][figure] is None}
    return nulls | ({"guard"} if snapshot["guard"]["memory_bytes"] is None else set())


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("mood", "reason", "groups"),
    [
        ("fail", "Input/output error", ({"cpu", "disk", "guard"}, {"memory", "shm", "network"})),
        # Only a folder may be on a network: /proc and /dev/shm answer or fail at once.
        ("hang", "no answer within 6 s", ({"disk"},)),
    ],
)
def test_each_sampler_is_null_with_its_reason_and_recovers_while_the_others_continue(
    tmp_path: Path,
    fake_nvml: FakeNvml,
    faulty_files: FaultyFiles,
    mood: str,
    reason: str,
    groups: tuple[set[str], ...],
) -> None:
    failed, works = {"level": "warning"}, {"level": "info"}
    folder = tmp_path / "network-folder"
    folder.mkdir()
    run = Run(
        tmp_path / "state",
        {**fake_nvml.env, **faulty_files.env, "MINER_GUARD_HEALTH__CHECKPOINT_DIR": str(folder)},
    )
    try:
        started = run.until("a second snapshot", 30, "health_snapshot")["ts"]
        for broken in groups:
            faulty_files.set(**{mood: [FAULTS[name] for name in broken]})
            messages = [
                run.until(
                    f"{name} to {mood}", 30, "guard_degraded", started, **failed, sampler=name
                )
                for name in broken
            ]
            assert all(reason in record["reason"] for record in messages), messages
            now = max(record["ts"] for record in messages)
            snapshot = run.until("the snapshot after it", 30, "health_snapshot", now)["snapshot"]
            assert _unknown_figures(snapshot) == broken == set(snapshot["unknown"])
            assert all(reason in why for why in snapshot["unknown"].values())
            assert len(snapshot["gpus"]["gpus"]) == 4
            faulty_files.set()
            for name in broken:
                run.until(f"{name} to recover", 30, "guard_degraded", now, **works, sampler=name)
            started = run.events("guard_degraded")[-1]["ts"]
            snapshot = run.until("a whole snapshot", 30, "health_snapshot", started)["snapshot"]
            assert (_unknown_figures(snapshot), snapshot["unknown"]) == (set(), {})
        times = [parse_iso_utc(record["ts"]) for record in run.events("health_snapshot")]
        assert max(b - a for a, b in itertools.pairwise(times)) < 10, "snapshots continued"
    finally:
        assert run.stop() == 0


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
        [program, "run", "--state-dir", state, "--", sys.executable, script],
        cwd=tmp_path,
        timeout=1400,
        stdout=subprocess.DEVNULL,
        env={**os.environ, **SETTINGS, "MINER_GUARD_HEALTH__SNAPSHOT_EVERY_S": "10"},
    )
    assert done.returncode == 0
    records = [hit.record() for hit in RunReader(state / "run.db").events({"health_snapshot"})]
    snapshots = [record["snapshot"] for record in records]
    assert len(snapshots) == pytest.approx(120, rel=0.1)
    memory = [snapshot["guard"]["memory_bytes"] for snapshot in snapshots]
    # The first minutes fill windows and caches; after that, usage stays flat.
    assert memory[-1] - memory[30] < 3 * 1024**2
    assert snapshots[-1]["costs"]["share_pct"] < 0.5
    assert snapshots[-1]["guard"]["cpu_s"] / 1200 < 0.02
