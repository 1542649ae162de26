"""Runs the demo's two ranks under a guard, and repeatedly kills and restarts them."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.faults.guarded import Guarded
from tests.support import requires
from tests.support.present_state import status_of
from tests.support.waiting import until

ON_DISK_EVERY = 10
SETTINGS = {
    "restart.backoff_s": 0.2,
    "miner.stop_timeout_s": 20,
    "health.snapshot_every_s": 600,
    "logs.step_lines_per_s": 100,
}


class RestartedDemo:
    """The demo's steps, its ranks, and the checkpoint that it resumed from."""

    def __init__(self, guarded: Guarded, folder: Path) -> None:
        requires.module("torch")
        self.guarded = guarded
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        options = ["--work", str(folder / f"work-{guarded.token}"), "--steps", "100000"]
        options += ["--effective-batch-size", "4", "--batch-size", "2"]
        options += ["--checkpoint-every", str(ON_DISK_EVERY)]
        options += ["--upload-steps", "100000", "--inner-steps-per-outer", "100000"]
        self._command = [sys.executable, *launcher, "-m", "miner_guard.demo.train", *options]
        self.resumed = 0

    def start(self) -> None:
        self.guarded.start(self._command, settings=SETTINGS)

    def ranks(self) -> list[int]:
        ranks = status_of(self.guarded.state.root)["rank_processes"]
        return [ranks[name]["pid"] for name in sorted(ranks)]

    def at(self) -> int:
        """The last step that is known to be complete."""
        steps = self.guarded.named("inner_step")
        return int(steps[-1]["inner_step"]) if steps else 0

    def reach(self, more: int) -> int:
        """Wait for this many more steps; returns the step reached."""
        goal = self.at() + more
        until(lambda: self.at() >= goal, 150, lambda: f"step {goal}: {self.guarded.tail()}")
        return self.at()

    def resume(self) -> dict[str, Any]:
        """Wait until the next launch has resumed and taken two steps."""
        self.resumed += 1
        event = self.guarded.wait_for(
            "checkpoint", self.resumed, seconds=150, line="CHECKPOINT RESUMED"
        )
        before = len(self.guarded.named("inner_step"))
        self.guarded.wait_for("inner_step", before + 2, seconds=150)
        return event

    def past_a_checkpoint(self) -> int:
        """Wait until disk and memory differ by more than a step; returns the step reached."""
        while (at := self.reach(3)) % ON_DISK_EVERY not in range(3, ON_DISK_EVERY - 1):
            pass
        return at

    def kill(self, *pids: int) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
