"""How long steps usually take, which of them are slow, and whether that matters: one judge for live
runs and finished traces."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from miner_guard.config import StepSettings
from miner_guard.rank.layout import StepRecord
from miner_guard.record.events import SPECIAL_PHASES
from miner_guard.watch.series import SortedWindow

TRAINING = "training"
"""Kind of a step without special phases."""

EVALUATION = ("inference", "val_loss")

RECENT = 32
_MIN_COUNT = 5
"""Minimum number of steps of a kind before one of them is judged against the others."""

_CLEAR_RATIO = 2.5
_OFTEN, _OFTEN_WITHIN = 3, 20
"""(count, steps): slow steps that are not clear matter only if `count` of them occur within `steps`
steps."""

_EPISODE = 8
"""Slow steps within this many steps of each other form one episode."""

LEVEL_STEPS = 8
"""This many steps in a row, each beyond the limit, are a new level."""

_LASTING_S = 20.0
"""Total step time over which short steps must stay changed to count. A busy host delays short steps
by fractions of a second, but not for that long."""

_WINDOW = 128
"""Recent steps of the same kind from which the median and the MAD are computed."""

WARMUP = 10
"""Steps at the start of a run that are not judged, because of compilation and cold caches."""

_MAD_FACTOR = 5.0
_MIN_EXCESS_RATIO = 0.5
"""Relative rule: a slow step exceeds median + max(_MAD_FACTOR · 1.4826 · MAD, _MIN_EXCESS_RATIO ·
median)."""

MIN_EXCESS_S = 1.0
"""A slow step also exceeds the median by this: a busy host delays short steps by fractions of a
second."""

CHANGE_RATIO = 0.75
"""A new level of the step time: the shorter of two medians is below this share of the longer."""


def kind_of(phases: Mapping[str, float]) -> str:
    """The kind of a step: `training`, or its special phases joined by `+`."""
    return "+".join(name for name in SPECIAL_PHASES if phases.get(name, 0.0) > 0) or TRAINING


def scheduled_seconds(phases: Mapping[str, float]) -> float:
    """Seconds of a step spent on evaluation, upload or AllReduce, not on training."""
    return sum(phases.get(name, 0.0) for name in SPECIAL_PHASES)


def _monitored_seconds(step: StepRecord, scheduled_s: float) -> float:
    """`scheduled_s` and what else the step's monitoring callback did."""
    callback_s = step.phases.get("monitor", 0.0) - step.nested_in_monitor_s
    example_s = step.phases.get("example_loss", 0.0)
    return scheduled_s + example_s + max(0.0, callback_s)


def grade(seconds: float, settings: StepSettings) -> str:
    """Grade a step time by source 004's table: good 10-20 s, acceptable 20-40 s, bad above 60 s;
    `poor` between 40 and 60 s."""
    if seconds <= settings.good_s:
        return "good"
    if seconds <= settings.acceptable_s:
        return "acceptable"
    return "bad" if seconds > settings.slow_s else "poor"


_MIN_PERIOD = 10
"""Shortest period, in steps, between pauses with other slow steps between them."""

_TOLERANCE = 0.02
"""Tolerance, as a fraction of the period: a checkpoint every ten minutes comes after a varying
number of steps."""

_MAX_MISSED = 4
"""A pause is still expected up to this many periods after the last one."""

_MAX_REMEMBERED = 16
_MAX_PERIODS = 8
_SIMILAR = 3.0
"""Largest ratio between the lengths of two pauses of the same kind."""


Weight = Literal["scheduled", "usual", "single", "episode"]
"""What a slow step means: work that recurs at an interval; one as long as all steps; a single one,
or one of an episode that has been reported, which is too little to act on; an episode that is
new."""


class SlowEpisodes:
    """Weighs slow training steps by those before them. O(1) memory."""

    def __init__(self, clear_ratio: float = _CLEAR_RATIO) -> None:
        """A step of at least `clear_ratio` times the usual time counts even if no other slow step
        is near it."""
        self._clear_ratio = clear_ratio
        self._remembered: deque[tuple[int, float]] = deque(maxlen=_MAX_REMEMBERED)
        self._close: deque[int] = deque(maxlen=_OFTEN)
        self._periods: dict[int, tuple[int, float]] = {}
        """Place and ratio of the last pause, by period in steps."""

        self._warned = False

    def weigh(self, place: int, ratio: float, *, explained: bool = True) -> Weight:
        """Weigh the next slow step. `place` is its number among the training steps, `ratio` its
        duration as a multiple of the usual time; `explained` is False if it was slow outside all
        named phases, which a single step does not prove to be a problem."""
        if self._expected(place, ratio) or self._learned(place, ratio):
            return "scheduled"
        if not self._close or place - self._close[-1] > _EPISODE:
            self._warned = False
        self._close.append(place)
        often = len(self._close) == _OFTEN and place - self._close[0] < _OFTEN_WITHIN
        if self._warned or not (often or (explained and ratio >= self._clear_ratio)):
            return "single"
        self._warned = True
        return "episode"

    def _expected(self, place: int, ratio: float) -> bool:
        for period, (last, length) in self._periods.items():
            times = round((place - last) / period)
            on_time = abs(place - last - times * period) <= _slack(period)
            if 1 <= times <= _MAX_MISSED and on_time and _similar(ratio, length):
                self._periods[period] = (place, ratio)
                return True
        return False

    def _learned(self, place: int, ratio: float) -> bool:
        """Return whether this is a third pause at the same interval, which establishes a period.
        An interval below `_MIN_PERIOD` steps must have no other slow step in it."""
        last = self._remembered[-1][0] if self._remembered else None
        alike = {earlier for earlier, length in self._remembered if _similar(ratio, length)}
        self._remembered.append((place, ratio))
        for earlier in sorted(alike, reverse=True):
            gap = place - earlier
            regular = gap >= _MIN_PERIOD or (gap > 1 and earlier == last)
            if regular and any(abs(earlier - first - gap) <= _slack(gap) for first in alike):
                if len(self._periods) >= _MAX_PERIODS:
                    del self._periods[min(self._periods, key=lambda p: self._periods[p][0])]
                self._periods[gap] = (place, ratio)
                return True
        return False


def _slack(period: int) -> int:
    return max(int(period >= _MIN_PERIOD), int(_TOLERANCE * period))


def _similar(one: float, other: float) -> bool:
    return max(one, other) <= _SIMILAR * min(one, other)


class UsualTime:
    """The usual duration of one kind of step. Memory: one window."""

    def __init__(
        self,
        *,
        mad_factor: float = _MAD_FACTOR,
        min_excess_ratio: float = _MIN_EXCESS_RATIO,
        min_excess_s: float = MIN_EXCESS_S,
    ) -> None:
        self._mad_factor, self._min_excess_ratio = mad_factor, min_excess_ratio
        self._min_excess_s = min_excess_s
        self.window = SortedWindow(_WINDOW)
        self._warm = self._streak = 0
        self._latest: deque[float] = deque(maxlen=LEVEL_STEPS)

    def limit(self, seconds: float) -> float | None:
        """The limit that a step of this duration exceeds, or None."""
        if len(self.window) < _MIN_COUNT:
            return None
        limit = max(
            self.window.robust_limit(self._mad_factor, self._min_excess_ratio),
            self.window.median + self._min_excess_s,
        )
        return limit if seconds > limit else None

    def admit(self, seconds: float, *, outlier: bool, warm: bool = False) -> None:
        """Add a step. Outliers stay out until they become the norm; those of the warm-up leave once
        enough others have followed: until then, they keep a slowdown right after the warm-up from
        passing for the usual speed."""
        self._latest.append(seconds)
        self._streak = self._streak + 1 if outlier else 0
        if not outlier or self._streak >= _WINDOW // 2:
            self.window.add(seconds)
        if warm:
            self._warm += 1
        elif len(self.window) >= self._warm + _MIN_COUNT:
            for _ in range(self._warm):
                self.window.drop_oldest()
            self._warm = 0

    def rebase(self) -> None:
        """Make the latest steps the usual ones, because their change has been reported."""
        self.window.clear()
        self._warm = 0
        for seconds in self._latest:
            self.window.add(seconds)


class LevelWatch:
    """Finds a lasting change of the step time: the median of the last 32 steps, or each of the last
    eight, is beyond the best or worst earlier median by `CHANGE_RATIO`, and the change either
    exceeds `min_excess_s` or has lasted 20 s. Then it starts again from the new level."""

    def __init__(self, min_excess_s: float = 0.0) -> None:
        self._min_excess_s = min_excess_s
        self._latest: deque[float] = deque(maxlen=RECENT)
        self._begin()

    def _begin(self) -> None:
        self._latest.clear()
        self._count = 0
        self._best, self._worst = math.inf, 0.0
        self._beyond_s = 0.0
        """Step time accumulated since the median left the level."""

    def observe(self, seconds: float) -> tuple[float, float] | None:
        """The levels before and after a change that this training step confirms."""
        self._latest.append(seconds)
        self._count += 1
        self._beyond_s += seconds
        if len(self._latest) < RECENT:
            return None
        row = list(self._latest)[-LEVEL_STEPS:]
        median = statistics.median(row)
        before = self._former_level(min(row), max(row))
        if before is None:
            if self._count % LEVEL_STEPS:
                return None
            median = statistics.median(self._latest)
            self._best, self._worst = min(self._best, median), max(self._worst, median)
            before = self._former_level(median, median)
        if before is None:
            self._beyond_s = 0.0
        elif abs(median - before) > self._min_excess_s or self._beyond_s >= _LASTING_S:
            self._begin()
            return before, median
        return None

    def _former_level(self, shortest: float, longest: float) -> float | None:
        """The level that these step times have left, if they have."""
        if self._best < CHANGE_RATIO * shortest:
            return self._best
        return self._worst if longest < CHANGE_RATIO * self._worst else None


@dataclass(frozen=True)
class SlowStep:
    """A step that took longer than a limit allows."""

    step: StepRecord
    limit_s: float
    rule: Literal["absolute", "relative"]
    median_s: float | None
    """Median of the recent steps of the same kind; None if there were none."""

    weight: Weight = "episode"


@dataclass(frozen=True)
class Regression:
    """A lasting slowdown, at the step that proved it: the medians before and after."""

    step: StepRecord
    best_s: float
    median_s: float


Finding = SlowStep | Regression


class StepTimes:
    """Judges one rank's step times. Memory: one window per kind of step, of which there are at most
    64.

    Steps below `_CLEAR_RATIO` times the usual time matter only if they last, as a regression.
    """

    def __init__(self, settings: StepSettings) -> None:
        self._settings = settings
        self._usual = defaultdict[str, UsualTime](UsualTime)
        self._first_tokens: int | None = None
        self._count = 0
        self._episodes = SlowEpisodes()
        self._level = LevelWatch(MIN_EXCESS_S)

    def observe(self, step: StepRecord) -> Iterator[Finding]:
        """Judge one finished step. The first `WARMUP` steps of a launch are judged by the absolute
        rule only."""
        self._count += 1
        self._first_tokens = self._first_tokens or step.tokens
        # Longer sequences, or a larger batch after a warm-up, make no slow step.
        more = (step.tokens or 0) / (self._first_tokens or 1)
        seconds, kind = step.seconds / max(1.0, more), kind_of(step.phases)
        slow = self._slow(step, kind, seconds)
        if kind != TRAINING:
            yield from () if slow is None else (slow,)
            return
        change = self._level.observe(seconds)
        if slow is not None:
            yield slow if change is None else replace(slow, weight="single")
        if change is not None:
            self._usual[TRAINING].rebase()
            if change[0] < change[1]:
                yield Regression(step, *change)

    def window(self) -> SortedWindow | None:
        """The durations of the recent training steps; None during the warm-up."""
        usual = self._usual.get(TRAINING)
        return None if usual is None or self._count <= WARMUP else usual.window

    def _slow(self, step: StepRecord, kind: str, seconds: float) -> SlowStep | None:
        usual, scheduled_s = self._usual[kind], scheduled_seconds(step.phases)
        warm = self._count <= WARMUP
        relative = None if warm else self._relative(step, usual, seconds)
        if not warm and len(usual.window) < _MIN_COUNT and {*kind.split("+")} <= {*EVALUATION}:
            # Too few of its kind: judge it as a training step, without its evaluation.
            rest_s = seconds - _monitored_seconds(step, scheduled_s)
            relative = self._relative(step, self._usual[TRAINING], rest_s)
        usual.admit(seconds, outlier=relative is not None, warm=warm)
        if step.seconds - scheduled_s > self._settings.slow_s:
            # A ten-minute upload inside a step does not make it slow.
            median_s = usual.window.median if usual.window else None
            weight: Weight = "episode"
            if relative is not None and relative.weight == "scheduled":
                weight = "scheduled"
            elif not warm and relative is None and (median_s or 0.0) > self._settings.slow_s:
                weight = "usual"
            return SlowStep(step, self._settings.slow_s, "absolute", median_s, weight)
        return relative

    def _relative(self, step: StepRecord, usual: UsualTime, seconds: float) -> SlowStep | None:
        limit = usual.limit(seconds)
        if limit is None:
            return None
        median = usual.window.median
        explained = step.seconds - sum(step.phases.values()) < 0.5 * (step.seconds - median)
        weight = self._episodes.weigh(self._count, seconds / median, explained=explained)
        if weight == "episode" and seconds < _CLEAR_RATIO * median:
            weight = "single"
        return SlowStep(step, limit, "relative", median, weight)


_COLLECTIVES = ("collective", "allreduce")
_MAY_GATHER = (*_COLLECTIVES, "forward", "backward")
"""Phases in which a rank may wait for the others: DDP reduces in backward, FSDP gathers in both."""

_DIFFERENT = 0.05
"""If the ranks' times in the collectives differ by more than this share of a step, they wait there
and nowhere else."""


def work_seconds(steps: Mapping[int, StepRecord]) -> dict[int, float]:
    """Return, by rank, the seconds of a step that the rank did not spend waiting for the others.

    The rank with the least time in the collectives waits least; any other rank's wait is the time
    that it spends there beyond that minimum. If all spend the same time there, the phases of
    `_MAY_GATHER` take their place.
    """
    longest = max((step.seconds for step in steps.values()), default=0.0)
    for names in (_COLLECTIVES, _MAY_GATHER):
        waits = {
            rank: sum(step.phases.get(name, 0.0) for name in names) for rank, step in steps.items()
        }
        shortest_wait = min(waits.values(), default=0.0)
        if max(waits.values(), default=0.0) - shortest_wait > _DIFFERENT * longest:
            break
    return {
        rank: max(0.0, step.seconds - (waits[rank] - shortest_wait)) for rank, step in steps.items()
    }
