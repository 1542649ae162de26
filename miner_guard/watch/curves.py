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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from miner_guard.config import LossSettings
from miner_guard.rank.layout import Now, StepRecord
from miner_guard.record import lines
from miner_guard.record.events import Event, event
from miner_guard.record.words import gb, rank_list
from miner_guard.watch.base import Context, Exit, Launch
from miner_guard.watch.lines import EVALUATION_WORDS, evaluation_in
from miner_guard.watch.progress import FactsMonitor, TrainingFacts
from miner_guard.watch.series import (
    MAD_TO_SIGMA,
    SortedWindow,
    centred,
    kendall,
    second_difference_sigma,
    step_noise,
)
from miner_guard.watch.step_times import (
    REGRESSION_RATIO,
    RegressionWatch,
    Sensitivity,
    SlowEpisodes,
    UsualTime,
)
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
    """One observation about a curve: an anomaly or a remark."""

    type: str
    """The type name used by `explain --trace`: nan, spike, divergence, plateau_high, overfit,
    slow_steps, …"""

    at_step: int
    """The step whose value decided it."""

    severity: str
    """`info` is a remark; `warning` and `critical` are alarms."""

    detail: str
    """The evidence: the value seen, the limit it was judged against, and the window."""

    fixes: tuple[str, ...] = ()
    cause: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    since: int | None = None
    """The step at which it began, if that was seen only later."""


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


@dataclass(frozen=True)
class Situation:
    """What the causes and fixes of a finding depend on."""

    facts: TrainingFacts = field(default_factory=TrainingFacts)
    step: int = 0
    lr: float | None = None
    good_step: int | None = None
    """The last step at which all was well."""


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


_ADVICE: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "nan": (
        "learning rate too high, no warmup, a bad batch, or mixed precision overflow",
        (
            "{lower}",
            "add warmup for the first 10 % of the steps",
            "{inspect}",
            "last resort: fp32 instead of mixed precision",
        ),
    ),
    "spike": (
        "a bad batch (very long or garbled sequences) or a learning rate at the edge of stability",
        (
            "check the batch at step {step}{examples}",
            "clip gradients to norm 1.0",
            "{lower} if it happens again",
        ),
    ),
    "divergence": (
        "training became unstable: learning rate too high or no warmup",
        (
            "resume from the last checkpoint {good}",
            "{lower}",
            "add warmup for the first 10 % of the steps",
            "clip gradients to norm 1.0",
        ),
    ),
    "plateau_high": (
        "the model is not learning: learning rate too low, wrong data format, or frozen parameters",
        (
            "check that the optimizer has trainable parameters and gets gradients",
            "{raise}: 5e-4 or 1e-3 for adapters",
            "check the data format: labels, end-of-sequence tokens",
        ),
    ),
    "slow_decrease": (
        "a low learning rate, a schedule that decays before the model has learned, or too few "
        "examples",
        (
            "{raise} to 5e-4 or 1e-3 (adapters) for one run, and change nothing else",
            "check the data: prompt template, end-of-sequence tokens, unmasked labels",
            "train longer or on more examples if evaluation loss is still falling",
        ),
    ),
    "eval_nan": (
        "a bad evaluation batch or a precision problem in evaluation: training loss is finite at "
        "that point",
        (
            "look for evaluation examples whose labels are all masked: the mean over zero tokens "
            "is NaN",
            "evaluate in bfloat16 or float32: float16 overflows",
            "divide by the number of unmasked tokens, or by 1 if there are none",
        ),
    ),
    "overfit": (
        "the model is learning the training examples, not the task",
        (
            "use the checkpoint nearest to step {good_step}, where evaluation was best",
            "stop earlier: train for fewer epochs",
            "get more data",
            "add weight_decay=0.05",
            "reduce the learning rate",
        ),
    ),
    "memory_leak": (
        "some code keeps tensors alive from one step to the next",
        (
            "use loss.item() or loss.detach() wherever a loss is stored",
            "free the tensors that evaluation and logging keep, and call gc.collect() and "
            "torch.cuda.empty_cache() between operations",
            "take a snapshot with torch.cuda.memory._record_memory_history to see what holds the "
            "memory",
        ),
    ),
    "memory_drop": (
        "the model left the GPU, a worker died, or the process restarted",
        (
            "check that the model is still on cuda and every rank is alive",
            "look for a restart in the log at that time",
        ),
    ),
    "slow_steps": (
        "",
        ("check GPU use and clocks: nvidia-smi", "check data loading: slow storage or network"),
    ),
}
"""Likely cause and fixes by type (source 003, the tables of symptoms; source 004, problem 2)."""


def advice(kind: str, at: Situation) -> tuple[str, tuple[str, ...]]:
    """The likely cause and the fixes for a finding of this kind."""
    cause, fixes = _ADVICE[kind]
    span = example_range(at.facts, at.step)
    words: dict[str, Any] = {
        "step": at.step,
        "good_step": at.good_step,
        "lower": "lower the learning rate (1e-4 rather than 2e-4)",
        "raise": "raise the learning rate",
        "good": "from before the loss began to climb",
        "examples": "" if span is None else f" (examples {span[0]} to {span[1]})",
        "inspect": f"inspect the batch at step {at.step}: its data may be bad"
        if span is None
        else f"check examples {span[0]} to {span[1]}: that batch may contain bad data",
    }
    if at.lr:
        words["lower"] = f"halve the learning rate, from {at.lr:.3g} to {at.lr / 2:.3g}"
        words["raise"] += f" from {at.lr:.3g}"
    if at.good_step is not None:
        words["good"] = f"at or before step {at.good_step}"
    if kind == "slow_steps" and at.facts.accumulation_steps is not None:
        count = at.facts.accumulation_steps
        fixes = (*fixes, f"use fewer accumulation steps: each step consists of {count} of them")
    return cause, tuple(fix.format_map(words) for fix in fixes)


def _found(kind: str, severity: str, detail: str, at: Situation, **evidence: Any) -> Anomaly:
    cause, fixes = advice(kind, at)
    return Anomaly(kind, at.step, severity, detail, fixes, cause, evidence)


SEEN_BEFORE = 1.5
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
    _KEPT = 32
    _SIZE = 15
    _BLOCKS = 20
    """A finished curve is cut into at least this many blocks."""

    def __init__(self, whole: Whole | None = None) -> None:
        self._size = self._SIZE
        if whole is not None:
            self._size = max(1, min(self._size, whole.values // self._BLOCKS))
        self._block: list[float] = []
        self._begun = 0
        self._levels: deque[float] = deque(maxlen=self._LASTING)
        self._bends = SortedWindow(self._KEPT)
        self._best: tuple[float, int] | None = None
        self._rise = self._recovered = 0.0
        self._left: int | None = None
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

    def observe(self, step: int, loss: float, lr: float | None) -> Anomaly | None:
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
            self._best, self._left = (level, step), None
            return None
        best, best_step = self._best
        if level - best < self._rise / 2:
            self._came_back(level - best, best)
        self._rise = max(self._rise, level - best)
        gap = self._gap(best)
        if level - best <= gap / 2:
            self._left = None
        elif self._left is None:
            self._left = self._begun
        near_top = level - best >= self._NEAR_TOP * self._rise
        lasts = len(self._levels) == self._LASTING and min(self._levels) - best > gap
        if self._reported or not (lasts and near_top):
            return None
        self._reported = True
        window = self._size * self._LASTING
        found = _found(
            "divergence",
            "warning",
            f"loss rose from {best:.4g} (best level, step {best_step}) to {level:.4g} and has not "
            f"come back for {window} steps",
            Situation(step=step, lr=lr, good_step=best_step),
            best=best,
            best_step=best_step,
            level=level,
            window=window,
        )
        return replace(found, since=self._left)

    def _came_back(self, rise: float, best: float) -> None:
        self._recovered = max(self._recovered, self._rise)
        self._rise = rise
        # Until the loss is halfway back, this is still the climb that was reported.
        self._reported = self._reported and rise > self._GAP * abs(best)

    def _gap(self, best: float) -> float:
        noise = MAD_TO_SIGMA * self._bends.median / math.sqrt(6) if len(self._bends) else 0.0
        return max(self._GAP * abs(best), self._GAP_SIGMAS * noise, SEEN_BEFORE * self._recovered)


_MIN_DELTA = 0.01
"""Minimum relative drop of the smoothed best for the loss to count as improved."""

_GAIN_SIGMAS = 2.0
"""The gain must also be this multiple of the blocks' noise: the lowest of many noisy blocks is low
by chance."""

_LEARNED = 0.10
"""If the loss has fallen by this share of its first level, the model has learned, and a later
plateau is convergence."""

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
        if whole is not None:
            self._steps = max(1, min(self._steps, whole.steps // 2))
            count = min(count, max(whole.values, self._MIN_VALUES) // 2)
        self._from_start = whole is not None and whole.from_start
        self._size = max(1, self._steps // count)
        """Minimum number of steps in a block: a trainer may log only every 50th step."""

        self._sum = 0.0
        self._count = 0
        self._ended: int | None = None
        """The last step of the latest block."""

        self._blocks: deque[float] = deque(maxlen=count)
        self._first: float | None = None
        self._best = math.inf
        self._best_step = 0
        self._noise = 0.0
        """Of a block, relative to the level."""

        self._reported = False

    def observe(self, step: int, loss: float, lr: float | None) -> Anomaly | None:
        """Judge one loss. Reports each plateau once."""
        if self._ended is None or step <= self._ended:
            # The first step, or the first after training resumed from an earlier checkpoint.
            self._ended = step - 1
            self._best_step = min(self._best_step, step)
        self._sum += loss
        self._count += 1
        if step - self._ended < self._size:
            return None
        level = self._sum / self._count
        self._sum, self._count, self._ended = 0.0, 0, step
        self._blocks.append(level)
        self._first = level if self._first is None else self._first
        noise = second_difference_sigma(self._blocks) if len(self._blocks) > 3 else 0.0
        min_gain = max(_MIN_DELTA * abs(self._best), _GAIN_SIGMAS * noise)
        if self._best == math.inf or level < self._best - min_gain:
            self._best, self._best_step, self._reported = level, step, False
            return None
        self._noise = noise / abs(level) if level else math.inf
        lasts = step - self._best_step >= self._steps and len(self._blocks) == self._blocks.maxlen
        if self._reported or not lasts:
            return None
        self._reported = True
        return self._anomaly(self._first, level, Situation(step=step, lr=lr))

    def _anomaly(self, first: float, level: float, at: Situation) -> Anomaly:
        without_low = at.step - self._best_step
        fallen = (first - self._best) / abs(first) if first else 0.0
        stuck = near_chance(first, self._best) or self._from_start
        learned = fallen >= _LEARNED
        found = _found(
            "plateau_high",
            "warning" if stuck and not learned and self._noise <= self._MAX_NOISE else "info",
            f"{'converged: ' if learned else ''}loss {level:.4g}, {fallen:.1%} below its first "
            f"level, no new low for {without_low} steps",
            at,
            first=first,
            best=self._best,
            level=level,
            window=without_low,
        )
        if not learned:
            return found
        return replace(found, cause="healthy convergence, or time for a lower LR", fixes=())


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
"""An upward jump must be `_TAIL` times the deepest dip of a value below both its neighbours,
because heavy-tailed noise jumps both ways while a spike only goes up. `_FORGET` fades an old dip
with a half-life of 350 values."""

_EXPLOSION_STEPS = 5


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
        self._dip = 0.0
        self._not_finite = False
        self._trend = Divergence(whole)
        self._plateau = Plateau(settings, whole)

    @property
    def stays_high(self) -> bool:
        """False if the loss has come back from a divergence."""
        return self._trend.stays

    def observe(
        self,
        step: int,
        loss: float,
        facts: TrainingFacts,
        lr: float | None = None,
        *,
        grad_norm: float | None = None,
    ) -> Iterator[Anomaly]:
        """Judge the loss of one step. Non-finite values stay out of every window."""
        at = Situation(facts, step, lr)
        if not math.isfinite(loss) or hides_nan(loss, grad_norm):
            if not self._not_finite:
                self._not_finite = True
                self._outliers.clear()
                yield not_finite(loss, grad_norm, at)
            return
        self._not_finite = False
        limit = self._limit()
        if limit is not None and loss > limit:
            yield from self._outlier(loss, limit, at)
            return
        yield from self._spike()
        self._in_row = self._high_in_row = 0
        self._dip = max(_FORGET * self._dip, self._dipped(loss))
        self._admit(loss)
        trend = self._trend.observe(step, loss, lr), self._plateau.observe(step, loss, lr)
        yield from filter(None, trend)

    def finish(self) -> Iterator[Anomaly]:
        """Yield what waited for values that will not come."""
        yield from self._spike()

    def _outlier(self, loss: float, limit: float, at: Situation) -> Iterator[Anomaly]:
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
            self._outliers.append((loss, self._finding(loss, median, limit, at)))
        if self._high_in_row == _EXPLOSION_STEPS:
            first = self._outliers[0][1].at_step if self._in_row == _EXPLOSION_STEPS else at.step
            self._outliers.clear()
            self._trend.reported()
            yield self._explosion(loss, median, replace(at, good_step=first - 1))
        elif self._in_row >= _EXPLOSION_STEPS and not self._high_in_row:
            yield from self._spike()

    def _spike(self) -> Iterator[Anomaly]:
        """The finding for the outliers in a row, which have ended."""
        if not self._outliers:
            return
        top, found = max(self._outliers[:2], key=lambda outlier: outlier[0])
        level, known = found.evidence["median"], found.evidence["window"] >= _WARMUP
        strong = known and top >= _STRONG_RATIO * level > 0
        certain = strong and _rise(top, level) > _TAIL * self._dip
        self._outliers.clear()
        yield replace(found, severity="warning") if certain else found

    def _finding(self, loss: float, median: float, limit: float, at: Situation) -> Anomaly:
        times = "one step" if self._in_row == 1 else "several steps in a row"
        return _found(
            "spike",
            "info",
            f"loss {loss:.4g} vs. a median of {median:.4g} over the last {len(self._local)} steps "
            f"(limit {limit:.4g}), {times}",
            at,
            loss=loss,
            median=median,
            limit=limit,
            window=len(self._window),
        )

    def _explosion(self, loss: float, median: float, at: Situation) -> Anomaly:
        """A loss that has stayed at a multiple of its usual level."""
        steps = self._high_in_row
        found = _found(
            "divergence",
            "critical",
            f"loss {loss:.4g} has been more than twice its median of {median:.4g} for {steps} "
            "steps",
            at,
            loss=loss,
            median=median,
            steps=steps,
        )
        return replace(found, since=None if at.good_step is None else at.good_step + 1)

    def _dipped(self, loss: float) -> float:
        """Return how far the value before `loss` dips below both its neighbours."""
        if len(self._two) < 2:
            return 0.0
        earlier, low = self._two
        return min(_rise(earlier, low), _rise(loss, low))

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


def not_finite(loss: float, grad_norm: float | None, at: Situation) -> Anomaly:
    """The finding for a loss that is NaN, infinite, or a 0 that hides one."""
    examples = example_range(at.facts, at.step)
    detail = f"loss is {loss} at step {at.step}"
    if loss == 0.0:
        norm = "" if grad_norm is None else f" with a gradient norm of {grad_norm}"
        detail = f"loss is 0.0 at step {at.step}{norm}: HF Trainer prints 0 for NaN"
    return _found(
        "nan",
        "critical",
        detail,
        at,
        loss=repr(loss),
        examples=list(examples) if examples else None,
        **({} if grad_norm is None or loss != 0.0 else {"grad_norm": repr(grad_norm)}),
    )


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
    _KEPT = 256

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
        """Take one evaluation; return the finding if it is the first of a row of non-finite
        ones."""
        before, self._not_finite = self._not_finite, not math.isfinite(eval_loss)
        if self._not_finite:
            return None if before else _evaluation_not_finite(step, eval_loss, train_loss)
        if math.isfinite(train_loss):
            self._rows.append((step, eval_loss, train_loss))
        if len(self._rows) > self._KEPT:
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
        found = _found(
            "overfit",
            "warning",
            f"evaluation loss {last:.4g}, best {best:.4g} at step {best_step}, while training loss "
            f"fell from {best_train:.4g} to {train:.4g}",
            Situation(step=step, good_step=best_step),
            best=best,
            best_step=best_step,
            evaluations=count - at,
        )
        return replace(found, since=best_step)

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


def _evaluation_not_finite(step: int, eval_loss: float, train_loss: float) -> Anomaly:
    detail = (
        f"evaluation loss is {eval_loss} at step {step}, with a training loss of {train_loss:.4g}"
    )
    return _found("eval_nan", "warning", detail, Situation(step=step), eval_loss=repr(eval_loss))


_MEMORY_BLOCKS = 8
_MEMORY_RISING = 6
_MIN_GROWTH = 0.005
_LEAK_FLOOR_GB = 1.0
"""Growth of allocated memory below this is never a leak."""

_DROP_SIGMAS = 4.0
"""With mixed sequence lengths, memory changes at every step."""


class MemoryWatch:
    """Judges one rank's allocated GPU memory, in GiB.

    A leak: the minima of eight blocks of `block` steps rise six of seven times. A drop: memory is
    `drop` (a share) below its usual amount for `hold` steps.
    """

    def __init__(self, *, block: int = 50, drop: float = 0.5, hold: int = 3) -> None:
        self._block, self._drop_share, self._hold = block, drop, hold
        self._minima: deque[tuple[int, float]] = deque(maxlen=_MEMORY_BLOCKS)
        """First step and lowest value of the latest blocks."""

        self._begun, self._lowest = 0, math.inf
        self._in_block = 0
        self._recent = SortedWindow(32)
        self._low_in_row = 0

    def observe(self, step: int, allocated_gb: float) -> Anomaly | None:
        """Judge one step's memory use."""
        return self._drop(step, allocated_gb) or self._leak(step, allocated_gb)

    def _leak(self, step: int, value: float) -> Anomaly | None:
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
        found = _found(
            "memory_leak",
            "warning",
            f"allocated memory grew from {minima[0]:.2f} to {minima[-1]:.2f} GB over "
            f"{_MEMORY_BLOCKS * self._block} steps, {1024 * per_step:.1f} MB per step, {rising} of "
            f"{_MEMORY_BLOCKS - 1} blocks rising",
            Situation(step=step),
            from_gb=minima[0],
            to_gb=minima[-1],
            gb_per_step=per_step,
        )
        return replace(found, since=since)

    def _drop(self, step: int, value: float) -> Anomaly | None:
        window = self._recent
        usual = window.median if len(window) >= 8 else None
        near = (
            0.0 if usual is None else usual - max(0.1, _DROP_SIGMAS * MAD_TO_SIGMA * window.mad())
        )
        if usual is None or value > min(near, (1 - self._drop_share) * usual):
            self._low_in_row = 0
            window.add(value)
            return None
        self._low_in_row += 1
        if self._low_in_row == window.size // 2:
            window.clear()
            window.add(value)
        if self._low_in_row != self._hold:
            return None
        times = f" and stayed there for {self._hold} steps" if self._hold > 1 else ""
        return _found(
            "memory_drop",
            "warning",
            f"allocated memory fell from {usual:.2f} to {value:.2f} GB ({value / usual:.0%})"
            + times,
            Situation(step=step),
            from_gb=usual,
            to_gb=value,
        )


def judge(trace: Trace, facts: TrainingFacts | None = None) -> list[Anomaly]:
    """All findings in a finished run, dated to the step at which they began, in step order."""
    known = facts or TrainingFacts()
    found = [
        *_judge_losses(trace, known),
        *_judge_step_times(trace["step_time"].finite(above=0.0), known),
        *_judge_memory(trace["gpu_mem_gb"].finite()),
    ]
    dated = (a if a.since is None else replace(a, at_step=a.since) for a in found)
    return sorted(dated, key=lambda a: (a.at_step, a.type))


def _judge_losses(trace: Trace, facts: TrainingFacts) -> Iterator[Anomaly]:
    loss = trace["loss"]
    # Some trainers log only the evaluation.
    loss, only = (loss, False) if len(loss) else (trace["eval_loss"], True)
    whole = Whole.of(loss)
    norms = (
        {} if only else dict(zip(trace["grad_norm"].steps, trace["grad_norm"].values, strict=True))
    )
    watch, before = LossWatch(LossSettings(), whole), -1
    found: list[Anomaly] = []
    for step, value in zip(loss.steps, loss.values, strict=True):
        if step < before:
            # The run started over, or resumed from an earlier checkpoint.
            found += watch.finish()
            watch = LossWatch(LossSettings(), whole)
        before = step
        rate, norm = trace.nearest("lr", step), norms.get(step)
        found += watch.observe(step, value, facts, rate, grad_norm=norm)
    found += watch.finish()
    if not watch.stays_high:
        found = [replace(a, severity="info") if a.type == "divergence" else a for a in found]
    if not only:
        found += _judge_evaluations(trace["eval_loss"], loss.finite())
    if trace.nan_steps and not any(a.type == "nan" for a in found):
        at = Situation(facts, trace.nan_steps[0], trace.nearest("lr", trace.nan_steps[0]))
        detail = f"the guard logged that the loss is NaN or Inf at step {at.step}"
        found.append(_found("nan", "critical", detail, at))
    kinds = {a.type for a in found}
    bad = kinds & {"nan", "divergence"}
    if not bad and "plateau_high" not in kinds:
        found += _slow_fall(loss.finite(), whole, max(trace["lr"].finite().values, default=None))
    climb = min((a.since or a.at_step for a in found if a.type == "divergence"), default=math.inf)
    for anomaly in found:
        follows = anomaly.type in ("spike", "overfit") and anomaly.at_step >= climb
        if not follows and not (bad and anomaly.type == "plateau_high"):
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
            yield replace(refused, type="nan", severity="critical")
    verdict = watch.verdict()
    if verdict is not None:
        yield verdict


_SLOW_FALL = (0.03, 0.15)
"""A fall between these shares of the first level counts as slow, a smaller one as flat and a larger
one as learning."""

_STEADY_SIGMAS = 6.0
"""The fall must be at least this multiple of the value-to-value noise: the pace of a noisy loss is
unknown."""

_SLOW_VALUES = range(9, 201)
"""A trace with this many values shows the beginning of a run; a longer one shows the loss's own
long-term shape."""


def _slow_fall(loss: Series, whole: Whole, lr: float | None) -> Iterator[Anomaly]:
    """Remark on a loss that falls by no more than 15 %, but by more than its noise (source 003:
    underfitting "stays flat or decreases very slowly"). Never an alarm: a fine-tuned model may have
    little to learn."""
    values, count = loss.values, len(loss)
    if not whole.from_start or count not in _SLOW_VALUES:
        return
    part, third = max(1, count // 10), count // 3
    first, last = statistics.median(values[:part]), statistics.median(values[-part:])
    fallen, (least, most) = first - last, _SLOW_FALL
    if first <= 0 or not least * first < fallen <= most * first:
        return
    if fallen < _STEADY_SIGMAS * step_noise(values):
        return
    late = max(0.0, statistics.median(values[-third - part : -third]) - last) / fallen
    detail = (
        f"the loss is decreasing, but slowly: {first:.4g} to {last:.4g}, {fallen / first:.1%} in "
        f"{loss.steps[-1] - loss.steps[0]} steps, {late:.0%} of that in the last third"
    )
    at = Situation(step=loss.steps[-1], lr=lr)
    yield _found("slow_decrease", "info", detail, at, first=first, level=last)


_EVERY_OUTLIER = Sensitivity(mad_factor=7.0, min_excess_ratio=0.15, min_excess_s=0.0)
"""A finished trace's step times have no known unit, and every outlier in them is a remark."""

_SLOW_RATIO, _CLEAR_RATIO = 1.5, 1.9
"""A slow step below the first ratio to the usual time is a remark; one above the second needs no
other near it. Lower than live, because a whole trace shows whether a slow step recurs."""

_BEYOND = 1.3
"""A slow step must take this many times as long as the regular slow steps to stand out."""

_AHEAD = 40
"""How many values set the level by which the first ones are judged."""

_CHANGED = 8
"""A new level of step times is known after this many values."""

_FIRST_STEP = 1
"""The first step of a run, which compiles and warms up: trainers count from 0 or from 1."""


def _judge_step_times(times: Series, facts: TrainingFacts) -> Iterator[Anomaly]:
    usual = UsualTime(_EVERY_OUTLIER)
    levels = _Levels(REGRESSION_RATIO)
    for value in reversed(times.values[:_AHEAD]):
        usual.admit(value, outlier=usual.limit(value) is not None)
    slow_steps: list[tuple[int, float, float]] = []
    changed: list[int] = []
    for place, value in enumerate(times.values):
        slow, change = usual.limit(value) is not None, levels.observe(value)
        if slow and usual.window.median:
            slow_steps.append((place, value, usual.window.median))
        usual.admit(value, outlier=slow)
        if change is not None:
            usual.rebase()
            changed.append(place - _CHANGED + 1)
            yield _regime_change(times.steps[max(0, changed[-1])], *change, facts)
    lasting = {place for start in changed for place in range(start, start + _CHANGED)}
    single = [row for row in slow_steps if row[0] not in lasting]
    yield from _slow_steps(times, single, facts)


def _regime_change(step: int, before: float, after: float, facts: TrainingFacts) -> Anomaly:
    _, fixes = advice("slow_steps", Situation(facts))
    return Anomaly(
        "regime_change",
        step,
        "warning" if after > before else "info",
        f"step time went from {before:.4g} to {after:.4g} and stayed there",
        fixes if after > before else (),
        evidence={"before": before, "after": after},
    )


def _slow_steps(
    times: Series, slow_steps: Sequence[tuple[int, float, float]], facts: TrainingFacts
) -> Iterator[Anomaly]:
    """Findings for the slow values, given as (place, value, usual value)."""
    period, episodes = _period([place for place, _, _ in slow_steps]), SlowEpisodes(_CLEAR_RATIO)
    regular = "" if period is None else f"; recurs every {period} values: scheduled work?"
    ratios = [value / usual for _, value, usual in slow_steps]
    scheduled = 0.0 if period is None else _BEYOND * statistics.median(ratios)
    _, fixes = advice("slow_steps", Situation(facts))
    for (place, value, usual), ratio in zip(slow_steps, ratios, strict=True):
        first = times.steps[place] <= _FIRST_STEP
        alarms = not first and ratio >= max(_SLOW_RATIO, scheduled)
        certain = alarms and episodes.weigh(place, ratio) == "episode"
        yield Anomaly(
            "slow_steps",
            times.steps[place],
            "warning" if certain else "info",
            f"step time {value:.4g} vs. a median of {usual:.4g} ({ratio:.2f} times){regular}"
            + ("; the first step compiles and warms up" if first else ""),
            () if first else fixes,
            evidence={"step_time": value, "level": usual},
        )


def _period(places: Sequence[int]) -> int | None:
    """Number of values between slow steps that recur regularly; None if no such period is found."""
    gaps = [b - a for a, b in itertools.pairwise(places) if b - a > 1]
    if len(gaps) < 3:
        return None
    middle = statistics.median(gaps)
    regular = sum(abs(gap - middle) <= max(2, 0.05 * middle) for gap in gaps)
    return round(middle) if regular >= 0.7 * len(gaps) else None


class _Levels:
    """Finds lasting changes of the step time, to slower and to faster, each from the new level."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._watches = RegressionWatch(ratio), RegressionWatch(ratio)

    def observe(self, seconds: float) -> tuple[float, float] | None:
        """The levels before and after a change that this value confirms."""
        if seconds <= 0:
            return None
        slower, faster = self._watches
        slowed, sped = slower.observe(seconds), faster.observe(1 / seconds)
        if slowed is None and sped is None:
            return None
        self._watches = RegressionWatch(self._ratio), RegressionWatch(self._ratio)
        if slowed is not None:
            return slowed.best_s, slowed.median_s
        return None if sped is None else (1 / sped.best_s, 1 / sped.median_s)


_WHOLE_DROP = 0.25
"""In a finished curve a value this share below the usual one counts (source 002: 76 % to 45 %)."""


def _judge_memory(memory: Series) -> Iterator[Anomaly]:
    """Judge blocks of a 32nd of the curve and of an eighth: a leak may begin late or be slow."""
    leaks: list[Anomaly] = []
    for share in (32, 8):
        watch = MemoryWatch(block=max(4, len(memory) // share), drop=_WHOLE_DROP, hold=1)
        pairs = zip(memory.steps, memory.values, strict=True)
        found = [a for step, value in pairs if (a := watch.observe(step, value)) is not None]
        if share == 32:
            yield from (a for a in found if a.type == "memory_drop")
        leaks = leaks or [a for a in found if a.type == "memory_leak"]
    yield from leaks[:1]


class CurvesMonitor(FactsMonitor):
    """Judges the loss of the lowest rank that reports one, NaN on all ranks, and the memory of each
    rank.

    What several ranks may show (a NaN spreads to all ranks within a step; ranks of one launch
    allocate alike) waits for the tick, by which every rank's steps have arrived, and is one line:
    of the rank that had the NaN first, or of all ranks whose memory changed. The evaluation loss
    comes with the steps or, until a step carries one, from the lines that the miner prints.
    """

    name = "curves"
    words = EVALUATION_WORDS

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._counts: dict[str, int] = {}
        self._last: dict[str, Any] | None = None
        self._reset()

    def _reset(self) -> None:
        self._loss = LossWatch(self.context.config.loss)
        self._overfit = OverfitWatch()
        self._recent = SortedWindow(16)
        self._last_step: tuple[int, StepRecord] | None = None
        self._evaluations_come = False
        """Whether steps carry evaluations, in which case the miner's lines add nothing new."""

        self._memory: dict[int, MemoryWatch] = {}
        self._lead: int | None = None
        self._not_finite: set[int] = set()
        self._ranks: set[int] = set()
        """Ranks that have reported steps in this launch."""

        self._pending: dict[str, list[tuple[int, StepRecord, Anomaly]]] = {}
        """By type: the findings of all ranks since the last tick, with rank and step."""

    def on_launch(self, launch: Launch) -> Iterable[Event]:
        self._reset()
        return ()

    def on_steps(self, rank: int, steps: Sequence[StepRecord]) -> Iterable[Event]:
        self._ranks.add(rank)
        for step in steps:
            for anomaly in self._judge(rank, step):
                yield self._event(anomaly, rank, step)
        if len(self._ranks) == 1:
            yield from self._report()

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Event]:
        if ranks and self._lead not in ranks:
            # After a new rendezvous this node may have different ranks.
            self._lead = None
            self._not_finite &= ranks.keys()
        return self._report()

    def on_exit(self, end: Exit) -> Iterable[Event]:
        return self._report()

    def objection(self) -> str | None:
        return "loss_nan" if "nan" in self._pending else None

    def on_lines(self, lines: Sequence[bytes]) -> Iterable[Event]:
        if self._evaluations_come or self._last_step is None:
            return
        for line in lines:
            value = evaluation_in(line)
            if value is not None:
                yield from self._evaluated(*self._last_step, value)

    def _report(self) -> Iterator[Event]:
        pending, self._pending = self._pending, {}
        for kind, rows in pending.items():
            rank, step, anomaly = min(rows, key=lambda row: (row[1].total_steps, row[0]))
            ranks = sorted({rank for rank, _, _ in rows})
            if kind == "nan" or len(self._ranks) == 1:
                yield self._event(anomaly, rank, step)
                continue
            anomaly = replace(anomaly, detail=f"{rank_list(ranks)}: {anomaly.detail}")
            found = self._event(anomaly, rank, step)
            yield replace(found, rank=rank if len(ranks) == 1 else None)

    def _event(self, anomaly: Anomaly, rank: int, step: StepRecord) -> Event:
        self._counts[anomaly.type] = self._counts.get(anomaly.type, 0) + 1
        self._last = {"type": anomaly.type, "at_step": anomaly.at_step, "detail": anomaly.detail}
        return event_of(anomaly, rank, step)

    def _judge(self, rank: int, step: StepRecord) -> Iterator[Anomaly]:
        number = step.inner_step if step.inner_step is not None else step.total_steps
        if step.loss is not None:
            yield from self._judge_loss(rank, step, number - step.loss_lag, step.loss)
        if step.allocated_bytes is not None:
            watch = self._memory.setdefault(rank, MemoryWatch())
            anomaly = watch.observe(number, gb(step.allocated_bytes) or 0.0)
            if anomaly is not None:
                self._pending.setdefault(anomaly.type, []).append((rank, step, anomaly))

    def _judge_loss(
        self, rank: int, step: StepRecord, number: int, loss: float
    ) -> Iterator[Anomaly]:
        if hides_nan(loss, step.grad_norm) or not math.isfinite(loss):
            # All ranks share the weights: report only the first rank with a non-finite loss.
            if not self._not_finite or "nan" in self._pending:
                at = Situation(self.facts, number, step.lr)
                row = (rank, step, not_finite(loss, step.grad_norm, at))
                self._pending.setdefault("nan", []).append(row)
            self._not_finite.add(rank)
            return
        self._not_finite.discard(rank)
        if self._lead is None or rank <= self._lead:
            self._lead = rank
            self._last_step = (rank, step)
            self._recent.add(loss)
            yield from self._loss.observe(number, loss, self.facts, step.lr)
            if step.eval_loss is not None:
                if not self._evaluations_come:
                    # Start over, because the miner may already have printed this evaluation.
                    self._evaluations_come, self._overfit = True, OverfitWatch()
                found = self._overfit.observe(step.total_steps, step.eval_loss, self._recent.median)
                yield from () if found is None else (found,)

    def _evaluated(self, rank: int, step: StepRecord, value: float) -> Iterator[Event]:
        found = self._overfit.observe(step.total_steps, value, self._recent.median)
        if found is not None:
            yield self._event(found, rank, step)

    def snapshot(self) -> Mapping[str, Any]:
        return {"anomalies": dict(self._counts), "last": self._last}


def event_of(anomaly: Anomaly, rank: int, step: StepRecord) -> Event:
    """The event for an anomaly, with its evidence, cause and fixes."""
    seen, at, level = anomaly.evidence, anomaly.at_step, anomaly.severity
    common: dict[str, Any] = {
        "rank": rank,
        "detail": anomaly.detail,
        "cause": anomaly.cause,
        "fixes": list(anomaly.fixes),
        "step": at,
        "outer_step": step.outer_step,
        "evidence": dict(seen),
    }
    if anomaly.type == "nan":
        own = {key: seen[key] for key in ("loss", "examples")}
        return event("loss_nan", "critical", lines.loss_nan(at, seen["examples"]), **own, **common)
    if anomaly.type == "eval_nan":
        text = f"EVALUATION LOSS is {seen['eval_loss']} at step {at}"
        return event("loss_divergence", "warning", text, eval_loss=seen["eval_loss"], **common)
    if anomaly.type == "spike":
        own = {key: seen[key] for key in ("loss", "median", "limit")}
        words = f"median {seen['median']:.4g}, limit {seen['limit']:.4g}"
        text = f"LOSS SPIKE: {seen['loss']:.4g} at step {at} ({words})"
        return event("loss_spike", level, text, **own, **common)
    detail = anomaly.detail
    if anomaly.type == "divergence":
        return event("loss_divergence", level, f"LOSS DIVERGING: {detail}", **common)
    if anomaly.type == "plateau_high":
        return event("loss_plateau", level, f"LOSS PLATEAU: {detail}", **common)
    if anomaly.type == "overfit":
        return event("overfit", level, f"OVERFITTING: {detail}", **common)
    if anomaly.type == "memory_leak":
        return event("memory_leak", level, f"MEMORY LEAK: {detail}", **common)
    return event("memory_drop", level, f"MEMORY DROP: {detail}", **common)
