"""Curves: the running miner's loss, evaluation loss and GPU memory, judged step by step."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from miner_guard.config import LossSettings
from miner_guard.rank.journal import JournalEntry, TrainingEntry
from miner_guard.rank.layout import Now, StepRecord
from miner_guard.record import lines
from miner_guard.record.events import Event, event
from miner_guard.record.words import gb, rank_list
from miner_guard.watch.base import Context, Exit, Launch, Monitor
from miner_guard.watch.progress import TrainingFacts
from miner_guard.watch.series import MAD_TO_SIGMA, SortedWindow, p_rising, p_rising_trimmed
from miner_guard.watch.trace_reading import EVALUATION_WORDS, evaluation_in

_WINDOW = 64
"""Recent values against which a value is compared to detect a spike."""

_WARMUP = 32
"""Values needed before the first verdict."""

_MAD_FACTOR = 6.0
_MIN_EXCESS_RATIO = 0.10
"""A spike exceeds median + max(_MAD_FACTOR · 1.4826 · MAD, _MIN_EXCESS_RATIO · |median|)."""

_EXPLOSION_RATIO = 2.0
"""Five consecutive steps above this multiple of the mean are an explosion."""

_DIVERGENCE_POINTS = 30
"""Points over which a rising trend is looked for."""

_DIVERGENCE_P = 0.99
"""The loss diverges if P(slope > 0) is above this."""

_OVERFIT_EVALS = 6
"""Rises of the evaluation loss in a row, while the training loss falls, that are overfitting."""

_LEAK_FLOOR_GB = 1.0
"""Growth of allocated memory below this is never a leak."""


@dataclass(frozen=True)
class Anomaly:
    """One observation about a curve: an anomaly or a remark."""

    type: str
    """The type name used by `explain --trace`: nan, spike, divergence, plateau_high, overfit,
    slow_steps, …"""

    at_step: int
    severity: str
    """`info` is a remark; `warning` and `critical` are alarms."""

    detail: str
    """The evidence: the value seen, the limit it was judged against, and the window."""

    fixes: tuple[str, ...] = ()
    cause: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)


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


def for_nan(facts: TrainingFacts, step: int, lr: float | None) -> tuple[str, tuple[str, ...]]:
    """Return the likely cause and fixes for a NaN or Inf loss (source 003, NaN or Inf Loss)."""
    examples = example_range(facts, step)
    inspect = (
        f"inspect the batch at step {step}: its data may be bad"
        if examples is None
        else f"check examples {examples[0]} to {examples[1]}: that batch may contain bad data"
    )
    return (
        "learning rate too high, no warmup, a bad batch, or mixed precision overflow",
        (
            _lower(lr),
            "add warmup for the first 10 % of the steps",
            inspect,
            "last resort: fp32 instead of mixed precision",
        ),
    )


def for_spike(facts: TrainingFacts, step: int, lr: float | None) -> tuple[str, tuple[str, ...]]:
    """Return the likely cause and fixes for a loss spike (source 003, Loss Explosion)."""
    examples = example_range(facts, step)
    where = "" if examples is None else f" (examples {examples[0]} to {examples[1]})"
    return (
        (
            "a bad batch (very long or garbled sequences) or a learning rate at the edge of "
            "stability"
        ),
        (
            f"check the batch at step {step}{where}",
            "clip gradients to norm 1.0",
            _lower(lr) + " if it happens again",
        ),
    )


def for_divergence(lr: float | None, last_good: int | None) -> tuple[str, tuple[str, ...]]:
    """Return the likely cause and fixes for a loss that climbs and stays high (source 003,
    Loss Explosion)."""
    back = "resume from the last checkpoint from before the loss began to climb"
    if last_good is not None:
        back = f"resume from the last checkpoint at or before step {last_good}"
    return "training became unstable: learning rate too high or no warmup", (
        back,
        _lower(lr),
        "add warmup for the first 10 % of the steps",
        "clip gradients to norm 1.0",
    )


def for_plateau(lr: float | None) -> tuple[str, tuple[str, ...]]:
    """Return the likely cause and fixes for a model that does not learn (source 003,
    Underfitting)."""
    raised = (
        "raise the learning rate"
        + (f" from {lr:.3g}" if lr else "")
        + ": 5e-4 or 1e-3 for adapters"
    )
    return (
        "the model is not learning: learning rate too low, wrong data format, or frozen parameters",
        (
            "check that the optimizer has trainable parameters and gets gradients",
            raised,
            "check the data format: labels, end-of-sequence tokens",
        ),
    )


def for_slow_fall(lr: float | None) -> tuple[str, tuple[str, ...]]:
    """Return the likely cause and fixes for a loss that decreases very slowly (source 003,
    Underfitting)."""
    raised = "raise the learning rate" + (f" from {lr:.3g}" if lr else "")
    return (
        "a low learning rate, a schedule that decays before the model has learned, or too few "
        "examples",
        (
            f"{raised} to 5e-4 or 1e-3 (adapters) for one run, and change nothing else",
            "check the data: prompt template, end-of-sequence tokens, unmasked labels",
            "train longer or on more examples if evaluation loss is still falling",
        ),
    )


def for_evaluation_nan() -> tuple[str, tuple[str, ...]]:
    """Return the likely cause and fixes for an evaluation loss that is NaN or infinite while the
    training loss is finite."""
    return (
        (
            "a bad evaluation batch or a precision problem in evaluation: training loss is finite "
            "at that point"
        ),
        (
            (
                "look for evaluation examples whose labels are all masked: the mean over zero "
                "tokens is NaN"
            ),
            "evaluate in bfloat16 or float32: float16 overflows",
            "divide by the number of unmasked tokens, or by 1 if there are none",
        ),
    )


def for_overfit(best_step: int) -> tuple[str, tuple[str, ...]]:
    """Return the likely cause and fixes for overfitting (source 003, Overfitting)."""
    return "the model is learning the training examples, not the task", (
        f"use the checkpoint nearest to step {best_step}, where evaluation was best",
        "stop earlier: train for fewer epochs",
        "get more data",
        "add weight_decay=0.05",
        "reduce the learning rate",
    )


def for_leak() -> tuple[str, tuple[str, ...]]:
    """Return the likely cause and fixes for memory that only grows."""
    return "some code keeps tensors alive from one step to the next", (
        "use loss.item() or loss.detach() wherever a loss is stored",
        (
            "free the tensors that evaluation and logging keep, and call gc.collect() and "
            "torch.cuda.empty_cache() between operations"
        ),
        (
            "take a snapshot with torch.cuda.memory._record_memory_history to see what holds the "
            "memory"
        ),
    )


def for_drop() -> tuple[str, tuple[str, ...]]:
    """Return the likely cause and fixes for a sudden drop in GPU memory."""
    return "the model left the GPU, a worker died, or the process restarted", (
        "check that the model is still on cuda and every rank is alive",
        "look for a restart in the log at that time",
    )


def for_slow(facts: TrainingFacts) -> tuple[str, ...]:
    """Things to check when individual steps are slow (source 004, problem 2)."""
    steps = ("check GPU use and clocks: nvidia-smi", "check data loading: slow storage or network")
    if facts.accumulation_steps is None:
        return steps
    return (
        *steps,
        f"use fewer accumulation steps: each step consists of {facts.accumulation_steps} of them",
    )


def _lower(lr: float | None) -> str:
    if not lr:
        return "lower the learning rate (1e-4 rather than 2e-4)"
    return f"halve the learning rate, from {lr:.3g} to {lr / 2:.3g}"


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
    _KEPT = 32

    def __init__(self, settings: LossSettings) -> None:
        self._size = max(8, _DIVERGENCE_POINTS // 2)
        self._block: list[float] = []
        self._levels: deque[float] = deque(maxlen=self._LASTING)
        self._bends = SortedWindow(self._KEPT)
        self._best: tuple[float, int] | None = None
        self._rise = self._recovered = 0.0
        self._reported = False
        self.came_back = False
        """True if the loss has recovered since the last event."""

    def reported(self) -> None:
        """Note that another rule has already reported the current climb."""
        self._reported = True
        # Values from before the climb would make it look as if the loss had recovered.
        self._block.clear()

    def observe(self, step: int, loss: float, lr: float | None) -> Iterator[Anomaly]:
        """Judge one loss. Reports each climb once."""
        self._block.append(loss)
        if len(self._block) < self._size:
            return
        level = statistics.median(self._block)
        self._block.clear()
        self._levels.append(level)
        if len(self._levels) >= 3:
            first, middle, last = list(self._levels)[-3:]
            self._bends.add(abs(first - 2 * middle + last))
        if self._best is None or level < self._best[0]:
            self._came_back(0.0, level)
            self._best = (level, step)
            return
        best, best_step = self._best
        if level - best < self._rise / 2:
            self._came_back(level - best, best)
        self._rise = max(self._rise, level - best)
        if self._reported or not self._climbs(best):
            return
        self._reported, self.came_back = True, False
        cause, fixes = for_divergence(lr, best_step)
        window = self._size * self._LASTING
        yield Anomaly(
            "divergence",
            step,
            "warning",
            f"loss rose from {best:.4g} (best level, step {best_step}) to {level:.4g} and has not "
            f"come back for {window} steps",
            fixes,
            cause,
            {"best": best, "best_step": best_step, "level": level, "window": window},
        )

    def _came_back(self, rise: float, best: float) -> None:
        self._recovered = max(self._recovered, self._rise)
        self._rise, self.came_back = rise, True
        # Until the loss is halfway back, this is still the climb that was reported.
        self._reported = self._reported and rise > self._GAP * abs(best)

    def _climbs(self, best: float) -> bool:
        if len(self._levels) < self._LASTING:
            return False
        noise = MAD_TO_SIGMA * self._bends.median / math.sqrt(6)
        gap = max(self._GAP * abs(best), self._GAP_SIGMAS * noise, SEEN_BEFORE * self._recovered)
        lasts = min(self._levels) - best > gap
        return lasts and self._levels[-1] - best >= self._NEAR_TOP * self._rise


def explosion(step: int, loss: float, median: float, *, steps: int, lr: float | None) -> Anomaly:
    """Return the anomaly for a loss that has stayed at a multiple of its usual level."""
    cause, fixes = for_divergence(lr, step - steps)
    return Anomaly(
        "divergence",
        step,
        "critical",
        f"loss {loss:.4g} has been more than twice its median of {median:.4g} for {steps} steps",
        fixes,
        cause,
        {"loss": loss, "median": median, "steps": steps},
    )


_FLAT_BLOCKS = 32
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
    """Reports a loss that has reached no new low for `plateau_steps`: as convergence if it fell
    earlier, otherwise as a model that is not learning."""

    def __init__(self, settings: LossSettings) -> None:
        self._steps = settings.plateau_steps
        self._size = max(1, settings.plateau_steps // _FLAT_BLOCKS)
        """Minimum number of steps in a block: a trainer may log only every 50th step."""

        self._sum = 0.0
        self._count = 0
        self._ended: int | None = None
        """The last step of the latest block."""

        self._blocks: deque[float] = deque(maxlen=_FLAT_BLOCKS)
        self._first: float | None = None
        self._best = math.inf
        self._best_step = 0
        self._reported = False

    def observe(self, step: int, loss: float, lr: float | None) -> Iterator[Anomaly]:
        """Judge one loss. Reports each plateau once."""
        if self._ended is None or step <= self._ended:
            # The first step, or the first after training resumed from an earlier checkpoint.
            self._ended = step - 1
            self._best_step = min(self._best_step, step)
        self._sum += loss
        self._count += 1
        if step - self._ended < self._size:
            return
        level = self._sum / self._count
        self._sum, self._count, self._ended = 0.0, 0, step
        self._blocks.append(level)
        self._first = level if self._first is None else self._first
        min_gain = max(_MIN_DELTA * abs(self._best), _GAIN_SIGMAS * self._noise())
        if self._best == math.inf or level < self._best - min_gain:
            self._best, self._best_step, self._reported = level, step, False
            return
        if (
            self._reported
            or step - self._best_step < self._steps
            or len(self._blocks) < _FLAT_BLOCKS
        ):
            return
        if self._falls(list(self._blocks)):
            return
        self._reported = True
        yield self._anomaly(step, level, lr)

    def _noise(self) -> float:
        """Standard deviation of a block; a second difference has six times the variance."""
        kept = list(self._blocks)
        bends = [abs(a - 2 * b + c) for a, b, c in zip(kept, kept[1:], kept[2:], strict=False)]
        return MAD_TO_SIGMA * statistics.median(bends) / math.sqrt(6) if len(bends) > 4 else 0.0

    @staticmethod
    def _falls(blocks: list[float]) -> bool:
        """Return whether the blocks fall by more than chance explains, and by enough to matter."""
        third = len(blocks) // 3
        fall = statistics.median(blocks[:third]) - statistics.median(blocks[-third:])
        surely = 1 - p_rising(blocks) > 0.9 or 1 - p_rising_trimmed(blocks) > 0.9
        return surely and fall > _MIN_DELTA * abs(statistics.median(blocks))

    def _anomaly(self, step: int, level: float, lr: float | None) -> Anomaly:
        assert self._first is not None
        without_low = step - self._best_step
        fallen = (self._first - self._best) / abs(self._first) if self._first else 0.0
        seen = {"first": self._first, "best": self._best, "level": level, "window": without_low}
        if fallen >= _LEARNED:
            text = (
                f"converged: loss {level:.4g}, {fallen:.0%} below its first level, no new low for "
                f"{without_low} steps"
            )
            return Anomaly(
                "plateau_high",
                step,
                "info",
                text,
                (),
                "healthy convergence, or time for a lower LR",
                seen,
            )
        cause, fixes = for_plateau(lr)
        text = (
            f"loss {level:.4g}, {fallen:.1%} below its first level, no new low for "
            f"{without_low} steps"
        )
        severity = "warning" if near_chance(self._first, self._best) else "info"
        return Anomaly("plateau_high", step, severity, text, fixes, cause, seen)


_LOCAL = 8
_MIN_LOCAL = 8
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
"""A value at this multiple of its level needs no second value to confirm it."""

_CONFIRMED_RATIO = 1.2
"""The second outlier in a row must reach this multiple of the level: a warm restart of the learning
rate raises the loss by only 5 to 15 %."""

_TAIL = 2.0
_FORGET = 0.998
"""An upward jump must be `_TAIL` times the deepest dip of a value below both its neighbours,
because heavy-tailed noise jumps both ways while a spike only goes up. `_FORGET` fades an old dip
with a half-life of 350 values."""

_EXPLOSION_STEPS = 5


class LossWatch:
    """Judges one loss curve, step by step. Silent on healthy training."""

    def __init__(self, settings: LossSettings) -> None:
        self._settings = settings
        self._window = SortedWindow(_WINDOW)
        self._local = SortedWindow(_LOCAL)
        self._changes = SortedWindow(_WINDOW)
        self._two: deque[float] = deque(maxlen=2)
        """The last two values that were not outliers."""

        self._spikes_in_row = 0
        self._high_in_row = 0
        self._exploded = False
        self._warned = False
        self._held: Anomaly | None = None
        """A spike warning held back because the spike may still prove to be the first step of an
        explosion."""

        self._strong = False
        """True if the spike is high enough to need no confirmation. A lower one counts only if it
        ends soon: a loss that jumps by a fifth at the end of each epoch takes the whole next
        epoch to come back."""

        self._dip = self._jump = self._top = 0.0
        self._not_finite = False
        self._trend = Divergence(settings)
        self._plateau = Plateau(settings)

    def observe(
        self, step: int, loss: float, facts: TrainingFacts, lr: float | None = None
    ) -> Iterator[Anomaly]:
        """Judge the loss of one step. Non-finite values stay out of every window."""
        if not math.isfinite(loss):
            if not self._not_finite:
                self._not_finite, self._held = True, None
                yield not_finite(step, loss, facts, lr)
            return
        self._not_finite = False
        spike = self._spike(step, loss, facts, lr)
        if spike is not None:
            yield spike
        if self._held is not None and self._alone():
            if self._strong or self._returned(loss, self._held):
                yield self._held
            self._held = None
        if self._spikes_in_row == 0:
            yield from self._trend.observe(step, loss, lr)
            yield from self._plateau.observe(step, loss, lr)

    def _returned(self, loss: float, spike: Anomaly) -> bool:
        """Return whether the loss has recovered by more than half of the jump."""
        level = spike.evidence["median"]
        back = _rise(loss, level) < _rise(spike.evidence["loss"], level) / 2
        return self._spikes_in_row == 0 and back

    def _alone(self) -> bool:
        """Return whether the outliers have ended, or do not amount to an explosion."""
        return self._spikes_in_row == 0 or (
            self._high_in_row == 0 and self._spikes_in_row >= _EXPLOSION_STEPS
        )

    def _spike(
        self, step: int, loss: float, facts: TrainingFacts, lr: float | None
    ) -> Anomaly | None:
        window = self._window
        limit = self._limit()
        if limit is None or loss <= limit:
            self._spikes_in_row = self._high_in_row = 0
            self._exploded = self._warned = False
            self._jump, self._top = max(_FORGET * self._jump, self._top), 0.0
            self._dip = max(_FORGET * self._dip, self._dipped(loss))
            self._admit(loss)
            return None
        median = self._local.median
        self._spikes_in_row += 1
        self._high_in_row = self._high_in_row + 1 if loss > _EXPLOSION_RATIO * abs(median) else 0
        if self._spikes_in_row >= window.size // 2:
            # If outliers continue for half a window, they are the new level.
            self._admit(loss)
        rise = _rise(loss, median)
        self._top = max(self._top, rise)
        if self._high_in_row >= _EXPLOSION_STEPS and not self._exploded:
            self._exploded, self._held = True, None
            self._trend.reported()
            return explosion(step, loss, median, steps=self._high_in_row, lr=lr)
        if self._spikes_in_row > 2:
            return None
        known = len(window) >= _WARMUP
        strong = known and loss >= _STRONG_RATIO * median > 0
        again = (
            self._spikes_in_row > 1
            and loss >= _CONFIRMED_RATIO * median
            and rise > SEEN_BEFORE * self._jump
        )
        certain = (strong or again) and rise > _TAIL * self._dip and not self._warned
        self._warned = self._warned or certain
        cause, fixes = for_spike(facts, step, lr)
        times = "one step" if self._spikes_in_row == 1 else "two steps in a row"
        seen = Anomaly(
            "spike",
            step,
            "info",
            f"loss {loss:.4g} vs. a median of {median:.4g} over the last {len(self._local)} steps "
            f"(limit {limit:.4g}), {times}",
            fixes,
            cause,
            {"loss": loss, "median": median, "limit": limit, "window": len(self._window)},
        )
        if certain:
            self._held, self._strong = replace(seen, severity="warning"), strong
        return None if self._held is not None and self._spikes_in_row > 1 else seen

    def _dipped(self, loss: float) -> float:
        """Return how far the value before `loss` dips below both its neighbours."""
        if len(self._two) < 2:
            return 0.0
        earlier, low = self._two
        return min(_rise(earlier, low), _rise(loss, low))

    def _limit(self) -> float | None:
        """The highest acceptable next loss; None while there are too few values."""
        if len(self._local) < _MIN_LOCAL:
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


def not_finite(step: int, loss: float, facts: TrainingFacts, lr: float | None) -> Anomaly:
    """The event for a NaN or infinite loss at `step`."""
    cause, fixes = for_nan(facts, step, lr)
    examples = example_range(facts, step)
    seen = {"loss": repr(loss), "examples": list(examples) if examples else None}
    return Anomaly("nan", step, "critical", f"loss is {loss} at step {step}", fixes, cause, seen)


def hides_nan(loss: float, grad_norm: float | None) -> bool:
    """Return whether a loss of exactly 0 hides a NaN: HF Trainer prints 0 together with a
    non-finite gradient norm."""
    return loss == 0.0 and grad_norm is not None and not math.isfinite(grad_norm)


def hidden_nan(step: int, grad_norm: float, facts: TrainingFacts, lr: float | None) -> Anomaly:
    """The event for a loss of 0.0 with a non-finite gradient norm."""
    anomaly = not_finite(step, 0.0, facts, lr)
    detail = (
        f"loss is 0.0 at step {step} with a gradient norm of {grad_norm}: HF Trainer prints "
        "0 for NaN"
    )
    return replace(
        anomaly, detail=detail, evidence={**anomaly.evidence, "grad_norm": repr(grad_norm)}
    )


MIN_EVALUATIONS = 5
"""Number of evaluations before the first verdict."""

MIN_FOR_LEVEL = 15
"""With fewer evaluations than this, each is judged individually; with this many or more, a smoothed
level is judged."""

TRAIN_FALL = 0.05
"""The training loss must have fallen by this share since the best evaluation."""

_AFTER = 4
_AFTER_MONOTONE = 3
"""This many evaluations after the best one suffice if each is worse than the one before."""

_RISE = 1.12
_STEADY_RISE = 1.05
_STEADY_AFTER = 8
_STEADY = 0.8
_RISING = 0.2


def rises(best: float, last: float, rising: float, after: int) -> bool:
    """Return whether the evaluation loss has risen permanently above its `best` value. `after` is
    the number of evaluations since then, `rising` their Kendall's tau, and `last` the current
    level. Used both for live runs and for finished ones."""
    if best <= 0 or after < (_AFTER_MONOTONE if rising == 1 else _AFTER):
        return False
    steady = last >= _STEADY_RISE * best and rising >= _STEADY and after >= _STEADY_AFTER
    return steady or (last >= _RISE * best and rising >= _RISING)


def kendall(values: Sequence[float]) -> float:
    """Kendall's tau against the order of the values. A long series is thinned to at most 400 evenly
    spaced values."""
    stride = max(1, len(values) // 200)
    kept = list(values)[::stride]
    pairs = len(kept) * (len(kept) - 1) // 2
    if not pairs:
        return 0.0
    signs = sum((b > a) - (b < a) for n, a in enumerate(kept) for b in kept[n + 1 :])
    return signs / pairs


class OverfitWatch:
    """Detects an evaluation loss that has risen from its best level while the training loss fell.

    A level is the median of three evaluations. It must exceed the best one by 3 % and by six noise
    sigmas (measured on second differences, which a trend does not affect), because the best of many
    noisy levels is low by chance. In addition, at least six evaluations since the best one must
    rise with P > 0.99. The first evaluations are judged by the rule for finished runs (`rises`),
    for which five may suffice.

    In a simulation of 200 flat runs with 100 evaluations each and 2 % noise, one run raises an
    alarm; if the limit ignored the noise, 140 would.
    """

    _LEVEL = 3
    _KEPT = 32
    _GAP = 0.03
    _GAP_SIGMAS = 6.0

    def __init__(self, settings: LossSettings) -> None:
        self._min_evals = _OVERFIT_EVALS
        self._p = _DIVERGENCE_P
        self._recent: deque[tuple[int, float]] = deque(maxlen=self._LEVEL)
        self._bends: deque[float] = deque(maxlen=self._KEPT)
        self._since: deque[float] = deque(maxlen=max(self._KEPT, self._min_evals))
        self._best: tuple[float, int, float] | None = None
        self._all: list[tuple[int, float, float]] = []
        """The first evaluations: step, loss and training loss."""

        self._reported = False
        self._not_finite = False

    def observe(self, step: int, eval_loss: float, train_loss: float) -> Anomaly | None:
        """Judge one evaluation, given the training loss at that time. A non-finite one is reported,
        then left out."""
        before, self._not_finite = self._not_finite, not math.isfinite(eval_loss)
        if self._not_finite or not math.isfinite(train_loss):
            return (
                evaluation_not_finite(step, eval_loss, train_loss)
                if self._not_finite and not before
                else None
            )
        self._recent.append((step, eval_loss))
        if len(self._all) < MIN_FOR_LEVEL:
            self._all.append((step, eval_loss, train_loss))
        if len(self._recent) < self._LEVEL:
            return None
        first, middle, last = (value for _, value in self._recent)
        self._bends.append(abs(first - 2 * middle + last))
        level = sorted((first, middle, last))[1]
        if self._best is None or level < self._best[0]:
            lowest = min(self._recent, key=lambda seen: seen[1])[0]
            self._best, self._reported = (level, lowest, train_loss), False
            self._since.clear()
            self._since.extend((first, middle))
        self._since.append(eval_loss)
        return self._judge_few(step) or self._judge(step, level, train_loss, self._best)

    def _judge_few(self, step: int) -> Anomaly | None:
        """Judge the first few evaluations one by one, because there are too few for medians of
        three."""
        seen = self._all
        if self._reported or len(seen) < MIN_EVALUATIONS or len(seen) >= MIN_FOR_LEVEL:
            return None
        at = min(range(len(seen)), key=lambda n: seen[n][1])
        best_step, best, best_train = seen[at]
        after = [value for _, value, _ in seen[at:]]
        last, train_loss = statistics.median(after[-self._LEVEL :]), seen[-1][2]
        clear = rises(best, last, kendall(after), len(after) - 1)
        if not clear or last - best <= self._GAP_SIGMAS * max(_noise(after), _sigma(self._bends)):
            return None
        if train_loss > best_train - TRAIN_FALL * abs(best_train):
            return None
        return self._anomaly(step, last, train_loss, (best, best_step, best_train))

    def _judge(
        self, step: int, level: float, train_loss: float, lowest: tuple[float, int, float]
    ) -> Anomaly | None:
        """Judge the latest level; `lowest` is the best level, its step and the training loss at
        that step."""
        best, _, best_train = lowest
        gap = max(self._GAP * abs(best), self._GAP_SIGMAS * _sigma(self._bends))
        if (
            self._reported
            or len(self._since) < self._min_evals
            or level - best <= gap
            or train_loss >= best_train
        ):
            return None
        if p_rising(self._since) <= self._p:
            return None
        return self._anomaly(step, level, train_loss, lowest)

    def _anomaly(
        self, step: int, level: float, train_loss: float, lowest: tuple[float, int, float]
    ) -> Anomaly:
        best, best_step, best_train = lowest
        self._reported = True
        cause, fixes = for_overfit(best_step)
        return Anomaly(
            "overfit",
            step,
            "warning",
            f"evaluation loss {level:.4g}, best {best:.4g} at step {best_step}, "
            f"while training loss fell from {best_train:.4g} to {train_loss:.4g}",
            fixes,
            cause,
            {"best": best, "best_step": best_step, "evaluations": len(self._since)},
        )


def _noise(values: Sequence[float]) -> float:
    return _sigma(
        [abs(a - 2 * b + c) for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    )


def _sigma(bends: Collection[float]) -> float:
    """Standard deviation of one evaluation; a second difference has six times the variance."""
    return MAD_TO_SIGMA * statistics.median(bends) / math.sqrt(6) if bends else 0.0


def evaluation_not_finite(step: int, eval_loss: float, train_loss: float) -> Anomaly:
    """The event for an evaluation at `step` that is NaN or infinite."""
    cause, fixes = for_evaluation_nan()
    detail = (
        f"evaluation loss is {eval_loss} at step {step}, with a training loss of {train_loss:.4g}"
    )
    return Anomaly(
        "eval_nan", step, "warning", detail, fixes, cause, {"eval_loss": repr(eval_loss)}
    )


_MEMORY_BLOCKS = 8
_BLOCK_STEPS = 50
_MEMORY_RISING = 6
_MIN_GROWTH = 0.005
_DROP_SHARE = 0.5
_DROP_STEPS = 3


class MemoryWatch:
    """Judges one rank's allocated GPU memory, in GiB."""

    def __init__(self, settings: LossSettings) -> None:
        self._floor_gb = _LEAK_FLOOR_GB
        self._minima: deque[float] = deque(maxlen=_MEMORY_BLOCKS)
        self._lowest: float | None = None
        self._in_block = 0
        self._recent = SortedWindow(32)
        self._low_in_row = 0

    def observe(self, step: int, allocated_gb: float) -> Anomaly | None:
        """Judge one step's memory use."""
        return self._drop(step, allocated_gb) or self._leak(step, allocated_gb)

    def _leak(self, step: int, value: float) -> Anomaly | None:
        self._lowest = value if self._lowest is None else min(self._lowest, value)
        self._in_block += 1
        if self._in_block < _BLOCK_STEPS:
            return None
        self._minima.append(self._lowest)
        self._lowest, self._in_block = None, 0
        minima = list(self._minima)
        if len(minima) < _MEMORY_BLOCKS:
            return None
        growth = minima[-1] - minima[0]
        rising = sum(later > earlier for earlier, later in itertools.pairwise(minima))
        if rising < _MEMORY_RISING or growth <= max(self._floor_gb, _MIN_GROWTH * minima[0]):
            return None
        self._minima.clear()
        cause, fixes = for_leak()
        per_step = growth / (_BLOCK_STEPS * (_MEMORY_BLOCKS - 1))
        return Anomaly(
            "memory_leak",
            step,
            "warning",
            f"allocated memory grew from {minima[0]:.2f} to {minima[-1]:.2f} GB over "
            f"{_MEMORY_BLOCKS * _BLOCK_STEPS} steps, "
            f"{1024 * per_step:.1f} MB per step, {rising} of {_MEMORY_BLOCKS - 1} blocks rising",
            fixes,
            cause,
            {"from_gb": minima[0], "to_gb": minima[-1], "gb_per_step": per_step},
        )

    def _drop(self, step: int, value: float) -> Anomaly | None:
        window = self._recent
        usual = window.median if len(window) >= 8 else None
        if usual is None or value > (1 - _DROP_SHARE) * usual or usual - value < 0.1:
            self._low_in_row = 0
            window.add(value)
            return None
        self._low_in_row += 1
        if self._low_in_row == window.size // 2:
            window.clear()
            window.add(value)
        if self._low_in_row != _DROP_STEPS:
            return None
        cause, fixes = for_drop()
        return Anomaly(
            "memory_drop",
            step,
            "warning",
            f"allocated memory fell from {usual:.2f} to {value:.2f} GB ({value / usual:.0%}) and "
            f"stayed there for {_DROP_STEPS} steps",
            fixes,
            cause,
            {"from_gb": usual, "to_gb": value},
        )


class CurvesMonitor(Monitor):
    """Judges the loss of the lowest rank that reports one, NaN on all ranks, and the memory of each
    rank. A NaN spreads to all ranks within a step, so it waits for the tick, by which every rank's
    steps have arrived, and the rank that had it first is named.

    The evaluation loss comes with the steps or, until a step carries one, from the lines that the
    miner prints.
    """

    name = "curves"
    words = EVALUATION_WORDS

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._facts = TrainingFacts.from_settings(context.config.miner, context.config.gate)
        self._counts: dict[str, int] = {}
        self._last: dict[str, Any] | None = None
        self._reset()

    def _reset(self) -> None:
        self._loss = LossWatch(self.context.config.loss)
        self._overfit = OverfitWatch(self.context.config.loss)
        self._recent = SortedWindow(16)
        self._last_step: tuple[int, StepRecord] | None = None
        self._evaluations_come = False
        """Whether steps carry evaluations, in which case the miner's lines add nothing new."""

        self._memory: dict[int, MemoryWatch] = {}
        self._lead: int | None = None
        self._not_finite: set[int] = set()
        self._ranks: set[int] = set()
        """Ranks that have reported steps in this launch."""

        self._first_nan: tuple[tuple[int, int], StepRecord, Anomaly] | None = None
        """The earliest NaN that has not been reported yet, with its total steps and rank."""

        self._memory_pending: dict[str, list[tuple[int, StepRecord, Anomaly]]] = {}
        """By type: what the memory of each rank has done since the last tick."""

    def on_launch(self, launch: Launch) -> Iterable[Event]:
        self._reset()
        return ()

    def on_entry(self, rank: int, entry: JournalEntry) -> Iterable[Event]:
        if isinstance(entry, TrainingEntry):
            self._facts = self._facts.with_entry(entry)
        return ()

    def on_steps(self, rank: int, steps: Sequence[StepRecord]) -> Iterable[Event]:
        self._ranks.add(rank)
        for step in steps:
            for anomaly in self._judge(rank, step):
                self._count(anomaly)
                yield event_of(anomaly, rank, step)
        if len(self._ranks) == 1:
            yield from self._pending()

    def _pending(self) -> Iterator[Event]:
        yield from self._report_nan()
        pending, self._memory_pending = self._memory_pending, {}
        for rows in pending.values():
            # Ranks of one launch allocate alike: one line for all of them.
            rank, step, anomaly = min(rows, key=lambda row: (row[1].total_steps, row[0]))
            self._count(anomaly)
            ranks = sorted({rank for rank, _, _ in rows})
            if len(self._ranks) > 1:
                anomaly = replace(anomaly, detail=f"{rank_list(ranks)}: {anomaly.detail}")
            event = event_of(anomaly, rank, step)
            yield replace(event, rank=rank if len(ranks) == 1 else None)

    def _report_nan(self) -> Iterator[Event]:
        first, self._first_nan = self._first_nan, None
        if first is not None:
            (_, rank), step, anomaly = first
            self._count(anomaly)
            yield event_of(anomaly, rank, step)

    def objection(self) -> str | None:
        return None if self._first_nan is None else "loss_nan"

    def on_exit(self, end: Exit) -> Iterable[Event]:
        return self._pending()

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Event]:
        if ranks and self._lead not in ranks:
            # After a new rendezvous this node may have different ranks.
            self._lead = None
            self._not_finite &= ranks.keys()
        return self._pending()

    def on_lines(self, lines: Sequence[bytes]) -> Iterable[Event]:
        if self._evaluations_come or self._last_step is None:
            return
        rank, step = self._last_step
        for line in lines:
            value = evaluation_in(line)
            anomaly = None if value is None else self._judge_evaluation(step, value)
            if anomaly is not None:
                self._count(anomaly)
                yield event_of(anomaly, rank, step)

    def _judge_evaluation(self, step: StepRecord, value: float) -> Anomaly | None:
        return (
            self._overfit.observe(step.total_steps, value, self._recent.median)
            if len(self._recent)
            else None
        )

    def _count(self, anomaly: Anomaly) -> None:
        self._counts[anomaly.type] = self._counts.get(anomaly.type, 0) + 1
        self._last = {"type": anomaly.type, "at_step": anomaly.at_step, "detail": anomaly.detail}

    def _judge(self, rank: int, step: StepRecord) -> Iterator[Anomaly]:
        number = _number(step)
        if step.loss is not None:
            yield from self._judge_loss(rank, step, number - step.loss_lag, step.loss)
        if step.allocated_bytes is not None:
            watch = self._memory.setdefault(rank, MemoryWatch(self.context.config.loss))
            anomaly = watch.observe(number, gb(step.allocated_bytes) or 0.0)
            if anomaly is not None:
                row = (rank, step, anomaly)
                self._memory_pending.setdefault(anomaly.type, []).append(row)

    def _judge_loss(
        self, rank: int, step: StepRecord, number: int, loss: float
    ) -> Iterator[Anomaly]:
        hidden = hides_nan(loss, step.grad_norm)
        if hidden or not math.isfinite(loss):
            # All ranks share the weights: report only the first rank with a non-finite loss.
            place, first = (step.total_steps, rank), self._first_nan
            if not self._not_finite or (first is not None and place < first[0]):
                anomaly = (
                    hidden_nan(number, step.grad_norm or 0.0, self._facts, step.lr)
                    if hidden
                    else not_finite(number, loss, self._facts, step.lr)
                )
                self._first_nan = (place, step, anomaly)
            self._not_finite.add(rank)
            return
        self._not_finite.discard(rank)
        if self._lead is None or rank <= self._lead:
            self._lead = rank
            self._last_step = (rank, step)
            self._recent.add(loss)
            yield from self._loss.observe(number, loss, self._facts, step.lr)
            if step.eval_loss is not None:
                yield from self._recorded_evaluation(step, step.eval_loss)

    def _recorded_evaluation(self, step: StepRecord, value: float) -> Iterator[Anomaly]:
        if not self._evaluations_come:
            # Start over, because the miner may already have printed this evaluation.
            self._evaluations_come = True
            self._overfit = OverfitWatch(self.context.config.loss)
        anomaly = self._judge_evaluation(step, value)
        if anomaly is not None:
            yield anomaly

    def snapshot(self) -> Mapping[str, Any]:
        return {"anomalies": dict(self._counts), "last": self._last}


def _number(step: StepRecord) -> int:
    """The step number that users see: the inner step, else the process's step count."""
    return step.inner_step if step.inner_step is not None else step.total_steps


def event_of(anomaly: Anomaly, rank: int, step: StepRecord) -> Event:
    """The event for an anomaly, with its evidence, cause and fixes."""
    common: dict[str, Any] = {
        "detail": anomaly.detail,
        "cause": anomaly.cause,
        "fixes": list(anomaly.fixes),
        "step": anomaly.at_step,
        "outer_step": step.outer_step,
        "evidence": dict(anomaly.evidence),
    }
    seen = anomaly.evidence
    if anomaly.type == "nan":
        return event(
            "loss_nan",
            "critical",
            lines.loss_nan(anomaly.at_step, seen["examples"]),
            rank=rank,
            loss=seen["loss"],
            examples=seen["examples"],
            **common,
        )
    if anomaly.type == "eval_nan":
        text = f"EVALUATION LOSS is {seen['eval_loss']} at step {anomaly.at_step}"
        return event(
            "eval_loss_nan", "warning", text, rank=rank, eval_loss=seen["eval_loss"], **common
        )
    if anomaly.type == "spike":
        numbers = {key: seen[key] for key in ("loss", "median", "limit")}
        text = (
            f"LOSS SPIKE: {seen['loss']:.4g} at step {anomaly.at_step} (median "
            f"{seen['median']:.4g}, limit {seen['limit']:.4g})"
        )
        return event("loss_spike", anomaly.severity, text, rank=rank, **numbers, **common)
    level, detail = anomaly.severity, anomaly.detail
    if anomaly.type == "divergence":
        return event("loss_divergence", level, f"LOSS DIVERGING: {detail}", rank=rank, **common)
    if anomaly.type == "plateau_high":
        return event("loss_plateau", level, f"LOSS PLATEAU: {detail}", rank=rank, **common)
    if anomaly.type == "overfit":
        return event("overfit", level, f"OVERFITTING: {detail}", rank=rank, **common)
    if anomaly.type == "memory_leak":
        return event("memory_leak", level, f"MEMORY LEAK: {detail}", rank=rank, **common)
    return event("memory_drop", level, f"MEMORY DROP: {detail}", rank=rank, **common)
