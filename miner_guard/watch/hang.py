"""Hang: no progress for too long. Decides when a lack of progress counts as one and which rank is
holding up the others, collects evidence, then applies `[hang] action`.

Only a finished step counts as progress; re-entering a data phase does not. The limit is
max(`min_s`, `factor` x the longest recent step), as NVRx calculates its timeouts. What a rank has
open with a longer allowance (a phase such as AllReduce, upload or evaluation, or an operation in
`tracker.track`) uses that instead, and while one rank is within its allowance the others may wait
for it. Before any rank has reported, output and CPU time count as progress.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil

from miner_guard.config import HangSettings
from miner_guard.exits import CRASH_LOOP
from miner_guard.rank.agree import LATE
from miner_guard.rank.layout import ENDED_STATES, Identity, Now, StepRecord, ranks_elsewhere
from miner_guard.record.events import Event, event, not_stored
from miner_guard.record.status_document import HangStatus
from miner_guard.record.words import GONE, IN_SHUTDOWN, rank_list
from miner_guard.system import processes
from miner_guard.validators.profiles import profile_of
from miner_guard.watch.base import Context, Events, Exit, Launch, Monitor, Records
from miner_guard.watch.evidence import (
    Scene,
    Subject,
    described_places,
    incident_folder,
    prune_incidents,
    subjects,
)

_RECENT_STEPS = 64
_UNOBSERVED_S = 15.0
"""Checks are about a second apart. A gap this long means that this process or the machine was
suspended."""

_IDLE_CPU_SHARE = 0.05
"""Share of one core. A launcher that polls its workers uses about 1 %; a process that loads,
compiles or tokenizes uses more."""

_COLLECTIVE = ("collective", "allreduce")
_ORDER = {
    "data": 0,
    "": 0,
    "forward": 1,
    "backward": 2,
    "optimizer": 3,
    **dict.fromkeys(_COLLECTIVE, 9),
}
"""Order of the phases within a step; a phase that is not listed (upload, validation) comes before
the collectives."""

_OTHER_PHASE = 4
_MAY_WAIT = frozenset({"", "forward", "backward", "optimizer", *_COLLECTIVE})
_UNTIMED = ("has not called init()", GONE)

FACTOR = 5.0
"""A hang lasts at least this many times the longest recent step (NVRx's calculated timeout)."""

GONE_S = 45.0
"""How long a launcher may take to end the other ranks after one has died: torchrun gives them 30 s
after SIGTERM."""

_MONITORING_S = 1800.0
"""Time allowed for an operation inside `tracker.track()` or `guard.track()`."""

_STACK_TIMEOUT_S = 10.0
"""How long the guard waits for the ranks' stacks."""


@dataclass(frozen=True)
class Hang:
    """No progress for longer than allowed."""

    culprits: tuple[int, ...]
    """Ranks that hold the others up; empty if none stands out."""

    detail: str
    idle_s: float
    limit_s: float
    lasting: bool = False
    """True if the hang persists even after more steps finish."""

    finished: bool = False
    """True if every rank had finished training, so only the exit is hanging."""


@dataclass(frozen=True)
class Processes:
    """The kernel's view of the ranks' processes."""

    gone: Collection[int] = ()
    """Ranks whose process no longer exists."""

    stopped: Collection[int] = ()
    """Ranks whose process is in state T, stopped by SIGSTOP or a debugger."""

    restarting: bool = False
    """All ranks of this node are gone, and torchrun had started them: it forms a new rendezvous."""

    absent: Collection[int] = ()
    """Ranks that have not called `init`."""

    elsewhere: int = 0
    """Number of ranks on other nodes, if the launcher reported it; the guard cannot see these
    processes."""


NOTHING_KNOWN = Processes()


class HangDetector:
    """Watches all ranks on one host. O(ranks) memory."""

    def __init__(self, settings: HangSettings) -> None:
        self._settings = settings
        self._allowances = settings.allowances
        self._durations: deque[float] = deque(maxlen=_RECENT_STEPS)
        self.launched(0.0)

    def launched(self, now: float) -> None:
        """Reset for a new launch, but keep the step times learned so far."""
        self._progress = now
        self._observed_at: float | None = None
        self._cpu: tuple[float, float] | None = None
        self._stepped = self._reported = False
        self._busy: set[int] = set()
        """Ranks that were within their allowance at the last check."""

        self._died: float | None = None
        """When a rank's death was first noticed."""

    def stepped(
        self, end: float, seconds: float, phases: Mapping[str, float] | None = None
    ) -> None:
        """Record that a rank finished a step that took `seconds`; `phases` gives the seconds spent
        in each phase.

        A phase with a separate allowance does not count towards the usual step time: with a
        ten-minute AllReduce in it, a later hang would be noticed only after fifty minutes.
        """
        allowed = sum(spent for name, spent in (phases or {}).items() if name in self._allowances)
        self._durations.append(max(0.0, seconds - allowed))
        self._progress = max(self._progress, end)
        self._stepped = True
        # Report a second stall like the first.
        self._reported = False

    def printed(self, now: float) -> None:
        """Record that the miner printed something, which counts as progress only until the first
        step."""
        if not self._stepped:
            self._progress = max(self._progress, now)

    def used_cpu(self, now: float, cpu_s: float) -> None:
        """Record the CPU seconds that the miner's processes have used in total; a clear increase
        counts as progress until the first step."""
        before, self._cpu = self._cpu, (now, cpu_s)
        if before is not None and cpu_s - before[1] > _IDLE_CPU_SHARE * (now - before[0]):
            self.printed(now)

    @property
    def limit_s(self) -> float:
        """Seconds currently allowed without a step, outside of what has a separate allowance."""
        if not self._stepped:
            return max(self._settings.first_step_s, self._settings.min_s)
        return max(self._settings.min_s, FACTOR * max(self._durations, default=0.0))

    def idle_s(self, now: float) -> float:
        return now - self._progress

    def check(
        self, now: float, ranks: Mapping[int, Now], processes: Processes = NOTHING_KNOWN
    ) -> Hang | None:
        """Judge the current state of the ranks. Reports a hang once, and again only after new
        progress."""
        if self._observed_at is not None and now - self._observed_at > _UNOBSERVED_S:
            self._progress += now - self._observed_at
        self._observed_at = now
        if self._reported:
            return None
        hang = self._judge(now, ranks, processes)
        self._reported = hang is not None
        return hang

    def _judge(self, now: float, ranks: Mapping[int, Now], processes: Processes) -> Hang | None:
        if not ranks:
            return self._before_init(now)
        limit_s = max([self.limit_s, *(a for r in ranks.values() for a, _ in self._open(r))])
        if self._deserted(now, ranks, processes):
            limit_s = GONE_S
        elif all(rank.state in ENDED_STATES for rank in ranks.values()):
            return self._after_the_end(now, ranks)
        elif processes.restarting:
            limit_s = max(self._settings.first_step_s, self.limit_s)
            if self.idle_s(now) <= limit_s:
                return None
        elif self._within_allowance(now, ranks, processes) or self.idle_s(now) <= self.limit_s:
            return None
        culprits = name_culprits(ranks, processes)
        return Hang(culprits, describe(now, ranks, culprits, processes), self.idle_s(now), limit_s)

    def late(self, now: float, ranks: Mapping[int, Now], allowed_s: float, what: str = "") -> Hang:
        """The event for ranks whose wait for a reply from the others timed out; uploads are then
        blocked. `what` is the waiting rank's report, which names the late node."""
        waiting = [rank.phase_since for rank in ranks.values() if rank.phase == "collective"]
        culprits = tuple(n for n, rank in sorted(ranks.items()) if rank.phase != "collective")
        detail = "a rank did not ask the gate when the others did"
        if waiting:
            detail = describe(now, ranks, culprits)
        detail += "; the ranks cannot agree on uploads for the rest of this launch"
        if not waiting:
            culprits = ()
        if what and not culprits:
            detail += f": {what}"
        idle_s = now - min(waiting, default=now - allowed_s)
        return Hang(culprits, detail, idle_s, allowed_s, lasting=True)

    def _before_init(self, now: float) -> Hang | None:
        """Judge a launch in which no rank has reported. Without a CPU reading, reports nothing,
        because a silent miner may be busy."""
        idle = self.idle_s(now)
        if self._cpu is None or idle <= self.limit_s:
            return None
        detail = "no rank has called init(), and the miner printed nothing and used no CPU for "
        return Hang((), f"{detail}{idle:.0f}s", idle, self.limit_s)

    def _deserted(self, now: float, ranks: Mapping[int, Now], processes: Processes) -> bool:
        """Whether a rank died and its launcher leaves the others waiting."""
        died = any(r in ranks and ranks[r].state not in ENDED_STATES for r in processes.gone)
        if processes.restarting or not died:
            self._died = None
            return False
        self._died = now if self._died is None else self._died
        return now - self._died > GONE_S

    def _after_the_end(self, now: float, ranks: Mapping[int, Now]) -> Hang | None:
        idle = now - max(rank.heartbeat for rank in ranks.values())
        if idle <= self._settings.exit_s:
            return None
        detail = (
            f"training ended on all ranks {idle:.0f}s ago, but the miner's process is still running"
        )
        finished = all(rank.state == "finished" for rank in ranks.values())
        return Hang((), detail, idle, self._settings.exit_s, finished=finished)

    def _open(self, rank: Now) -> Iterator[tuple[float, float]]:
        """What the rank has open that may take its own time, each as (allowance, end)."""
        allowance = (
            self._allowances.get(rank.phase) if rank.allowance_s is None else rank.allowance_s
        )
        if allowance is not None:
            yield allowance, rank.phase_since + allowance
        if rank.operation_since is not None:
            yield _MONITORING_S, rank.operation_since + _MONITORING_S

    def _within_allowance(self, now: float, ranks: Mapping[int, Now], processes: Processes) -> bool:
        """Whether a rank is in something long that may continue. Once it has ended, the usual limit
        counts from its end; if it exceeds its allowance, the limit is not extended.

        A phase nested in a long one declares the time that remains. When that is no longer than the
        usual limit, the limit counts from there, so both end at the same time.
        """
        until = {
            number: max((end for a, end in self._open(rank) if a > self.limit_s), default=0.0)
            for number, rank in ranks.items()
            if number not in processes.gone
        }
        busy = {number for number, end in until.items() if end >= now}
        if not busy and any(not until.get(number) for number in self._busy):
            self._progress = max(self._progress, now)
        self._busy = busy
        return bool(busy)


def name_culprits(
    ranks: Mapping[int, Now], processes: Processes = NOTHING_KNOWN
) -> tuple[int, ...]:
    """The ranks that hold the others up: missing, stopped or absent ones first, then those behind
    in steps, then those behind within the step.

    Empty if all ranks are at the same point.
    """
    for condition in (processes.gone, processes.stopped, processes.absent):
        if condition:
            return tuple(sorted(condition))
    if len(ranks) < 2:
        # A rank that is alone on its node may be waiting for a rank on another node: its phase may
        # contain a collective, and many miners name no phases.
        return tuple(
            number
            for number, rank in ranks.items()
            if not processes.elsewhere or rank.state in ENDED_STATES or rank.phase not in _MAY_WAIT
        )
    places = {number: (rank.total_steps, _place(rank)) for number, rank in ranks.items()}
    first = min(places.values())
    behind = tuple(sorted(number for number, place in places.items() if place == first))
    return behind if len(behind) < len(ranks) else ()


def _place(rank: Now) -> int:
    # A rank that has ended its training no longer waits for the others; they wait for it.
    if rank.state in ENDED_STATES:
        return -1
    return _OTHER_PHASE if _operating(rank) else _ORDER.get(rank.phase, _OTHER_PHASE)


def _operating(rank: Now) -> bool:
    """Return whether the rank is in a monitoring operation, and not in a collective inside it."""
    return rank.operation_since is not None and rank.phase not in _COLLECTIVE


def describe(
    now: float,
    ranks: Mapping[int, Now],
    culprits: Collection[int],
    processes: Processes = NOTHING_KNOWN,
) -> str:
    """Describe the hang, as in `rank 2 in data for 912s, ranks 0,1,3 waiting in allreduce`. Ranks
    at the same place are described together, with the longest time."""
    places = {n: _where(ranks.get(n), gone=n in processes.gone) for n in {*ranks, *culprits}}
    stopped = ": its process is stopped (state T)"
    behind: dict[tuple[str, str], list[int]] = {}
    waiting: dict[str, list[int]] = {}
    for number, place in sorted(places.items()):
        if number in culprits:
            state = stopped if number in processes.stopped else ""
            behind.setdefault((place, state), []).append(number)
        else:
            waiting.setdefault(place, []).append(number)
    words = [] if culprits else ["no rank stands out"]
    for (place, state), numbers in behind.items():
        since = min((_since(ranks[n]) for n in numbers if n in ranks), default=now)
        lasting = f" for {now - since:.0f}s" if place not in _UNTIMED else ""
        words.append(f"{rank_list(numbers)} {place}{lasting}{state}")
    doing = "waiting " if culprits else ""
    words += [f"{rank_list(numbers)} {doing}{place}" for place, numbers in waiting.items()]
    return ", ".join(words)


def _since(rank: Now) -> float:
    began = rank.operation_since
    return began if _operating(rank) and began is not None else rank.phase_since


def _where(rank: Now | None, *, gone: bool) -> str:
    if rank is None or gone:
        return _UNTIMED[gone and rank is not None]
    if rank.state in ENDED_STATES:
        return IN_SHUTDOWN
    if _operating(rank):
        return f"in {rank.operation}"
    if rank.phase:
        return f"in {rank.phase}"
    return "before its first step" if rank.total_steps == 0 else "between phases"


class RankProcesses:
    """Tracks the ranks' processes. Each call reads one /proc file per rank."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._identities: Mapping[int, Identity] = {}

    def observe(self) -> Processes:
        """The state of the ranks' processes; one that cannot be inspected counts as alive."""
        self._identities = self._records.identities()
        states = {rank: _state(one) for rank, one in self._identities.items()}
        gone = {rank for rank, state in states.items() if state == "gone"}
        elastic = any(one.local_world_size for one in self._identities.values())
        return Processes(
            gone=gone,
            stopped={rank for rank, state in states.items() if state in ("T", "t")},
            restarting=elastic and gone == states.keys(),
            absent=self._absent(),
            elsewhere=ranks_elsewhere(self._identities.values()),
        )

    def _absent(self) -> set[int]:
        """Ranks on this node that have not reported; known only if the launcher set the world
        size."""
        identities = list(self._identities.values())
        if not identities or any(one.local_world_size != one.world_size for one in identities):
            return set()
        return set(range(identities[0].world_size)) - self._identities.keys()


def _state(identity: Identity) -> str:
    try:
        status = processes.stat(identity.pid)
    except OSError:
        return "unknown"
    if status is None:
        return "unknown" if processes.exists(identity.pid) else "gone"
    if status.process.start != identity.process_start or status.state in "ZX":
        return "gone"
    return status.state


_CPU_EVERY_S = 30.0
_CPU_LOOKS = 10
"""While no rank reports, the monitor reads the miner's CPU time every `_CPU_EVERY_S`, or this many
times per hang limit if that is more often. Each reading scans all of /proc, so keep them rare."""


class HangMonitor(Monitor):
    """Feeds the detector and acts on its results; inactive while the miner is being stopped."""

    name = "hang"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._settings = context.config.hang
        self._detector = HangDetector(self._settings)
        profile = profile_of(context.config.miner)
        self._advice = {} if profile is None else profile.advice
        self._begin(None)

    def _begin(self, launch: Launch | None) -> None:
        self._processes = RankProcesses(self.context.records)
        self._last_incident: str | None = None
        self._ranks: Mapping[int, Now] = {}
        """The ranks' headers at the last tick."""

        self._hang: Hang | None = None
        self._launch = launch
        """None if no launch is running or the launch is being stopped."""

        self._cpu_read = float("-inf")

    def on_launch(self, launch: Launch) -> Events:
        self._detector.launched(launch.started)
        self._begin(launch)
        return ()

    def on_exit(self, end: Exit) -> Events:
        self._launch = self._hang = None
        return ()

    def on_steps(self, rank: int, steps: Sequence[StepRecord]) -> Events:
        for step in steps:
            self._detector.stepped(step.end, step.seconds, step.phases)
        if self._hang is not None and not self._hang.lasting:
            self._hang = None
        return ()

    def on_output(self, chunk: bytes) -> Events:
        # A client that repeats its state makes no progress, however often it says so.
        named = any(now.phase for now in self._ranks.values())
        if not self._ranks or (self.context.config.miner.attach == "log" and not named):
            self._detector.printed(self.context.clock.monotonic())
        return ()

    def on_event(self, event: Event) -> Events:
        if event.name == "incident":
            label = str(event.fields.get("label"))
            self._last_incident = None if event.level == "info" else label
        if event.name == "miner_stopping":
            # During a stop, a rank that waits for one that has already exited is not hanging.
            self._launch = self._hang = None
        lasting = self._hang is not None and self._hang.lasting
        if event.fields.get("where") == LATE and not lasting and self._launch is not None:
            now, gate = self.context.clock.monotonic(), self.context.config.gate
            what = str(event.fields.get("what"))
            self._on_hang(self._detector.late(now, self._ranks, gate.broadcast_timeout_s, what))
        return ()

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Events:
        self._ranks = ranks
        if self._launch is None:
            return ()
        if not ranks:
            self._read_cpu(now, self._launch.pid)
        hang = self._detector.check(now, ranks, self._processes.observe())
        if hang is not None:
            self._on_hang(hang)
        return ()

    def _read_cpu(self, now: float, pid: int) -> None:
        if now - self._cpu_read < min(_CPU_EVERY_S, self._detector.limit_s / _CPU_LOOKS):
            return
        self._cpu_read = now
        used_s = 0.0
        try:
            miner = psutil.Process(pid)
            for process in (miner, *miner.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    used_s += sum(process.cpu_times()[:2])
        except (OSError, psutil.Error):
            # Without a free descriptor /proc can't be read: the CPU time is then unknown, which is
            # no reason to report a hang.
            return
        self._detector.used_cpu(now, used_s)

    def _on_hang(self, hang: Hang) -> None:
        """Gather evidence and report in a job: locating the culprit takes a moment."""
        self._hang = hang
        who = subjects(self.context.state, self.context.records)
        self.context.jobs.once("hang evidence", lambda: self._gather_and_act(hang, who))

    # in a job thread

    def _gather_and_act(self, hang: Hang, who: list[Subject]) -> None:
        launch, scene, early = self._launch, None, list[Subject]()
        folder = incident_folder(self.context.state, self.context.clock.wall(), "hang")
        try:
            scene = Scene(self.context, folder, who, _STACK_TIMEOUT_S)
            early = [] if who or launch is None else scene.before_init(launch.pid)
        except OSError as error:
            self.context.emit(not_stored("evidence of the hang", error))
        attributed = hang if scene is None else self._with_culprits(hang, scene)
        story = self._story(attributed, {} if scene is None else scene.frames(), who)
        if where := described_places(early):
            story["detail"] += f"; at {where}"
        reported = self._report(hang, story)
        if scene is not None:
            self._store(scene, early, story)
        if reported:
            self._act(hang, str(story["detail"]))

    def _store(self, scene: Scene, early: Sequence[Subject], story: Mapping[str, Any]) -> None:
        try:
            scene.store({**story, "status": dict(self.context.status())})
            prune_incidents(self.context.state)
        except OSError as error:
            self.context.emit(not_stored("evidence of the hang", error))
            return
        named = [f"rank {rank}" for rank in scene.frames()]
        named += [f"pid {one.process.pid}" for one in early if one.frame or one.stopped]
        ranks, late = ", ".join(named) or "no stacks, only other evidence", scene.late
        self.context.emit(
            event(
                "stack_dump",
                "error",
                f"STACK DUMP: {ranks} in {scene.folder!s}" + (f"; {late[1]}" if late else ""),
                ranks=ranks,
                path=str(scene.folder),
                late_in_collective=late[0] if late else None,
            )
        )

    def _with_culprits(self, hang: Hang, scene: Scene) -> Hang:
        """Name the culprits that the stacks or the collectives show if the headers name none:
        FSDP's forward pass is not a phase, so all headers look alike."""
        behind, late = scene.behind(), scene.late
        if hang.culprits or not (behind or late):
            return hang
        if not behind and late:
            who = f"{rank_list(late[0])} for {hang.idle_s:.0f}s" if late[0] else hang.detail
            detail = f"{who}; {late[1]}"
            return replace(hang, culprits=tuple(late[0]), detail=detail)
        rest = sorted(self._ranks.keys() - set(behind))
        where = (
            f"the collective that {rank_list(rest)} {'is' if len(rest) == 1 else 'are'} waiting in"
            if rest
            else "any collective, alone on its node"
        )
        detail = f"{rank_list(behind)} outside {where}, for {hang.idle_s:.0f}s"
        return replace(hang, culprits=behind, detail=detail)

    def _story(
        self, hang: Hang, frames: Mapping[int, str], who: Sequence[Subject]
    ) -> dict[str, Any]:
        """The fields of the hang event and of hang.json; `frames` maps each rank to its innermost
        frame in the miner's code."""
        named = [rank for rank in hang.culprits or sorted(frames)[:1] if rank in frames]
        where = ", ".join(
            frames[rank] if len(hang.culprits) == 1 else f"rank {rank}: {frames[rank]}"
            for rank in named
        )
        detail = hang.detail + elsewhere(hang, who) + (f"; at {where}" if where else "")
        phases = {now.phase for now in self._ranks.values()}
        advice = "; ".join(words for phase, words in self._advice.items() if phase in phases)
        before = self._last_incident and f"before it: INCIDENT {self._last_incident}"
        detail = "; ".join(filter(None, (detail, advice, before)))
        return {
            "detail": detail,
            "advice": advice,
            "culprits": list(hang.culprits),
            "idle_s": hang.idle_s,
            "limit_s": hang.limit_s,
            "frames": {str(rank): frame for rank, frame in frames.items()},
        }

    def _report(self, hang: Hang, story: Mapping[str, Any]) -> bool:
        """Report the hang; False if it cleared or the miner is being stopped."""
        if self._launch is None or self._hang is not hang:
            return False
        culprits, detail = story["culprits"], story["detail"]
        rank = culprits[0] if len(culprits) == 1 else None
        self.context.emit(
            event("hang_detected", "critical", f"HANG DETECTED: {detail}", rank=rank, **story)
        )
        return True

    def _act(self, hang: Hang, detail: str) -> None:
        if self._launch is None:
            return
        if self._hang is not hang:
            # Gathering takes seconds. If the ranks are stepping again, or another launch has
            # replaced this one, leave the miner alone.
            what = "the hang cleared while the guard collected evidence; the miner keeps running"
            self.context.emit(event("stack_dump", "info", f"STACK DUMP: {what}"))
        elif hang.finished:
            self.context.control.finish(f"hang at exit: {detail}")
        elif self._settings.action == "restart":
            self.context.control.restart(f"hang: {detail}")
        elif self._settings.action == "stop":
            self.context.control.stop(f"hang: {detail}", CRASH_LOOP)

    def snapshot(self) -> Mapping[str, Any]:
        watching = bool(self._ranks)
        return HangStatus(
            watching=watching,
            limit_s=round(self._detector.limit_s, 1) if watching else None,
            hang=self._hang.detail if self._hang is not None else None,
        ).to_json()


def elsewhere(hang: Hang, who: Sequence[Subject]) -> str:
    """Return a hint to look at the other nodes if they run ranks and no rank on this node stands
    out; otherwise an empty string."""
    here = [one.identity for one in who if one.identity is not None]
    if hang.culprits or hang.finished or ranks_elsewhere(here) <= 0:
        return ""
    there = sorted(set(range(here[0].world_size)) - {one.rank for one in here})
    return f"; {rank_list(there)} on other nodes: check the guards there for the late rank"
