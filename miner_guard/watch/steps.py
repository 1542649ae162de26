"""Steps: the step line, slow steps, source 001's timing lines, and the numbers for the status."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

from miner_guard.config import StepSettings
from miner_guard.rank.journal import JournalEntry, TrainingEntry
from miner_guard.rank.layout import FLAG_FIRST, Now, StepRecord
from miner_guard.record import lines
from miner_guard.record.events import Event, event
from miner_guard.record.phases import SPECIAL_PHASES
from miner_guard.record.status_document import RankSteps, StepsStatus
from miner_guard.record.words import counted, gb, known
from miner_guard.state_dir import json_number
from miner_guard.system.once import Once
from miner_guard.watch.base import Context, Exit, Launch, Monitor
from miner_guard.watch.gpu import memory_grade
from miner_guard.watch.progress import Goodput, TrainingFacts
from miner_guard.watch.series import SortedWindow

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

REGRESSION_RATIO = 0.75
"""A lasting slowdown: best earlier median / median of the last 32 steps is below this."""

_FAST_LOG_EVERY = 10
"""Inner steps between `Fast log time` lines (source 001)."""

_FAST_LOG_USUAL_S = 0.3
_FAST_LOG_MAX_S = 1.0
"""A fast log takes 0.1-0.3 s; above 1 s is a red flag (source 001)."""

_EVALUATION_USUAL_S = 10.0
"""An evaluation step takes 5-10 s (source 001)."""

_INFERENCE_USUAL_PCT = 80.0
_INFERENCE_MAX_PCT = 90.0
_VAL_LOSS_USUAL_PCT = 20.0
_VAL_LOSS_MAX_PCT = 50.0
_OVERHEAD_GOOD_PCT = 10.0
_OVERHEAD_MAX_PCT = 20.0
"""Shares of an evaluation step: above the first of each pair is a remark, above the second a red
flag (source 001)."""

_RED_FLAG_MIN_S = 1.0
"""The parts of a shorter evaluation step are as short as a fast log, so it raises no red flag."""

_EXPECTED = "10-30s"
"""The expected range that the slow-step line prints (source 004)."""


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


@dataclass(frozen=True)
class Sensitivity:
    """Which step is slow relative to the others of its kind."""

    mad_factor: float = _MAD_FACTOR
    min_excess_ratio: float = _MIN_EXCESS_RATIO
    min_excess_s: float = MIN_EXCESS_S
    warmup: int = WARMUP


class StepTimes:
    """Judges one rank's step durations. Memory: one window per kind of step, at most 64 kinds."""

    def __init__(self, settings: StepSettings, rule: Sensitivity | None = None) -> None:
        self._settings = settings
        self._rule = rule or Sensitivity()
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
            window = self._windows[kind] = SortedWindow(_WINDOW)
            self._early[kind] = SortedWindow(max(1, self._rule.warmup))
        if self._seen <= self._rule.warmup:
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
        if self._seen <= self._rule.warmup:
            return None
        window, early = self._windows.get(TRAINING), self._early.get(TRAINING)
        return window or early or None

    def _relative(self, seconds: float, kind: str, window: SortedWindow) -> SlowStep | None:
        if len(window) < _MIN_COUNT:
            return None
        limit = window.robust_limit(self._rule.mad_factor, self._rule.min_excess_ratio)
        limit = max(limit, window.median + self._rule.min_excess_s)
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
        if not outlier or streak >= _WINDOW // 2:
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
        self._per_token = SortedWindow(_WINDOW)
        self._first: int | None = None

    def observe(self, seconds: float, tokens: int | None) -> TokenRate | None:
        """Normalise one training step; None if its token count is unknown."""
        if not tokens:
            return None
        self._first = self._first or tokens
        each, window = seconds / tokens, self._per_token
        limit = window.robust_limit(_MAD_FACTOR, _MIN_EXCESS_RATIO) if window else 0.0
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


_MAY_GATHER = ("collective", "allreduce", "forward", "backward")
"""Phases in which a rank may wait for the others: DDP reduces in backward, FSDP gathers in both."""


def work_seconds(steps: Mapping[int, tuple[float, Mapping[str, float]]]) -> dict[int, float]:
    """Return, by rank, the seconds of a step that the rank did not spend waiting for the others.
    `steps` gives the duration and phases of each rank's step.

    The rank with the least time in the phases of `_MAY_GATHER` waits least; any other rank's wait
    is the time that it spends there beyond that minimum.
    """
    waits = {
        rank: sum(phases.get(name, 0.0) for name in _MAY_GATHER)
        for rank, (_, phases) in steps.items()
    }
    shortest_wait = min(waits.values(), default=0.0)
    return {
        rank: max(0.0, seconds - (waits[rank] - shortest_wait))
        for rank, (seconds, _) in steps.items()
    }


EVALUATION = ("inference", "val_loss")


@dataclass(frozen=True)
class FastLog:
    """Time spent in a monitoring callback without evaluation, by part."""

    total_s: float
    loss_calc_s: float
    overhead_s: float


@dataclass(frozen=True)
class Breakdown:
    """The time that an evaluation step's callback took, by part."""

    total_s: float
    inference_s: float
    val_loss_s: float
    example_loss_s: float
    overhead_s: float | None
    """None if the miner has no `monitor` phase around the evaluation, so the overhead is
    unknown."""


@dataclass(frozen=True)
class RedFlag:
    """One of source 001's red flags, or a remark on a value that approaches one."""

    which: str
    seen: str
    limit: str
    meaning: str
    remark: bool = False
    """True if the value is outside the range that source 001 expects, but below its red flag."""


class TimingLog:
    """Decides which step gets a timing line: in each stretch of `every` steps, the first step
    with something to report."""

    def __init__(self, settings: StepSettings) -> None:
        self._settings = settings
        self._fast_stretch = 0
        self._breakdown_stretch = 0

    def observe(
        self, step: int, phases: Mapping[str, float], nested_in_monitor_s: float
    ) -> FastLog | Breakdown | None:
        """The timing line due at `step` (counted over the run), or None."""
        monitor = phases.get("monitor", 0.0)
        if any(phases.get(name, 0.0) > 0 for name in EVALUATION):
            stretch = step // self._settings.breakdown_every
            if stretch == self._breakdown_stretch:
                return None
            self._breakdown_stretch = stretch
            self._fast_stretch = step // _FAST_LOG_EVERY
            return breakdown(phases, nested_in_monitor_s)
        stretch = step // _FAST_LOG_EVERY
        if monitor <= 0 or stretch == self._fast_stretch:
            return None
        self._fast_stretch = stretch
        return FastLog(
            monitor, phases.get("example_loss", 0.0), max(0.0, monitor - nested_in_monitor_s)
        )


def breakdown(phases: Mapping[str, float], nested_in_monitor_s: float) -> Breakdown:
    """The components of an evaluation step. Without a `monitor` phase the total is the sum of the
    known ones."""
    parts = [phases.get(name, 0.0) for name in ("inference", "val_loss", "example_loss")]
    monitor = phases.get("monitor", 0.0)
    if monitor <= 0:
        return Breakdown(sum(parts), parts[0], parts[1], parts[2], None)
    overhead = max(0.0, monitor - nested_in_monitor_s)
    # A component outside the callback still belongs to the evaluation's time.
    return Breakdown(max(monitor, sum(parts) + overhead), parts[0], parts[1], parts[2], overhead)


def red_flags(seen: FastLog | Breakdown, settings: StepSettings) -> Iterator[RedFlag]:
    """Source 001's red flags in one timing line, and remarks on values outside the expected
    range."""
    if isinstance(seen, FastLog):
        yield from _beyond(
            "fast log",
            seen.total_s,
            (_FAST_LOG_USUAL_S, _FAST_LOG_MAX_S),
            "something slow is running that should not be",
        )
        return
    if seen.total_s < _RED_FLAG_MIN_S:
        return
    if seen.total_s > _EVALUATION_USUAL_S:
        yield RedFlag(
            "evaluation",
            f"{seen.total_s:.3f}s",
            f"{_EVALUATION_USUAL_S:g}s",
            "5-10s is typical: use fewer examples or evaluate less often",
            remark=True,
        )
    for part in _parts(seen, settings):
        yield from part.judge(seen.total_s)


def _beyond(
    which: str, seconds: float, limits: tuple[float, float], meaning: str
) -> Iterator[RedFlag]:
    usual, maximum = limits
    if seconds > usual:
        remark = seconds <= maximum
        yield RedFlag(
            which, f"{seconds:.3f}s", f"{usual if remark else maximum:g}s", meaning, remark
        )


@dataclass(frozen=True)
class _Part:
    """One part of an evaluation step, with its limits as percentages of the step's total."""

    which: str
    seconds: float
    usual_pct: float
    max_pct: float
    remark: str
    red_flag: str

    def judge(self, total_s: float) -> Iterator[RedFlag]:
        share = 100 * self.seconds / total_s
        seen = f"{share:.1f}% of {total_s:.3f}s"
        if share > self.max_pct:
            yield RedFlag(self.which, seen, f"{self.max_pct:g}%", self.red_flag)
        elif share > self.usual_pct:
            yield RedFlag(self.which, seen, f"{self.usual_pct:g}%", self.remark, remark=True)


def _parts(seen: Breakdown, settings: StepSettings) -> Iterator[_Part]:
    """The parts whose share is meaningful: if one part makes up the whole evaluation, its share
    means nothing."""
    if seen.overhead_s is not None:
        yield _Part(
            "overhead",
            seen.overhead_s,
            _OVERHEAD_GOOD_PCT,
            _OVERHEAD_MAX_PCT,
            "1-5% is typical; optimize the costly parts",
            "inefficient status updates or display",
        )
    if seen.overhead_s is not None or seen.val_loss_s > 0:
        yield _Part(
            "inference",
            seen.inference_s,
            _INFERENCE_USUAL_PCT,
            _INFERENCE_MAX_PCT,
            "60-80% is typical: generate fewer or shorter examples",
            "generation may be hanging: check its timeout",
        )
    if seen.inference_s > 0:
        yield _Part(
            "validation",
            seen.val_loss_s,
            _VAL_LOSS_USUAL_PCT,
            _VAL_LOSS_MAX_PCT,
            "10-20% is typical: use fewer validation examples",
            "validation set too large or inefficient",
        )


Kind = Literal["isolated", "periodic", "recurring"]

_WITHIN_STEPS = 20
_RECURRING = 3
"""This many slow steps within 20 steps count as a problem."""

_MIN_PERIOD = 10
"""Shortest period, in steps. If slow steps are more frequent, that is simply the program's
speed."""

_TOLERANCE = 0.02
"""Tolerance, as a fraction of the period: a checkpoint every ten minutes comes after a varying
number of steps."""

_MAX_MISSED = 4
"""A pause is still expected up to this many periods after the last one."""

_MAX_REMEMBERED = 16
_MAX_PERIODS = 8
_SIMILAR = 3.0
"""Largest ratio between the lengths of two pauses of the same kind."""


class PauseWatch:
    """Classifies slow steps one at a time. O(1) memory."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=_MAX_REMEMBERED)
        self._unexplained: deque[int] = deque(maxlen=_RECURRING)
        self._periods: dict[int, tuple[int, float]] = {}
        """Step and duration (s) of the last pause, by period in steps."""

    def observe(self, step: int, seconds: float) -> Kind:
        """Judge a step that was slow outside every named phase; `step` must increase from call to
        call."""
        if self._expected(step, seconds) or self._learned(step, seconds):
            return "periodic"
        self._seen.append((step, seconds))
        self._unexplained.append(step)
        full = len(self._unexplained) == _RECURRING
        return "recurring" if full and step - self._unexplained[0] < _WITHIN_STEPS else "isolated"

    def _expected(self, step: int, seconds: float) -> bool:
        for period, (last, length) in self._periods.items():
            times = round((step - last) / period)
            on_time = abs(step - last - times * period) <= _slack(period)
            if 1 <= times <= _MAX_MISSED and on_time and _similar(seconds, length):
                self._periods[period] = (step, seconds)
                return True
        return False

    def _learned(self, step: int, seconds: float) -> bool:
        """Return whether this is a third pause at the same interval, which establishes a period."""
        alike = {earlier for earlier, length in self._seen if _similar(seconds, length)}
        for earlier in sorted(alike, reverse=True):
            gap = step - earlier
            slack = _slack(gap)
            if gap >= _MIN_PERIOD and any(abs(earlier - first - gap) <= slack for first in alike):
                if len(self._periods) >= _MAX_PERIODS:
                    oldest = min(self._periods, key=lambda period: self._periods[period][0])
                    del self._periods[oldest]
                self._periods[gap] = (step, seconds)
                return True
        return False


def _slack(period: int) -> int:
    return max(1, int(_TOLERANCE * period))


def _similar(one: float, other: float) -> bool:
    return max(one, other) <= _SIMILAR * min(one, other)


_LEFT_OUT_EVERY_S = 10.0
_SLOW_REPEAT_S = 60.0


class StepsMonitor(Monitor):
    """Rank 0, or the lowest rank that reports, stands for the whole run: collectives give all ranks
    the same step time."""

    name = "steps"
    words = frozenset({b"outer step:"})

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._facts = TrainingFacts.from_settings(context.config.miner, context.config.gate)
        self._goodput = Goodput()
        self._last: dict[int, StepRecord] = {}
        self._steps: dict[int, int] = {}
        self._phase = self._operation = ""
        self._loss_first: float | None = None
        self._max: tuple[float, int | None] | None = None
        self._limiter = LineLimiter(context.config.logs.step_lines_per_s)
        self._evaluated = LineLimiter(context.config.logs.step_lines_per_s)
        """Separate limit for steps with an evaluation: they are rare, and they are the only points
        on the evaluation curve."""

        self._reset()

    def _reset(self) -> None:
        """Reset the state for a new launch."""
        steps = self.context.config.steps
        self._times = StepTimes(steps)
        self._regression = RegressionWatch(REGRESSION_RATIO, MIN_EXCESS_S)
        self._slowdowns = SlowWarnings[StepRecord]()
        self._work = TokenNormalizer(steps)
        self._timing = TimingLog(steps)
        self._pauses = PauseWatch()
        self._warned_at = self._noted_at = float("-inf")
        self._slow_left_out = 0
        self._summary_stretch = 0
        self._on_cpu = False
        self._monitored: tuple[str, float, float] | None = None
        """The last monitoring operation of the lead rank: name, begin, and last tick in it."""

        self._miner_prints_steps = False
        self.words = type(self).words
        self._low_memory_reports = Once()
        self._peaks_gb: dict[int, float] = {}
        self._timing_remarks = Once()
        """One remark of each kind per launch: it describes the program, so later ones would only
        repeat it."""

    def on_launch(self, launch: Launch) -> Iterable[Event]:
        self._reset()
        self._goodput.launched(launch.started)
        return ()

    def on_entry(self, rank: int, entry: JournalEntry) -> Iterable[Event]:
        if isinstance(entry, TrainingEntry):
            self._facts = self._facts.with_entry(entry)
        return ()

    def on_lines(self, lines: Sequence[bytes]) -> Iterable[Event]:
        self._miner_prints_steps = self._miner_prints_steps or any(
            b"Outer Step:" in line and b"Inner Step:" in line for line in lines
        )
        if self._miner_prints_steps:
            self.words = frozenset()
        return ()

    def on_steps(self, rank: int, steps: Sequence[StepRecord]) -> Iterable[Event]:
        for step in steps:
            self._last[rank] = step
            self._steps[rank] = self._steps.get(rank, 0) + 1
            if rank == min(self._last):
                yield from self._lead_step(rank, step)

    def _lead_step(self, rank: int, step: StepRecord) -> Iterator[Event]:
        if self._loss_first is None:
            self._loss_first = step.loss
        self._goodput.step(step.start, step.end, step.phases, step.nested_in_monitor_s)
        if (self._limiter if step.eval_loss is None else self._evaluated).allow(step.end):
            about = _about_the_loss(step)
            figures = step.figures()
            yield event(
                "inner_step",
                "info",
                lines.inner_step(figures, about, miner_prints_steps=self._miner_prints_steps),
                rank=rank,
                **figures,
                grad_norm=json_number(step.grad_norm),
                eval_loss=json_number(step.eval_loss),
                tokens=step.tokens,
                total_steps=step.total_steps,
                miner_prints_steps=self._miner_prints_steps or None,
                **about,
            )
        if not step.flags & FLAG_FIRST:
            yield from self._time(rank, step)
        yield from self._timing_lines(rank, step)

    def _time(self, rank: int, step: StepRecord) -> Iterator[Event]:
        if self._max is None or step.seconds > self._max[0]:
            self._max = (step.seconds, step.inner_step)
        kind = kind_of(step.phases)
        slow = self._times.observe(step.seconds, kind, scheduled_seconds(step.phases))
        training = kind == TRAINING
        as_usual = self._work.observe(step.seconds, step.tokens) if training else None
        if slow is not None and slow.rule == "relative" and as_usual and as_usual.explains:
            slow = None
        seconds = step.seconds if as_usual is None else as_usual.seconds
        regression = self._regression.observe(seconds) if training else None
        if regression is not None:
            self._times.rebase()
        lasts = regression is not None
        for late, seen in self._slowdowns.observe(step, slow, kind, lasts=lasts):
            yield from self._slow_line(rank, late, seen)
        if regression is not None and not self._on_cpu:
            yield event(
                "steps_regressed",
                "warning",
                f"STEPS REGRESSED: median {regression.median_s:.2f}s, best "
                f"{regression.best_s:.2f}s earlier ({regression.ratio:.0%} of best speed)",
                rank=rank,
                median_s=regression.median_s,
                best_s=regression.best_s,
                ratio=regression.ratio,
                inner_step=step.inner_step,
                outer_step=step.outer_step,
            )
        yield from self._summary(rank, step)

    def _slow_line(self, rank: int, step: StepRecord, slow: SlowStep) -> Iterator[Event]:
        # Every slow step longer than 60 s gets a line, as in source 004; a line for shorter ones
        # would flood the console. The report marks all of them.
        too_soon = step.end - self._warned_at < _SLOW_REPEAT_S or self._on_cpu
        pause = self._pause(step, slow)
        level, left_out = "warning", self._slow_left_out
        expected = _EXPECTED
        if slow.rule == "relative" and slow.median_s is not None:
            expected = f"{slow.median_s:.1f}-{slow.limit_s:.1f}s"
        remark = pause == "isolated" or not slow.certain
        again = remark and step.end - self._noted_at < _SLOW_REPEAT_S
        if pause == "periodic" or again or (slow.rule == "relative" and too_soon):
            level = "debug"
            self._slow_left_out += 1
        elif remark:
            level, self._noted_at = "info", step.end
        else:
            self._slow_left_out = 0
            self._warned_at = step.end if slow.rule == "relative" else self._warned_at
        phases = sorted(step.phases.items(), key=lambda item: -item[1])[:4]
        operation, monitored_s = self._monitored_in(step)
        no_gpu = self._no_gpu() or None
        if monitored_s >= 0.5 * (slow.seconds - (slow.median_s or slow.limit_s)) > 0:
            advice = f" - {monitored_s:.0f}s of it in {operation}"
        else:
            operation, advice = None, "" if no_gpu else " - Check GPU usage!"
        yield event(
            "slow_step",
            level,
            f"SLOW STEP: {slow.seconds:.1f}s (expected {expected}){advice}",
            rank=rank,
            step_time_s=slow.seconds,
            expected=expected,
            inner_step=step.inner_step,
            outer_step=step.outer_step,
            limit_s=slow.limit_s,
            rule=slow.rule,
            median_s=slow.median_s,
            step_kind=slow.kind,
            left_out=left_out,
            pause=pause,
            no_gpu=no_gpu,
            operation=operation,
            phases_s={name: round(seconds, 3) for name, seconds in phases},
        )
        yield from self._low_memory(rank, step, slow)

    def _monitored_in(self, step: StepRecord) -> tuple[str | None, float]:
        """The monitoring operation during the step, and its seconds as far as ticks have shown
        them."""
        if self._monitored is None:
            return None, 0.0
        operation, since, until = self._monitored
        return operation, max(0.0, min(until, step.end) - max(since, step.start))

    def _low_memory(self, rank: int, step: StepRecord, slow: SlowStep) -> Iterator[Event]:
        """Yield source 004's second line for a slow step, once per launch. If memory stays
        low, `cpu_fallback` reports it."""
        memory, gpu = gb(step.allocated_bytes), self.context.config.gpu
        low = memory is not None and memory < gpu.low_memory_gb and gpu.expect != 0
        if slow.rule == "absolute" and low and self._low_memory_reports.first():
            yield event(
                "low_gpu_memory",
                "warning",
                "LOW GPU MEMORY: Model may be on CPU!",
                rank=rank,
                gpu_mem_gb=memory,
            )

    def _no_gpu(self) -> bool:
        """Return True if this machine is known to have no GPU."""
        health = self.context.status().get("health")
        gpus = health.get("gpus") if isinstance(health, Mapping) else None
        return isinstance(gpus, Mapping) and gpus.get("state") == "absent"

    def _pause(self, step: StepRecord, slow: SlowStep) -> str | None:
        """Return the kind of pause; None if named phases account for most of the excess time, or if
        the step exceeded the absolute limit."""
        if slow.rule != "relative" or slow.median_s is None:
            return None
        outside = step.seconds - sum(step.phases.values())
        if outside < 0.5 * (step.seconds - slow.median_s):
            return None
        return self._pauses.observe(step.total_steps, step.seconds)

    def _summary(self, rank: int, step: StepRecord) -> Iterator[Event]:
        stretch = step.total_steps // self.context.config.steps.breakdown_every
        window = self._times.training_window()
        if stretch == self._summary_stretch or window is None or self._max is None:
            return
        self._summary_stretch = stretch
        p95_s, speed = window.quantile(0.95), grade(window.median, self.context.config.steps)
        memory = gb(step.allocated_bytes)
        memory_speed = memory_grade(memory, self.context.config.gpu)
        yield event(
            "step_summary",
            "info",
            f"STEP SUMMARY: p50 {window.median:.2f}s p95 {known(p95_s, '.2f')}s "
            f"max {self._max[0]:.2f}s, grade {speed}"
            + (
                ""
                if memory_speed is None
                else f" | GPU memory {known(memory, '.1f')}GB, grade {memory_speed}"
            ),
            rank=rank,
            p50_s=window.median,
            p95_s=p95_s,
            max_s=self._max[0],
            grade=speed,
            steps=self._steps[rank],
            gpu_mem_gb=memory,
            memory_grade=memory_speed,
        )

    def _timing_lines(self, rank: int, step: StepRecord) -> Iterator[Event]:
        seen = self._timing.observe(step.total_steps, step.phases, step.nested_in_monitor_s)
        if isinstance(seen, FastLog):
            yield event(
                "fast_log",
                "info",
                f"Fast log time: {seen.total_s:.3f}s (loss calc: {seen.loss_calc_s:.3f}s, "
                f"overhead: {seen.overhead_s:.3f}s)",
                rank=rank,
                total_s=seen.total_s,
                loss_calc_s=seen.loss_calc_s,
                overhead_s=seen.overhead_s,
                inner_step=step.inner_step,
                outer_step=step.outer_step,
            )
        elif seen is not None:
            yield event(
                "timing_breakdown",
                "info",
                _breakdown(step.total_steps, seen),
                rank=rank,
                step=step.total_steps,
                total_s=seen.total_s,
                inference_s=seen.inference_s,
                val_loss_s=seen.val_loss_s,
                example_loss_s=seen.example_loss_s,
                overhead_s=seen.overhead_s,
                inner_step=step.inner_step,
                outer_step=step.outer_step,
            )
        if seen is not None:
            for flag in red_flags(seen, self.context.config.steps):
                if flag.remark and not self._timing_remarks.first(flag.which):
                    continue
                fields: dict[str, Any] = {
                    "which": flag.which,
                    "seen": flag.seen,
                    "limit": flag.limit,
                    "meaning": flag.meaning,
                    "step": step.total_steps,
                }
                says = f"{flag.which}: {flag.seen} ({{}} {flag.limit}): {flag.meaning}"
                if flag.remark:
                    text = f"TIMING REMARK: {says.format('usual below')}"
                    yield event("timing_remark", "info", text, rank=rank, **fields)
                else:
                    text = f"TIMING RED FLAG: {says.format('limit')}"
                    yield event("timing_red_flag", "warning", text, rank=rank, **fields)

    def on_event(self, event: Event) -> Iterable[Event]:
        if event.name == "hang_detected":
            self._goodput.hang_found()
        if event.name == "gpu_memory_peak" and event.rank is not None:
            self._peaks_gb[event.rank] = event.fields["peak_gb"]
        if event.name == "cpu_fallback":
            # A CPU fallback explains a lasting slowdown, so do not report the slowdown too.
            self._on_cpu = event.fields["verdict"] != "cleared"
        return ()

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Event]:
        lead = ranks[min(ranks)] if ranks else None
        self._phase = lead.phase if lead else ""
        self._operation = lead.operation if lead else ""
        if lead is not None and lead.operation_since is not None:
            self._monitored = (lead.operation, lead.operation_since, now)
        for rank in self._last.keys() - ranks.keys() if ranks else ():
            # After a new rendezvous this node may have different ranks: a rank that no longer
            # exists must not lead.
            del self._last[rank]
        return self._left_out(now)

    def on_exit(self, end: Exit) -> Iterable[Event]:
        now = self.context.clock.monotonic()
        self._goodput.exited(now, finished=end.finished)
        for step, slow in self._slowdowns.release():
            yield from self._slow_line(min(self._last, default=0), step, slow)
        yield from self._left_out(float("inf"))

    def _left_out(self, now: float) -> Iterator[Event]:
        if (count := self._limiter.left_out(now)) > 0:
            yield event(
                "step_lines_left_out",
                "info",
                f"{counted(count, 'step line')} left out (limit {self._limiter.per_s:g}/s, "
                "[logs] step_lines_per_s)",
                count=count,
                limit_per_s=f"{self._limiter.per_s:g}",
            )

    def snapshot(self) -> Mapping[str, Any]:
        now = self.context.clock.monotonic()
        lead = self._last[min(self._last)] if self._last else None
        window = self._times.training_window()
        median = window.median if window is not None else None
        since = max(0.0, now - lead.end) if lead is not None else 0.0
        inner = lead.inner_step if lead is not None else None
        memory_gb = gb(lead.allocated_bytes) if lead else None
        return StepsStatus(
            outer_step=lead.outer_step if lead else None,
            inner_step=inner,
            total_steps=lead.total_steps if lead else None,
            steps=self._steps[min(self._last)] if lead else 0,
            loss=json_number(lead.loss) if lead else None,
            loss_first=json_number(self._loss_first),
            loss_last=json_number(lead.loss) if lead else None,
            lr=lead.lr if lead else None,
            grad_norm=json_number(lead.grad_norm) if lead else None,
            gpu_mem_gb=memory_gb,
            memory_grade=memory_grade(memory_gb, self.context.config.gpu),
            step_time_s=lead.seconds if lead else None,
            last_step_age_s=since if lead else None,
            phase=self._operation or self._phase,
            p50_s=median,
            p95_s=window.quantile(0.95) if window is not None else None,
            max_s=self._max[0] if self._max else None,
            max_at_inner_step=self._max[1] if self._max else None,
            grade=None if median is None else grade(median, self.context.config.steps),
            tokens_per_s=self._facts.tokens_per_s(lead.tokens if lead else None, median),
            samples_per_s=self._facts.samples_per_s(median),
            eta_upload_s=self._facts.eta_upload_s(inner, median, since),
            eta_outer_s=self._facts.eta_outer_s(inner, median, since),
            goodput=self._goodput.shares(now, self._phase),
            per_rank=self._per_rank(now),
        ).to_json()

    def _per_rank(self, now: float) -> dict[str, RankSteps]:
        work = work_seconds({rank: (s.seconds, s.phases) for rank, s in self._last.items()})
        return {
            str(rank): _rank_row(step, work[rank], self._peaks_gb.get(rank), now)
            for rank, step in sorted(self._last.items())
        }


def _about_the_loss(step: StepRecord) -> dict[str, Any]:
    """Fields for a loss that is a sum or belongs to another step."""
    if step.loss is None:
        return {}
    about: dict[str, Any] = {"loss_summed": True} if step.loss_summed else {}
    number = step.total_steps if step.inner_step is None else step.inner_step
    return {**about, "loss_step": number - step.loss_lag} if step.loss_lag else about


def _rank_row(step: StepRecord, work_s: float, peak_gb: float | None, now: float) -> RankSteps:
    return RankSteps(
        outer_step=step.outer_step,
        inner_step=step.inner_step,
        loss=json_number(step.loss),
        step_time_s=step.seconds,
        work_s=work_s,
        gpu_mem_gb=gb(step.allocated_bytes),
        gpu_peak_gb=peak_gb,
        phases_s=dict(step.phases),
        last_step_age_s=max(0.0, now - step.end),
    )


class LineLimiter:
    """Limits lines per second of step time and counts those it suppresses."""

    def __init__(self, per_s: float) -> None:
        self.per_s = per_s
        self._second = -1
        self._used = 0.0
        self._left_out = 0
        self._counted_at = float("-inf")

    def allow(self, now: float) -> bool:
        """Return True if a line may be printed at `now` (monotonic). Rates below 1/s allow one
        line every 1/per_s seconds."""
        stretch = max(1.0, 1.0 / self.per_s)
        if int(now / stretch) != self._second:
            self._second, self._used = int(now / stretch), 0.0
        if self._used + 1 > max(1.0, self.per_s):
            self._left_out += 1
            return False
        self._used += 1
        return True

    def left_out(self, now: float) -> int:
        """Lines suppressed since the last non-zero result; 0 if that is less than 10 s old."""
        if not self._left_out or now - self._counted_at < _LEFT_OUT_EVERY_S:
            return 0
        count, self._left_out = self._left_out, 0
        self._counted_at = now if now != float("inf") else self._counted_at
        return count


def _breakdown(step: int, parts: Breakdown) -> str:
    """Source 001's block: seconds and share of each part of an evaluation step."""
    rows = [f"TIMING BREAKDOWN (Step {step:,}):", f"   {'Total:':<15} {parts.total_s:.3f}s"]
    for title, seconds in (
        ("Inference", parts.inference_s),
        ("Val Loss", parts.val_loss_s),
        ("Example Loss", parts.example_loss_s),
        ("Overhead", parts.overhead_s),
    ):
        if seconds is None:
            rows.append(f"   {title + ':':<15} unknown")
            continue
        share = 100 * seconds / parts.total_s if parts.total_s else 0.0
        rows.append(f"   {title + ':':<15} {seconds:.3f}s ({share:.1f}%)")
    return "\n".join(rows)
