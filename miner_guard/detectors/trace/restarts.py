"""Finds where a curve starts over by design, as in a resumed run or the next cross-validation
fold."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import median

from miner_guard.detectors.trace.series import step_noise

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
