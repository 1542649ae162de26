"""Over 100 000 steps (a million in `make soak`) the hook's memory stays flat, and training does not
notice when the supervisor dies in the middle."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from miner_guard.rank.flight import FlightReader
from miner_guard.state_dir import StateDir
from tests.support.listener import listening

TRAINING = """
import gc, json, os, signal, sys
import miner_guard

def own_bytes():
    # CPython keeps up to 2,000 freed tuples of each length, and each decision of the gate leaves
    # some, so memory grows by up to 290 kB per 200 decisions and stops after 2,000, as a run of
    # four million steps showed. A collection empties most of these lists.
    # RssAnon leaves out the flight record's pages, which are shared: the thread that copies the
    # record to the disk reads all of them a second after the start, at no particular step.
    gc.collect()
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

folder, reader, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
guard = miner_guard.init(folder)
memory = []
for number in range(steps):
    with guard.phase("data"):
        pass
    with guard.phase(f"made up {number}"):
        pass
    guard.add_cost(f"operation {number}", 0.001)
    if number % 1000 == 0:
        guard.may_upload(outer_step=1, inner_step=number)
    guard.step(outer_step=1, inner_step=number, loss=2.0, lr=1e-4)
    if number == steps // 2:
        os.kill(reader, signal.SIGKILL)
    if number in (steps * 6 // 10, steps * 8 // 10, steps - 1):
        memory.append(own_bytes())
guard.close(finished=True)
print(json.dumps({"memory": memory, "errors": guard.error_count}))
"""


@pytest.mark.parametrize(
    "steps", [100_000, pytest.param(1_000_000, marks=[pytest.mark.long, pytest.mark.timeout(1500)])]
)
def test_memory_stays_flat_and_the_supervisor_may_die_in_the_middle(
    tmp_path: Path, steps: int
) -> None:
    state = StateDir(tmp_path)
    with listening(state.socket) as supervisor:
        training = subprocess.run(
            [sys.executable, "-c", TRAINING, str(tmp_path), str(supervisor.pid), str(steps)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=150 * steps / 100_000,
        )
    assert supervisor.wait() == -signal.SIGKILL
    answer = json.loads(training.stdout.splitlines()[-1])
    # One-time loading falls into one of the two stretches, 12 bytes a step show in both.
    growth = [late - early for early, late in itertools.pairwise(answer["memory"])]
    print(f"{steps} steps: {growth} bytes more after 60-80 % and 80-100 % of them")
    assert min(growth) < 250_000, f"the hook keeps something for every step: {growth}"
    assert answer["errors"] == 0
    now = FlightReader(state.flight_of(0)).now()
    assert now is not None
    assert (now.state, now.total_steps, now.inner_step) == ("finished", steps, steps - 1)
    assert now.dropped > 0
    assert len(list(FlightReader(state.flight_of(0)).steps())) == 4096
