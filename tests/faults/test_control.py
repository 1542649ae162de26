"""`miner-guard ctl`: an operator sends requests to the running guard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.faults.guarded import REPO, Guarded, until

FAST = {"miner.stop_timeout_s": 3, "restart.backoff_s": 0.1}


def ctl(guarded: Guarded, *words: str) -> str:
    line = [sys.executable, "-m", "miner_guard", *words, "--state-dir", str(guarded.state.root)]
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_manual_restart_is_immediate_and_not_counted(guarded: Guarded) -> None:
    guarded.start(guarded.miner("process_tree", "stay"), "--max-restarts", "0", settings=FAST)
    until(lambda: b"family complete" in guarded.output.read_bytes(), 60, "the miner")
    ctl(guarded, "ctl", "restart")
    guarded.wait_for("miner_started", 2)
    assert guarded.named("miner_exited")[0]["level"] == "info"
    assert not guarded.named("miner_restarting")
    assert guarded.stop() == 0


def test_a_restart_that_would_cost_the_epoch_waits_for_its_end(guarded: Guarded) -> None:
    """Asked again, it restarts at once: the second launch of this client is in the epoch too."""
    state = "applying state epoch 3 step 40 (x -> {})"
    client = (
        f"echo '{state.format('Warmup')}'; while [ ! -e {guarded.state.root}/over ]; do sleep .1; "
        f"done; echo '{state.format('Waiting for members')}'; exec sleep 600"
    )
    attached = {**FAST, "miner.attach": "log", "miner.profile": "psyche"}
    guarded.start(["sh", "-c", client], settings=attached)
    guarded.wait_for("miner_started")
    until(lambda: "warmup" in ctl(guarded, "status", "--json"), 60, "the client's state")
    assert "in the state warmup; ask again" in ctl(guarded, "ctl", "restart")
    ctl(guarded, "ctl", "restart")
    guarded.wait_for("miner_started", 2)
    until(lambda: "warmup" in ctl(guarded, "status", "--json"), 60, "the client's state")
    assert "in the state warmup; ask again" in ctl(guarded, "ctl", "restart")
    # A crash comes first: then nothing is left to restart for.
    os.kill(guarded.named("miner_started")[1]["pid"], signal.SIGKILL)
    guarded.wait_for("miner_started", 3)
    until(lambda: "warmup" in ctl(guarded, "status", "--json"), 60, "the client's state")
    assert "in the state warmup; ask again" in ctl(guarded, "ctl", "restart")
    assert len(guarded.named("miner_started")) == 3
    (guarded.state.root / "over").touch()
    guarded.wait_for("miner_started", 4)
    assert guarded.stop() == 0


def test_a_stop_of_a_paused_guard_ends_it(guarded: Guarded) -> None:
    guarded.start(["false"], settings={**FAST, "restart.backoff_s": 60})
    guarded.wait_for("miner_restarting")
    ctl(guarded, "ctl", "pause")
    guarded.wait_for("miner_paused")
    assert guarded.stop() == 0


@pytest.mark.parametrize("order", ["a stop", "a manual restart"])
def test_before_it_ends_ranks_that_look_for_requests_the_guard_has_them_save(
    guarded: Guarded, order: str
) -> None:
    """SIGTERM ends most ranks at once: an orderly stop at step 71 once resumed at step 50. Slurm
    and Kubernetes send it as their notice of a preemption."""
    guarded.start(guarded.miner("steps", 100000, 0.05, "checkpoints"), settings=FAST)
    guarded.wait_for("inner_step", 2)
    if order == "a stop":
        assert guarded.stop(signal.SIGTERM) == 0
    else:
        ctl(guarded, "ctl", "restart")
        guarded.wait_for("miner_started", 2)
        assert guarded.stop() == 0
    output = guarded.output.read_text()
    assert output.index("after a checkpoint, 3s to stop") < output.index("checkpoint asked for")
    assert output.index("checkpoint asked for") < output.index("MINER EXITED")


def test_a_checkpoint_request_reaches_the_rank(guarded: Guarded) -> None:
    guarded.start(guarded.miner("steps", 100000, 0.05, "checkpoints"), settings=FAST)
    guarded.wait_for("inner_step", 2)
    until(lambda: "asked 1 rank " in ctl(guarded, "ctl", "checkpoint"), 60, "a rank to ask")
    until(lambda: b"checkpoint asked for" in guarded.output.read_bytes(), 60, guarded.tail)
    assert guarded.stop() == 0
