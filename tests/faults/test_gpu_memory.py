"""Before the guard restarts the miner, GPU memory is back to its level before the launch, or the
guard reports that it is not."""

from __future__ import annotations

import os
import signal
import time

from tests.faults.guarded import Guarded
from tests.support.fake_nvml import FakeNvml, fake_nvml, nvml_library

__all__ = ["fake_nvml", "nvml_library"]

FAST = {"miner.stop_timeout_s": 3, "restart.backoff_s": 0.1, "health.snapshot_every_s": 1}
HELD = {"mem.used.2": 60 << 30}


def test_the_next_launch_waits_until_the_memory_is_free(
    guarded: Guarded, fake_nvml: FakeNvml
) -> None:
    guarded.start(
        ["sleep", "600"], settings={**FAST, "gpu.memory_settle_s": 120}, env=fake_nvml.env
    )
    _die_holding(guarded, fake_nvml)
    time.sleep(3)
    assert len(guarded.named("miner_started")) == 1
    fake_nvml.set({"mem.used.2": None})
    guarded.wait_for("miner_started", 2)
    assert not [e for e in guarded.named("guard_degraded") if "GPU memory" in e["msg"]]
    assert guarded.stop() == 0


def test_memory_that_stays_held_is_reported_and_the_miner_started_anyway(
    guarded: Guarded, fake_nvml: FakeNvml
) -> None:
    guarded.start(["sleep", "600"], settings={**FAST, "gpu.memory_settle_s": 1}, env=fake_nvml.env)
    _die_holding(guarded, fake_nvml)
    guarded.wait_for("miner_started", 2)
    (message,) = [e["msg"] for e in guarded.named("guard_degraded") if "GPU memory" in e["msg"]]
    expected = "1s after the stop, GPU memory is still above its level before the first launch"
    assert expected in message
    assert "60.0 GB" in message
    assert guarded.stop() == 0


def _die_holding(guarded: Guarded, fake_nvml: FakeNvml) -> None:
    """Kill the miner while something else holds its GPU memory."""
    guarded.wait_for("miner_started")
    # The job that reads the baseline was planned before those of the samples.
    guarded.wait_for("health_snapshot", 3)
    fake_nvml.set(HELD)
    os.kill(guarded.named("miner_started")[0]["pid"], signal.SIGKILL)
    guarded.wait_for("miner_restarting")
