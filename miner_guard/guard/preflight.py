"""The preflight: collects data, judges it, reports, and decides whether the miner may start.

It blocks for up to `[gpu] preflight_wait_s` plus the probes' deadlines, so run it in a separate
thread. The only file it writes is host.json, which tells the next run how many GPUs this host has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from miner_guard.checks.check import Check, Snapshot, counts
from miner_guard.checks.gpu import usable
from miner_guard.checks.preflight import PreflightRequest, judge
from miner_guard.eventlog.catalog import Finding, make_finding
from miner_guard.eventlog.write_errors import not_stored
from miner_guard.guard.collect import collect_snapshot
from miner_guard.record.events import event
from miner_guard.state_dir import StateDir, read_json, write_json
from miner_guard.system.clock import Clock, SystemClock

_AGAIN_S = 5.0
"""Interval between checks while a problem may still clear by itself."""

_EVENT_LEVEL = {"warn": "warning", "critical": "critical", "unknown": "warning"}


@dataclass(frozen=True)
class Outcome:
    """The preflight's result."""

    go: bool
    """Whether the miner may start."""

    checks: Sequence[Check]


def preflight(
    question: PreflightRequest,
    emit: Callable[[Finding], None],
    wait: Callable[[float], bool],
    *,
    clock: Clock | None = None,
    collect: Callable[[PreflightRequest, Callable[[float], bool]], Snapshot] = collect_snapshot,
) -> Outcome:
    """Check until no critical problem is left, one of them cannot clear by itself, or
    `preflight_wait_s` has passed.

    `wait(seconds)` pauses and returns True if the guard is stopping. `emit` is called in this
    thread.
    """
    timer = clock or SystemClock()
    settings = question.config.gpu
    end = timer.monotonic() + settings.preflight_wait_s
    reported: set[tuple[str, str]] = set()
    waiting = False
    while True:
        snapshot = collect(question, wait)
        checks = judge(snapshot)
        critical = [c for c in checks if c.level == "critical"]
        for check in checks:
            # Do not report a check again just because its reading changed (29.1 GB, then 29.2 GB).
            if (
                check.level != "ok"
                and (key := (f"{check.check}{check.gpu}", check.level)) not in reported
            ):
                reported.add(key)
                emit(finding_of(check))
        left = end - timer.monotonic()
        if not critical or left <= 0 or not all(c.may_clear for c in critical):
            break
        if not waiting:
            waiting = True
            emit(
                make_finding(
                    "preflight_waiting",
                    left_s=left,
                    what=", ".join(sorted({c.check for c in critical})),
                )
            )
        if wait(min(_AGAIN_S, left)):
            return Outcome(False, checks)
    go = not critical or settings.on_critical == "warn"
    if not go and any(c.check == "cuda.available" for c in critical):
        # Report it here because the miner does not start; otherwise its ranks would report it.
        emit(
            event(
                "cuda_unavailable",
                "critical",
                "CUDA NOT AVAILABLE - Model will run on CPU (VERY SLOW!)",
            )
        )
    n = counts(checks)
    emit(make_finding("preflight", level="critical" if critical else None, **n))
    if not critical:
        remember_gpus(question.state, snapshot, emit)
    return Outcome(go, checks)


def finding_of(check: Check) -> Finding:
    """Convert a check to a finding."""
    return make_finding(
        "preflight_finding",
        level=_EVENT_LEVEL[check.level],
        check=check.check,
        seen=check.seen,
        limit=check.limit,
        next_step=check.next_step or "nothing to do",
        gpu=check.gpu,
        outcome=check.level,
    )


def remember_gpus(state: StateDir, snapshot: Snapshot, emit: Callable[[Finding], None]) -> None:
    """Store the number of working GPUs in host.json, for the next run's `expect = "auto"`."""
    if snapshot.nvml is None or snapshot.nvml["state"] not in ("ok", "absent"):
        return
    count = usable(snapshot)
    document = read_json(state.host_facts)
    memory = document if isinstance(document, dict) else {}
    if memory.get("gpu_count") == count:
        return
    try:
        write_json(state.host_facts, {**memory, "gpu_count": count})
    except OSError as error:
        emit(not_stored(str(state.host_facts), error))
