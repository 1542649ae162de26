"""Decides when a lack of progress counts as a hang, and which rank is holding up the others. Pure:
the caller passes times in monotonic seconds.

Only a finished step counts as progress; re-entering a data phase does not. The limit is
max(`min_s`, `factor` x the longest recent step), as NVRx calculates its timeouts. Phases with a
longer allowance (AllReduce, upload, load, evaluation, checkpoint) and monitoring operations
(`tracker.track`) use that instead, and while one rank is within its allowance the others may wait
for it. Before any rank has reported, output and CPU time count as progress.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from miner_guard.config import HangSettings
from miner_guard.rank.layout import ENDED_STATES, Now
from miner_guard.record.words import rank_list

_RECENT_STEPS = 64
_UNOBSERVED_S = 15.0
"""Checks are about a second apart. A gap this long means that this process or the machine was
suspended."""

_SAME_TIME_S = 0.01

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

_MAY_WAIT = frozenset({"", "forward", "backward", "optimizer", *_COLLECTIVE})

_UNTIMED = ("has not called init()", "is gone")
_MAX_NAMED = 4
"""Up to this many ranks are described one by one; more are grouped by place, with the longest
wait."""

_OTHER_PHASE = 4


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
        self._reset(0.0)

    def _reset(self, now: float) -> None:
        self._progress = now
        self._observed_at: float | None = None
        self._cpu: tuple[float, float] | None = None
        self._stepped = False
        self._busy_until_now: set[int] = set()
        self._operating: set[int] = set()
        """Of those, the ranks in a monitoring operation."""

        self._granted: dict[int, float] = {}
        self._reported = False

    def launched(self, now: float) -> None:
        """Reset for a new launch, but keep the step times learned so far."""
        self._reset(now)

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
        """Seconds currently allowed without a step, outside phases that have a separate
        allowance."""
        if not self._stepped:
            return max(self._settings.first_step_s, self._settings.min_s)
        return max(self._settings.min_s, self._settings.factor * max(self._durations, default=0.0))

    def idle_s(self, now: float) -> float:
        """Seconds since the last progress."""
        return now - self._progress

    def check(
        self, now: float, ranks: Mapping[int, Now], processes: Processes = NOTHING_KNOWN
    ) -> Hang | None:
        """Judge the current state of the ranks. Reports a hang once, and again only after new
        progress."""
        self._forgive_suspension(now)
        if self._reported:
            return None
        if not ranks:
            return self._before_init(now)
        if all(rank.state in ENDED_STATES for rank in ranks.values()):
            return self._after_the_end(now, ranks)
        busy = {
            number
            for number, rank in ranks.items()
            if self._within_allowance(now, number, rank) and number not in processes.gone
        }
        if busy:
            self._busy_until_now = busy
            self._operating = {n for n in busy if ranks[n].operation_since is not None}
            return None
        if self._busy_until_now:
            self._end_of_long_phase(now, ranks)
        if self.idle_s(now) <= self.limit_s:
            return None
        return self._hang(now, ranks, processes, self._limit_in_force(ranks))

    def lost(
        self, now: float, ranks: Mapping[int, Now], processes: Processes, allowed_s: float
    ) -> Hang | None:
        """Return the hang to report if a rank died and its launcher did not stop the others within
        `allowed_s`, leaving them to wait forever. None if this hang was already reported."""
        if self._reported:
            return None
        return self._hang(now, ranks, processes, allowed_s)

    def _hang(
        self, now: float, ranks: Mapping[int, Now], processes: Processes, limit_s: float
    ) -> Hang:
        self._reported = True
        culprits = name_culprits(ranks, processes)
        return Hang(culprits, describe(now, ranks, culprits, processes), self.idle_s(now), limit_s)

    def late(self, now: float, ranks: Mapping[int, Now], allowed_s: float, what: str = "") -> Hang:
        """The finding for ranks whose wait for a reply from the others timed out; uploads are then
        blocked. `what` is the waiting rank's report, which names the late node."""
        waiting = [rank.phase_since for rank in ranks.values() if rank.phase == "collective"]
        culprits = (
            tuple(n for n, rank in sorted(ranks.items()) if rank.phase != "collective")
            if waiting
            else ()
        )
        words = (
            describe(now, ranks, culprits)
            if waiting
            else "a rank did not ask the gate when the others did"
        )
        detail = f"{words}; the ranks cannot agree on uploads for the rest of this launch"
        if what and not culprits:
            detail += f": {what}"
        return Hang(
            culprits, detail, now - min(waiting, default=now - allowed_s), allowed_s, lasting=True
        )

    def _forgive_suspension(self, now: float) -> None:
        if self._observed_at is not None and now - self._observed_at > _UNOBSERVED_S:
            self._progress += now - self._observed_at
        self._observed_at = now

    def _before_init(self, now: float) -> Hang | None:
        """Judge a launch in which no rank has reported. Without a CPU reading, reports nothing,
        because a silent miner may be busy."""
        if self._cpu is None or self.idle_s(now) <= self.limit_s:
            return None
        self._reported = True
        idle = self.idle_s(now)
        detail = (
            "no rank has called init(), and the miner printed nothing and used no CPU for "
            f"{idle:.0f}s"
        )
        return Hang((), detail, idle, self.limit_s)

    def _after_the_end(self, now: float, ranks: Mapping[int, Now]) -> Hang | None:
        idle = now - max(rank.heartbeat for rank in ranks.values())
        if idle <= self._settings.exit_s:
            return None
        self._reported = True
        detail = (
            f"training ended on all ranks {idle:.0f}s ago, but the miner's process is still running"
        )
        finished = all(rank.state == "finished" for rank in ranks.values())
        return Hang((), detail, idle, self._settings.exit_s, finished=finished)

    def _within_allowance(self, now: float, number: int, rank: Now) -> bool:
        allowance = self._allowance_s(rank)
        if allowance is not None and allowance > self.limit_s:
            self._granted[number] = rank.phase_since + allowance
        if self._in_granted_phase(number, rank) and now <= self._granted[number]:
            return True
        return self._operation_until(rank) >= now

    def _operation_until(self, rank: Now) -> float:
        """When the allowance of the rank's open monitoring operation ends; -inf if none is open."""
        if rank.operation_since is None:
            return -math.inf
        return rank.operation_since + self._settings.monitoring_s

    def _in_granted_phase(self, number: int, rank: Now) -> bool:
        """Return whether the rank is still in its last long phase or in a phase nested in it. A
        nested phase reports the remaining time as its allowance, so both end at the same time."""
        allowance, until = self._allowance_s(rank), self._granted.get(number)
        if allowance is None or until is None:
            return False
        return abs(rank.phase_since + allowance - until) < _SAME_TIME_S

    def _allowance_s(self, rank: Now) -> float | None:
        return self._allowances.get(rank.phase) if rank.allowance_s is None else rank.allowance_s

    def _end_of_long_phase(self, now: float, ranks: Mapping[int, Now]) -> None:
        """Once a long phase has ended, count the usual limit from its end; a phase that exceeded
        its allowance no longer extends the limit."""
        ended = [
            n
            for n in self._busy_until_now
            if n not in ranks
            or not (self._in_granted_phase(n, ranks[n]) or ranks[n].operation_since is not None)
        ]
        if ended:
            self._progress = max(
                [self._progress, *(ranks[n].heartbeat for n in ended if n in ranks)]
            )
        if self._operating.intersection(ended):
            # The end of an operation leaves no heartbeat.
            self._progress = max(self._progress, now)
        self._busy_until_now = set()

    def _limit_in_force(self, ranks: Mapping[int, Now]) -> float:
        declared = [a for rank in ranks.values() if (a := self._allowance_s(rank)) is not None]
        if any(rank.operation_since is not None for rank in ranks.values()):
            declared.append(self._settings.monitoring_s)
        return max([self.limit_s, *declared])


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
        # A rank that is alone on its node may be waiting for a rank on another node.
        return tuple(
            number
            for number, rank in ranks.items()
            if not (processes.elsewhere and _may_wait(rank))
        )
    places = {number: (rank.total_steps, _place(rank)) for number, rank in ranks.items()}
    first = min(places.values())
    behind = tuple(sorted(number for number, place in places.items() if place == first))
    return behind if len(behind) < len(ranks) else ()


def _may_wait(rank: Now) -> bool:
    """Return whether the rank's phase may contain a collective. A rank between phases may be in one
    too, because many miners name no phases."""
    return rank.state not in ENDED_STATES and rank.phase in _MAY_WAIT


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
    """Describe the hang, as in `rank 2 in data for 912s, ranks 0,1,3 waiting in allreduce`."""
    words = _culprits(now, ranks, culprits, processes)
    if not culprits:
        words.append("no rank stands out")
    waiting: dict[str, list[int]] = {}
    for number, rank in sorted(ranks.items()):
        if number not in culprits:
            waiting.setdefault(_where(rank), []).append(number)
    for where, numbers in waiting.items():
        doing = "waiting " if culprits else ""
        words.append(f"{rank_list(numbers)} {doing}{where}")
    return ", ".join(words)


def _culprits(
    now: float, ranks: Mapping[int, Now], culprits: Collection[int], processes: Processes
) -> list[str]:
    if len(culprits) <= _MAX_NAMED:
        return [_culprit(now, number, ranks.get(number), processes) for number in sorted(culprits)]
    alike: dict[tuple[str, str], list[int]] = {}
    for number in sorted(culprits):
        alike.setdefault(_place_of(number, ranks.get(number), processes), []).append(number)
    words = []
    for (place, state), numbers in alike.items():
        since = min((_since(ranks[n]) for n in numbers if n in ranks), default=now)
        lasting = f" for {now - since:.0f}s" if place not in _UNTIMED else ""
        words.append(f"{rank_list(numbers)} {place}{lasting}{state}")
    return words


def _culprit(now: float, number: int, rank: Now | None, processes: Processes) -> str:
    place, state = _place_of(number, rank, processes)
    timed = rank is not None and place not in _UNTIMED
    lasting = f" for {now - _since(rank):.0f}s" if rank is not None and timed else ""
    return f"rank {number} {place}{lasting}{state}"


def _place_of(number: int, rank: Now | None, processes: Processes) -> tuple[str, str]:
    """Describe where a rank is, and any problem with its process."""
    if rank is None:
        return _UNTIMED[0], ""
    if number in processes.gone:
        return _UNTIMED[1], ""
    stopped = ": its process is stopped (state T)" if number in processes.stopped else ""
    return _where(rank), stopped


def _since(rank: Now) -> float:
    began = rank.operation_since
    return began if _operating(rank) and began is not None else rank.phase_since


def _where(rank: Now) -> str:
    if rank.state in ENDED_STATES:
        return "in shutdown"
    if _operating(rank):
        return f"in {rank.operation}"
    if rank.phase:
        return f"in {rank.phase}"
    return "before its first step" if rank.total_steps == 0 else "between phases"
