"""When no progress is a hang, and which rank holds the others up. Pure: times are handed in,
monotonic seconds.

A step is progress, nothing else is: a data phase that is entered again and again is not. The limit
is max(`min_s`, `factor` x the longest recent step), as NVRx calculates its timeouts; phases that
declare a longer allowance (AllReduce, upload, load, evaluation, checkpoint) have that one instead,
and while one rank is within such an allowance the others may wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from miner_guard.config import HangSettings
from miner_guard.flight_recorder.records import Now

_RECENT_STEPS = 64
_UNOBSERVED_S = 15.0
"""Between two looks, about a second apart, so much time passed: this process or machine was
suspended."""

_SAME_TIME_S = 0.01

_COLLECTIVE = ("collective", "allreduce")
_ORDER = {
    "data": 0,
    "": 0,
    "forward": 1,
    "backward": 2,
    "optimizer": 3,
    **dict.fromkeys(_COLLECTIVE, 9),
}
"""How far a rank is within its step; a phase not named here (upload, validation) comes before the
collectives."""

_OTHER_PHASE = 4
_ENDED = ("closed", "finished")


@dataclass(frozen=True)
class Hang:
    """No progress for longer than allowed."""

    culprits: tuple[int, ...]
    """Ranks that hold the others up; empty where none stands out."""

    detail: str
    idle_s: float
    limit_s: float
    lasting: bool = False
    """Steps that follow don't mend it."""


class HangDetector:
    """Watches all ranks of one host. O(ranks) memory."""

    def __init__(self, settings: HangSettings) -> None:
        self._settings = settings
        self._allowances = settings.allowances
        self._durations: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._looked_at: float | None = None
        self._reset(0.0)

    def _reset(self, now: float) -> None:
        self._progress = now
        self._stepped = False
        self._busy_until_now: set[int] = set()
        self._granted: dict[int, float] = {}
        self._said = False

    def launched(self, now: float) -> None:
        """A new launch: nothing has progressed yet. What was learned of step times stays."""
        self._reset(now)
        self._looked_at = None

    def stepped(
        self, end: float, seconds: float, phases: Mapping[str, float] | None = None
    ) -> None:
        """A rank finished a step of `seconds`, of which `phases` took theirs.

        A phase with an allowance of its own says nothing of how long a step takes: with an
        AllReduce of ten minutes in it, a hang in the steps after would be noticed in fifty.
        """
        allowed = sum(spent for name, spent in (phases or {}).items() if name in self._allowances)
        self._durations.append(max(0.0, seconds - allowed))
        self._progress = max(self._progress, end)
        self._stepped = True
        # A second stall is reported like the first.
        self._said = False

    def printed(self, now: float) -> None:
        """A miner that is known by its lines alone wrote some: before its first step that is all
        its progress."""
        if not self._stepped:
            self._progress = max(self._progress, now)

    @property
    def has_stepped(self) -> bool:
        """A step was seen since the launch."""
        return self._stepped

    @property
    def limit_s(self) -> float:
        """Seconds without a step that are allowed now, outside phases with their own allowance."""
        if not self._stepped:
            return max(self._settings.first_step_s, self._settings.min_s)
        return max(self._settings.min_s, self._settings.factor * max(self._durations, default=0.0))

    def idle_s(self, now: float) -> float:
        """Seconds since the last progress."""
        return now - self._progress

    def look(self, now: float, ranks: Mapping[int, Now], gone: Collection[int] = ()) -> Hang | None:
        """Judge the ranks as they are; a hang is answered once, until there is progress again.

        `gone` are ranks whose process does not exist any more.
        """
        self._forgive_suspension(now)
        if not ranks or self._said:
            return None
        if all(rank.state in _ENDED for rank in ranks.values()):
            return self._after_the_end(now, ranks)
        busy = {
            number
            for number, rank in ranks.items()
            if self._within_allowance(now, number, rank) and number not in gone
        }
        if busy:
            self._busy_until_now = busy
            return None
        if self._busy_until_now:
            self._end_of_long_phase(now, ranks)
        if self.idle_s(now) <= self.limit_s:
            return None
        self._said = True
        culprits = name_culprits(ranks, gone)
        return Hang(
            culprits,
            describe(now, ranks, culprits, gone),
            self.idle_s(now),
            self._limit_in_force(ranks),
        )

    def late(self, now: float, ranks: Mapping[int, Now], allowed_s: float) -> Hang:
        """Ranks that waited for the others' answer waited longer than allowed: uploads are blocked
        from then on."""
        waiting = [rank.phase_since for rank in ranks.values() if rank.phase == "collective"]
        culprits = (
            tuple(n for n, rank in sorted(ranks.items()) if rank.phase != "collective")
            if waiting
            else ()
        )
        words = (
            describe(now, ranks, culprits) if waiting else "a rank did not ask when the others did"
        )
        detail = f"{words}; no upload can be agreed on in this launch any more"
        return Hang(
            culprits, detail, now - min(waiting, default=now - allowed_s), allowed_s, lasting=True
        )

    def _forgive_suspension(self, now: float) -> None:
        if self._looked_at is not None and now - self._looked_at > _UNOBSERVED_S:
            self._progress += now - self._looked_at
        self._looked_at = now

    def _after_the_end(self, now: float, ranks: Mapping[int, Now]) -> Hang | None:
        idle = now - max(rank.heartbeat for rank in ranks.values())
        if idle <= self._settings.exit_s:
            return None
        self._said = True
        detail = f"all ranks ended their training {idle:.0f}s ago, but the miner's process lives on"
        return Hang((), detail, idle, self._settings.exit_s)

    def _within_allowance(self, now: float, number: int, rank: Now) -> bool:
        allowance = self._allowance_s(rank)
        if allowance is not None and allowance > self.limit_s:
            self._granted[number] = rank.phase_since + allowance
        return self._in_granted_phase(number, rank) and now <= self._granted[number]

    def _in_granted_phase(self, number: int, rank: Now) -> bool:
        """Whether it is in its last long phase, or in one nested there: that is shown with what is
        left of its time."""
        allowance, until = self._allowance_s(rank), self._granted.get(number)
        if allowance is None or until is None:
            return False
        return abs(rank.phase_since + allowance - until) < _SAME_TIME_S

    def _allowance_s(self, rank: Now) -> float | None:
        return self._allowances.get(rank.phase) if rank.allowance_s is None else rank.allowance_s

    def _end_of_long_phase(self, now: float, ranks: Mapping[int, Now]) -> None:
        """After a long phase that ended well the usual limit counts from its end; one that did not
        end is over."""
        ended = [
            n
            for n in self._busy_until_now
            if n not in ranks or not self._in_granted_phase(n, ranks[n])
        ]
        if ended:
            self._progress = max(
                [self._progress, *(ranks[n].heartbeat for n in ended if n in ranks)]
            )
        self._busy_until_now = set()

    def _limit_in_force(self, ranks: Mapping[int, Now]) -> float:
        declared = [a for rank in ranks.values() if (a := self._allowance_s(rank)) is not None]
        return max([self.limit_s, *declared])


def name_culprits(ranks: Mapping[int, Now], gone: Collection[int] = ()) -> tuple[int, ...]:
    """The ranks that hold the others up: those that are gone, else behind in steps, else earliest
    within the step.

    Empty where all are at the same place, or where only one rank is known.
    """
    if gone:
        return tuple(sorted(gone))
    if len(ranks) < 2:
        return tuple(ranks)
    places = {number: (rank.total_steps, _place(rank)) for number, rank in ranks.items()}
    least = min(places.values())
    behind = tuple(sorted(number for number, place in places.items() if place == least))
    return behind if len(behind) < len(ranks) else ()


def _place(rank: Now) -> int:
    # A rank that ended its training waits for nobody; the others wait for it.
    return -1 if rank.state in _ENDED else _ORDER.get(rank.phase, _OTHER_PHASE)


def describe(
    now: float, ranks: Mapping[int, Now], culprits: Collection[int], gone: Collection[int] = ()
) -> str:
    """`rank 2 in data for 912s, ranks 0,1,3 waiting in allreduce`."""
    words = [
        f"rank {number} is gone"
        if number in gone
        else f"rank {number} {_where(ranks[number])} for {now - ranks[number].phase_since:.0f}s"
        for number in sorted(culprits)
    ]
    if not culprits:
        words.append("no rank stands out")
    waiting: dict[str, list[int]] = {}
    for number, rank in sorted(ranks.items()):
        if number not in culprits:
            waiting.setdefault(_where(rank), []).append(number)
    for where, numbers in waiting.items():
        doing = "waiting " if culprits else ""
        words.append(f"{_ranks(numbers)} {doing}{where}")
    return ", ".join(words)


def _where(rank: Now) -> str:
    if rank.state in _ENDED:
        return "with its training ended"
    return f"in {rank.phase}" if rank.phase else "between phases"


def _ranks(numbers: Iterable[int]) -> str:
    listed = [str(number) for number in numbers]
    return f"rank {listed[0]}" if len(listed) == 1 else f"ranks {','.join(listed)}"
