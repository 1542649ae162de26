"""Before a launch: the preflight collects data, judges it, reports, and decides whether the miner
may start; a relaunch waits until the GPU memory of the last attempt is free.

The preflight blocks for up to `[gpu] preflight_wait_s` plus the probes' deadlines, so run it in a
separate thread. The only file it writes is host.json, which tells the next run how many GPUs this
host has.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miner_guard.checks import environment, gpu, host, miner_side
from miner_guard.checks.check import Check, Snapshot, counts
from miner_guard.checks.gpu import HELD_BYTES, usable, visible
from miner_guard.checks.nvml import NvmlSampler, levels
from miner_guard.checks.request import (
    PreflightRequest,
    expectation_of,
    folders_of,
    interpreter_of,
    profile_of,
)
from miner_guard.config import optional_deps
from miner_guard.exits import UNAVAILABLE
from miner_guard.record.events import Event, degraded, event, not_stored
from miner_guard.record.words import counted
from miner_guard.state_dir import StateDir, read_json, write_json
from miner_guard.system import probe
from miner_guard.system.clock import Clock, Once, SystemClock
from miner_guard.uploads.repos import credentials
from miner_guard.uploads.repos.base import TIMEOUT_S
from miner_guard.validators.checkout import version_of

_READINGS, _BETWEEN_READINGS_S = 3, 3.0
"""Take up to three readings of GPU memory, three seconds apart, as long as the latest shows a GPU
whose memory is in use."""


PROBE_TIMEOUT_S = 20.0
"""Deadline for one probe. If a driver hangs, the guard reports it instead of hanging too."""

_PROBE_PATIENCE_S = 160.0
"""How much longer a probe in the miner's interpreter may read from disk or compute: `import torch`
can take a minute from a cold disk."""

_STORAGE_S = 1.5 * TIMEOUT_S
"""Deadline for the storage's clock and state together."""


_SUBJECTS = (
    gpu.driver_checks,
    gpu.count_checks,
    gpu.cuda_checks,
    gpu.gpu_checks,
    gpu.held_memory_checks,
    host.host_checks,
    environment.environment_checks,
    environment.storage_checks,
    host.minimum_checks,
)


def judge(snapshot: Snapshot) -> list[Check]:
    """Run all checks on `snapshot`. Pure: the same snapshot gives the same checks."""
    return [check for checks in _SUBJECTS for check in checks(snapshot)]


def collect_snapshot(question: PreflightRequest, wait: Callable[[float], bool]) -> Snapshot:
    """Run all queries in parallel and wait for each until its deadline.

    `wait(seconds)` pauses and returns True if the guard is stopping, which ends the GPU memory
    readings.
    """
    sampler = NvmlSampler(PROBE_TIMEOUT_S, question.env)
    try:
        with ThreadPoolExecutor(max_workers=16, thread_name_prefix="preflight") as pool:
            return _snapshot(question, pool, sampler, wait)
    finally:
        sampler.close()


def _snapshot(
    q: PreflightRequest,
    pool: ThreadPoolExecutor,
    sampler: NvmlSampler,
    wait: Callable[[float], bool],
) -> Snapshot:
    repo, python = q.config.repo, interpreter_of(q.command, q.env)
    unread: dict[str, str] = {}
    unanswered: set[str] = set()

    def inside(what: str, **more: Any) -> Future[probe.Answer]:
        """Run a query in the miner's Python interpreter."""
        return pool.submit(
            probe.ask,
            Path(miner_side.__file__),
            {"what": what, **more},
            PROBE_TIMEOUT_S,
            python=python,
            env=dict(q.env),
            patience_s=_PROBE_PATIENCE_S,
        )

    def value(name: str, future: Future[probe.Answer]) -> Any:
        answer = future.result()
        if answer.reason is not None:
            unread[name] = answer.reason
            if not answer.answered:
                unanswered.add(name)
        return answer.value

    packages = inside("packages")
    paths = {"paths": folders_of(q)}
    host = pool.submit(probe.ask, "miner_guard.checks.host", paths, PROBE_TIMEOUT_S)
    storage = targets = None
    module, urls = "miner_guard.checks.environment", q.config.alerts.urls
    if repo.kind != "none":
        settings = {"repo": dataclasses.asdict(repo)}
        storage = pool.submit(probe.ask, module, settings, _STORAGE_S, env=dict(q.env))
    if urls:
        targets = pool.submit(probe.ask, module, {"alerts": [*urls]}, PROBE_TIMEOUT_S)
    nvml = sampler.sample()
    present = sum(1 for row in nvml["gpus"] if row["state"] != "gone")
    # A mask such as CUDA_VISIBLE_DEVICES is deliberate: do not expect the GPUs that it hides.
    if (shown := visible(q.env)) is not None:
        present = min(present, shown)
    expectation, torch, used = expectation_of(q, present), None, {}
    if q.torch or nvml["state"] != "absent" or expectation.expects_gpus:
        torch = value("torch", inside("torch"))
    if torch is not None:
        # Each GPU in a child process of its own: one that hangs must not block the others' answers.
        children = [inside("use", device=index) for index in range(torch["gpu_count"])]
        answers = enumerate(future.result() for future in children)
        used = {i: a.value or {"error": a.reason, "answered": a.answered} for i, a in answers}
    profile = profile_of(q.config)
    scripts = (path for path in map(Path, q.command) if path.suffix == ".py" and path.is_file())
    script = next(scripts, Path("."))
    alerts = {} if targets is None else value("alerts", targets) or {}
    return Snapshot(
        config=q.config,
        expectation=expectation,
        command=tuple(q.command),
        env=q.env,
        compute={} if profile is None else profile.compute,
        network=None if profile is None else profile.unpaid,
        clone=None if profile is None else version_of(script.parent, profile.read_from),
        nvml=nvml,
        torch=torch,
        cuda=used,
        held=_held(nvml, sampler, wait),
        packages=value("packages", packages),
        host=value("host", host),
        repo=None if storage is None else value("repo", storage),
        unusable_alerts=alerts.get("unusable", ()),
        missing_extras={e.name: names for e, names in optional_deps.missing_extras(q.config)},
        keys_file=credentials.problem(repo),
        unread=unread,
        unanswered=frozenset(unanswered),
    )


def _held(
    nvml: Mapping[str, Any], sampler: NvmlSampler, wait: Callable[[float], bool]
) -> tuple[Mapping[str, int], ...]:
    readings = [levels(nvml)]
    while any(v >= HELD_BYTES for v in readings[-1].values()) and len(readings) < _READINGS:
        if wait(_BETWEEN_READINGS_S):
            break
        readings.append(sampler.memory_levels() or {})
    return tuple(readings)


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
    emit: Callable[[Event], None],
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
    timer, settings = clock or SystemClock(), question.config.gpu
    end = timer.monotonic() + settings.preflight_wait_s
    reported, waiting = Once(), Once()
    while True:
        snapshot = collect(question, wait)
        checks = judge(snapshot)
        critical = [c for c in checks if c.level == "critical"]
        for check in checks:
            # Do not report a check again just because its reading changed (29.1 GB, then 29.2 GB).
            fact = (check.check, check.gpu, check.level)
            if check.level != "ok" and not _irrelevant(check, snapshot) and reported.first(fact):
                emit(event_of(check))
        remaining_s = end - timer.monotonic()
        if not critical or remaining_s <= 0 or not all(c.may_clear for c in critical):
            break
        if waiting.first():
            what = ", ".join(sorted({c.check for c in critical}))
            text = f"PREFLIGHT WAITING: up to {remaining_s:.0f}s, this may clear by itself: {what}"
            emit(event("preflight", "info", text, left_s=remaining_s, what=what))
        if wait(min(_AGAIN_S, remaining_s)):
            return Outcome(False, checks)
    go = not critical or settings.preflight == "warn"
    if not go and any(c.check == "cuda.available" for c in critical):
        # Report it here because the miner does not start; otherwise its ranks would report it.
        text = "CUDA NOT AVAILABLE - Model will run on CPU (VERY SLOW!)"
        emit(event("cuda_unavailable", "critical", text))
    n = counts(checks)
    # `grep -i warning` must not find a start without any.
    words = [f"{n['ok']} ok", *([counted(n["warn"], "warning")] if n["warn"] else [])]
    words += [f"{n[level]} {level}" for level in ("critical", "unknown") if n[level]]
    text = f"PREFLIGHT: {', '.join(words)}"
    emit(event("preflight", "critical" if critical else "info", text, **n))
    if not critical:
        remember_gpus(question.state, snapshot, emit)
    return Outcome(go, checks)


def _irrelevant(check: Check, snapshot: Snapshot) -> bool:
    """Whether a check only says that GPUs are unknown where none is expected: `doctor` prints that,
    a run on the CPU does not repeat it at each start."""
    about_gpus = check.check.startswith(("driver.", "gpu.", "cuda."))
    return check.level == "unknown" and about_gpus and not snapshot.expectation.expects_gpus


def event_of(check: Check) -> Event:
    """Convert a check to an event."""
    return event(
        "preflight",
        _EVENT_LEVEL[check.level],
        f"PREFLIGHT {check.check}: {check.seen}; {check.next_step or 'nothing to do'}",
        check=check.check,
        seen=check.seen,
        limit=check.limit,
        next_step=check.next_step or "nothing to do",
        gpu=check.gpu,
        outcome=check.level,
    )


def remember_gpus(state: StateDir, snapshot: Snapshot, emit: Callable[[Event], None]) -> None:
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


class PreflightRunner:
    """Runs one preflight before the first launch. `start` returns immediately; the result reaches
    the supervisor's thread through `soon`."""

    def __init__(
        self,
        question: PreflightRequest,
        emit: Callable[[Event], None],
        soon: Callable[[Callable[[], None]], None],
    ) -> None:
        """`emit` and `soon` must be callable from any thread; `soon` runs the call that it is given
        on the supervisor's thread."""
        self._question, self._emit, self._soon = question, emit, soon
        self._stop = threading.Event()
        self._then: tuple[Callable[[], None], Callable[[int, str], None]] | None = None
        self.node_fault = ""
        """What is wrong with this machine's GPUs, if that kept the miner from starting."""

    def start(self) -> None:
        """Start the preflight while the supervisor prepares the launch."""
        if self._question.config.gpu.preflight:
            threading.Thread(target=self._look, name="preflight", daemon=True).start()

    def begin(self, launch: Callable[[], None], refuse: Callable[[int, str], None]) -> None:
        """After the preflight, call `launch()` or `refuse(exit code, reason)` on the supervisor's
        thread.

        Call this before that thread runs the calls passed to `soon`.
        """
        if self._question.config.gpu.preflight:
            self._then = (launch, refuse)
        else:
            launch()

    def cancel(self) -> None:
        """Stop waiting, and kill the probes because they could delay the guard's exit. The runner
        launches nothing after this."""
        self._stop.set()
        probe.end_all()

    def _look(self) -> None:
        try:
            outcome = preflight(self._question, self._emit, self._stop.wait)
        except Exception as error:  # noqa: BLE001 - a bug in the preflight must not keep the miner from starting; the error is reported
            what = (
                f"the preflight failed: {type(error).__name__}: {error}; starting the miner "
                "without it"
            )
            self._emit(degraded(what))
            outcome = None
        self._soon(lambda: self._decide(outcome))

    def _decide(self, outcome: Outcome | None) -> None:
        if self._stop.is_set() or self._then is None:
            return
        launch, refuse = self._then
        if outcome is None or outcome.go:
            launch()
            return
        critical = [c for c in outcome.checks if c.level == "critical"]
        self.node_fault = refusal([c for c in critical if c.check in gpu.NODE_FAULTS])
        refuse(UNAVAILABLE, f"preflight: {refusal(critical)}")


_MAX_NAMED = 4


def refusal(critical: Sequence[Check]) -> str:
    """What keeps the miner from starting: every check, because the first, such as a missing
    library, may say nothing of the machine."""
    named = [
        f"{check.check}: {check.seen}"
        + (f" (expected {check.limit})" if (check.limit or "")[:1].isdigit() else "")
        for check in critical[:_MAX_NAMED]
    ]
    more = critical[_MAX_NAMED:]
    return "; ".join([*named, *([f"and {len(more)} more"] if more else [])])


_SLACK_BYTES = 512 * 1024**2
"""Tolerance above the baseline, because drivers keep a little memory."""

_LOOK_EVERY_S = 0.5

Levels = Mapping[str, int]
"""Bytes in use, keyed by GPU UUID."""


def still_held(before: Levels, now: Levels) -> dict[str, int]:
    """Bytes above the baseline, for the GPUs whose memory is still in use."""
    over = {uuid: used - before[uuid] for uuid, used in now.items() if uuid in before}
    return {uuid: size for uuid, size in over.items() if size > _SLACK_BYTES}


class GpuMemoryWait:
    """Delays a relaunch, by `settle_s` at most, until GPU memory is back to its level before the
    first launch. It compares memory, because in a container NVML shows other pids, or none."""

    def __init__(
        self,
        read: Callable[[], Levels | None],
        settle_s: float,
        clock: Clock,
        *,
        report: Callable[[Event], None],
        soon: Callable[[Callable[[], None]], None],
    ) -> None:
        """`read` returns the bytes in use, keyed by GPU UUID, or None without a GPU; it blocks for
        at most the sampler's deadline and never raises."""
        self._read, self._settle_s, self._clock = read, settle_s, clock
        self._report, self._soon = report, soon
        self._before: Levels | None = None
        self._closed = threading.Event()

    def remember(self) -> None:
        """Record the baseline. Runs in a job thread during the first launch, before any miner
        allocates GPU memory."""
        self._before = self._read()

    def wait(self, proceed: Callable[[], None]) -> None:
        """Call `proceed` on the supervisor's thread when the memory is free. After `settle_s`
        seconds, report an event and call `proceed` anyway."""
        if self._before is None:
            proceed()
            return
        arguments = (self._before, proceed)
        threading.Thread(target=self._wait, args=arguments, name="gpu-settle", daemon=True).start()

    def _wait(self, before: Levels, proceed: Callable[[], None]) -> None:
        deadline = self._clock.monotonic() + self._settle_s
        while over := still_held(before, self._read() or {}):
            if self._clock.monotonic() >= deadline:
                gpus = ", ".join(f"{u} {size / 1024**3:.1f} GB" for u, size in sorted(over.items()))
                what = (
                    f"{self._settle_s:.0f}s after the stop, GPU memory is still above its level "
                    f"before the first launch: {gpus}; starting the miner anyway"
                )
                self._report(degraded(what))
                break
            if self._closed.wait(_LOOK_EVERY_S):
                return
        self._soon(proceed)

    def close(self) -> None:
        """Stop waiting and never call `proceed`."""
        self._closed.set()
