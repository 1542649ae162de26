"""Curves: loss, evaluation loss and memory, judged by the same judges in a running miner and in a
finished curve.

Live, a judge sees what came before a value. After the fact it also knows how long the curve is
(`Whole`): short curves get shorter blocks, a finding is dated to where it began, and the evaluation
is judged once, at the end. Step times of a finished curve are judged by `watch.steps`.
"""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from miner_guard.config import LossSettings, read_toml
from miner_guard.rank.layout import Now, StepRecord
from miner_guard.record.events import Event, event
from miner_guard.record.words import gb, rank_list
from miner_guard.watch.alike import SharedFinding, SharedFindings
from miner_guard.watch.base import Context, Exit, Launch
from miner_guard.watch.lines import EVALUATION_WORDS, evaluation_in
from miner_guard.watch.progress import FactsMonitor, TrainingFacts
from miner_guard.watch.series import (
    MAD_TO_SIGMA,
    SortedWindow,
    centred,
    kendall,
    second_difference_sigma,
)
from miner_guard.watch.step_times import LEVEL_STEPS, LevelWatch, SlowEpisodes, UsualTime
from miner_guard.watch.trace_reading import Series, Trace

_WINDOW = 64
"""Recent values against which a value is compared to detect a spike."""

_WARMUP = 32
"""Values needed before the first verdict."""

_MAD_FACTOR = 6.0
_MIN_EXCESS_RATIO = 0.10
"""A spike exceeds median + max(_MAD_FACTOR · 1.4826 · MAD, _MIN_EXCESS_RATIO · |median|)."""

_EXPLOSION_RATIO = 2.0
"""Five consecutive steps above this multiple of the median are an explosion."""


@dataclass(frozen=True)
class Anomaly:
    """One observation about a curve: an anomaly or a remark. `advised` adds the cause and fixes."""

    type: str
    """The type name used by `explain --trace`: nan, spike, divergence, plateau_high, overfit,
    slow_steps, …"""

    at_step: int
    """The step whose value decided it."""

    severity: str
    """`info` is a remark; `warning` and `critical` are alarms."""

    detail: str
    """The evidence: the value seen, the limit it was judged against, and the window."""

    evidence: Mapping[str, Any] = field(default_factory=dict)
    case: str = ""
    """The row of advice.toml, for a type that has several."""

    since: int | None = None
    """The step at which it began, if that was seen only later."""

    good_step: int | None = None
    """The last step at which all was well."""

    cause: str = ""
    fixes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Whole:
    """What is known of a finished curve."""

    values: int
    steps: int
    """Steps from the first value to the last."""

    from_start: bool
    """Whether it begins where its run began. Late in a run a flat loss is normal; only a loss that
    was never higher has not learned."""

    @staticmethod
    def of(series: Series) -> Whole:
        """A series begins its run if its first step is at most three strides from zero."""
        if not len(series):
            return Whole(0, 0, from_start=False)
        span = series.steps[-1] - series.steps[0]
        stride = span / max(1, len(series) - 1)
        return Whole(len(series), span, series.steps[0] <= max(3 * stride, 1))


_ADVICE = read_toml(Path(__file__).with_name("advice.toml"))


def example_range(facts: TrainingFacts, step: int) -> tuple[int, int] | None:
    """Return the indices of the first and last example in `step`, or None if the settings do not
    determine them.

    Source 003: start = batch · accumulation · step, end = start + batch · accumulation. With more
    than one rank a step takes `world_size` times as many examples, and the range covers all ranks.
    An effective batch size already counts all ranks (subnet 38 divides it by the world size).
    """
    size = facts.effective_batch_size
    if size is None and facts.batch_size is not None and facts.accumulation_steps is not None:
        size = facts.batch_size * facts.accumulation_steps * (facts.world_size or 1)
    return None if size is None else (size * step, size * (step + 1) - 1)


def advised(
    anomaly: Anomaly, facts: TrainingFacts, lr: float | None, taken: int | None = None
) -> Anomaly:
    """The finding with its likely cause, its fixes, and the examples of its step. `taken` is the
    number of the step since the data began, where steps restart at 1 in each outer step."""
    advice = _ADVICE[anomaly.case or anomaly.type]
    span = example_range(facts, anomaly.at_step if taken is None else taken)
    each, good = facts.accumulation_steps, anomaly.good_step
    words: dict[str, Any] = {
        "step": anomaly.at_step,
        "good_step": good,
        "lower": "lower the learning rate (1e-4 rather than 2e-4)",
        "raise": "raise the learning rate",
        "good": "from before the loss began to climb",
        "examples": "" if span is None else f" (examples {span[0]} to {span[1]})",
        "inspect": f"inspect the batch at step {anomaly.at_step}: its data may be bad"
        if span is None
        else f"check examples {span[0]} to {span[1]}: that batch may contain bad data",
        "fewer": f"use fewer accumulation steps: each step consists of {each} of them"
        if each
        else "",
    }
    if lr:
        words["lower"] = f"halve the learning rate, from {lr:.3g} to {lr / 2:.3g}"
        words["raise"] += f" from {lr:.3g}"
    if good is not None:
        words["good"] = f"at or before step {good}"
    evidence = anomaly.evidence
    if anomaly.type == "nan":
        evidence = {**evidence, "examples": list(span) if span else None}
    fixes = tuple(filter(None, (fix.format_map(words) for fix in advice["fixes"])))
    return replace(anomaly, cause=advice["cause"], fixes=fixes, evidence=evidence)


RECOVERED_RATIO = 1.5
"""A jump must be this many times as high as any earlier jump from which the loss recovered, because
every epoch may cause a similar one."""


class Divergence:
    """Detects a loss that climbs away from its best level and does not come back.

    Levels are medians of blocks. The last four must all exceed the best one: by 10 %, by six sigmas
    of the noise (measured on second differences, which a trend does not affect), and by 1.5 times
    any rise that the run has recovered from (at a new epoch, after a warm restart, or with
    unshuffled data). The last level must be close to the highest one.
    """

    _GAP = 0.10
    _GAP_SIGMAS = 6.0
    _LASTING = 4
    _NEAR_TOP = 0.9
    _STAYS = 0.25
    _MAX_BENDS = 32
    SIZE = 15
    _BLOCKS = 20
    """A finished curve is cut into at least this many blocks."""

    def __init__(self, whole: Whole | None = None) -> None:
        self._size = self.SIZE
        if whole is not None:
            self._size = max(1, min(self._size, whole.values // self._BLOCKS))
        self._block: list[float] = []
        self._begun = 0
        self._levels: deque[float] = deque(maxlen=self._LASTING)
        self._bends = SortedWindow(self._MAX_BENDS)
        self._best: tuple[float, int] | None = None
        self._rise = self._recovered = 0.0
        self.away_since: int | None = None
        """The step since which the loss has been away from its best level."""

        self._reported = False

    @property
    def stays(self) -> bool:
        """True if the loss is still clearly above its best level."""
        if self._best is None or not self._levels:
            return True
        best = self._best[0]
        return self._levels[-1] - best >= self._STAYS * abs(best)

    def reported(self) -> None:
        """Note that another rule has already reported the current climb."""
        self._reported = True
        # Values from before the climb would make it look as if the loss had recovered.
        self._block.clear()

    @property
    def best_step(self) -> int | None:
        return None if self._best is None else self._best[1]

    def observe(self, step: int, loss: float) -> Anomaly | None:
        """Judge one loss. Reports each climb once."""
        if not self._block:
            self._begun = step
        self._block.append(loss)
        if len(self._block) < self._size:
            return None
        level = statistics.median(self._block)
        self._block.clear()
        self._levels.append(level)
        if len(self._levels) >= 3:
            first, middle, last = list(self._levels)[-3:]
            self._bends.add(abs(first - 2 * middle + last))
        if self._best is None or level < self._best[0]:
            self._came_back(0.0, level)
            self._best, self.away_since = (level, step), None
            return None
        best, best_step = self._best
        if level - best < self._rise / 2:
            self._came_back(level - best, best)
        self._rise = max(self._rise, level - best)
        gap = self._gap(best)
        if level - best <= gap / 2:
            self.away_since = None
        elif self.away_since is None:
            self.away_since = self._begun
        near_top = level - best >= self._NEAR_TOP * self._rise
        lasts = len(self._levels) == self._LASTING and min(self._levels) - best > gap
        if self._reported or not (lasts and near_top):
            return None
        self._reported = True
        window = self._size * self._LASTING
        return Anomaly(
            "divergence",
            step,
            "warning",
            f"loss rose from {best:.4g} (best level, step {best_step}) to {level:.4g} and has not "
            f"come back for {window} steps",
            {"best": best, "best_step": best_step, "level": level, "window": window},
            since=self.away_since,
            good_step=best_step,
        )

    def _came_back(self, rise: float, best: float) -> None:
        self._recovered = max(self._recovered, self._rise)
        self._rise = rise
        # Until the loss is halfway back, this is still the climb that was reported.
        self._reported = self._reported and rise > self._GAP * abs(best)

    def _gap(self, best: float) -> float:
        noise = MAD_TO_SIGMA * self._bends.median / math.sqrt(6) if len(self._bends) else 0.0
        return max(
            self._GAP * abs(best), self._GAP_SIGMAS * noise, RECOVERED_RATIO * self._recovered
        )


_MIN_DELTA = 0.01
"""Minimum relative drop of the smoothed best for the loss to count as improved."""

_GAIN_SIGMAS = 2.0
"""The gain must also be this multiple of the blocks' noise: the lowest of many noisy blocks is low
by chance."""

_LEARNED = 0.10
"""If the loss has fallen by this share of its first level, the model has learned, and a later
plateau is convergence."""

_SLOW_FALL = (0.03, 0.15)
"""In the first steps of a run, a fall between these shares of the first level is slow, a smaller
one flat; in `plateau_steps`, a fall below the first share is slow."""

_STEADY_SIGMAS = 6.0
"""The fall must be at least this multiple of the blocks' noise: the pace of a noisy loss is
unknown."""

_SLOW_VALUES = range(9, 201)
"""A curve with this many values shows the beginning of a run; a longer one shows the loss's own
long-term shape."""

_CHANCE = (7.0, 13.0)
"""An untrained language model's loss, in nats: ln(vocabulary size), for 1,100 to 440,000 tokens."""

_NEAR_CHANCE = 0.12
"""Learning only the token frequencies lowers a language model's loss by this fraction of its
initial value."""


def near_chance(begin: float, best: float) -> bool:
    """Return whether a loss that started at `begin` and has reached `best` is still that of an
    untrained language model."""
    return _CHANCE[0] <= begin <= _CHANCE[1] and begin - best < _NEAR_CHANCE * begin


class Plateau:
    """Reports a loss that has reached no new low for `plateau_steps`, or for half of a finished
    curve: as convergence if it fell earlier, otherwise as a model that is not learning."""

    _BLOCKS = 32
    _MIN_VALUES = 9
    """Values below which a curve is too short to be called flat."""

    _MAX_NOISE = 0.05
    """Blocks noisier than this can hide a fall."""

    def __init__(self, settings: LossSettings, whole: Whole | None = None) -> None:
        self._steps, count = settings.plateau_steps, self._BLOCKS
        self._stride = 1
        if whole is not None:
            self._stride = max(1, whole.steps // max(1, whole.values - 1))
            self._steps = max(1, min(self._steps, whole.steps // 2))
            count = min(count, max(whole.values, self._MIN_VALUES) // 2)
        self._whole, self._from_start = whole, whole is not None and whole.from_start
        self._size = max(1, self._steps // count)
        """Minimum number of steps in a block: a trainer may log only every 50th step."""

        self._sum = 0.0
        self._count = 0
        self._ended: int | None = None
        """The last step of the latest block."""

        self._blocks: deque[float] = deque(maxlen=count)
        self._first: tuple[int, float] | None = None
        """The last step of the first block, and its level."""

        self._paced = whole is not None
        """Whether the pace of the fall has been judged."""

        self._best = math.inf
        self._best_step = 0
        self._reported = False
        self._means: list[tuple[int, float]] = []
        """The last step and the mean of equal parts of a live run's beginning, which grow as it
        does."""

        self._part: list[float] = []
        self._width = 0 if whole is not None else 1
        """Values in each of these parts; 0 once the beginning has been judged."""

    def observe(self, step: int, loss: float) -> Anomaly | None:
        """Judge one loss. Reports each plateau once."""
        beginning = self._beginning(step, loss)
        return self._lasting(step, loss) or beginning

    def _beginning(self, step: int, loss: float) -> Anomaly | None:
        """Remark on a loss that has been flat since the first step, at each doubling of a live run
        until `plateau_steps`, which take hours where a step takes 15 s. Its means have neither been
        higher nor fallen, and are steady enough to show a fall of 3 %."""
        if not self._width:
            return None
        self._part.append(loss)
        if len(self._part) < self._width:
            return None
        self._means.append((step, statistics.fmean(self._part)))
        self._part.clear()
        if len(self._means) < self._BLOCKS:
            return None
        means, half = [mean for _, mean in self._means], self._BLOCKS // 2
        begin, level = statistics.fmean(means[:half]), statistics.fmean(means[half:])
        noise, visible = second_difference_sigma(means), _SLOW_FALL[0] * abs(level)
        (first, _), (second, _), *_ = self._means
        late = step - first >= self._steps or first > 3 * (second - first)
        steady = _STEADY_SIGMAS * noise <= visible
        flat = steady and max(means) - level <= visible and begin - level <= noise / 2
        pairs = zip(self._means[::2], self._means[1::2], strict=True)
        self._means = [(last, (one + other) / 2) for (_, one), (last, other) in pairs]
        self._width = 0 if late or flat else 2 * self._width
        # An untrained language model may still be in its warm-up.
        if late or not flat or near_chance(begin, level):
            return None
        self._paced = self._reported = True
        detail = f"the loss has not fallen in its first {step - first} steps: {begin:.4g} to "
        evidence = {"first": begin, "level": level, "window": step - first}
        return Anomaly("plateau_high", step, "info", f"{detail}{level:.4g}", evidence)

    def _lasting(self, step: int, loss: float) -> Anomaly | None:
        if self._ended is None or step <= self._ended:
            # The first step, or the first after training resumed from an earlier checkpoint.
            self._ended = step - self._stride
            self._best_step = min(self._best_step, step)
        self._sum += loss
        self._count += 1
        if step - self._ended < self._size:
            return None
        level = self._sum / self._count
        self._sum, self._count, self._ended = 0.0, 0, step
        self._blocks.append(level)
        self._first = self._first or (step, level)
        if not self._paced and step - self._first[0] >= self._steps:
            self._paced = True
            if slow := self._slow(_MIN_DELTA, _SLOW_FALL[0]):
                return slow
        noise = second_difference_sigma(self._blocks) if len(self._blocks) > 3 else 0.0
        min_gain = max(_MIN_DELTA * abs(self._best), _GAIN_SIGMAS * noise)
        if self._best == math.inf or level < self._best - min_gain:
            self._best, self._best_step, self._reported = level, step, False
            return None
        lasts = step - self._best_step >= self._steps and len(self._blocks) == self._blocks.maxlen
        if self._reported or not lasts:
            return None
        self._reported = True
        steady = noise <= self._MAX_NOISE * abs(level)
        return self._anomaly(self._first[1], level, step, steady=steady)

    def finish(self) -> Anomaly | None:
        """Remark on a finished curve that shows the first steps of a run, and falls slowly."""
        short = self._whole is not None and self._whole.values in _SLOW_VALUES
        return self._slow(*_SLOW_FALL) if short and self._from_start else None

    def _slow(self, low: float, high: float) -> Anomaly | None:
        """Remark on a loss that has fallen by a share between `low` and `high`, beyond its noise
        (source 003: underfitting "stays flat or decreases very slowly"). A fine-tuned model may
        have little to learn, so it is no alarm unless the model is untrained."""
        if self._first is None or self._ended is None:
            return None
        (begun, first), level = self._first, self._blocks[-1]
        noise = second_difference_sigma(self._blocks)
        fallen = (first - level) / abs(first) if first else 0.0
        if not low < fallen <= high or first - level < _STEADY_SIGMAS * noise:
            return None
        stuck = self._whole is None and near_chance(first, min(self._best, level))
        return Anomaly(
            "slow_decrease",
            self._ended,
            "warning" if stuck else "info",
            f"the loss is decreasing, but slowly: {first:.4g} to {level:.4g}, {fallen:.1%} in "
            f"{self._ended - begun} steps",
            {"first": first, "level": level},
        )

    def _anomaly(self, first: float, level: float, step: int, *, steady: bool) -> Anomaly:
        without_low = step - self._best_step
        fallen = (first - self._best) / abs(first) if first else 0.0
        stuck = near_chance(first, self._best) or self._from_start
        learned = fallen >= _LEARNED
        return Anomaly(
            "plateau_high",
            step,
            "warning" if stuck and not learned and steady else "info",
            f"{'converged: ' if learned else ''}loss {level:.4g}, {fallen:.1%} below its first "
            f"level, no new low for {without_low} steps",
            {"first": first, "best": self._best, "level": level, "window": without_low},
            "converged" if learned else "",
        )


_LOCAL = 8
_LOCAL_FACTOR = 8.0
_LOCAL_EXCESS = 0.25
"""The local rule. While a loss falls fast, its spread over 64 values is mostly descent, so an
outlier must exceed the median of the last 8 values by 25 % and by 8 sigma of the step-to-step
noise, with the drift removed."""

_MIN_FIRST = 3
_FIRST_FACTOR = 5.0
"""The rule for the first values of a run or a log: a loss starts high, so a value far above the
highest of them is an outlier. Five in a row count as an explosion, just as they do later in a
run."""

_MAX_FIRST_SPREAD = 3.0
"""If the highest of the first values exceeds the lowest by more than this factor, as in a
policy-gradient loss around zero, they do not establish a level."""

_STRONG_RATIO = 1.5
"""A value at this multiple of its level deserves a warning."""

_TAIL = 2.0
_FORGET = 0.998
"""An upward jump, or an explosion, must be `_TAIL` times the largest one that was no outlier: of a
value away from both its neighbours, or of the level below an earlier and a later one, because each
rollout of a reinforcement learner has another level. `_FORGET` fades an old jump with a half-life
of 350 values."""

_EXPLOSION_STEPS = 5

_NO_START = 0.01
"""A loss that began below this share of its level measures a distance from there, such as GRPO's to
the reference model: it can only rise, so that is a remark."""

_RECURRING = 3
"""So many spikes within `_WINDOW` values are how this loss behaves: the next ones are remarks,
unless one is `RECOVERED_RATIO` times as high as any of them."""


class LossWatch:
    """Judges one loss curve, value by value. Silent on healthy training."""

    def __init__(self, settings: LossSettings, whole: Whole | None = None) -> None:
        self._window = SortedWindow(_WINDOW)
        self._local = SortedWindow(_LOCAL)
        self._changes = SortedWindow(_WINDOW)
        self._two: deque[float] = deque(maxlen=2)
        """The last two values that were not outliers."""

        self._outliers: list[tuple[float, Anomaly]] = []
        """The latest outliers in a row, and the finding for each; at most `_EXPLOSION_STEPS`."""

        self._in_row = self._high_in_row = 0
        self._exploded = False
        """Whether the outliers in a row have been reported as an explosion."""

        self._dip = 0.0
        self._spikes: deque[tuple[int, float]] = deque(maxlen=2 * _RECURRING)
        """How many values had come before each of the latest spikes, and its height."""

        self._first = math.nan
        self._high = self._low = math.nan
        """The level from which the loss has fallen last, and the lowest one since."""

        self._from_start = whole is None or whole.from_start
        self._finite = self._recovered = 0
        """How many losses were finite, and how many times it became so again after a NaN."""

        self.not_finite = False
        self._trend = Divergence(whole)
        self._plateau = Plateau(settings, whole)

    @property
    def stays_high(self) -> bool:
        """False if the loss has come back from a divergence."""
        return self._trend.stays

    def observe(self, step: int, loss: float, grad_norm: float | None = None) -> Iterator[Anomaly]:
        """Judge the loss of one step. Non-finite values stay out of every window."""
        for anomaly in self._judge(step, loss, grad_norm):
            rises = anomaly.type in ("spike", "divergence") and bool(self._local)
            if rises and abs(self._first) < _NO_START * abs(self._local.median):
                anomaly = replace(anomaly, severity="info")
            yield anomaly

    def _judge(self, step: int, loss: float, grad_norm: float | None) -> Iterator[Anomaly]:
        if not math.isfinite(loss) or hides_nan(loss, grad_norm):
            if not self.not_finite:
                self.not_finite = True
                yield self._not_finite(step, loss, grad_norm)
                self._outliers.clear()
            return
        self._recovered += self.not_finite
        self._finite += 1
        self._first = loss if math.isnan(self._first) else self._first
        self.not_finite = False
        limit = self._limit()
        if limit is not None and loss > limit:
            yield from self._outlier(step, loss, limit)
            return
        yield from self._spike()
        self._in_row, self._high_in_row, self._exploded = 0, 0, False
        self._dip = max(_FORGET * self._dip, self._dipped(loss))
        self._admit(loss)
        if len(self._local) == _LOCAL:
            self._dip = max(self._dip, self._level_dipped(self._local.median))
        yield from filter(
            None, (self._trend.observe(step, loss), self._plateau.observe(step, loss))
        )

    def _not_finite(self, step: int, loss: float, grad_norm: float | None) -> Anomaly:
        """The finding for a loss that is NaN, infinite, or a 0 that hides one. What came before it
        decides between source 003's causes."""
        if not self._finite and self._from_start:
            case = "nan from the start"
        elif self._recovered:
            case = "nan at random"
        elif self._finite < _WARMUP and self._from_start:
            case = "nan in the first steps"
        else:
            climbs = self._outliers or self._trend.away_since is not None
            case = "nan after a climb" if climbs else "nan at one step"
        evidence, norm = {"loss": repr(loss)}, ""
        if loss == 0.0:
            evidence["grad_norm"] = repr(grad_norm)
            norm = f" with a gradient norm of {grad_norm}: HF Trainer prints 0 for NaN"
        detail = f"loss is {loss} at step {step}{norm}"
        return Anomaly(
            "nan", step, "critical", detail, evidence, case, good_step=self._trend.best_step
        )

    def finish(self) -> Iterator[Anomaly]:
        """What is known at the end of the curve."""
        yield from self._spike()
        yield from filter(None, (self._plateau.finish(),))

    def _spike(self) -> Iterator[Anomaly]:
        """The finding for the outliers in a row, which have ended."""
        if not self._outliers:
            return
        top, anomaly = max(self._outliers[:2], key=lambda outlier: outlier[0])
        level, warmed_up = anomaly.evidence["median"], anomaly.evidence["window"] >= _WARMUP
        strong = warmed_up and top >= _STRONG_RATIO * level > 0
        recent = [high for place, high in self._spikes if self._finite - place <= _WINDOW]
        often = len(recent) >= _RECURRING and top < RECOVERED_RATIO * max(recent)
        certain = strong and not often and _rise(top, level) > _TAIL * self._dip
        self._spikes.append((self._finite, top))
        self._outliers.clear()
        yield replace(anomaly, severity="warning") if certain else anomaly

    def _outlier(self, step: int, loss: float, limit: float) -> Iterator[Anomaly]:
        """Take a value above the limit. Outliers are one finding once they end, or at the fifth:
        until then they may prove to be the first steps of an explosion."""
        median, window = self._local.median, self._window
        self._in_row += 1
        high = loss > _EXPLOSION_RATIO * abs(median)
        self._high_in_row = self._high_in_row + 1 if high else 0
        if self._in_row >= window.size // 2:
            # If outliers continue for half a window, they are the new level.
            self._admit(loss)
        if self._in_row <= _EXPLOSION_STEPS:
            self._outliers.append((loss, self._outlying(step, loss, limit)))
        far = _rise(loss, median) > _TAIL * self._dip
        if self._high_in_row >= _EXPLOSION_STEPS and far and not self._exploded:
            first = self._outliers[0][1].at_step if self._outliers else step
            self._exploded = True
            self._outliers.clear()
            self._trend.reported()
            yield Anomaly(
                "divergence",
                step,
                "critical",
                f"loss {loss:.4g} has been more than twice its median of {median:.4g} for "
                f"{self._high_in_row} steps",
                {"loss": loss, "median": median, "steps": self._high_in_row},
                since=first,
                good_step=first - 1,
            )
        elif self._in_row >= _EXPLOSION_STEPS and not self._high_in_row:
            yield from self._spike()

    def _outlying(self, step: int, loss: float, limit: float) -> Anomaly:
        median, times = self._local.median, "several steps in a row"
        return Anomaly(
            "spike",
            step,
            "info",
            f"loss {loss:.4g} vs. a median of {median:.4g} over the last {len(self._local)} steps "
            f"(limit {limit:.4g}), {'one step' if self._in_row == 1 else times}",
            {"loss": loss, "median": median, "limit": limit, "window": len(self._window)},
        )

    def _dipped(self, loss: float) -> float:
        """Return how far the value before `loss` is below both its neighbours, or above both."""
        if len(self._two) < 2:
            return 0.0
        earlier, middle = self._two
        sides = _rise(earlier, middle), _rise(loss, middle)
        return max(min(sides), -max(sides))

    def _level_dipped(self, level: float) -> float:
        """Return how far the level has been below both an earlier one and this one."""
        if not level < self._high:
            self._low = level if math.isnan(self._high) else self._low
            depth = _rise(self._high, self._low) if self._high > self._low else 0.0
            self._high = self._low = level
            return depth
        self._low = min(self._low, level)
        return min(_rise(self._high, self._low), _rise(level, self._low))

    def _limit(self) -> float | None:
        """The highest acceptable next loss; None while there are too few values."""
        if len(self._local) < _LOCAL:
            return self._first_limit()
        level = self._local.median
        noise = MAD_TO_SIGMA * self._changes.mad() / math.sqrt(2)
        limit = level + max(_LOCAL_FACTOR * noise, _LOCAL_EXCESS * abs(level))
        if len(self._window) < _WARMUP:
            return limit
        return min(limit, self._window.robust_limit(_MAD_FACTOR, _MIN_EXCESS_RATIO))

    def _first_limit(self) -> float | None:
        """The limit before the level is known; only an explosion exceeds it."""
        if len(self._local) < _MIN_FIRST:
            return None
        lowest, highest = self._local.quantile(0.0), self._local.quantile(1.0)
        steady = 0 < highest <= _MAX_FIRST_SPREAD * lowest
        return _FIRST_FACTOR * highest if steady else None

    def _admit(self, loss: float) -> None:
        self._window.add(loss)
        self._local.add(loss)
        if self._two:
            self._changes.add(loss - self._two[-1])
        self._two.append(loss)


def _rise(loss: float, level: float) -> float:
    """Return how far `loss` is above `level`: the logarithm of their ratio if both are positive."""
    return math.log(loss) - math.log(level) if loss > 0 < level else loss - level


def hides_nan(loss: float, grad_norm: float | None) -> bool:
    """Return whether a loss of exactly 0 hides a NaN: HF Trainer prints 0 together with a
    non-finite gradient norm."""
    return loss == 0.0 and grad_norm is not None and not math.isfinite(grad_norm)


class OverfitWatch:
    """Detects an evaluation loss that has risen from its best level while the training loss fell.

    The level (means over a tenth of the evaluations, single ones while there are fewer than 15)
    must exceed the lowest by 12 %, or by 5 % if it has risen almost steadily since; by six sigmas
    of the noise (measured on second differences, which a trend does not affect), because the best
    of many noisy levels is low by chance; and the training loss must have fallen by 5 %.
    """

    _MIN_EVALUATIONS = 5
    _MIN_FOR_LEVEL = 15
    _AFTER, _AFTER_MONOTONE = 4, 3
    """This many evaluations must follow the best one; fewer if each is worse than the one
    before."""

    _RISE, _RISING = 1.12, 0.2
    _STEADY_RISE, _STEADY, _STEADY_AFTER = 1.05, 0.8, 8
    """Ratio to the best level, and Kendall's tau of the evaluations since then."""

    _GAP_SIGMAS = 6.0
    _TRAIN_FALL = 0.05
    _NEW_LOW = 0.99
    _MAX_ROWS = 256

    def __init__(self, gap_sigmas: float = _GAP_SIGMAS) -> None:
        """`gap_sigmas`: 0 where only the end of the curve is judged, which is judged once."""
        self._gap_sigmas = gap_sigmas
        self._rows: list[tuple[int, float, float]] = []
        """Step, evaluation and training loss."""

        self._reported = math.inf
        """The best level of the overfitting reported last; a new low is needed for another."""

        self._not_finite = False

    def observe(self, step: int, eval_loss: float, train_loss: float) -> Anomaly | None:
        """Judge one evaluation, given the training loss at that time. A non-finite one is reported,
        then left out."""
        refused = self.add(step, eval_loss, train_loss)
        return refused or (self.verdict() if math.isfinite(eval_loss) else None)

    def add(self, step: int, eval_loss: float, train_loss: float) -> Anomaly | None:
        """Take one evaluation; return the finding if it is the first of a row of non-finite ones. A
        remark if none was ever a number: some trainers log NaN until the first evaluation."""
        before, self._not_finite = self._not_finite, not math.isfinite(eval_loss)
        if self._not_finite:
            severity = "warning" if self._rows else "info"
            detail = f"evaluation loss is {eval_loss} at step {step}, with a training loss of "
            detail += f"{train_loss:.4g}"
            evidence = {"eval_loss": repr(eval_loss)}
            return None if before else Anomaly("eval_nan", step, severity, detail, evidence)
        if math.isfinite(train_loss):
            self._rows.append((step, eval_loss, train_loss))
        if len(self._rows) > self._MAX_ROWS:
            self._rows = self._rows[::2]
        return None

    def verdict(self) -> Anomaly | None:
        """Judge the evaluations so far. Reports each rise once."""
        count = len(self._rows)
        if count < self._MIN_EVALUATIONS:
            return None
        values = [value for _, value, _ in self._rows]
        width = max(3, count // 10) if count >= self._MIN_FOR_LEVEL else 1
        smooth = centred(values, width)
        # Whole windows only: a partial one at the start carries the noise of few values.
        at = min(range((width - 1) // 2, count - width // 2), key=lambda n: smooth[n])
        best, last = smooth[at], statistics.median(smooth[-3:])
        (best_step, _, best_train), (step, _, train) = self._rows[at], self._rows[-1]
        if not best < self._reported or not self._rises(best, last, values[at:]):
            return None
        if train > best_train - self._TRAIN_FALL * abs(best_train):
            return None
        self._reported = self._NEW_LOW * best
        return Anomaly(
            "overfit",
            step,
            "warning",
            f"evaluation loss {last:.4g}, best {best:.4g} at step {best_step}, while training loss "
            f"fell from {best_train:.4g} to {train:.4g}",
            {"best": best, "best_step": best_step, "evaluations": count - at},
            since=best_step,
            good_step=best_step,
        )

    def _rises(self, best: float, last: float, after: Sequence[float]) -> bool:
        """Return whether the evaluation has risen permanently above its `best` level."""
        if best <= 0 or last < self._STEADY_RISE * best or len(after) <= self._AFTER_MONOTONE:
            return False
        if last - best <= self._gap_sigmas * second_difference_sigma(after):
            return False
        rising, count = kendall(after), len(after) - 1
        steady = rising >= self._STEADY and count >= self._STEADY_AFTER
        high = last >= self._RISE * best and rising >= self._RISING
        return (steady or high) and (rising == 1 or count >= self._AFTER)


_MEMORY_BLOCKS = 8
_MEMORY_RISING = 6
_MIN_GROWTH = 0.005
_LEAK_FLOOR_GB = 1.0
"""Growth of allocated memory below this is never a leak."""

_DROP_SIGMAS = 4.0
"""With mixed sequence lengths, memory changes at every step."""


class MemoryWatch:
    """Finds a leak in one rank's allocated GPU memory, in GiB: the minima of eight blocks of
    `block` steps rise six of seven times. `watch.gpu` reports a sudden drop."""

    def __init__(self, block: int = 50) -> None:
        self._block = block
        self._minima: deque[tuple[int, float]] = deque(maxlen=_MEMORY_BLOCKS)
        """First step and lowest value of the latest blocks."""

        self._begun, self._lowest = 0, math.inf
        self._in_block = 0

    def observe(self, step: int, value: float) -> Anomaly | None:
        if not self._in_block:
            self._begun, self._lowest = step, value
        self._lowest = min(self._lowest, value)
        self._in_block += 1
        if self._in_block < self._block:
            return None
        self._minima.append((self._begun, self._lowest))
        self._in_block = 0
        minima = [lowest for _, lowest in self._minima]
        if len(minima) < _MEMORY_BLOCKS:
            return None
        growth = minima[-1] - minima[0]
        rising = sum(later > earlier for earlier, later in itertools.pairwise(minima))
        if rising < _MEMORY_RISING or growth <= max(_LEAK_FLOOR_GB, _MIN_GROWTH * minima[0]):
            return None
        since = self._minima[0][0]
        self._minima.clear()
        per_step = growth / (self._block * (_MEMORY_BLOCKS - 1))
        return Anomaly(
            "memory_leak",
            step,
            "warning",
            f"allocated memory grew from {minima[0]:.2f} to {minima[-1]:.2f} GB over "
            f"{_MEMORY_BLOCKS * self._block} steps, {1024 * per_step:.1f} MB per step, {rising} of "
            f"{_MEMORY_BLOCKS - 1} blocks rising",
            {"from_gb": minima[0], "to_gb": minima[-1], "gb_per_step": per_step},
            since=since,
        )


def judge(trace: Trace, facts: TrainingFacts | None = None) -> list[Anomaly]:
    """All findings in a finished run, dated to the step at which they began, in step order."""
    anomalies = [
        *_judge_losses(trace),
        *_judge_step_times(trace["step_time"].finite(above=0.0)),
        *_judge_memory(trace["gpu_mem_gb"].finite()),
    ]
    dated = (a if a.since is None else replace(a, at_step=a.since) for a in anomalies)
    training = facts or TrainingFacts()
    # A loss that falls slowly is asked about the highest rate that it had.
    rate = max(trace["lr"].finite().values, default=None)
    return [
        advised(a, training, rate if a.type == "slow_decrease" else trace.nearest("lr", a.at_step))
        for a in sorted(dated, key=lambda a: (a.at_step, a.type))
    ]


def _judge_losses(trace: Trace) -> Iterator[Anomaly]:
    loss = trace["loss"]
    # Some trainers log only the evaluation.
    loss, only = (loss, False) if len(loss) else (trace["eval_loss"], True)
    whole = Whole.of(loss)
    norms = (
        {} if only else dict(zip(trace["grad_norm"].steps, trace["grad_norm"].values, strict=True))
    )
    watch, before = LossWatch(LossSettings(), whole), -1
    anomalies: list[Anomaly] = []
    for step, value in zip(loss.steps, loss.values, strict=True):
        if step < before:
            # The run started over, or resumed from an earlier checkpoint.
            anomalies += watch.finish()
            watch = LossWatch(LossSettings(), whole)
        before = step
        anomalies += watch.observe(step, value, norms.get(step))
    anomalies += watch.finish()
    if not watch.stays_high:
        anomalies = [
            replace(a, severity="info") if a.type == "divergence" else a for a in anomalies
        ]
    if sum(a.type == "nan" for a in anomalies) > 1:
        anomalies = [replace(a, case="nan at random") if a.type == "nan" else a for a in anomalies]
    if not only:
        anomalies += _judge_evaluations(trace["eval_loss"], loss.finite())
    kinds = {a.type for a in anomalies}
    bad = kinds & {"nan", "divergence"}
    climb = min(
        (a.since or a.at_step for a in anomalies if a.type == "divergence"), default=math.inf
    )
    for anomaly in anomalies:
        follows = anomaly.type in ("spike", "overfit") and anomaly.at_step >= climb
        slow = anomaly.type in ("plateau_high", "slow_decrease") and bad
        paced = anomaly.type == "slow_decrease" and "plateau_high" in kinds
        if not (follows or slow or paced):
            yield anomaly


def _judge_evaluations(evaluation: Series, training: Series) -> Iterator[Anomaly]:
    # An evaluation that was never a number has never run.
    if not len(training) or not len(evaluation.finite()):
        return
    watch = OverfitWatch(gap_sigmas=0)
    for step, value in zip(evaluation.steps, evaluation.values, strict=True):
        place = max(1, bisect_right(training.steps, step))
        recent = statistics.median(training.values[max(0, place - 16) : place])
        refused = watch.add(step, value, recent)
        if refused is not None:
            yield replace(refused, type="nan", severity="critical", case="eval_nan")
    verdict = watch.verdict()
    if verdict is not None:
        yield verdict


_SLOW_RATIO, _CLEAR_RATIO = 1.5, 1.9
"""A slow step below the first ratio to the usual time is a remark; one above the second needs no
other near it."""

_AHEAD = 40
"""How many values set the level by which the first ones are judged."""

_FIRST_STEP = 1
"""The first step of a run, which compiles and warms up: trainers count from 0 or from 1."""


def _judge_step_times(times: Series) -> Iterator[Anomaly]:
    # A finished trace's step times have no known unit, and every outlier in them is a remark.
    usual = UsualTime(mad_factor=7.0, min_excess_ratio=0.15, min_excess_s=0.0)
    levels, slow = LevelWatch(), list[tuple[int, float]]()
    for value in reversed(times.values[:_AHEAD]):
        usual.admit(value, outlier=usual.limit(value) is not None)
    for place, value in enumerate(times.values):
        outlies, change = usual.limit(value) is not None, levels.observe(value)
        if outlies and usual.window.median:
            slow.append((place, usual.window.median))
        usual.admit(value, outlier=outlies)
        if change is not None:
            usual.rebase()
            # Its first values are the change, not slow steps.
            first = place - LEVEL_STEPS + 1
            slow = [row for row in slow if row[0] < first]
            yield _regime_change(times.steps[first], *change)
    yield from _slow_steps(times, slow)


def _regime_change(step: int, before: float, after: float) -> Anomaly:
    slower = after > before
    return Anomaly(
        "regime_change",
        step,
        "warning" if slower else "info",
        f"step time went from {before:.4g} to {after:.4g} and stayed there",
        {"before": before, "after": after},
        "slow_steps" if slower else "nothing to do",
    )


def _slow_steps(times: Series, slow: Iterable[tuple[int, float]]) -> Iterator[Anomaly]:
    """Findings for the slow values, given as (place, usual value)."""
    rows = [(place, times.values[place] / usual, usual) for place, usual in slow]
    first = {place for place, _, _ in rows if times.steps[place] <= _FIRST_STEP}
    judged = [row[:2] for row in rows if row[0] not in first and row[1] >= _SLOW_RATIO]
    weights = {p: w for (p, _), w in zip(judged, _weights(judged), strict=True)}
    # What recurs is known from its third time on, seen from either end of the curve.
    back = _weights([(-place, ratio) for place, ratio in reversed(judged)])
    recurs = {p for (p, _), w in zip(reversed(judged), back, strict=True) if w == "scheduled"}
    recurs |= {place for place, weight in weights.items() if weight == "scheduled"}
    for place, ratio, usual in rows:
        why = "; recurs at an interval: scheduled work?" if place in recurs else ""
        why = "; the first step compiles and warms up" if place in first else why
        certain = weights.get(place) == "episode" and place not in recurs
        yield Anomaly(
            "slow_steps",
            times.steps[place],
            "warning" if certain else "info",
            f"step time {times.values[place]:.4g} vs. a median of {usual:.4g} ({ratio:.2f} times)"
            + why,
            {"step_time": times.values[place], "level": usual},
            "nothing to do" if place in first else "",
        )


def _weights(slow: Iterable[tuple[int, float]]) -> list[str]:
    episodes = SlowEpisodes(_CLEAR_RATIO)
    return [episodes.weigh(place, ratio) for place, ratio in slow]


_DROP = 0.25
"""A value this share below the usual one counts (source 002: 76 % to 45 %)."""


def _judge_memory(memory: Series) -> Iterator[Anomaly]:
    """Judge blocks of a 32nd of the curve and of an eighth: a leak may begin late or be slow."""
    leaks: list[Anomaly] = []
    for share in (32, 8):
        watch = MemoryWatch(max(4, len(memory) // share))
        pairs = zip(memory.steps, memory.values, strict=True)
        leaks = leaks or [a for s, v in pairs if (a := watch.observe(s, v)) is not None]
    yield from (*leaks[:1], *_memory_drops(memory))


def _memory_drops(memory: Series) -> Iterator[Anomaly]:
    window, low_in_row = SortedWindow(32), 0
    for step, value in zip(memory.steps, memory.values, strict=True):
        usual = window.median if len(window) >= 8 else 0.0
        near = max(0.1, _DROP_SIGMAS * MAD_TO_SIGMA * window.mad()) if usual else 0.0
        if usual <= 0 or value > min(usual - near, (1 - _DROP) * usual):
            low_in_row = 0
            window.add(value)
            continue
        low_in_row += 1
        if low_in_row == window.size // 2:
            window.clear()
            window.add(value)
        if low_in_row == 1:
            detail = f"allocated memory fell from {usual:.2f} to {value:.2f} GB"
            detail += f" ({value / usual:.0%})"
            evidence = {"from_gb": usual, "to_gb": value}
            yield Anomaly("memory_drop", step, "warning", detail, evidence)


class RankCurves:
    """The judges of one rank's curves."""

    def __init__(self, settings: LossSettings) -> None:
        self.loss = LossWatch(settings)
        self._memory = MemoryWatch()
        self._overfit = OverfitWatch()
        self._recent = SortedWindow(16)
        self.last: StepRecord | None = None
        """The last step with a loss that was a number."""

        self.evaluates = False
        """Whether steps carry evaluations, in which case the miner's lines add nothing new."""

    def observe(self, step: StepRecord) -> Iterator[Anomaly]:
        number = step.total_steps if step.inner_step is None else step.inner_step
        if step.loss is not None:
            yield from self.loss.observe(number - step.loss_lag, step.loss, step.grad_norm)
            if not self.loss.not_finite:
                self.last = step
                self._recent.add(step.loss)
                if step.eval_loss is not None:
                    if not self.evaluates:
                        # The miner may already have printed this evaluation: start over.
                        self.evaluates, self._overfit = True, OverfitWatch()
                    yield from self.evaluated(step, step.eval_loss)
        if step.allocated_bytes is not None:
            anomaly = self._memory.observe(number, gb(step.allocated_bytes) or 0.0)
            yield from () if anomaly is None else (anomaly,)

    def evaluated(self, step: StepRecord, eval_loss: float) -> Iterator[Anomaly]:
        """Judge the evaluation that belongs to `step`."""
        anomaly = self._overfit.observe(step.total_steps, eval_loss, self._recent.median)
        yield from () if anomaly is None else (anomaly,)


_TOGETHER = {
    "nan": 0,
    "spike": 2,
    "divergence": 4 * Divergence.SIZE,
    "plateau_high": 500,
    "slow_decrease": 500,
    "overfit": 500,
    "eval_nan": 500,
    "memory_leak": 200,
}
"""Ranks that show the same within this many steps of each other share a line. Their losses are
similar but not equal, so the blocks that judge a trend end at different steps."""


class CurvesMonitor(FactsMonitor):
    """Judges the curves of every rank; one line names those that show the same, or the rank that
    had a NaN first. The evaluation loss comes with the steps or, until a step carries one, from the
    lines that the miner prints.
    """

    name = "curves"
    words = EVALUATION_WORDS

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._counts: dict[str, int] = {}
        self._last: dict[str, Any] | None = None
        self._nan_at: deque[tuple[int | None, int]] = deque(maxlen=64)
        """Outer and inner steps at which the loss became NaN in earlier launches."""

        self._reset()

    def _reset(self) -> None:
        self._ranks: dict[int, RankCurves] = {}
        """The ranks that have reported steps in this launch."""

        self._shared: SharedFindings[Anomaly] = SharedFindings(self._are_alike)

    def on_launch(self, launch: Launch) -> Iterable[Event]:
        nan = [told for told in self._shared.told if told.finding.type == "nan"]
        self._nan_at += [(told.step.outer_step, told.finding.at_step) for told in nan]
        self._reset()
        return ()

    def on_steps(self, rank: int, steps: Sequence[StepRecord]) -> Iterable[Event]:
        curves = self._ranks.setdefault(rank, RankCurves(self.context.config.loss))
        for step in steps:
            for anomaly in curves.observe(step):
                self._shared.add(rank, step, anomaly)
        # The steps of a rank whose loss was NaN earlier may still arrive: wait for the tick.
        return ()

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Event]:
        reports = list(self._report())
        for rank in self._ranks.keys() - ranks.keys() if ranks else ():
            # After a new rendezvous this node may have different ranks.
            del self._ranks[rank]
        return reports

    def on_exit(self, end: Exit) -> Iterable[Event]:
        return self._report()

    def objection(self) -> str | None:
        pending = self._shared.pending
        return "loss_nan" if any(each.finding.type == "nan" for each in pending) else None

    def on_lines(self, lines: Sequence[bytes]) -> Iterable[Event]:
        reporting = [
            (r, each, each.last) for r, each in self._ranks.items() if each.last is not None
        ]
        if not reporting or any(curves.evaluates for _, curves, _ in reporting):
            return
        rank, curves, step = min(reporting, key=lambda row: row[0])
        # After a NaN the evaluation is one too.
        for value in () if curves.loss.not_finite else map(evaluation_in, lines):
            for anomaly in () if value is None else curves.evaluated(step, value):
                yield self._event(SharedFinding(anomaly, step, {rank: step}))

    def _report(self) -> list[Event]:
        return [self._event(each) for each in self._shared.take()]

    def _are_alike(self, one: SharedFinding[Anomaly], other: SharedFinding[Anomaly]) -> bool:
        kind, step = one.finding.type, one.step.total_steps
        if kind != other.finding.type:
            return False
        # All ranks share the weights: once a loss is NaN, those of the other ranks follow.
        nan = [r for r, each in self._ranks.items() if r in one.ranks and each.loss.not_finite]
        if kind == "nan" and nan:
            return True
        return abs(step - other.step.total_steps) <= _TOGETHER[kind]

    def _event(self, shared: SharedFinding[Anomaly]) -> Event:
        anomaly, step, ranks = shared.finding, shared.step, [*shared.ranks]
        if anomaly.type == "nan":
            # The others followed.
            number = step.total_steps
            ranks = [r for r, each in shared.ranks.items() if each.total_steps == number]
            if (step.outer_step, anomaly.at_step) in self._nan_at:
                anomaly = replace(anomaly, case="nan at the same step again")
        # Inner steps restart at 1 in each outer step, but the data does not.
        earlier = max(0, step.total_steps - (step.inner_step or step.total_steps))
        anomaly = advised(anomaly, self.facts, step.lr, earlier + anomaly.at_step)
        if len(ranks) > 1:
            anomaly = replace(anomaly, detail=f"{rank_list(ranks)}: {anomaly.detail}")
        self._counts[anomaly.type] = self._counts.get(anomaly.type, 0) + 1
        self._last = {"type": anomaly.type, "at_step": anomaly.at_step, "detail": anomaly.detail}
        return event_of(anomaly, step, ranks)

    def snapshot(self) -> Mapping[str, Any]:
        return {"anomalies": dict(self._counts), "last": self._last}


def event_of(anomaly: Anomaly, step: StepRecord, ranks: Collection[int]) -> Event:
    """The event for an anomaly of these ranks, with its evidence, cause and fixes."""
    evidence, at = anomaly.evidence, anomaly.at_step
    level, detail = anomaly.severity, anomaly.detail
    common: dict[str, Any] = {
        "rank": min(ranks) if len(ranks) == 1 else None,
        "ranks": sorted(ranks),
        "detail": detail,
        "cause": anomaly.cause,
        "fixes": list(anomaly.fixes),
        "step": at,
        "outer_step": step.outer_step,
        "evidence": dict(evidence),
    }
    which = f" on {rank_list(ranks)}" if len(ranks) > 1 else ""
    if anomaly.type == "nan":
        examples = (
            ""
            if evidence["examples"] is None
            else " (examples {}-{})".format(*evidence["examples"])
        )
        text = f"Loss is NaN or Inf at step {at}{which}{examples}"
        figures = {key: evidence[key] for key in ("loss", "examples")}
        return event("loss_nan", "critical", text, **figures, **common)
    if anomaly.type == "eval_nan":
        text = f"EVALUATION LOSS is {evidence['eval_loss']} at step {at}{which}"
        return event("loss_divergence", level, text, eval_loss=evidence["eval_loss"], **common)
    if anomaly.type == "spike":
        figures = {key: evidence[key] for key in ("loss", "median", "limit")}
        words = f"median {evidence['median']:.4g}, limit {evidence['limit']:.4g}"
        text = f"LOSS SPIKE: {evidence['loss']:.4g} at step {at}{which} ({words})"
        return event("loss_spike", level, text, **figures, **common)
    if anomaly.type == "divergence":
        return event("loss_divergence", level, f"LOSS DIVERGING: {detail}", **common)
    if anomaly.type in ("plateau_high", "slow_decrease"):
        return event("loss_plateau", level, f"LOSS PLATEAU: {detail}", **common)
    if anomaly.type == "overfit":
        return event("overfit", level, f"OVERFITTING: {detail}", **common)
    return event("gpu_usage", level, f"MEMORY LEAK: {detail}", **common)
