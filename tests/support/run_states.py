"""The situations of a run that people must be able to tell apart, as recorded states and events,
with the words and the axes that every surface shows for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miner_guard.record.events import Event, event
from miner_guard.record.status_document import NO_REPO, RunState, StatusDocument
from miner_guard.watch.state import Memory, judge

RESTARTING = event(
    "miner_restarting",
    "warning",
    "MINER RESTARTING in 4s (attempt 2 of 5): it ended with code 1",
    wait_s=4.0,
    attempt=2,
    max_restarts=5,
    cause="it ended with code 1",
)
HANG = event(
    "hang_detected",
    "critical",
    "HANG DETECTED: rank 1 in data for 912s, ranks 0,2-3 waiting in allreduce",
    detail="rank 1 in data for 912s, ranks 0,2-3 waiting in allreduce",
    culprits=[1],
    idle_s=912.0,
    limit_s=300.0,
)
STRAGGLER = event(
    "straggler",
    "warning",
    "STRAGGLER: rank 12 works 14.2s a step",
    rank=12,
    detail="works 14.2s a step",
    score=0.6,
)
OUT_OF_MEMORY = event(
    "incident",
    "error",
    "INCIDENT cuda_oom: c Fix: Halve the batch.",
    label="cuda_oom",
    cause="c",
    fix="Halve the batch.",
    excerpt="x",
)
LOOP = event(
    "crash_loop",
    "critical",
    "CRASH LOOP: cuda_oom again after a restart; a restart does not fix it. Halve the batch.",
    detail="cuda_oom again after a restart; a restart does not fix it. Halve the batch.",
    restarts=1,
)
FULL = event(
    "disk_full",
    "critical",
    "DISK FULL: cannot write guard.jsonl (No space left on device); the miner keeps running",
    what="guard.jsonl",
    reason="No space left on device",
)
NAN = event(
    "loss_nan", "critical", "Loss is NaN or Inf at step 72", step=72, loss="NaN", outer_step=62
)
SAVED = event(
    "checkpoint_saved",
    "info",
    "CHECKPOINT SAVED: /data/step-600.pt in 8.00s",
    path="/data/step-600.pt",
    step=600,
    seconds=8.0,
    size_bytes=1,
)
GPU = event(
    "gpu_fault",
    "critical",
    "GPU FAULT: GPU 3 fell off the bus; restart the host",
    gpu=3,
    what="fell off the bus",
    next_step="restart the host",
)


def healthy(**changes: Any) -> dict[str, Any]:
    """A miner that publishes and trains; `uploads__repo__stale=True` changes one value."""
    status: dict[str, Any] = {
        "state": "running",
        "steps": {
            "outer_step": 56,
            "inner_step": 84,
            "total_steps": 84,
            "loss": 3.4,
            "grade": "good",
            "p50_s": 15.0,
        },
        "uploads": {
            "audit": {"outcome": "accepted", "detail": "12 of 12 rules"},
            "repo": {
                "stale": False,
                "due": False,
                "age_s": 612,
                "limit_s": 2000,
                "revision": "1.56.51",
            },
        },
        "hang": {"hang": None, "watching": True},
        "chain": {"registered": True},
        "ranks": {"cpu_fallback": {}},
        "costs": {"budget_status": "ok", "share_pct": 0.1},
    }
    for path, value in changes.items():
        *way, last = path.split("__")
        table = status
        for name in way:
            table = table.setdefault(name, {})
        table[last] = value
    return status


def memory_of(events: Iterable[Event]) -> Memory:
    """What the judge remembers after these events."""
    memory = Memory()
    for each in events:
        memory.take(each)
    return memory


@dataclass(frozen=True)
class Situation:
    """One situation and how it is shown."""

    name: str
    words: str
    colour: str
    axes: tuple[str, str, str | None]
    """Life, health, earning."""

    cause: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    events: Sequence[Event] = ()

    @property
    def life(self) -> str:
        return self.axes[0]

    @property
    def health(self) -> str:
        return self.axes[1]

    @property
    def earning(self) -> str | None:
        return self.axes[2]

    def state(self) -> RunState:
        """The judge's answer."""
        return judge(StatusDocument.from_json(healthy(**self.changes)), memory_of(self.events))

    def document(self) -> dict[str, Any]:
        """The document as a guard records it."""
        since = {"since": "2026-01-02T03:00:00.000000Z"}
        updated = {"updated": "2026-01-02T03:04:05.000000Z"}
        return {
            "verdict": {**self.state().to_json(), **since},
            **healthy(**self.changes),
            **updated,
        }


_NOTHING_PUBLISHED = {"uploads": {"repo": {"reason": NO_REPO}}, "chain": {}}
_BLOCKED = {
    "uploads__decision__allowed": False,
    "uploads__decision__reason": "base (60) < network (61). Reload the global state",
    "uploads__repo__due": True,
    "uploads__repo__age_s": 1862,
}
_REFUSED = {
    "state": "done",
    "exit_code": 69,
    "reason": "preflight: cuda: no NVIDIA driver",
    "steps": {},
    **_NOTHING_PUBLISHED,
}

SITUATIONS = (
    Situation("healthy", "EARNING", "green", ("training", "well", "yes"), "inner step 84"),
    Situation(
        "plain trainer",
        "TRAINING",
        "green",
        ("training", "well", None),
        "loss 3.40",
        _NOTHING_PUBLISHED,
    ),
    Situation(
        "preflight",
        "STARTING",
        "grey",
        ("starting", "well", None),
        "preflight",
        {"state": "starting", "steps": {}, **_NOTHING_PUBLISHED},
    ),
    Situation(
        "first minute",
        "STARTING",
        "grey",
        ("starting", "well", None),
        "no step yet",
        {"steps": {}, **_NOTHING_PUBLISHED},
    ),
    Situation(
        "before the first upload",
        "TRAINING",
        "green",
        ("training", "well", "not proven"),
        "nothing has been uploaded yet",
        {"uploads": {"repo": {"empty": True}}},
    ),
    Situation(
        "slow rank",
        "EARNING, degraded",
        "yellow",
        ("training", "degraded", "yes"),
        "rank 12 works 14.2s a step",
        events=(STRAGGLER,),
    ),
    Situation(
        "hang",
        "HUNG, earning at risk",
        "red",
        ("hung", "failing", "at risk"),
        "rank 1 in data for 912s",
        {"hang__hang": "rank 1 in data for 912s", "uploads__repo__age_s": 371},
    ),
    Situation(
        "nan",
        "EARNING AT RISK",
        "red",
        ("training", "failing", "at risk"),
        "loss has been NaN since step 72 of outer step 62; the published files are 1,817 s old",
        {"uploads__repo__age_s": 1817},
        (NAN,),
    ),
    Situation(
        "nan of a plain trainer",
        "TRAINING, failing",
        "red",
        ("training", "failing", None),
        "loss has been NaN since step 72 of outer step 62",
        _NOTHING_PUBLISHED,
        (NAN,),
    ),
    Situation(
        "crash",
        "RESTARTING, earning at risk",
        "yellow",
        ("restarting", "degraded", "at risk"),
        "it ended with code 1; restarting, attempt 2 of 5",
        {"state": "waiting"},
        (OUT_OF_MEMORY, RESTARTING),
    ),
    Situation(
        "crash loop",
        "STOPPED",
        "red",
        ("stopped", "failing", "at risk"),
        "crash loop: cuda_oom again after a restart; a restart does not fix it",
        {"state": "done", "exit_code": 75},
        (OUT_OF_MEMORY, LOOP),
    ),
    Situation(
        "blocked",
        "EARNING AT RISK",
        "yellow",
        ("training", "degraded", "at risk"),
        "the gate is blocking an upload that is due: base (60) < network (61); the published "
        "files are 1,862 s old (limit 2,000 s)",
        _BLOCKED,
    ),
    Situation(
        "stale",
        "NOT EARNING",
        "red",
        ("training", "failing", "no"),
        "the published files are 2,100 s old (limit 2,000 s)",
        {"uploads__repo__stale": True, "uploads__repo__age_s": 2100},
    ),
    Situation(
        "rejected",
        "NOT EARNING",
        "red",
        ("training", "failing", "no"),
        "validators would reject the published files",
        {"uploads__audit__outcome": "rejected"},
    ),
    Situation(
        "unregistered",
        "NOT EARNING",
        "red",
        ("training", "failing", "no"),
        "not registered",
        {"chain__registered": False},
    ),
    Situation(
        "cpu fallback",
        "EARNING AT RISK",
        "red",
        ("training", "failing", "at risk"),
        "CPU on ranks 0-3; no GPU: this machine has no NVIDIA driver",
        {
            "ranks__cpu_fallback": {str(rank): {"verdict": "certain"} for rank in range(4)},
            "health": {"gpus": {"state": "absent", "reason": "NVML Shared Library Not Found"}},
        },
    ),
    Situation(
        "disk full",
        "EARNING, degraded",
        "yellow",
        ("training", "degraded", "yes"),
        "the disk is full: guard.jsonl cannot be written (No space left on device)",
        events=(FULL,),
    ),
    Situation(
        "monitoring over budget",
        "EARNING, degraded",
        "yellow",
        ("training", "degraded", "yes"),
        "11.2%",
        {"costs__budget_status": "critical", "costs__share_pct": 11.2},
    ),
    Situation(
        "refused",
        "REFUSED",
        "red",
        ("refused", "failing", None),
        "preflight: cuda: no NVIDIA driver",
        _REFUSED,
    ),
    Situation(
        "finished",
        "FINISHED",
        "grey",
        ("finished", "well", None),
        "the miner finished its work",
        {
            "state": "done",
            "exit_code": 0,
            "last_exit": {"code": 0, "finished": True},
            **_NOTHING_PUBLISHED,
        },
    ),
    Situation(
        "paused",
        "STOPPED",
        "grey",
        ("stopped", "well", "at risk"),
        "an operator paused",
        {"state": "paused"},
    ),
    Situation(
        "stopped",
        "STOPPED",
        "grey",
        ("stopped", "well", None),
        "the guard stopped the miner (SIGTERM)",
        {"state": "done", "exit_code": 0, "reason": "SIGTERM", **_NOTHING_PUBLISHED},
    ),
    Situation(
        "restarts off",
        "STOPPED",
        "red",
        ("stopped", "failing", None),
        "restarts are off; the miner ended: exit code 3",
        {
            "state": "done",
            "exit_code": 3,
            "reason": "restarts are off; the miner ended: exit code 3",
            **_NOTHING_PUBLISHED,
        },
    ),
)
