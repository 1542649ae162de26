"""Curves after the fact: the same quantities where the whole curve is known, so that a value is
judged by those after it as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median

from miner_guard.config import LossSettings
from miner_guard.watch.curves import (
    MIN_EVALUATIONS,
    MIN_FOR_LEVEL,
    TRAIN_FALL,
    Anomaly,
    Divergence,
    for_divergence,
    for_drop,
    for_leak,
    for_nan,
    for_overfit,
    for_plateau,
    for_slow,
    for_slow_fall,
    for_spike,
    kendall,
    near_chance,
    rises,
)
from miner_guard.watch.progress import TrainingFacts
from miner_guard.watch.series import MAD_TO_SIGMA, SortedWindow
from miner_guard.watch.steps import SlowEpisodes
from miner_guard.watch.trace_reading import Series, Trace, centred, step_noise

_MIN_NOISE = 0.0005


@dataclass(frozen=True)
class OutlierRule:
    """The criteria for an outlier."""

    window: int
    min_before: int
    """Minimum number of values before an outlier; if 0, the first step is judged by the values
    after it."""

    levels: tuple[tuple[float, float], ...]
    """(ratio to the level, noise sigmas) pairs, smaller ratios last: the smaller the ratio, the
    more sigmas it needs."""

    max_length: int
    """A longer streak is a level change, not outliers."""


SPIKE = OutlierRule(
    window=32, min_before=5, levels=((1.9, 5.0), (1.3, 6.0), (1.03, 25.0)), max_length=8
)
SLOW = OutlierRule(
    window=25, min_before=0, levels=((1.5, 4.0), (1.3, 5.0), (1.15, 7.5)), max_length=8
)


@dataclass(frozen=True)
class Outlier:
    """One value that stands out."""

    index: int
    value: float
    level: float
    sigmas: float

    @property
    def ratio(self) -> float:
        """The value divided by the level."""
        return self.value / self.level if self.level else math.inf


def outliers(values: Sequence[float], rule: OutlierRule) -> list[Outlier]:
    """Return all outliers in order. `values` must be finite."""
    return select(candidates(values, rule), rule)


@lru_cache(maxsize=2)
def deepest_dip(values: tuple[float, ...]) -> float:
    """Return how many sigmas deep the deepest downward outlier is, judged by the rule for upward
    spikes; 0 if no value qualifies, or if some values are not positive."""
    if not values or min(values) <= 0:
        return 0.0
    upside_down = outliers([1 / value for value in values], SPIKE)
    return max((o.sigmas for o in upside_down), default=0.0)


def select(every: Iterable[Outlier], rule: OutlierRule) -> list[Outlier]:
    """The `candidates` that the rule accepts as outliers."""
    found = [o for o in every if o.sigmas >= _needed(o.ratio, rule)]
    return [o for run in runs(found, 1) if len(run) <= rule.max_length for o in run]


def runs(found: Sequence[Outlier], gap: int) -> Iterator[list[Outlier]]:
    """Groups of outliers, each within `gap` places of the one before."""
    group: list[Outlier] = []
    for outlier in found:
        if group and outlier.index - group[-1].index > gap:
            yield group
            group = []
        group.append(outlier)
    if group:
        yield group


def _needed(ratio: float, rule: OutlierRule) -> float:
    return next((sigmas for minimum, sigmas in rule.levels if ratio >= minimum), math.inf)


def candidates(values: Sequence[float], rule: OutlierRule) -> Iterator[Outlier]:
    """Values whose ratio to the medians on both sides exceeds the rule's minimum ratio, each with
    its sigmas."""
    size, count = rule.window, len(values)
    before, after = SortedWindow(size), SortedWindow(size)
    for value in values[1 : size + 1]:
        after.add(value)
    minimum = rule.levels[-1][0]
    for place, value in enumerate(values):
        enough = len(before) + min(size, count - 1 - place) >= 8 and len(before) >= rule.min_before
        if enough:
            level = _level(before, after, count - 1 - place)
            if level is not None and (value > minimum * level if level > 0 else value > level):
                sigmas = _sigmas(values, place, size, level)
                yield Outlier(place, value, level, sigmas)
        before.add(value)
        following = place + 1 + size
        if following < count:
            after.add(values[following])
        elif len(after):
            after.drop_oldest()


def _level(before: SortedWindow, after: SortedWindow, left: int) -> float | None:
    sides = [side.median for side, length in ((before, len(before)), (after, left)) if length >= 4]
    return max(sides) if sides else None


def _sigmas(values: Sequence[float], place: int, size: int, level: float) -> float:
    sides = [values[max(0, place - size) : place], values[place + 1 : place + 1 + size]]
    positive = values[place] > 0 and level > 0 and all(v > 0 for side in sides for v in side)
    scale = math.log if positive else float
    rest: list[float] = []
    for side in sides:
        scaled = [scale(v) for v in side]
        if len(scaled) >= 4:
            middle = median(scaled)
            rest += [abs(v - middle) for v in scaled]
    noise = MAD_TO_SIGMA * median(rest) if rest else 0.0
    if positive:
        return math.log(values[place] / level) / max(noise, _MIN_NOISE)
    return (values[place] - level) / max(noise, _MIN_NOISE * abs(level), 1e-12)


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


def flat_part(values: Sequence[float]) -> Flat | None:
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


_JUMP = 0.10
"""Relative change between two samples that counts as a jump."""

_DROP = 0.25
"""A value more than this fraction below the usual one counts as a drop (source 002:
76 % to 45 %)."""

_SIGMAS = 4.0
"""A jump must exceed this multiple of the noise: with mixed sequence lengths, memory changes at
every step."""

_TRANSIENT = 6
_MEMORY_START_UP = 0.10
_LEVEL_RISE = 0.03
_MIN_RISE = 0.05
_MIN_GB = 1.0


@dataclass(frozen=True)
class LevelChange:
    """One event in a memory curve."""

    index: int
    kind: str
    """`memory_drop`, `memory_leak` or `regime_change`."""

    before: float
    after: float
    recovered: bool = False


def changes(values: Sequence[float]) -> list[LevelChange]:
    """Return all events in order. `values` must be finite, in GiB or as a percentage of GPU
    memory."""
    if len(values) < 8:
        return []
    leak = steps_of_growth(values)
    if leak:
        return leak
    return _drops_and_levels(values) or gradual_growth(values) or late_growth(values)


def _drops_and_levels(values: Sequence[float]) -> list[LevelChange]:
    found: list[LevelChange] = []
    since = _settled(values)
    noise = _SIGMAS * step_noise(values)
    place = since + 2
    while place < len(values):
        usual = median(values[max(since, place - 16) : place])
        value = values[place]
        if usual > 0 and abs(value - usual) > max(_JUMP * usual, noise):
            end = _until_back(values, place, usual)
            if end is not None and value < usual:
                lowest = min(range(place, end), key=lambda n: values[n])
                if values[lowest] < (1 - _DROP) * usual:
                    found.append(LevelChange(lowest, "memory_drop", usual, values[lowest], True))
                place = end
                continue
            if end is None:
                found += _edge(values, place, usual)
                since = place + 1
                place += 3
                continue
        place += 1
    return found


def _settled(values: Sequence[float]) -> int:
    """Return the index at which the start-up ramp ends: the first of eight values that differ by
    less than 10 %."""
    for place in range(len(values) - 8):
        part = values[place : place + 8]
        if max(part) - min(part) <= _JUMP * max(part):
            return place
    return len(values)


def _until_back(values: Sequence[float], place: int, usual: float) -> int | None:
    """Index at which memory is back at its usual level, if that happens soon; None for a lasting
    change."""
    for index in range(place + 1, min(len(values), place + _TRANSIENT + 1)):
        if abs(values[index] - usual) <= _JUMP * usual / 2:
            return index
    return None


def _edge(values: Sequence[float], place: int, usual: float) -> list[LevelChange]:
    """A lasting change, with an intermediate sample as a separate event; a fall below all earlier
    values is a drop."""
    after = (
        median(values[place + 1 : place + 1 + _TRANSIENT])
        if place + 1 < len(values)
        else values[place]
    )
    start = min(_settled(values), place - 1)
    lowest_before = min(
        median(values[n : n + 4]) for n in range(start, max(start + 1, place - 3), 4)
    )
    if after < (1 - _DROP) * lowest_before:
        return [LevelChange(place, "memory_drop", usual, after)]
    if abs(after - usual) <= _JUMP * usual:
        return []
    edge = [LevelChange(place, "regime_change", usual, after)]
    on_the_way = abs(values[place] - after) > _JUMP * max(after, usual) and place + 1 < len(values)
    return (
        [*edge, LevelChange(place + 1, "regime_change", values[place], after)]
        if on_the_way
        else edge
    )


def steps_of_growth(values: Sequence[float]) -> list[LevelChange]:
    """Find stepwise growth that is never released: every rise of 3 %, if at least two come after
    start-up."""
    rises: list[LevelChange] = []
    highest = values[0]
    place = 1
    while place < len(values):
        ahead = values[place : place + _TRANSIENT]
        level = median(ahead)
        if values[place] > highest * (1 + _LEVEL_RISE / 3) and level > highest * (1 + _LEVEL_RISE):
            rises.append(LevelChange(place, "memory_leak", highest, level))
            highest = max(highest, values[place])
        else:
            highest = max(highest, min(values[place], level))
        place += 1
    settled = max(8, int(_MEMORY_START_UP * 0.1 * len(values)))
    late = [r for r in rises if r.index > settled]
    last = median(values[-min(len(values), 9) :])
    grown = last - values[min(settled, len(values) - 1)]
    stays = last >= 0.97 * highest
    enough = grown > max(_MIN_RISE * last, _MIN_GB)
    return rises if len(late) >= 2 and stays and enough else []


def gradual_growth(values: Sequence[float]) -> list[LevelChange]:
    """Find growth without steps: the minima of 8 blocks after start-up rise in at least 6 of 7
    cases, by more than 5 % and 1 GiB in total."""
    rest = values[max(4, int(_MEMORY_START_UP * len(values))) :]
    size = len(rest) // 8
    if size < 4:
        return []
    minima = [min(rest[n * size : (n + 1) * size]) for n in range(8)]
    rising = sum(later > earlier for earlier, later in itertools.pairwise(minima))
    grown = minima[-1] - minima[0]
    if rising < 6 or grown <= max(_MIN_RISE * minima[0], _MIN_GB):
        return []
    return [LevelChange(len(values) - len(rest), "memory_leak", minima[0], minima[-1])]


_BLOCKS = 32
_RISING = 7


def late_growth(values: Sequence[float]) -> list[LevelChange]:
    """Find growth that begins mid-run and continues to the end: the minima of blocks, each a 32nd
    of the run, rise at least 7 times in a row, with at most one exception, by more than 5 % and 1
    GiB in total."""
    size = max(4, len(values) // _BLOCKS)
    start = len(values) % size
    minima = [min(values[n : n + size]) for n in range(start, len(values), size)]
    first = len(minima) - 1
    missed = False
    while first > 0 and (minima[first] > minima[first - 1] or not missed):
        missed = missed or minima[first] <= minima[first - 1]
        first -= 1
    while first < len(minima) - 1 and minima[first + 1] <= minima[first]:
        first += 1
    grown = minima[-1] - minima[first]
    if len(minima) - 1 - first < _RISING or grown <= max(_MIN_RISE * minima[first], _MIN_GB):
        return []
    return [LevelChange(start + first * size, "memory_leak", minima[first], minima[-1])]


_ALIKE = 0.10
_COMPARED = 5
_FOLLOWED = 20
"""Maximum number of values compared: after a restart, the loss must fall as it did at the start of
the run; a loss that has exploded stays high."""

_MIN_LEVEL_RATIO = 0.8
"""The median after a restart must be at least this share of the run's early median; after a spike,
the loss immediately returns to its previous, lower level."""

_JUMP_SIGMAS = 5.0
"""The jump at a restart must be at least this multiple of the value-to-value noise, because a flat
loss always looks the way it did at the beginning."""

_MIN_FALL = 1.02
_AT_ONCE = 0.5
"""A restart undoes at least this share of the descent (on a log scale) from one value to the
next."""

_MIN_RUN = 5


def restarts(values: Sequence[float]) -> list[int]:
    """Indices at which the values repeat the run's initial descent.

    After a restart, the values fall as the run's first values did (to within 10 %, over five
    values), whereas a spike is over immediately.
    """
    opening = values[:_COMPARED]
    if (
        len(values) < 3 * _COMPARED
        or min(opening) <= 0
        or opening[0] < _MIN_FALL * min(values[:20])
    ):
        return []
    found: list[int] = []
    last = 0
    min_jump = _JUMP_SIGMAS * step_noise([math.log(v) for v in values if v > 0])
    for place in range(_MIN_RUN, len(values) - 2):
        if place - last < _MIN_RUN or not _jumps(values, place, last, min_jump):
            continue
        again = values[place : place + _COMPARED]
        far = [
            abs(math.log(b) - math.log(a)) if b > 0 else math.inf
            for a, b in zip(opening, again, strict=False)
        ]
        falls = sum(b <= a for a, b in itertools.pairwise(again)) >= len(again) // 2
        if (
            far[0] <= _ALIKE
            and sorted(far)[len(far) // 2] <= _ALIKE
            and falls
            and _follows(values, place)
        ):
            found.append(place)
            last = place
    return found


def _follows(values: Sequence[float], place: int) -> bool:
    """Return whether the values fall as they did at the start of the run, and no faster; True if
    there are too few values to decide."""
    then, now = values[_COMPARED:_FOLLOWED], values[place + _COMPARED : place + _FOLLOWED]
    if len(now) < len(then):
        return True
    return _MIN_LEVEL_RATIO * median(then) <= median(now) <= (1 + _ALIKE) * median(then)


def _jumps(values: Sequence[float], place: int, last: int, min_jump: float) -> bool:
    """Return whether the value is clearly above the preceding ones (by at least `min_jump` on a log
    scale) and undoes at least half of the descent in one step; a diverging loss climbs back to its
    initial values gradually."""
    before = values[max(last, place - 4) : place]
    if not before or values[place] <= _MIN_FALL * (level := median(before)) or level <= 0:
        return False
    lowest = min(v for v in values[last:place] if v > 0)
    fallen = math.log(values[last] / lowest)
    return math.log(values[place] / level) >= max(min_jump, _AT_ONCE * fallen)


@dataclass(frozen=True)
class Overfit:
    """Evaluation was best at `step` and has risen since, while the training loss continued to
    fall."""

    step: int
    best: float
    last: float
    train_then: float
    train_last: float
    rising: float
    """Kendall's tau of the evaluations since then: 1 means a steady rise, 0 no trend."""


def overfit(evaluation: Series, training: Series) -> Overfit | None:
    """Overfitting found in a run, or None. Both series must be finite.

    The smoothed evaluation loss (means over a tenth of the run) ends 12 % above its minimum, or 5 %
    if it rises almost steadily; at least four evaluations follow the minimum, or three that each
    exceed the one before; and the training loss fell in the meantime.
    """
    if len(evaluation) < MIN_EVALUATIONS or len(training) < MIN_EVALUATIONS:
        return None
    width = max(3, len(evaluation) // 10) if len(evaluation) >= MIN_FOR_LEVEL else 1
    smooth = centred(evaluation.values, width)
    # Whole windows only: a partial one at the start carries the noise of few values.
    at = min(range((width - 1) // 2, len(smooth) - width // 2), key=lambda n: smooth[n])
    after = evaluation.values[at:]
    best, last = smooth[at], median(smooth[-3:])
    rising = kendall(after)
    if not rises(best, last, rising, len(after) - 1):
        return None
    then, now = _training(training, evaluation.steps[at])
    if now > then - TRAIN_FALL * abs(then):
        return None
    return Overfit(evaluation.steps[at], best, last, then, now, rising)


def _training(training: Series, step: int) -> tuple[float, float]:
    """Training loss around `step` and at the end, as medians of the same number of values."""
    place = sum(s <= step for s in training.steps)
    width = max(3, len(training) // 20)
    around = training.values[max(0, place - width // 2 - 1) : place + width // 2 + 1]
    return median(around or training.values[-width:]), median(training.values[-width:])


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
    cause, fixes = for_nan(facts, step, trace.nearest("lr", step))
    return Anomaly("nan", step, "critical", detail, fixes, cause)


def _loss(trace: Trace, facts: TrainingFacts, has_nan: bool) -> Iterator[Anomaly]:
    loss = trace["loss"].finite()
    if not len(loss):
        # Some trainers log only the evaluation.
        loss = trace["eval_loss"].finite()
    again = restarts(loss.values)
    start = again[-1] if again else 0
    climbed = climb(loss.values[start:])
    if climbed is None and not again:
        climbed = _unreturned(loss.values)
    if climbed is not None:
        yield _climb(trace, loss, start + climbed.index, climbed)
    until = len(loss) if climbed is None else start + climbed.index
    yield from spikes(
        trace, loss, [o for o in outliers(loss.values, SPIKE) if o.index < until], facts
    )
    if not has_nan and climbed is None and (flat := flat_part(loss.values)) is not None:
        yield _plateau(trace, loss, flat)
    elif not has_nan and climbed is None and _from_the_start(loss):
        yield from _slow_fall(trace, loss)
    over = overfit(trace["eval_loss"].finite(), trace["loss"].finite())
    if over is not None and climbed is None:
        yield _overfit(over)


def _unreturned(values: Sequence[float]) -> Climb | None:
    """The last climb in the loss that the live judge reports, if the loss never came back down."""
    watch, found = Divergence(LossSettings()), None
    for index, value in enumerate(values):
        found = next(iter(watch.observe(index, value, None)), found)
    if found is None or watch.came_back:
        return None
    onset = found.at_step + 1 - found.evidence["window"]
    return Climb(onset, found.evidence["best"], found.evidence["level"])


def spikes(
    trace: Trace, loss: Series, found: Sequence[Outlier], facts: TrainingFacts | None = None
) -> Iterator[Anomaly]:
    """The loss outliers that are spikes: one per group, excluding restarts and the jitter of tiny
    losses."""
    again = restarts(loss.values)
    min_jump = _MIN_SHARE * fall(loss.values)
    deepest = deepest_dip(tuple(loss.values)) if found else 0.0
    for group in runs(found, _SAME_SPIKE):
        top = max(group, key=lambda o: o.value)
        restarted = any(-1 <= top.index - place <= _NEAR_RESTART for place in again)
        if restarted or top.value - top.level < min_jump:
            continue
        step = loss.steps[top.index]
        cause, fixes = for_spike(facts or TrainingFacts(), step, trace.nearest("lr", step))
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


def _climb(trace: Trace, loss: Series, index: int, seen: Climb) -> Anomaly:
    step = loss.steps[index]
    cause, fixes = for_divergence(trace.nearest("lr", step), loss.steps[index - 1])
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
    seen = slow_fall(loss.values)
    if seen is None:
        return
    rates = trace["lr"].finite().values
    cause, fixes = for_slow_fall(max(rates, default=None))
    share = (seen.first - seen.level) / seen.first
    detail = (
        f"the loss is decreasing, but slowly: {seen.first:.4g} to {seen.level:.4g}, {share:.1%} in "
        f"{loss.steps[-1] - loss.steps[0]} steps, {seen.late:.0%} of that in the last third"
    )
    evidence = {"first": seen.first, "level": seen.level}
    yield Anomaly("slow_decrease", loss.steps[-1], "info", detail, fixes, cause, evidence)


def _plateau(trace: Trace, loss: Series, seen: Flat) -> Anomaly:
    step = loss.steps[seen.index]
    cause, fixes = for_plateau(trace.nearest("lr", step))
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


def _overfit(seen: Overfit) -> Anomaly:
    cause, fixes = for_overfit(seen.step)
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
            () if first else for_slow(facts),
            "",
            {"step_time": seen.value, "level": seen.level},
        )
    for shift in shifts(values):
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
            for_slow(facts) if slower else (),
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
    for change in changes(memory.values):
        step = memory.steps[change.index]
        text = f"GPU memory went from {change.before:.4g} to {change.after:.4g}"
        if change.kind == "memory_leak":
            cause, fixes = for_leak()
            text += " and never came back down"
        elif change.kind == "memory_drop":
            cause, fixes = for_drop()
            text += " and recovered soon after" if change.recovered else " and stayed there"
        else:
            cause, fixes = "a different process, stage or batch size", ()
        evidence = {"before": change.before, "after": change.after}
        yield Anomaly(change.kind, step, "warning", text, fixes, cause, evidence)
