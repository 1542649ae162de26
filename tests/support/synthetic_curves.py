"""Curves that look like training: quiet ones of many kinds, and the same with one anomaly inserted.

A seed determines everything. A judge is measured by two figures: anomalies found, and quiet curves
that raised an alarm.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

LENGTH = 1200
_ONSET_OFF = LENGTH // 20
"""An event may come up to this many values before a climb, because noise hides the onset."""

Curve = list[float]
Maker = Callable[[random.Random], Curve]


def _decay(first: float, last: float, shape: float = 80.0) -> Curve:
    return [last + (first - last) / (1 + step / shape) for step in range(LENGTH)]


def _noisy(levels: Curve, chance: random.Random, share: float) -> Curve:
    return [level * (1 + chance.gauss(0, share)) for level in levels]


def pretraining(chance: random.Random) -> Curve:
    """A language model's loss: a power law with 1 to 4 % noise."""
    return _noisy(_decay(10.8, chance.uniform(2.4, 4)), chance, chance.uniform(0.01, 0.04))


def finetuning(chance: random.Random) -> Curve:
    """A small fall, then the 8 to 15 % noise of small batches around a level."""
    return _noisy(_decay(1.8, 1.3, 30), chance, chance.uniform(0.08, 0.15))


def heavy_tails(chance: random.Random) -> Curve:
    """Noise with Student's t distribution of three degrees of freedom: some batches are much
    harder."""
    share = chance.uniform(0.02, 0.05)
    levels = _decay(9, 3)
    return [
        x * (1 + share * chance.gauss(0, 1) / math.sqrt(chance.gammavariate(1.5, 2 / 3)))
        for x in levels
    ]


def near_zero(chance: random.Random) -> Curve:
    """A task that the model has learned: losses in the thousandths that jump by whole factors."""
    spread = chance.uniform(0.4, 0.8)
    return [x * math.exp(chance.gauss(0, spread)) for x in _decay(0.9, 0.002, 8)]


def policy_gradient(chance: random.Random) -> Curve:
    """A reinforcement learner's loss: noise around zero, positive and negative."""
    spread = chance.uniform(0.01, 0.2)
    return [chance.gauss(0, spread) for _ in range(LENGTH)]


def rollouts(chance: random.Random) -> Curve:
    """PPO: eight updates on each batch of experience, whose returns set the level."""
    levels = [100 * math.exp(chance.gauss(0, 0.4)) for _ in range(LENGTH // 8)]
    return [level * chance.gauss(1, 0.15) for level in levels for _ in range(8)]


def episodes(chance: random.Random) -> Curve:
    """A2C: a quiet loss with the end of an episode every few updates."""
    return [
        chance.uniform(30, 150) if chance.random() < 0.15 else chance.gauss(5, 0.3)
        for _ in range(LENGTH)
    ]


def sawtooth(chance: random.Random) -> Curve:
    """Each epoch is shuffled badly: the loss falls during it and jumps back up at its end."""
    period, height = chance.randrange(60, 200), chance.uniform(0.08, 0.3)
    levels = [x * (1 + height * (1 - (n % period) / period)) for n, x in enumerate(_decay(6, 2.5))]
    return _noisy(levels, chance, 0.015)


def staircase(chance: random.Random) -> Curve:
    """The data repeats: the loss falls by a step at each epoch."""
    period = chance.randrange(150, 300)
    return _noisy([3.0 * 0.8 ** (n // period) for n in range(LENGTH)], chance, 0.03)


def warm_restarts(chance: random.Random) -> Curve:
    """A learning rate that goes back up: a bump of 5 to 15 % each time."""
    period, height = chance.randrange(200, 400), chance.uniform(0.05, 0.15)
    bumps = [1 + height * math.exp(-((n % period) / 25)) * (n >= period) for n in range(LENGTH)]
    return _noisy([x * b for x, b in zip(_decay(8, 3), bumps, strict=True)], chance, 0.015)


def correlated(chance: random.Random) -> Curve:
    """Documents in order: noise that lasts for tens of steps."""
    state, curve = 0.0, []
    for level in _decay(9, 3):
        state = 0.95 * state + chance.gauss(0, 0.012)
        curve.append(level * (1 + state))
    return curve


def converged(chance: random.Random) -> Curve:
    """The end of a long run."""
    return _noisy([2.8] * LENGTH, chance, chance.uniform(0.01, 0.05))


LOSSES: dict[str, Maker] = {
    maker.__name__: maker
    for maker in (
        pretraining,
        finetuning,
        heavy_tails,
        near_zero,
        policy_gradient,
        sawtooth,
        staircase,
        warm_restarts,
        correlated,
        converged,
    )
}


def steady_steps(chance: random.Random) -> Curve:
    """Step times with 1 to 5 % noise."""
    return _noisy([chance.uniform(3, 30)] * LENGTH, chance, chance.uniform(0.01, 0.05))


def jittery_steps(chance: random.Random) -> Curve:
    """A shared host: log-normal noise."""
    spread = chance.uniform(0.08, 0.15)
    return [12 * math.exp(chance.gauss(0, spread)) for _ in range(LENGTH)]


def periodic_steps(chance: random.Random) -> Curve:
    """Every few steps, one has more work and takes 1.8 times as long."""
    period = chance.choice((2, 4, 5, 8, 10, 16, 25, 50, 100))
    levels = [12 * (1.8 if n % period == period - 1 else 1) for n in range(LENGTH)]
    return _noisy(levels, chance, 0.02)


def modest_steps(chance: random.Random) -> Curve:
    """Single steps that take 1.2 to 1.45 times as long as usual: not worth an alert."""
    levels = [
        12 * (chance.uniform(1.2, 1.45) if chance.random() < 0.01 else 1) for _ in range(LENGTH)
    ]
    return _noisy(levels, chance, 0.01)


STEP_TIMES: dict[str, Maker] = {
    maker.__name__: maker for maker in (steady_steps, jittery_steps, periodic_steps, modest_steps)
}


@dataclass(frozen=True)
class Injected:
    """A curve with one anomaly in it."""

    values: Curve
    kind: str
    first: int
    last: int
    """First and last index at which an event of this kind counts as found."""


def spike(curve: Curve, chance: random.Random, factor: float) -> Injected:
    """One to three values at `factor` times their level."""
    at, width = chance.randrange(200, LENGTH - 200), chance.choice((1, 2, 3))
    values = [x * factor if at <= n < at + width else x for n, x in enumerate(curve)]
    return Injected(values, "spike", at, at + width)


def not_a_number(curve: Curve, chance: random.Random) -> Injected:
    """NaN from one step on."""
    at = chance.randrange(100, LENGTH - 100)
    return Injected([math.nan if n >= at else x for n, x in enumerate(curve)], "nan", at, at)


def divergence(curve: Curve, chance: random.Random) -> Injected:
    """A loss that turns and climbs to twice its level over 200 to 400 steps."""
    at, ramp = chance.randrange(300, 600), chance.randrange(200, 400)
    level = median(curve[at - 40 : at])
    values = list(curve)
    for n in range(at, LENGTH):
        # Cancel the fall that the curve would still have had.
        here = median(curve[max(0, n - 20) : n + 20])
        values[n] = curve[n] * level / here * (1 + min(1.0, (n - at) / ramp))
    return Injected(values, "divergence", at - _ONSET_OFF, LENGTH)


def explosion(curve: Curve, chance: random.Random) -> Injected:
    """A loss that, from one step on, is ten times its level."""
    at = chance.randrange(200, LENGTH - 200)
    values = [x * 10 if n >= at else x for n, x in enumerate(curve)]
    return Injected(values, "divergence", at - _ONSET_OFF, LENGTH)


def slow_step(curve: Curve, chance: random.Random) -> Injected:
    """One step that takes three times as long as usual."""
    at = chance.randrange(200, LENGTH - 200)
    return Injected([x * 3 if n == at else x for n, x in enumerate(curve)], "slow_steps", at, at)


def lasting_slowdown(curve: Curve, chance: random.Random) -> Injected:
    """From one step on, all steps take 1.6 times as long as usual."""
    at = chance.randrange(200, LENGTH - 300)
    values = [x * 1.6 if n >= at else x for n, x in enumerate(curve)]
    return Injected(values, "regime_change", at - 8, LENGTH)
