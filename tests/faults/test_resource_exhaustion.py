"""Guards that run out of descriptors, or start with state files that are damaged or not regular
files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

from miner_guard.state_dir import StateDir
from tests.faults.guarded import Guarded, until
from tests.support import requires
from tests.support.present_state import status_of

FAST = {"miner.stop_timeout_s": 3, "restart.backoff_s": 0.1}


def test_with_every_descriptor_in_use_the_miner_keeps_running(guarded: Guarded) -> None:
    """A guard that cannot open any more files reports it, keeps relaying, and recovers once it can
    open files again."""
    code = "import time\nfor n in range(100000): print('line', n, flush=True); time.sleep(0.05)"
    settings = {**FAST, "health.snapshot_every_s": 1, "logs.level": "warning"}
    guard = guarded.start([sys.executable, "-c", code], settings=settings)
    guarded.wait_for("health_snapshot", seconds=60)
    pid = guarded.named("miner_started")[0]["pid"]

    def sampler(level: str) -> None:
        """Wait until a sampler fails (warning) or works again (info)."""
        until(
            lambda: any(
                e["level"] == level and "sampler" in e for e in guarded.named("guard_degraded")
            ),
            60,
            f"a sampler's {level}",
        )

    _limit(guarded.guard_pid, 3)
    size = guarded.output.stat().st_size
    sampler("warning")
    until(lambda: guarded.output.stat().st_size > size, 60, "the miner's output to continue")
    assert guard.poll() is None
    assert os.path.exists(f"/proc/{pid}")
    _limit(guarded.guard_pid, 1000)
    sampler("info")
    assert guarded.stop() == 0
    assert len(guarded.named("miner_started")) == 1


def test_a_miner_that_dies_without_free_descriptors_is_restarted_once_there_is_one(
    guarded: Guarded,
) -> None:
    """The guard once assumed that a process that it could not inspect was gone, and then waited
    forever."""
    guarded.start(guarded.miner("process_tree", "stay"), settings=FAST)
    until(lambda: b"family complete" in guarded.output.read_bytes(), 60, guarded.tail)
    _limit(guarded.keeper_pid, 3)
    os.kill(guarded.named("miner_started")[0]["pid"], signal.SIGKILL)
    until(lambda: "cannot inspect" in guarded.tail(), 60, guarded.tail)
    assert len(guarded.named("miner_started")) == 1
    assert not guarded.named("orphan_killed")
    _limit(guarded.keeper_pid, 1000)
    guarded.wait_for("miner_started", 2)
    assert len(guarded.named("orphan_killed")) == 6
    assert guarded.stop() == 0


def _limit(pid: int, descriptors: int) -> None:
    requires.tool("prlimit")
    subprocess.run(["prlimit", f"--pid={pid}", f"--nofile={descriptors}:"], check=True, timeout=10)


def test_damaged_files_of_the_last_run_delay_nothing(guarded: Guarded) -> None:
    """A full disk or a power cut may damage the ledger, the status, host.json and the sockets."""
    state: StateDir = guarded.state
    state.root.mkdir(parents=True, exist_ok=True)
    state.db.write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    for path in (state.host_facts, state.gate_inputs):
        path.write_bytes(b'{"processes": [\xff')
    for path in (state.socket, state.control):
        path.write_text("not a socket")
    state.gate_inputs.unlink()
    os.mkfifo(state.gate_inputs)
    state.log.write_bytes(b'{"event": "torn')
    settings = {
        **FAST,
        "repo.kind": "local",
        "repo.path": str(state.root / "repo"),
        "logs.step_lines_per_s": 100,
    }
    guarded.start(guarded.miner("steps", 20, 0.1, "finish"), settings=settings)
    assert guarded.processes[0].wait(60) == 0, guarded.tail()
    text = state.log.read_text()
    events = [json.loads(line) for line in text.splitlines()[1:]]
    assert len([e for e in events if e["event"] == "inner_step"]) == 20, guarded.tail()
    assert len([e for e in events if "FILE SET ASIDE" in e["msg"]]) >= 1
    assert status_of(state.root)["state"] == "done"
    assert "internal error" not in text
    assert "failed with" not in text, [line for line in text.splitlines() if "failed with" in line]
