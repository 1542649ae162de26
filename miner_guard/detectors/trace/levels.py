"""Finds lasting level changes: regime changes in step time and memory, and a loss that climbs or
never falls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from miner_guard.detectors.plateau import near_chance
from miner_guard.detectors.trace.series import step_noise
from miner_guard.detectors.window import MAD_TO_SIGMA

_SIDE = 32
_MIN_SIDE = 8
_START_UP = 16
"""Values before the first judged change: the first steps compile and fill caches."""

_MIN_CHANGE = math.log(1.18)
_CHANGE_SIGMAS = 2.0
_DRIFT_BLOCKS = 20
_MIN_DRIFT = math.log(1.12)


@dataclass(frozen=True)
class Shift:
    """A new level that begins at `index`."""

    index: int
    before: float
    after: float
    sharp: bool


def shifts(values: Sequence[float]) -> list[Shift]:
    """Find level changes in positive `values`: the medians of the 32 values before and after differ
    by more than noise.

    Without a sharp change, a slow drift of more than 12 % over the run counts as a change at its
    midpoint.
    """
    if len(values) < _START_UP + _MIN_SIDE or min(values) <= 0:
        return []
    logs = [math.log(v) for v in values]
    found: list[Shift] = []
    place = _START_UP
    while place <= len(logs) - _MIN_SIDE:
        if not _changes(logs, place):
            place += max(1, _MIN_SIDE // 4)
            continue
        best = _sharpest(logs, place)
        if not found or best - found[-1].index > _MIN_SIDE:
            left, right = _sides(logs, best)
            if abs(median(right) - median(left)) >= _MIN_CHANGE:
                found.append(Shift(best, math.exp(median(left)), math.exp(median(right)), True))
        place = max(place, best) + _SIDE // 2
    return found or _drift(logs)


def _sides(logs: Sequence[float], place: int) -> tuple[Sequence[float], Sequence[float]]:
    return logs[max(0, place - _SIDE) : place], logs[place : place + _SIDE]


def _changes(logs: Sequence[float], place: int) -> bool:
    left, right = _sides(logs, place)
    low, high = median(left), median(right)
    noise = MAD_TO_SIGMA * median([abs(v - low) for v in left] + [abs(v - high) for v in right])
    return abs(high - low) >= max(_MIN_CHANGE, _CHANGE_SIGMAS * noise)


def _sharpest(logs: Sequence[float], place: int) -> int:
    """The split near `place` with the least absolute deviation on both sides."""
    first, last = max(_START_UP, place - _MIN_SIDE), min(len(logs) - _MIN_SIDE, place + _SIDE)
    low, high = max(0, first - _SIDE), min(len(logs), last + _SIDE)

    def cost(split: int) -> float:
        left, right = logs[low:split], logs[split:high]
        middle_left, middle_right = median(left), median(right)
        return sum(abs(v - middle_left) for v in left) + sum(abs(v - middle_right) for v in right)

    return min(range(first, last + 1), key=cost)


def _drift(logs: Sequence[float]) -> list[Shift]:
    size = len(logs) // _DRIFT_BLOCKS
    if size < _SIDE:
        return []
    blocks = [median(logs[n * size : (n + 1) * size]) for n in range(_DRIFT_BLOCKS)]
    furthest = max(range(_DRIFT_BLOCKS), key=lambda n: abs(blocks[n] - blocks[0]))
    change = blocks[furthest] - blocks[0]
    if abs(change) < _MIN_DRIFT:
        return []
    half = next(n for n in range(_DRIFT_BLOCKS) if abs(blocks[n] - blocks[0]) >= abs(change) / 2)
    return [Shift(half * size, math.exp(blocks[0]), math.exp(blocks[furthest]), False)]


def fall(values: Sequence[float]) -> float:
    """Return how far the level drops from the first tenth to its lowest point after that; 0 if it
    never drops."""
    part = max(3, len(values) // 10)
    blocks = _block_medians(values, part)
    return max(0.0, blocks[0] - min(blocks)) if blocks else 0.0


@dataclass(frozen=True)
class Climb:
    """A loss that has left its best level permanently."""

    index: int
    best: float
    level: float


_CLIMB_RATIO = 1.25
_LASTING = 4


def climb(values: Sequence[float]) -> Climb | None:
    """Find a loss that leaves its best level permanently and ends at least 25 % above it.

    The rise must be at least a tenth of the preceding descent (a loss near zero doubles by noise
    alone) and four sigmas of the value-to-value noise.
    """
    if len(values) < 8:
        return None
    width = 5 if len(values) >= 15 else 3
    smooth = [
        median(values[max(0, n - width // 2) : n + width // 2 + 1]) for n in range(len(values))
    ]
    tail = median(values[-max(_LASTING, len(values) // 10) :])
    best = min(smooth)
    if best <= 0 or tail < _CLIMB_RATIO * best:
        return None
    fallen = max(0.0, max(values[:3]) - best)
    noise = step_noise([math.log(v) for v in values if v > 0])
    if tail - best < 0.1 * fallen or math.log(tail / best) < 4 * noise:
        return None
    limit = min(best + 0.25 * (tail - best), best * math.exp(min(3 * noise, 1.0)), 1.5 * best)
    limit = max(limit, best * 1.02)
    last_low = max((n for n, v in enumerate(values) if v <= limit), default=-1)
    onset = last_low + 1
    if onset < 1 or len(values) - onset < _LASTING:
        return None
    return Climb(onset, best, tail)


@dataclass(frozen=True)
class Flat:
    """A loss that never fell."""

    index: int
    first: float
    level: float
    band: float


_MIN_FLAT = 9
_FLAT_FALL = 0.03
_FLAT_FIRST = 0.045
_FLAT_ERROR = 0.02
_OF_MEDIAN = 1.25
"""Ratio of a median's standard deviation to a mean's, for normal noise."""

_FEW_SIGMAS = 2.0
"""How far, in sigmas, noise alone can lift the highest of the first few values above the level."""

_STILL = 0.01


def flat(values: Sequence[float]) -> Flat | None:
    """Find a loss that stays within 3 % of its initial level until the end, with too little noise
    to hide a fall.

    A loss that fell at its start and then stays level has converged and does not count, unless it
    is stuck near chance.
    """
    count = len(values)
    if count < _MIN_FLAT:
        return None
    part = max(3, count // 10)
    first, last = median(values[:part]), median(values[-part:])
    scale = abs(median(values))
    if scale == 0:
        return None
    middle = median(values)
    noise = MAD_TO_SIGMA * median([abs(v - middle) for v in values])
    blocks = _block_medians(values, part)
    fell = max(first, values[0], *values[1:2]) - min(blocks)
    error = noise / math.sqrt(part) / scale
    if _stuck_near_chance(values, first, blocks, error):
        return Flat(
            min(count - 1, max(_MIN_FLAT - 1, count // 2)),
            first,
            last,
            (max(blocks) - min(blocks)) / scale,
        )
    # By chance alone, the lowest of ten blocks lies two standard deviations of a block's median
    # below the level.
    chance = 2 * _OF_MEDIAN * error * scale
    if (
        fell > _FLAT_FIRST * scale + _FEW_SIGMAS * noise
        or first - min(blocks) > _FLAT_FALL * scale + chance
    ):
        return None
    if (
        abs(last - first) > _FLAT_FALL * scale
        or error > _FLAT_ERROR
        or max(values[:3]) > middle + max(0.06 * scale, _FEW_SIGMAS * noise)
    ):
        return None
    return Flat(
        min(count - 1, max(_MIN_FLAT - 1, count // 2)),
        first,
        last,
        (max(blocks) - min(blocks)) / scale,
    )


@dataclass(frozen=True)
class SlowFall:
    """A loss that falls steadily but only slightly."""

    first: float
    level: float
    late: float
    """The fall over the last third of the values, as a share of the total fall."""


_SLOW_FALL = (0.03, 0.15)
"""A fall between these shares of the first level counts as slow, a smaller one as flat and a larger
one as learning."""

_STEADY_SIGMAS = 6.0
"""The fall must be at least this multiple of the value-to-value noise: the pace of a noisy loss is
unknown."""

_MAX_SLOW = 200
"""A trace with up to this many values shows the beginning of a run; a longer one shows the loss's
own long-term shape."""


def slow_fall(values: Sequence[float]) -> SlowFall | None:
    """Find a loss that falls by no more than 15 % from first to last, but by more than its noise
    (source 003: underfitting is a loss that "stays flat or decreases very slowly")."""
    count = len(values)
    if not _MIN_FLAT <= count <= _MAX_SLOW:
        return None
    part = max(1, count // 10)
    first, last = median(values[:part]), median(values[-part:])
    min_fall, max_fall = _SLOW_FALL
    fallen = first - last
    if first <= 0 or not min_fall * first < fallen <= max_fall * first:
        return None
    if fallen < _STEADY_SIGMAS * step_noise(values):
        return None
    third = count // 3
    late = median(values[-third - part : -third]) - last
    return SlowFall(first, last, max(0.0, late) / fallen)


def _stuck_near_chance(
    values: Sequence[float], first: float, blocks: Sequence[float], error: float
) -> bool:
    """Return whether the loss starts at an untrained language model's level, falls a little, then
    stops falling."""
    begin = max(first, values[0])
    half = blocks[len(blocks) // 2 :]
    stuck = near_chance(begin, min(blocks)) and half[0] - min(half) < _STILL * begin
    return stuck and error <= _FLAT_ERROR


def _block_medians(values: Sequence[float], size: int) -> list[float]:
    return [median(values[n : n + size]) for n in range(0, len(values) - size + 1, size)]
