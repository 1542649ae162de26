"""Judges inner-step times: finds slow steps, in absolute terms and against the recent past, and
grades the run.

The absolute rule and the grades come from source 004's tables. By the relative rule, a step is slow
beyond median + max(5 · 1.4826 · MAD, 0.5 · median) of the last 128 steps of its kind (simulated: no
false alarm at 3 % noise, 1.2 % of steps at 15 %, and every step of 1.6 times the median is found;
median + 3 · MAD without the floor fires on 10 % of healthy steps). A rolling median adapts to a
lasting slowdown, so `RegressionWatch` also compares the best past median with the median of the
last 32 steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from miner_guard.config import StepSettings
from miner_guard.detectors.window import SortedWindow
from miner_guard.record.phases import SPECIAL_PHASES
from miner_guard.system.once import Once

TRAINING = "training"
"""Kind of a step without special phases."""

_EVALUATION = {"inference", "val_loss"}

_RECENT = 32
_MIN_COUNT = 5
"""Minimum number of steps of a kind before one of them is judged against the others."""

_MAX_KINDS = 64

_CLEAR_RATIO = 2.5
_OFTEN, _OFTEN_WITHIN = 3, 32
"""(count, steps): steps slower by less than `_CLEAR_RATIO` matter only if `count` of them occur
within `steps` steps."""

_EPISODE = 8
"""Slow steps within this many steps of each other form one episode."""

_IN_A_ROW = 8
"""This many steps in a row, each beyond the limit, count as a regression."""

_MAX_HELD = 40
"""Maximum number of steps for which a warning is held back; by then, RegressionWatch has
decided."""

_LASTING_S = 20.0
"""Total step time over which short steps must stay slower to count as a regression."""


def kind_of(phases: Mapping[str, float]) -> str:
    """The kind of a step: `training`, or its special phases joined by `+`."""
    return "+".join(name for name in SPECIAL_PHASES if phases.get(name, 0.0) > 0) or TRAINING


def scheduled_seconds(phases: Mapping[str, float]) -> float:
    """Seconds of a step spent on evaluation, upload or AllReduce, not on training."""
    return sum(phases.get(name, 0.0) for name in SPECIAL_PHASES)


@dataclass(frozen=True)
class SlowStep:
    """A step that took longer than a limit allows."""

    seconds: float
    limit_s: float
    rule: str
    """`absolute` or `relative`."""

    median_s: float | None
    """Median of the recent steps of the same kind; None if there were none."""

    kind: str
    certain: bool = True
    """False for a step that recurs at regular intervals, which is scheduled work, and for a single
    step below `_CLEAR_RATIO` times the median, which is too short to act on."""

    @property
    def clear(self) -> bool:
        """True if the step counts even if no other slow step is near it."""
        usual = self.median_s if self.rule == "relative" else None
        return usual is None or self.seconds >= _CLEAR_RATIO * usual


@dataclass(frozen=True)
class Regression:
    """A lasting slowdown: the best past median against the median of the last 32 steps."""

    median_s: float
    best_s: float

    @property
    def ratio(self) -> float:
        """Share of the best speed that remains."""
        return self.best_s / self.median_s


def grade(seconds: float, settings: StepSettings) -> str:
    """Grade a step time by source 004's table: good 10-20 s, acceptable 20-40 s, bad above 60 s;
    `poor` between 40 and 60 s."""
    if seconds <= settings.good_s:
        return "good"
    if seconds <= settings.acceptable_s:
        return "acceptable"
    return "bad" if seconds > settings.slow_s else "poor"


class SlowEpisodes:
    """Decides which slow steps deserve a warning (see `SlowStep.certain`): one per episode."""

    def __init__(self, clear_ratio: float = _CLEAR_RATIO) -> None:
        """A step of at least `clear_ratio` times the usual time counts even if no other slow step
        is near it."""
        self._clear_ratio = clear_ratio
        self._places: deque[int] = deque(maxlen=_OFTEN)
        self._warned = Once()

    def certain(self, place: int, ratio: float) -> bool:
        """Return whether the next slow step deserves a warning. `place` is its number among the
        training steps, `ratio` its duration as a multiple of the usual time."""
        earlier = list(self._places)
        self._places.append(place)
        if not earlier or place - earlier[-1] > _EPISODE:
            self._warned.clear()
        often = len(earlier) >= _OFTEN - 1 and place - earlier[1 - _OFTEN] < _OFTEN_WITHIN
        if _regular([*earlier, place]):
            return False
        return (ratio >= self._clear_ratio or often) and self._warned.first()


class StepTimes:
    """Judges one rank's step durations. Memory: one window per kind of step, at most 64 kinds."""

    def __init__(self, settings: StepSettings) -> None:
        self._settings = settings
        self._windows: dict[str, SortedWindow] = {}
        self._early: dict[str, SortedWindow] = {}
        self._streak: dict[str, int] = {}
        self._seen = 0
        self._episodes = SlowEpisodes()
        self._latest: deque[float] = deque(maxlen=_RECENT)
        """The latest training steps, slow ones included."""

    def observe(
        self, seconds: float, kind: str = TRAINING, scheduled_s: float = 0.0
    ) -> SlowStep | None:
        """Judge one finished step. The first `warmup` steps of a launch are judged by the absolute
        rule only.

        Until enough steps have followed, warm-up steps serve as the baseline; otherwise a slowdown
        right after the warm-up would pass for the run's normal speed. `scheduled_s` is the share of
        `seconds` outside training: a ten-minute upload inside a step does not make it slow by the
        absolute rule.
        """
        self._seen += 1
        if kind == TRAINING:
            self._latest.append(seconds)
        window = self._windows.get(kind)
        if window is None:
            if len(self._windows) >= _MAX_KINDS:
                return self._absolute(seconds, scheduled_s, kind)
            window = self._windows[kind] = SortedWindow(self._settings.window)
            self._early[kind] = SortedWindow(max(1, self._settings.warmup))
        if self._seen <= self._settings.warmup:
            self._early[kind].add(seconds)
            return self._absolute(seconds, scheduled_s, kind)
        known = window if len(window) >= _MIN_COUNT else self._early[kind]
        relative = self._relative(seconds, kind, known) or self._beside_evaluation(
            seconds, kind, scheduled_s, known
        )
        self._admit(seconds, kind, window, outlier=relative is not None)
        absolute = self._absolute(seconds, scheduled_s, kind)
        if absolute is not None or relative is None or relative.median_s is None:
            return absolute or relative
        certain = self._episodes.certain(self._seen, seconds / relative.median_s)
        return replace(relative, certain=certain)

    def rebase(self) -> None:
        """Make the latest training steps the new baseline, because their change has been
        reported."""
        if (window := self._windows.get(TRAINING)) is not None:
            window.clear()
            for seconds in list(self._latest)[-_IN_A_ROW:]:
                window.add(seconds)

    def training_window(self) -> SortedWindow | None:
        """Return the durations of the recent training steps after the warm-up, or of the warm-up
        steps if there are no others. None during the warm-up."""
        if self._seen <= self._settings.warmup:
            return None
        window, early = self._windows.get(TRAINING), self._early.get(TRAINING)
        return window or early or None

    def _relative(self, seconds: float, kind: str, window: SortedWindow) -> SlowStep | None:
        if len(window) < _MIN_COUNT:
            return None
        limit = window.robust_limit(self._settings.mad_factor, self._settings.min_excess_ratio)
        limit = max(limit, window.median + self._settings.min_excess_s)
        return (
            SlowStep(seconds, limit, "relative", window.median, kind) if seconds > limit else None
        )

    def _beside_evaluation(
        self, seconds: float, kind: str, scheduled_s: float, own: SortedWindow
    ) -> SlowStep | None:
        """Judge an evaluation step as a training step, leaving out its evaluation time, because too
        few steps of its kind have been seen."""
        training = self.training_window()
        if len(own) >= _MIN_COUNT or training is None or not set(kind.split("+")) <= _EVALUATION:
            return None
        slow = self._relative(seconds - scheduled_s, kind, training)
        return (
            None
            if slow is None
            else replace(slow, seconds=seconds, limit_s=slow.limit_s + scheduled_s)
        )

    def _absolute(self, seconds: float, scheduled_s: float, kind: str) -> SlowStep | None:
        if seconds - scheduled_s <= self._settings.slow_s:
            return None
        window = self._windows.get(kind)
        return SlowStep(
            seconds, self._settings.slow_s, "absolute", window.median if window else None, kind
        )

    def _admit(self, seconds: float, kind: str, window: SortedWindow, *, outlier: bool) -> None:
        streak = self._streak.get(kind, 0) + 1 if outlier else 0
        self._streak[kind] = streak
        # Outliers stay out of the window until they become the norm.
        if not outlier or streak >= self._settings.window // 2:
            window.add(seconds)


_Step = TypeVar("_Step")


class SlowWarnings(Generic[_Step]):
    """Warns once per slowdown: a warning about training steps below `_CLEAR_RATIO` times the usual
    time is held back until the slow steps end. If they last, RegressionWatch's report replaces
    it."""

    def __init__(self) -> None:
        self._held: tuple[_Step, SlowStep] | None = None
        self._place = self._slow_at = self._held_at = 0

    def observe(
        self, step: _Step, slow: SlowStep | None, kind: str = TRAINING, *, lasts: bool
    ) -> Iterator[tuple[_Step, SlowStep]]:
        """Take the next step and yield the slow steps to report now. `lasts`: whether a lasting
        slowdown is reported with this step."""
        if kind != TRAINING:
            yield from () if slow is None else ((step, slow),)
            return
        self._place += 1
        ended = slow is None and self._place - self._slow_at > _EPISODE
        if lasts or ended or self._place - self._held_at > _MAX_HELD:
            yield from self.release(certain=not lasts)
        if slow is None:
            return
        self._slow_at = self._place
        if lasts:
            yield step, replace(slow, certain=False)
        elif slow.certain and not slow.clear and self._held is None:
            self._held, self._held_at = (step, slow), self._place
        else:
            yield step, slow

    def release(self, *, certain: bool = True) -> Iterator[tuple[_Step, SlowStep]]:
        """Yield the slow step whose warning is held back, if any; as a remark unless `certain`."""
        if self._held is not None:
            step, slow = self._held
            self._held = None
            yield step, replace(slow, certain=certain)


def _regular(places: Sequence[int]) -> bool:
    """Return whether the last three places are equally spaced, with other steps between them."""
    if len(places) < 3:
        return False
    first, second = places[-2] - places[-3], places[-1] - places[-2]
    return second > 1 and abs(first - second) <= max(1, 0.05 * first)


@dataclass(frozen=True)
class TokenRate:
    """A training step, normalised by its tokens."""

    seconds: float
    """Its duration, scaled to the first step's token count."""

    explains: bool
    """True if the step was as fast per token as the recent ones, so that its token count explains
    its duration."""


class TokenNormalizer:
    """Distinguishes a slow step from one with more work, such as longer sequences or a larger batch
    after a warm-up."""

    def __init__(self, settings: StepSettings) -> None:
        self._settings = settings
        self._per_token = SortedWindow(settings.window)
        self._first: int | None = None

    def observe(self, seconds: float, tokens: int | None) -> TokenRate | None:
        """Normalise one training step; None if its token count is unknown."""
        if not tokens:
            return None
        self._first = self._first or tokens
        each, window = seconds / tokens, self._per_token
        limit = (
            window.robust_limit(self._settings.mad_factor, self._settings.min_excess_ratio)
            if window
            else 0.0
        )
        explains = len(window) >= _MIN_COUNT and each <= limit
        window.add(each)
        return TokenRate(min(seconds, each * self._first), explains)


class RegressionWatch:
    """Reports once when the median of the last 32 training steps, or each of the last eight, is
    slower than the best median by the ratio, and the slowdown either exceeds `min_excess_s` or has
    lasted 20 s. A busy host delays short steps by fractions of a second, but not for that long."""

    def __init__(self, ratio: float, min_excess_s: float = 0.0) -> None:
        self._ratio = ratio
        self._min_excess_s = min_excess_s
        self._recent = SortedWindow(_RECENT)
        self._row = SortedWindow(_IN_A_ROW)
        self._since = 0
        self._best: float | None = None
        self._behind_s = 0.0
        """Step time accumulated since the median fell behind."""

        self._reported = Once()

    def observe(self, seconds: float) -> Regression | None:
        """Judge one training step. Reports at most once until the speed recovers."""
        self._recent.add(seconds)
        self._row.add(seconds)
        self._since += 1
        self._behind_s += seconds
        if len(self._recent) < _RECENT:
            return None
        if self._best is not None and self._best < self._ratio * self._row.quantile(0):
            return self._behind(self._row.median, self._best)
        if self._since % 8:
            return None
        median = self._recent.median
        if self._best is None or median < self._best:
            self._best = median
        if self._best >= self._ratio * median:
            self._reported.clear()
            self._behind_s = 0.0
            return None
        return self._behind(median, self._best)

    def _behind(self, median: float, best: float) -> Regression | None:
        lasting = median - best > self._min_excess_s or self._behind_s >= _LASTING_S
        return Regression(median, best) if lasting and self._reported.first() else None
