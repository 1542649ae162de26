"""Finds the anomalies in a whole trace, for `explain --trace`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from statistics import median

from miner_guard.config import LossSettings
from miner_guard.detectors import advice
from miner_guard.detectors.advice import Anomaly
from miner_guard.detectors.divergence import Divergence
from miner_guard.detectors.eta import TrainingFacts
from miner_guard.detectors.step_time import SlowEpisodes
from miner_guard.detectors.trace import evaluation, levels, memory_curve
from miner_guard.detectors.trace.outliers import SLOW, SPIKE, Outlier, deepest_dip, outliers, runs
from miner_guard.detectors.trace.restarts import restarts
from miner_guard.detectors.trace.series import Series, Trace

_SAME_SPIKE = 8
_NEAR_RESTART = 3
_TAIL = 1.5
"""A spike must be at least this multiple of the deepest dip: heavy-tailed noise jumps both ways."""

_MIN_SHARE = 0.05
"""A spike must be at least this share of the loss's total descent: near zero, tiny losses jump
about."""

_MAX_NAN = 5
_FROM_START = 3
"""If a trace's first step number is at most three strides, the trace shows the run from its start;
any other shows only a window of the run."""

_SLOW_RATIO = 1.5
_CLEAR_RATIO = 1.9
"""Lower than the live threshold, because a whole trace shows whether a slow step recurs."""

_BEYOND = 1.3
"""A slow step must take this many times as long as the regular slow steps to stand out."""

_ZEROS = 3
_FIRST_STEP = 1
"""The first step of a run: trainers count from 0 or from 1."""


def judge(trace: Trace, facts: TrainingFacts | None = None) -> list[Anomaly]:
    """All anomalies in a trace, in step order."""
    known = facts or TrainingFacts()
    found = [*_not_finite(trace, known)]
    has_nan = bool(found)
    found += _loss(trace, known, has_nan)
    found += _step_time(trace["step_time"].finite(), known)
    found += _memory(trace["gpu_mem_gb"].finite())
    return sorted(found, key=lambda a: (a.at_step, a.type))


def _not_finite(trace: Trace, facts: TrainingFacts) -> Iterator[Anomaly]:
    """Yield the first step of each stretch of non-finite losses, in training or evaluation."""
    reported: set[int] = set()
    for name, words in (("loss", "loss"), ("eval_loss", "evaluation loss")):
        series = trace[name]
        # An evaluation that is NaN from its first record on may never have run.
        finite = name == "loss"
        for step, value in zip(series.steps, series.values, strict=True):
            if (
                not math.isfinite(value)
                and finite
                and step not in reported
                and len(reported) < _MAX_NAN
            ):
                reported.add(step)
                yield _nan(trace, facts, step, f"{words} is {value} at step {step}")
            finite = math.isfinite(value)
        if reported:
            return
    for step in trace.nan_said[:1]:
        yield _nan(
            trace, facts, step, f"the guard logged that the loss is NaN or Inf at step {step}"
        )
        return
    for step in _hidden_nan(trace):
        yield _nan(
            trace, facts, step, f"loss is printed as 0 at step {step}: HF Trainer prints 0 for NaN"
        )


def _hidden_nan(trace: Trace) -> Iterator[int]:
    """Find where HF Trainer printed 0.0 for a NaN loss: with a NaN grad_norm, or abruptly after
    losses far from 0."""
    norms = dict(zip(trace["grad_norm"].steps, trace["grad_norm"].values, strict=True))
    loss = trace["loss"]
    for place, (step, value) in enumerate(zip(loss.steps, loss.values, strict=True)):
        if value != 0.0:
            continue
        following = loss.values[place : place + _ZEROS]
        before = loss.values[max(0, place - 5) : place]
        fell_at_once = (
            len(following) == _ZEROS and not any(following) and bool(before) and min(before) > 0.1
        )
        if not math.isfinite(norms.get(step, 0.0)) or fell_at_once:
            yield step
            return


def _nan(trace: Trace, facts: TrainingFacts, step: int, detail: str) -> Anomaly:
    cause, fixes = advice.for_nan(facts, step, trace.nearest("lr", step))
    return Anomaly("nan", step, "critical", detail, fixes, cause)


def _loss(trace: Trace, facts: TrainingFacts, has_nan: bool) -> Iterator[Anomaly]:
    loss = trace["loss"].finite()
    if not len(loss):
        # Some trainers log only the evaluation.
        loss = trace["eval_loss"].finite()
    again = restarts(loss.values)
    start = again[-1] if again else 0
    climbed = levels.climb(loss.values[start:])
    if climbed is None and not again:
        climbed = _unreturned(loss.values)
    if climbed is not None:
        yield _climb(trace, loss, start + climbed.index, climbed)
    until = len(loss) if climbed is None else start + climbed.index
    yield from spikes(
        trace, loss, [o for o in outliers(loss.values, SPIKE) if o.index < until], facts
    )
    if not has_nan and climbed is None and (flat := levels.flat(loss.values)) is not None:
        yield _plateau(trace, loss, flat)
    elif not has_nan and climbed is None and _from_the_start(loss):
        yield from _slow_fall(trace, loss)
    over = evaluation.overfit(trace["eval_loss"].finite(), trace["loss"].finite())
    if over is not None and climbed is None:
        yield _overfit(over)


def _unreturned(values: Sequence[float]) -> levels.Climb | None:
    """The last climb in the loss that the live judge reports, if the loss never came back down."""
    watch, found = Divergence(LossSettings()), None
    for index, value in enumerate(values):
        found = next(iter(watch.observe(index, value, None)), found)
    if found is None or watch.came_back:
        return None
    onset = found.at_step + 1 - found.evidence["window"]
    return levels.Climb(onset, found.evidence["best"], found.evidence["level"])


def spikes(
    trace: Trace, loss: Series, found: Sequence[Outlier], facts: TrainingFacts | None = None
) -> Iterator[Anomaly]:
    """The loss outliers that are spikes: one per group, excluding restarts and the jitter of tiny
    losses."""
    again = restarts(loss.values)
    min_jump = _MIN_SHARE * levels.fall(loss.values)
    deepest = deepest_dip(tuple(loss.values)) if found else 0.0
    for group in runs(found, _SAME_SPIKE):
        top = max(group, key=lambda o: o.value)
        restarted = any(-1 <= top.index - place <= _NEAR_RESTART for place in again)
        if restarted or top.value - top.level < min_jump:
            continue
        step = loss.steps[top.index]
        cause, fixes = advice.for_spike(facts or TrainingFacts(), step, trace.nearest("lr", step))
        detail = (
            f"loss {top.value:.4g} vs. {top.level:.4g} before and after it "
            f"({top.ratio:.2f}x), "
            f"{top.sigmas:.0f} sigma above the local noise; the spike spans {len(group)} "
            f"value{'s' if len(group) > 1 else ''}"
        )
        yield Anomaly(
            "spike",
            step,
            "warning" if top.sigmas > _TAIL * deepest else "info",
            detail,
            fixes,
            cause,
            {"loss": top.value, "level": top.level},
        )


def _climb(trace: Trace, loss: Series, index: int, seen: levels.Climb) -> Anomaly:
    step = loss.steps[index]
    cause, fixes = advice.for_divergence(trace.nearest("lr", step), loss.steps[index - 1])
    detail = (
        f"loss rose from {seen.best:.4g} at step {step}, never came back down "
        f"and ended at {seen.level:.4g}"
    )
    return Anomaly(
        "divergence",
        step,
        "critical",
        detail,
        fixes,
        cause,
        {"best": seen.best, "level": seen.level},
    )


def _from_the_start(loss: Series) -> bool:
    """Return True if the trace begins at the start of its run."""
    if not len(loss):
        return False
    stride = (loss.steps[-1] - loss.steps[0]) / max(1, len(loss) - 1)
    return loss.steps[0] <= max(_FROM_START * stride, 1)


def _slow_fall(trace: Trace, loss: Series) -> Iterator[Anomaly]:
    """Remark on a loss that falls slowly. Never an alarm: a fine-tuned model may have little to
    learn."""
    seen = levels.slow_fall(loss.values)
    if seen is None:
        return
    rates = trace["lr"].finite().values
    cause, fixes = advice.for_slow_fall(max(rates, default=None))
    share = (seen.first - seen.level) / seen.first
    detail = (
        f"the loss is decreasing, but slowly: {seen.first:.4g} to {seen.level:.4g}, {share:.1%} in "
        f"{loss.steps[-1] - loss.steps[0]} steps, {seen.late:.0%} of that in the last third"
    )
    evidence = {"first": seen.first, "level": seen.level}
    yield Anomaly("slow_decrease", loss.steps[-1], "info", detail, fixes, cause, evidence)


def _plateau(trace: Trace, loss: Series, seen: levels.Flat) -> Anomaly:
    step = loss.steps[seen.index]
    cause, fixes = advice.for_plateau(trace.nearest("lr", step))
    detail = (
        f"loss {seen.first:.4g} at the start, {seen.level:.4g} at the end: it stayed within "
        f"{seen.band:.1%} over {len(loss)} values from step {loss.steps[0]} to {loss.steps[-1]}"
    )
    # Late in a run a flat loss is normal; only a loss that was never higher has not learned.
    severity = "warning" if _from_the_start(loss) else "info"
    return Anomaly(
        "plateau_high",
        step,
        severity,
        detail,
        fixes,
        cause,
        {"first": seen.first, "level": seen.level},
    )


def _overfit(seen: evaluation.Overfit) -> Anomaly:
    cause, fixes = advice.for_overfit(seen.step)
    detail = (
        f"evaluation loss was best at step {seen.step} ({seen.best:.4g}) and ends at "
        f"{seen.last:.4g}, "
        f"while training loss went from {seen.train_then:.4g} to {seen.train_last:.4g}"
    )
    return Anomaly(
        "overfit",
        seen.step,
        "warning",
        detail,
        fixes,
        cause,
        {"best": seen.best, "last": seen.last},
    )


def _step_time(times: Series, facts: TrainingFacts) -> Iterator[Anomaly]:
    values = times.values
    slow = outliers(values, SLOW)
    period, episodes = _period(slow), SlowEpisodes(_CLEAR_RATIO)
    usual = median([o.ratio for o in slow]) if slow else 0.0
    for seen in slow:
        # As in live monitoring, an excess below 50 % deserves no warning.
        scheduled = period is not None and seen.ratio < _BEYOND * usual
        worth_it = seen.ratio >= _SLOW_RATIO and not scheduled
        certain = worth_it and episodes.certain(seen.index, seen.ratio)
        regular = "" if period is None else f"; recurs every {period} values: scheduled work?"
        first = times.steps[seen.index] <= _FIRST_STEP
        yield Anomaly(
            "slow_steps",
            times.steps[seen.index],
            "info" if first or not certain else "warning",
            (
                f"step time {seen.value:.4g} vs. {seen.level:.4g} before and after it "
                f"({seen.ratio:.2f} times){regular}"
            )
            + ("; the first step compiles and warms up" if first else ""),
            () if first else advice.for_slow(facts),
            "",
            {"step_time": seen.value, "level": seen.level},
        )
    for shift in levels.shifts(values):
        slower = shift.after > shift.before
        yield Anomaly(
            "regime_change",
            times.steps[shift.index],
            "warning" if slower else "info",
            f"step time went from {shift.before:.4g} to {shift.after:.4g} "
            + (
                "at this step and stayed there"
                if shift.sharp
                else "in a slow drift whose midpoint is this step"
            ),
            advice.for_slow(facts) if slower else (),
            "",
            {"before": shift.before, "after": shift.after},
        )


def _period(slow: Sequence[Outlier]) -> int | None:
    """Number of values between slow steps that recur regularly; None if no such period is found."""
    gaps = [b.index - a.index for a, b in itertools.pairwise(slow) if b.index - a.index > 1]
    if len(gaps) < 3:
        return None
    middle = median(gaps)
    regular = sum(abs(g - middle) <= max(2, 0.05 * middle) for g in gaps)
    return round(middle) if regular >= 0.7 * len(gaps) else None


def _memory(memory: Series) -> Iterator[Anomaly]:
    for change in memory_curve.changes(memory.values):
        step = memory.steps[change.index]
        text = f"GPU memory went from {change.before:.4g} to {change.after:.4g}"
        if change.kind == "memory_leak":
            cause, fixes = advice.for_leak()
            text += " and never came back down"
        elif change.kind == "memory_drop":
            cause, fixes = advice.for_drop()
            text += " and recovered soon after" if change.recovered else " and stayed there"
        else:
            cause, fixes = "a different process, stage or batch size", ()
        evidence = {"before": change.before, "after": change.after}
        yield Anomaly(change.kind, step, "warning", text, fixes, cause, evidence)
