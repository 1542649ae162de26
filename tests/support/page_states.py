"""Ten states of a miner as a guard would leave them in its state directory: for pictures and for
tests of the page. Time is simulated; the lines come from the catalogue, the verdicts from the
monitor that judges a real run."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miner_guard.config import LogSettings
from miner_guard.eventlog.catalog import make_finding
from miner_guard.eventlog.emitter import Emitter
from miner_guard.eventlog.jsonl import JsonlSink
from miner_guard.eventlog.redact import Redactor
from miner_guard.eventlog.status_document import RankSteps
from miner_guard.flight_recorder.records import StepRecord
from miner_guard.monitors.verdict import VerdictMonitor
from miner_guard.state_dir import StateDir, write_json
from miner_guard.system.clock import FakeClock, iso_utc
from tests.support.contexts import context
from uploads.ledger import Ledger

_INNER_STEPS = 100
_UPLOAD_EVERY = 10
_GIB = 1024**3
_GRADIENTS_BYTES = 812_345_678


class Story:
    """A run of a miner: train it, let things happen, then write what the guard knows."""

    def __init__(self, root: Path, *, ranks: int = 4, gpus: bool = True) -> None:
        self.state, self.clock = StateDir(root), FakeClock()
        self._ranks, self._random = ranks, random.Random(7)
        self.step_s, self.least_inner, self.may_push = 15.0, 50, True
        self._emitter = Emitter(
            self.clock, "3f9c21d7a04e", Redactor(), [JsonlSink(self.state.log, LogSettings())]
        )
        self.status: dict[str, Any] = {"state": "running", "run_id": "3f9c21d7a04e", "restarts": 0}
        # The guard composes a new document each time and never changes one.
        self._monitor = VerdictMonitor(
            context(root, clock=self.clock, status=lambda: dict(self.status))
        )
        self._ledger = Ledger(self.state.ledger)
        self._total = self._inner = 0
        self._outer, self._published = 56, -1e9
        self.slow_rank: int | None = None
        self.lost_s: dict[str, float] = {"hang": 0.0, "restart": 0.0}
        self._gpus = ranks if gpus else 0
        self.say("miner_started", pid=4711, command="torchrun miner.py", attempt=0)

    def say(self, event: str, **fields: Any) -> None:
        """Log an event and let the verdict know it."""
        finding = make_finding(event, **fields)
        self._emitter.emit(finding)
        for further in self._monitor.on_finding(finding):
            self._emitter.emit(further)

    def tick(self) -> None:
        """One turn of the guard: the verdict judges the status."""
        for finding in self._monitor.on_tick(self.clock.monotonic(), {}):
            self._emitter.emit(finding)

    def train(self, hours: float, *, loss: Callable[[float], Any] | None = None) -> None:
        """Steps of about 15 s, a push each `_UPLOAD_EVERY` steps from inner step 50 on."""
        for _ in range(int(hours * 3600 / self.step_s)):
            self._step(loss or self._usual_loss)

    def _usual_loss(self, total: float) -> float:
        return 2.6 + 2.4 * math.exp(-total / 900) + self._random.gauss(0, 0.03)

    def _step(self, loss: Callable[[float], Any]) -> None:
        seconds = self.step_s * self._random.gauss(1.0, 0.03)
        self.clock.advance(seconds)
        self._total += 1
        self._inner += 1
        if self._inner > _INNER_STEPS:
            self._outer, self._inner = self._outer + 1, 1
        value = loss(self._total)
        memory = 18.4 if self._gpus else None
        self.say(
            "inner_step",
            outer_step=self._outer,
            inner_step=self._inner,
            lr=2.1e-5,
            loss=value,
            step_time_s=seconds,
            gpu_mem_gb=memory,
        )
        steps = {
            "outer_step": self._outer,
            "inner_step": self._inner,
            "total_steps": self._total,
            "steps": self._total,
            "loss": value,
            "p50_s": self.step_s,
            "p95_s": 1.05 * self.step_s,
            "max_s": 1.14 * self.step_s,
            "grade": "good",
            "step_time_s": seconds,
            "last_step_age_s": 3.0,
            "phase": "forward",
            "per_rank": {str(rank): self._rank_row(rank, seconds) for rank in range(self._ranks)},
        }
        self.status["steps"] = steps
        number = value if isinstance(value, float) else math.nan
        self._monitor.on_steps(0, [StepRecord(number=self._total, loss=number)])
        if self._inner % _UPLOAD_EVERY == 0:
            self._push()
        if self._total % 4 == 0:
            self.observe()

    def _rank_row(self, rank: int, seconds: float) -> dict[str, Any]:
        waits = 0.4 if rank == self.slow_rank else 6.0 + self._random.random()
        took = seconds + self._random.gauss(0, 0.05)
        return {
            "step_time_s": took,
            "work_s": took - waits,
            "gpu_mem_gb": 18.4 if self._gpus else None,
            "last_step_age_s": 3.0,
            "phases_s": {"collective": waits},
        }

    def _push(self) -> None:
        if self._inner < self.least_inner:
            reason = f"inner_step ({self._inner}) < minimum ({self.least_inner})."
            self._decide(False, f"{reason} Validators will reject this!")
        elif not self.may_push:
            self._decide(False, "loss is NaN")
        else:
            self._decide(True, f"inner_step {self._inner} >= minimum {self.least_inner}")
            tag = f"5.{self._outer}.{self._inner}"
            self.say("upload_started", tag=tag)
            self.clock.advance(4)
            size = f"{_GRADIENTS_BYTES} bytes, checksum 9f2c01ab77de, pushed in 11.4s"
            self.say("upload_succeeded", tag=tag, detail=f"gradients 2s old, {size}")
            self._published = self.clock.monotonic()
            row = {"tag": tag, "bytes": _GRADIENTS_BYTES, "seconds": 11.4, "attempts": 1}
            self._ledger.upload(self.clock.wall(), "verified", **row, checksum="9f2c01ab77de")
            if self._inner % 50 == 0:
                self.say("audit_passed", detail="12 of 12 rules")
                self._uploads()["audit"] = {"outcome": "accepted", "detail": "12 of 12 rules"}

    def _decide(self, allowed: bool, reason: str) -> None:
        event = "upload_allowed" if allowed else "upload_blocked"
        steps = {"outer_step": self._outer, "inner_step": self._inner}
        self.say(event, reason=reason, kind="gradient", verdicts=[], **steps)
        decided = {"allowed": allowed, "reason": reason, "decided_at": self.clock.wall()}
        self._uploads()["decision"] = decided

    def _uploads(self) -> dict[str, Any]:
        uploads: dict[str, Any] = self.status.setdefault("uploads", {})
        return uploads

    def observe(self) -> None:
        """What the guard does once a minute and once a second: a snapshot, and a verdict."""
        age = self.clock.monotonic() - self._published
        known = age < 1e8
        repo = {
            "age_s": round(age) if known else None,
            "limit_s": 2000,
            "stale": known and age > 2000,
        }
        self._uploads()["repo"] = {**repo, "due": age > 1800, "revision": f"5.{self._outer}"}
        self.status["health"] = self._health()
        self._account()
        self.tick()
        self.clock.advance(6)
        self.tick()
        steps = self.status.get("steps", {})
        snapshot = {
            "uploads": self._uploads(),
            "miner": {"goodput": steps.get("goodput", {}).get("training")},
            "ranks": {
                rank: {"work_s": RankSteps.from_json(row).work_s}
                for rank, row in steps.get("per_rank", {}).items()
            },
            "gpus": self.status["health"]["gpus"],
        }
        self.say("health_snapshot", summary="running", snapshot=snapshot)

    def _account(self) -> None:
        trained = self._total * self.step_s
        whole = trained + sum(self.lost_s.values()) + 40.0
        shares = {"training": 0.96 * trained / whole, "upload": 0.04 * trained / whole}
        shares |= {name: seconds / whole for name, seconds in self.lost_s.items()}
        self.status.setdefault("steps", {})["goodput"] = {**shares, "init": 40.0 / whole}

    def _health(self) -> dict[str, Any]:
        rows = [
            {
                "index": gpu,
                "uuid": f"GPU-{gpu}",
                "state": "ok",
                "memory_used_bytes": 18.4 * _GIB,
                "memory_total_bytes": 24 * _GIB,
                "utilization_ratio": 0.72 if gpu == self.slow_rank else 0.97,
                "temperature_c": 71.0,
                "power_w": 310.0,
            }
            for gpu in range(self._gpus)
        ]
        absent = {"gpus": [], "state": "absent", "reason": "NVML Shared Library Not Found"}
        host = {"cpu_pct": 41.0, "memory_used_bytes": 30 * _GIB, "disk_free_bytes": 310 * _GIB}
        return {"gpus": {"gpus": rows} if rows else absent, "host": host}

    def silence(self, seconds: float, kind: str) -> None:
        """No rank steps; the guard watches."""
        steps = self.status["steps"]
        for _ in range(int(seconds // 30)):
            self.clock.advance(24)
            self.lost_s[kind] += 30
            if kind == "hang":
                steps["last_step_age_s"] += 30
                self.status["hang"] = {"watching": True, "limit_s": 300.0, "hang": None}
            self.observe()

    def write(self) -> StateDir:
        """status.json and the cost ledger, as they are now."""
        self.tick()
        self.clock.advance(6)
        self.tick()
        operations = {
            "guard.hook": _cost(self._total, 0.0003 * self._total, 0.0),
            "guard.loop": _cost(self._total, 0.0, 0.02 * self._total),
            "validation": _cost(self._total // 100 + 1, 0.9 * (self._total // 100 + 1), 0.0),
        }
        costs = {"operations": operations, "total_percentage": 0.21, "budget_percentage": 5.0}
        self.state.costs.parent.mkdir(exist_ok=True)
        write_json(self.state.costs, {**costs, "budget_status": "ok"})
        verdict = self._monitor.snapshot()
        self.status["costs"] = {"share_pct": 0.21}
        now = iso_utc(self.clock.wall())
        write_json(self.state.status, {"verdict": verdict, **self.status, "updated": now})
        self._ledger.close()
        return self.state


def _cost(calls: int, blocking_s: float, background_s: float) -> dict[str, Any]:
    return {
        "calls": calls,
        "total_time": blocking_s,
        "background_time": background_s,
        "percentage": blocking_s / 100,
        "impact": "negligible",
        "status": "active",
    }


def healthy(root: Path) -> Story:
    """Six hours of training, every push verified."""
    story = Story(root)
    story.train(6)
    return story


def hang(root: Path) -> Story:
    """Forty seconds after a hang was found: the guard restarts the miner, second attempt."""
    story = Story(root)
    story.train(4)
    story.silence(300, "hang")
    detail = "rank 1 in data for 306s, ranks 0,2-3 waiting in allreduce; at train.py:212 next_batch"
    story.say("hang_detected", detail=detail, culprits=[1], idle_s=306.0, limit_s=300.0)
    story.say("stack_dump", ranks="ranks 0-3", path="incidents/20260102T-hang")
    story.say("miner_exited", how="restarted: hang", code=None, runtime_s=14_700.0)
    restart = {"wait_s": 4.0, "attempt": 2, "max_restarts": 5}
    story.say("miner_restarting", **restart, cause=f"hang: {detail}")
    story.status.update(state="running", restarts=2, hang={"hang": None})
    story.silence(60, "restart")
    return story


def loss_nan(root: Path) -> Story:
    """The loss became NaN; the gate blocks every upload."""
    story = Story(root)
    story.train(3)
    story.may_push = False
    story.say("loss_nan", step=72, loss=None)
    story.train(0.5, loss=lambda _total: "NaN")
    return story


def blocked(root: Path) -> Story:
    """An upload is due, and the gate blocks it: the base is too old."""
    story = Story(root)
    story.train(3.05)
    reason = "base age 214 blocks > 200: validators reject gradients on this base"
    story._uploads()["decision"] = {"allowed": False, "reason": reason}
    for _ in range(3):
        steps = {"outer_step": 63, "inner_step": 60}
        story.say("upload_blocked", reason=reason, kind="gradient", verdicts=[], **steps)
        story.clock.advance(420)
        story.observe()
    return story


def disk_full(root: Path) -> Story:
    """The disk of the state directory is full; training continues."""
    story = Story(root)
    story.train(4)
    story.say("disk_full", what="guard.jsonl", reason="No space left on device")
    story.train(0.1)
    return story


def guard_gone(root: Path) -> Story:
    """The guard was killed: its last status is old. The caller ages the file."""
    return healthy(root)


def no_gpu(root: Path) -> Story:
    """The driver is gone and the model trains on the CPU."""
    story = Story(root, gpus=False)
    story.train(0.4)
    evidence = "device cpu, steps 16 times slower, no GPU memory"
    story.say("cpu_fallback", which="ranks 0-3", evidence=evidence, verdict="certain")
    certain = {str(rank): {"verdict": "certain"} for rank in range(4)}
    story.status["ranks"] = {"cpu_fallback": certain}
    story.observe()
    return story


def sixteen_ranks(root: Path) -> Story:
    """Sixteen ranks, and the others wait for the thirteenth."""
    story = Story(root, ranks=16)
    story.slow_rank = 12
    story.train(2)
    detail = "works 14.2s a step, the others 8.1s and wait for it"
    story.say("straggler", rank=12, detail=detail, score=0.57)
    story.train(0.1)
    return story


def week(root: Path) -> Story:
    """Seven days with a hang, a restart and a stale repo in them."""
    story = Story(root)
    story.step_s, story.least_inner = 60.0, 13
    for day in range(7):
        story.train(11)
        if day in (2, 5):
            story.silence(900, "hang")
            story.say(
                "hang_detected",
                detail="rank 3 in data for 906s",
                culprits=[3],
                idle_s=906.0,
                limit_s=300.0,
            )
            story.silence(300, "restart")
        if day == 4:
            story.may_push = False
            story.train(2)
            story.may_push = True
        story.train(12)
    return story


def crash_loop(root: Path) -> Story:
    """It failed five times in a row; the guard has given up."""
    story = Story(root)
    story.train(2)
    cause = "CUDA ran out of memory on rank 2: 23.4 of 24.0 GB in use"
    for attempt in range(1, 6):
        story.say("incident", label="cuda_oom", cause=cause, fix="use a smaller batch", excerpt="x")
        story.say("miner_exited", how="code 1 without being asked", code=1, runtime_s=61.0)
        if attempt < 5:
            restart = {"wait_s": 4.0, "attempt": attempt, "max_restarts": 5}
            story.say("miner_restarting", **restart, cause="cuda_oom, exit code 1")
        story.silence(60, "restart")
    story.say("crash_loop", detail="5 failures in 10 min; first cause: cuda_oom", restarts=5)
    story.status.update(state="done", restarts=5)
    return story


STATES: dict[str, Callable[[Path], Story]] = {
    "healthy": healthy,
    "hang": hang,
    "nan": loss_nan,
    "blocked": blocked,
    "disk-full": disk_full,
    "guard-gone": guard_gone,
    "no-gpu": no_gpu,
    "ranks-16": sixteen_ranks,
    "crash-loop": crash_loop,
    "week": week,
}
"""By name; each is a story to `write`."""
