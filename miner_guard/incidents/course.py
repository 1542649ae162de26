"""What a log tells of the run's own course: steps that go on after a trouble, training that had finished before it."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

_STEP = re.compile(rb"\bloss\b\W{0,4}\d|\b(?:inner |train )?step\b\W{0,3}\d.{0,60}\bloss(?!\W{0,4}(?:nan|inf))")
_STEPS = 2
"""Steps that must follow: one may have been printed late, by another rank."""

_AWAITED = 500
"""Lines after a trouble in which the steps that overcome it are looked for."""

_FINISHED = re.compile(
    rb"^(?!.*\b(?:epoch|stage|fold|round|batch|warm ?up|not|before|until|when|step)\b).*"
    rb"(?:\b(?:training|train|pre ?training|fine ?tuning|run)\b(?: \w+){0,3} (?:finished|completed?|done|ended)\b"
    rb"|\b(?:finished|completed|done|end of)(?: with)? training\b)"
    rb"|\btrain_runtime\b|max_(?:steps|epochs)\S* reached"
)
_REMEMBERED = 100
"""Lines before an end in which training may have said that it has finished."""


Trouble = tuple[str, bool]
"""A label that was tried again or warned of, and whether training needs what failed: then its steps overcome it."""


class Course:
    """Follows the lines around what a scanner sees. Memory is bounded."""

    def __init__(self) -> None:
        self._recent: deque[bytes] = deque(maxlen=_REMEMBERED)
        self._tried: dict[Trouble, int] = {}
        """Troubles that steps would show to be past, with the line of the latest sighting."""

        self._steps = 0

    @property
    def waits(self) -> bool:
        """Something was tried again that steps may show to be overcome."""
        return bool(self._tried)

    def finished(self, shapes: Sequence[bytes], index: int) -> bool:
        """Whether training said that it has finished, shortly before line `index` of a block with these `shapes`."""
        before = [*self._recent, *shapes[max(0, index - _REMEMBERED) : index + 1]]
        return any(_FINISHED.search(shape) for shape in before[-_REMEMBERED:])

    def overcome(
        self, lines: Sequence[bytes], shapes: Sequence[bytes], first: int, tried: Mapping[int, set[Trouble]]
    ) -> Iterator[tuple[tuple[Trouble, ...], int]]:
        """Troubles that the steps in this block show to be past, with the line that showed it.

        `first`: the number of the block's first line. `tried`: troubles by the line on which they were seen.
        """
        if not tried and not self._tried:
            return
        for number in range(first if self._tried else min(tried), first + len(lines)):
            if number in tried:
                self._tried.update(dict.fromkeys(tried[number], number))
                self._steps = 0
            elif self._tried and number - max(self._tried.values()) > _AWAITED:
                self._tried.clear()
            elif self._tried and b"loss" in shapes[number - first] and _STEP.search(lines[number - first].lower()):
                self._steps += 1
                if self._steps == _STEPS:
                    yield tuple(self._tried), number
                    self._tried.clear()

    def pass_by(self, shapes: Sequence[bytes]) -> None:
        """Remember the last lines of a block that was looked at."""
        self._recent.extend(shapes[-_REMEMBERED - 1 : len(shapes) - (not shapes[-1])])
