"""Over 100 000 steps (a million in `make soak`) the hook's memory stays flat, and training does not
notice when the supervisor dies in the middle."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.listener import listening

TRAINING = """
import gc, json, os, signal, sys
import miner_guard

def own_bytes():
    # CPython keeps up to 2,000 freed tuples of each length, and each decision of the gate leaves
    # some, so memory grows by up to 290 kB per 200 decisions and stops after 2,000, as a run of
    # four million steps showed. A collection empties most of these lists.
    # RssAnon leaves out the record's pages, which are shared.
    gc.collect()
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

folder, listener, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
guard = miner_guard.init(folder)
assert guard.supervised
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
        os.kill(listener, signal.SIGKILL)
    if number in (steps * 6 // 10, steps * 8 // 10, steps - 1):
        memory.append(own_bytes())
guard.close(finished=True)
print(json.dumps([memory, guard.error_count, guard.supervised]))
"""


@pytest.mark.parametrize(
    "steps", [100_000, pytest.param(1_000_000, marks=[pytest.mark.long, pytest.mark.timeout(1500)])]
)
def test_memory_stays_flat_and_the_supervisor_may_die_in_the_middle(
    tmp_path: Path, steps: int
) -> None:
    with listening() as listener:
        training = subprocess.run(
            [sys.executable, "-c", TRAINING, str(tmp_path), str(listener.process.pid), str(steps)],
            env={**os.environ, **listener.env},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=150 * steps / 100_000,
        )
    assert listener.process.wait() == -signal.SIGKILL
    memory, errors, supervised = json.loads(training.stdout.splitlines()[-1])
    # One-time loading falls into one of the two stretches, 12 bytes a step show in both.
    growth = [late - early for early, late in itertools.pairwise(memory)]
    print(f"{steps} steps: {growth} bytes more after 60-80 % and 80-100 % of them")
    assert min(growth) < 250_000, f"the hook keeps something for every step: {growth}"
    assert (errors, supervised) == (0, False)
