"""What a log tells of the run's own course: steps that continue after a trouble, training that had
finished before it."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

_LOSS = re.compile(rb"loss\b\W{0,4}\d")
_NOT_TRAINING = (b"val_", b"valid_", b"validation_", b"test_")
_STEP = re.compile(rb"\bstep\b\W{0,3}\d.{0,60}\bloss(?!\W{0,4}(?:nan|inf))")
_NUMBERS = re.compile(rb"\bstep\b\W{0,4}(\d+)")
_ZERO = re.compile(rb"(?:\b|_)loss\b\W{0,4}0(?:\.0*)?(?:[^\d.]|$)")
_STEPS = 2
"""Steps that must follow: one may have been printed late, by another rank."""

_SOUND_STEPS = 4
"""The same where the loss itself was the trouble: the other ranks may print finite ones for a
while."""

_MANY_STEPS = 10
"""The same after an error: ranks that work together take no more than a few steps without the one
that it ended."""

_AWAITED = 500
"""Lines after a trouble in which the steps that overcome it are looked for."""

_FINISHED = re.compile(
    rb"^(?!.*\b(?:epoch|stage|fold|round|batch|warm ?up|not|before|until|when|step)\b).*"
    rb"(?:\b(?:training|train|pre ?training|fine ?tuning|run)\b(?: \w+){0,3} "
    rb"(?:finished|completed?|done|ended)\b"
    rb"|\b(?:finished|completed|done|end of)(?: with)? training\b)"
    rb"|\btrain_runtime\b|max_(?:steps|epochs)\S* reached"
)
_REMEMBERED = 100
"""Lines before an end in which training may have said that it has finished."""


class PendingError(NamedTuple):
    """What steps that follow may show to be past."""

    label: str
    needed: bool = True
    """Training needs what failed: its steps overcome it. Otherwise they show that it does
    without."""

    loss: bool = False
    """The loss itself was the trouble, also where nobody tried again. A loss of 0 after it is no
    better than NaN."""

    raised: bool = False
    """An error, and not a warning or another try: one that a program may catch, or that may end a
    rank."""

    @property
    def steps(self) -> int:
        """How many steps must follow."""
        return _SOUND_STEPS if self.loss else _MANY_STEPS if self.raised else _STEPS


class RecoveryTracker:
    """Follows the lines around what a scanner sees. Memory is bounded."""

    def __init__(self) -> None:
        self._recent: deque[bytes] = deque(maxlen=_REMEMBERED)
        self._tried: dict[PendingError, set[object]] = {}
        """Troubles that steps would show to be past, with the steps since the latest sighting."""

        self._latest = 0
        """The line of the latest sighting."""

    @property
    def waits(self) -> bool:
        """Something was tried again that steps may show to be overcome."""
        return bool(self._tried)

    def finished(self, shapes: Sequence[bytes], index: int) -> bool:
        """Whether training said that it has finished, shortly before line `index` of a block with
        these `shapes`."""
        before = [*self._recent, *shapes[max(0, index - _REMEMBERED) : index + 1]]
        return any(_FINISHED.search(shape) for shape in before[-_REMEMBERED:])

    def overcome(
        self,
        lines: Sequence[bytes],
        shapes: Sequence[bytes],
        first: int,
        tried: Mapping[int, set[PendingError]],
    ) -> Iterator[tuple[tuple[PendingError, ...], int]]:
        """Troubles that the steps in this block show to be past, with the line that showed it.

        `first`: the number of the block's first line. `tried`: by line, the troubles among what was
        seen on it; a line with none shows something else that went wrong.
        """
        if not self._tried and not any(tried.values()):
            return
        seen, number, end = sorted(tried), first - 1, first + len(lines)
        while (number := number + 1 if self._tried else _next(seen, number, end)) < end:
            if number in tried:
                # What came after a loss that is no number may be what it led to.
                self._tried = {
                    trouble: steps for trouble, steps in self._tried.items() if not trouble.loss
                }
                self._tried.update((trouble, set()) for trouble in tried[number])
                self._latest = number
            elif number - self._latest > _AWAITED:
                self._tried.clear()
            elif b"loss" in shapes[number - first] and (
                past := self._step(lines[number - first].lower(), number)
            ):
                yield past, number

    def _step(self, line: bytes, number: int) -> tuple[PendingError, ...]:
        """Troubles that `line` shows to be past, if it prints a step."""
        if not _prints_step(line):
            return ()
        step = tuple(_NUMBERS.findall(line)) or number
        for trouble, steps in self._tried.items():
            if not (trouble.loss and _ZERO.search(line)):
                steps.add(step)
        past = tuple(t for t, steps in self._tried.items() if len(steps) >= t.steps)
        for trouble in past:
            del self._tried[trouble]
        return past

    def pass_by(self, shapes: Sequence[bytes]) -> None:
        """Remember the last lines of a block that was looked at."""
        self._recent.extend(shapes[-_REMEMBERED - 1 : len(shapes) - (not shapes[-1])])


def _prints_step(line: bytes) -> bool:
    for loss in _LOSS.finditer(line):
        before = line[: loss.start()]
        if not before[-1:].isalnum() and not before.endswith(_NOT_TRAINING):
            return True
    return _STEP.search(line) is not None


def _next(numbers: Sequence[int], number: int, end: int) -> int:
    place = bisect_right(numbers, number)
    return numbers[place] if place < len(numbers) else end
