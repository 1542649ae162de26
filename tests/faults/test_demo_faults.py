"""Each fault in the demo's numbers yields its own event and no other; the steps before it yield
none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.guarded import MINERS, Guarded
from tests.support import requires
from tests.support.launcher import TRAINING, launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

SETTINGS = {"health.snapshot_every_s": 600, "logs.step_lines_per_s": 100}
MAX_LENGTH = 400.0
JUDGED = {
    *("slow_step", "cpu_fallback", "loss_nan", "loss_spike", "loss_divergence", "loss_plateau"),
    *("overfit", "gpu_drop", "straggler", "hang_detected", "incident", "crash_loop"),
    "guard_degraded",
}
"""Events that report a problem with training."""


def run(guarded: Guarded, tmp_path: Path, steps: int, *faults: str) -> list[dict[str, Any]]:
    """The events that judge the run of a demo miner with `faults`, in order."""
    requires.module("torch")
    work = str(tmp_path / f"work-{guarded.token}")
    flags = f"--steps {steps} --effective-batch-size 16 --batch-size 8 --checkpoint-every 1000"
    flags += " --upload-steps 1000 --inner-steps-per-outer 1000"
    flags += "".join(f" --fault {fault}" for fault in faults)
    demo = ["-m", "miner_guard.demo.train", "--work", work, *flags.split()]
    miner = launch(2, *demo, imports=TRAINING)
    process = guarded.start(miner, settings=SETTINGS)
    assert process.wait(MAX_LENGTH) == 0, guarded.tail()
    return [e for e in guarded.events if e["event"] in JUDGED and e["level"] != "debug"]


def test_slow_spike_and_nan_are_each_reported_at_their_step_and_nothing_else(
    guarded: Guarded, tmp_path: Path
) -> None:
    # On both ranks, because noise in half of the samples is within the normal variation of such a
    # small batch.
    seen = run(guarded, tmp_path, 30, "slow@19", "spike@24:0", "spike@24:1", "nan@28")
    assert [(e["event"], e["level"]) for e in seen] == [
        ("slow_step", "warning"),
        ("loss_spike", "info"),
        ("loss_nan", "critical"),
    ]
    slow, spike, nan = seen
    assert slow["inner_step"] == 19
    assert slow["phases_s"]["data" if slow["rank"] == 1 else "forward"] > 5
    assert spike["step"] == 24
    # The weights are poisoned in step 28, the first loss that shows it is the next one's.
    assert nan["step"] == 29
    assert nan["examples"] == [29 * 16, 30 * 16 - 1]


@pytest.mark.long
def test_steps_that_stay_eight_times_as_long_are_reported_as_slow_and_nothing_else(
    guarded: Guarded, tmp_path: Path
) -> None:
    seen = run(guarded, tmp_path, 24, "cpu-fallback@12")
    times = [e["step_time_s"] for e in guarded.named("inner_step")]
    assert times[-1] > 4 * times[8], "the fault took effect"
    assert {e["event"] for e in seen} == {"slow_step"}


def test_the_rank_that_the_others_wait_for_is_named_and_cleared(
    guarded: Guarded, tmp_path: Path
) -> None:
    requires.module("torch")
    miner = launch(2, str(MINERS / "straggling.py"), guarded.token)
    process = guarded.start(miner, settings=SETTINGS)
    assert process.wait(MAX_LENGTH) == 0, guarded.tail()
    named = guarded.named("straggler")
    assert {(e["rank"], e.get("phase", "cleared")) for e in named} == {(1, "data"), (1, "cleared")}
    assert named[0]["score"] > 0.2
    assert named[-1]["level"] == "info"
    assert {e["event"] for e in guarded.events if e["event"] in JUDGED} == {"straggler"}


def test_a_rank_that_is_late_in_no_phase_is_named_by_its_collectives(guarded: Guarded) -> None:
    """All ranks step alike, and nothing names the work of the one or the wait of the other."""
    requires.module("torch")
    miner = launch(2, str(MINERS / "straggling.py"), guarded.token, "unnamed")
    process = guarded.start(miner, settings=SETTINGS)
    assert process.wait(MAX_LENGTH) == 0, guarded.tail()
    named = [e for e in guarded.named("straggler") if e["level"] != "info"]
    assert {e["rank"] for e in named} == {1}, guarded.tail()
    assert "collectives 0.2" in named[0]["detail"]
