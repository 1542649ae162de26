"""Judges the GPU memory use of a whole run: growth that continues after the start, drops, and other
level changes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from miner_guard.detectors.trace.series import step_noise

_JUMP = 0.10
"""Relative change between two samples that counts as a jump."""

_DROP = 0.25
"""A value more than this fraction below the usual one counts as a drop (source 002:
76 % to 45 %)."""

_SIGMAS = 4.0
"""A jump must exceed this multiple of the noise: with mixed sequence lengths, memory changes at
every step."""

_TRANSIENT = 6
_START_UP = 0.10
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
    settled = max(8, int(_START_UP * 0.1 * len(values)))
    late = [r for r in rises if r.index > settled]
    last = median(values[-min(len(values), 9) :])
    grown = last - values[min(settled, len(values) - 1)]
    stays = last >= 0.97 * highest
    enough = grown > max(_MIN_RISE * last, _MIN_GB)
    return rises if len(late) >= 2 and stays and enough else []


def gradual_growth(values: Sequence[float]) -> list[LevelChange]:
    """Find growth without steps: the minima of 8 blocks after start-up rise in at least 6 of 7
    cases, by more than 5 % and 1 GiB in total."""
    rest = values[max(4, int(_START_UP * len(values))) :]
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
