"""The guard as PID 1 of a PID namespace, which is what a container's entry point is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests import needs
from tests.faults.guarded import REPO, TOKEN, Guarded, living, until

FAST = {"MINER_GUARD_MINER__STOP_TIMEOUT_S": "3", "MINER_GUARD_GPU__PREFLIGHT": "false"}
ZOMBIES = """
import os, subprocess, time
for _ in range(5):
    if os.fork() == 0:
        subprocess.Popen(["sleep", "0.2"], start_new_session=True)
        os._exit(0)
    os.wait()
print("orphans made", flush=True)
time.sleep(600)
"""


def test_it_reaps_forwards_and_leaves_nothing(guarded: Guarded) -> None:
    unshare = [needs.tool("unshare"), "--fork", "--pid", "--mount-proc"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode != 0:
        pytest.skip("PID namespaces are not permitted here")
    line = [*unshare, sys.executable, "-m", "miner_guard", "run", "--state-dir", str(guarded.state.root), "--"]
    env = {**os.environ, **FAST, TOKEN: guarded.token, "PYTHONPATH": str(REPO)}
    with guarded.output.open("wb") as out:
        outer = subprocess.Popen([*line, sys.executable, "-c", ZOMBIES], env=env, stdout=out, stderr=subprocess.STDOUT)
    guarded.processes.append(outer)
    until(lambda: b"orphans made" in guarded.output.read_bytes(), 30, "the miner")
    assert guarded.named("guard_started")[0]["pid"] == 1
    guard = next(pid for pid, words in living(guarded.token) if words.startswith(sys.executable) and " run " in words)
    until(lambda: not _zombies_of(guard), 30, "the orphans to be reaped")
    os.kill(guard, signal.SIGTERM)
    assert outer.wait(30) == 0
    guarded.assert_nothing_left()


def _zombies_of(guard: int) -> list[str]:
    time.sleep(0.2)
    listed = subprocess.run(["ps", "--ppid", str(guard), "-o", "stat="], capture_output=True, text=True).stdout
    return [state for state in listed.split() if state.startswith("Z")]
