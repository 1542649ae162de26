"""Tracks training through a log: whether steps continue after an error, and whether training
finished before it."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from miner_guard.incidents.log_lines import EXCEPTION
from miner_guard.incidents.patterns import Label
from miner_guard.incidents.sightings import Sighting

_LOSS = re.compile(rb"loss\b\W{0,4}\d")
_NOT_TRAINING = (b"val_", b"valid_", b"validation_", b"test_")
_STEP = re.compile(rb"\bstep\b\W{0,3}\d.{0,60}\bloss(?!\W{0,4}(?:nan|inf))")
_NUMBERS = re.compile(rb"\bstep\b\W{0,4}(\d+)")
_ZERO = re.compile(rb"(?:\b|_)loss\b\W{0,4}0(?:\.0*)?(?:[^\d.]|$)")
_NAME = 16
"""How many bytes before `loss` may hold the rest of the metric's name."""

_KEPT = 1024
"""Maximum number of bytes of a line's template to keep."""

_STEPS = 2
"""Steps required after an error, since a single one may be another rank's late output."""

_SOUND_STEPS = 4
"""Steps required after a bad loss, since other ranks may print finite losses for a while."""

_MANY_STEPS = 10
"""Steps required after an exception. Once it has ended a rank, the others take only a few more
steps."""

_AWAITED = 500
"""Number of lines after an error within which its recovery steps must appear."""

_FINISHED = re.compile(
    rb"^(?!.*\b(?:epoch|stage|fold|round|batch|warm ?up|not|before|until|when|step)\b).*"
    rb"(?:\b(?:training|train|pre ?training|fine ?tuning|run)\b(?: \w+){0,3} "
    rb"(?:finished|completed?|done|ended)\b"
    rb"|\b(?:finished|completed|done|end of)(?: with)? training\b)"
    rb"|\btrain_runtime\b|max_(?:steps|epochs)\S* reached"
)
_UPLOADS = re.compile(r"put(?<!\wput)\b|post(?<!\wpost)\b|upload|push|commit|sav(?:e|ing)\b")
"""Uploads and other outgoing requests: continued training does not show that they recovered. Each
alternative begins with a letter, because `re` then skips quickly to these letters."""

_NAN = re.compile(
    r"^(?!.*\b(?:e?val(?:uation|idation)?|valid|test)(?:\b|_))(?!.*(?:stop|exit|abort|terminat))"
    r".*(?:\b|_)(?:nan|inf\w*)(?:\b|_)"
)
"""A non-finite loss, which later finite losses clear. Steps say nothing about an evaluation loss,
and an exploded loss is still a number."""

_PENDING_ROLES = ("cause", "retry", "warning")
_REMEMBERED = 100
"""How many lines before an exit to search for a report that training finished."""


class PendingError(NamedTuple):
    """An error that later steps may clear."""

    label: str
    needed: bool = True
    """Whether training needs what failed. If so, later steps show that it recovered; if not,
    they show only that training continues without it."""

    loss: bool = False
    """Whether the loss itself is bad, so that it counts even without a retry. A loss of 0 after it
    is as bad as NaN."""

    raised: bool = False
    """Whether this is an exception rather than a warning or retry. The program may catch it, or it
    may end a rank."""

    hint: bool = False
    """Whether only the general layer recognizes the line. If steps follow, it was not a fault."""

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of the label's sightings that the steps retract."""
        if self.hint:
            return ("hint",)
        return ("cause", "retry", "warning") if self.loss or self.raised else ("retry", "warning")

    @property
    def steps(self) -> int:
        """How many steps must follow."""
        return _SOUND_STEPS if self.loss else _MANY_STEPS if self.raised else _STEPS


def pending(sighting: Sighting, label: Label) -> PendingError | None:
    """The error that later steps may clear, or None if steps say nothing about this sighting."""
    if sighting.role == "hint":
        return PendingError(label.name, hint=True)
    if sighting.role not in _PENDING_ROLES:
        return None
    text = sighting.text.lower()
    if sighting.role != "cause":
        needed = label.overcome_by_steps and not _UPLOADS.search(text)
        waits = label.overcome_by_steps or label.restart == "outage"
        return PendingError(label.name, needed) if waits else None
    if label.undone_by_losses:
        # An exception ends the run, no matter what the other ranks still print.
        printed = not EXCEPTION.match(sighting.text)
        return PendingError(label.name, loss=True) if printed and _NAN.search(text) else None
    return PendingError(label.name, raised=True) if label.overcome_by_steps else None


class RecoveryTracker:
    """Tracks the lines around a scanner's sightings, in bounded memory."""

    def __init__(self) -> None:
        self._recent: deque[bytes] = deque(maxlen=_REMEMBERED)
        self._tried: dict[PendingError, set[object]] = {}
        """Errors that further steps would clear, each with the steps since its latest sighting."""

        self._latest = 0
        """The line of the latest sighting."""

    @property
    def waits(self) -> bool:
        """Whether further steps could still clear an error."""
        return bool(self._tried)

    def finished(self, shapes: Sequence[bytes], index: int) -> bool:
        """Whether the end of training was reported at line `index` of a block with these
        `shapes`, or shortly before it."""
        before = [*self._recent, *shapes[max(0, index - _REMEMBERED) : index + 1]]
        return any(_FINISHED.search(shape, 0, _KEPT) for shape in before[-_REMEMBERED:])

    def overcome(
        self,
        lines: Sequence[bytes],
        shapes: Sequence[bytes],
        first: int,
        tried: Mapping[int, set[PendingError]],
    ) -> Iterator[tuple[tuple[PendingError, ...], int]]:
        """The errors that the steps in this block clear, each with the line that cleared it.

        `first` is the number of the block's first line. `tried` maps each line to the pending
        errors among its sightings; a line with an empty set shows a different fault.
        """
        if not self._tried and not any(tried.values()):
            return
        # The lines of a block have only a few different shapes.
        losing = {shape for shape in set(shapes) if b"loss" in shape}
        losses = [n for n, shape in enumerate(shapes, first) if shape in losing] if losing else []
        for number in sorted({*tried, *losses}):
            if number - self._latest > _AWAITED + (number in tried):
                self._tried.clear()
            if number in tried:
                # A later fault may be a consequence of the non-finite loss.
                for trouble in [trouble for trouble in self._tried if trouble.loss]:
                    del self._tried[trouble]
                for trouble in tried[number]:
                    self._tried[trouble] = set()
                self._latest = number
            elif self._tried and (past := self._step(lines[number - first].lower(), number)):
                yield past, number
        if first + len(lines) - self._latest > _AWAITED + 1:
            self._tried.clear()

    def _step(self, line: bytes, number: int) -> tuple[PendingError, ...]:
        """The errors that `line` clears, if it prints a step."""
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
        """Remember the last lines of a scanned block."""
        latest = shapes[-_REMEMBERED - 1 : len(shapes) - (not shapes[-1])]
        self._recent.extend(shape[:_KEPT] for shape in latest)


def _prints_step(line: bytes) -> bool:
    for loss in _LOSS.finditer(line):
        before = line[max(0, loss.start() - _NAME) : loss.start()]
        if not before[-1:].isalnum() and not before.endswith(_NOT_TRAINING):
            return True
    return _STEP.search(line) is not None
