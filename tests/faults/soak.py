"""`python -m tests.faults.soak MINUTES [SEED]`: four ranks, 200 steps a second, a fault every 20 s.
Prints a table of the guard's resource usage; `grown` names the resources that did not stay flat.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence as Rows
from dataclasses import astuple, dataclass
from pathlib import Path

from miner_guard.state_dir import StateDir
from tests.faults.bar import SETTINGS, STOP_S, libraries, mounted
from tests.faults.guarded import Guarded
from tests.faults.injected import TROUBLES, World, undo
from tests.support.waiting import until

STEP_S = 0.005
FAULT_EVERY_S = 20.0
DISK_MB = 400
"""Room for an hour: on a disk of 32 MB, run.db had none after four minutes, and the guard's memory
grew by what then waited for the disk."""


@dataclass(frozen=True)
class Sample:
    """Resource usage of guard and keeper."""

    minute: float
    guard_mb: float
    """Resident memory."""

    keeper_mb: float
    descriptors: int
    """Of both."""

    threads: int
    """Of both."""

    helpers_mb: float
    """Resident memory of the guard's helper processes."""

    log_mb: float
    """Size of guard.jsonl and its rotated files."""

    steps_per_s: float
    """Steps of rank 0 since the last sample."""


def soak(minutes: float, seed: int, folder: Path) -> list[Sample]:
    """Run the soak; returns one sample per fault. Raises AssertionError if the run or the shutdown
    fails."""
    guarded = Guarded(folder)
    samples: list[Sample] = []
    with mounted(folder, DISK_MB) as disk:
        if disk is not None:
            guarded.state = StateDir(disk.place / "state")
        clock, steps = folder / "clock", folder / "steps"
        world = World(guarded, disk, random.Random(seed), clock)
        clock.write_text("0")
        env = {"SHIFTED_CLOCK_STATE": str(clock), "LD_PRELOAD": libraries(folder)}
        try:
            guarded.start(
                guarded.miner("four_ranks", steps, STEP_S),
                settings={**SETTINGS, "logs.max_bytes": 1_000_000},
                env=env,
            )
            until(lambda: steps.exists() and _last_step(steps) > 20, 60, guarded.tail)
            began, last = time.monotonic(), (time.monotonic(), _last_step(steps))
            while time.monotonic() - began < 60 * minutes:
                due = time.monotonic() + FAULT_EVERY_S
                trouble = world.random.choice(TROUBLES)
                trouble(world)
                time.sleep(max(0.0, due - time.monotonic()))
                undo(world)
                assert guarded.processes[-1].poll() is None, (
                    f"the run ended after {trouble.__name__}"
                )
                now = (time.monotonic(), _last_step(steps))
                rate = (now[1] - last[1]) / (now[0] - last[0])
                last = now
                assert rate > 0, f"no step after {trouble.__name__}"
                samples.append(_sample(world, (now[0] - began) / 60, rate))
                figures = " | ".join(f"{value:.1f}" for value in astuple(samples[-1]))
                print(figures, trouble.__name__, flush=True)
            assert guarded.stop(seconds=STOP_S) == 0
            guarded.assert_nothing_left(1.0)
        finally:
            if disk is not None:
                disk.thaw()
            guarded.clean()
    return samples


def _last_step(path: Path) -> int:
    """The number in the last complete line. The file grows by 720,000 lines an hour, one per
    step."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().split(b"\n")
    return int(lines[-2].split()[1]) if len(lines) > 2 else 0


def _sample(world: World, minute: float, rate: float) -> Sample:
    guard, keeper = world.pids("guard"), world.pids("keeper")
    both = [Path(f"/proc/{pid}") for pid in (*guard, *keeper)]
    assert len(both) == 2, "guard and keeper"
    logs = world.guarded.state.root.glob("guard.jsonl*")
    return Sample(
        minute,
        _resident_mb(guard),
        _resident_mb(keeper),
        sum(len(list((proc / "fd").iterdir())) for proc in both),
        sum(len(list((proc / "task").iterdir())) for proc in both),
        _resident_mb(world.pids("helper")),
        sum(path.stat().st_size for path in logs) / 2**20,
        rate,
    )


def _resident_mb(pids: list[int]) -> float:
    pages = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def grown(samples: Rows[Sample]) -> list[str]:
    """Figures that grew from the second third to the last; caches fill in the first third."""
    third = len(samples) // 3
    second, last = samples[third : 2 * third], samples[2 * third :]
    found = []
    limits = (
        ("guard_mb", 1.05, 3.0),
        ("keeper_mb", 1.05, 1.0),
        ("helpers_mb", 1.1, 5.0),
        ("descriptors", 1.0, 4),
        ("threads", 1.0, 2),
    )
    for name, share, slack in limits:
        before = statistics.median(getattr(sample, name) for sample in second)
        after = statistics.median(getattr(sample, name) for sample in last)
        if after > before * share + slack:
            found.append(f"{name} grew from {before:.1f} to {after:.1f}")
    return found


def main(minutes: str, seed: str = "1") -> int:
    with tempfile.TemporaryDirectory() as folder:
        bad = grown(soak(float(minutes), int(seed), Path(folder)))
    print("; ".join(bad) or "flat")
    return min(len(bad), 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
