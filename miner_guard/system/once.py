"""Limits how often something is reported: once until it clears, or once per interval.

Pure: the caller passes the time. It uses only the standard library, so that ranks can use it too.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator


class Once:
    """Lets the first report on each subject through, and the next one only after `clear`."""

    def __init__(self, max_subjects: int | None = None) -> None:
        """`max_subjects`: maximum number of subjects to let through; None: no limit."""
        self._reported: set[Hashable] = set()
        self._max = max_subjects

    def first(self, subject: Hashable = None) -> bool:
        """Return True if `subject` should be reported now."""
        full = self._max is not None and len(self._reported) >= self._max
        if subject in self._reported or full:
            return False
        self._reported.add(subject)
        return True

    def clear(self, subject: Hashable = None) -> bool:
        """Let `subject` through again. Returns whether it had been reported."""
        reported = subject in self._reported
        self._reported.discard(subject)
        return reported

    def __contains__(self, subject: Hashable) -> bool:
        return subject in self._reported

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._reported)

    def __bool__(self) -> bool:
        return bool(self._reported)


class OncePer:
    """Lets a report through when its content has changed, and a repeat once every `every_s`
    seconds."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._last: tuple[object, float] | None = None
        self.left_out = 0
        """Number of reports that `ask` has refused since the last call to `take_left_out`."""

    def ask(self, now: float, content: object = None) -> bool:
        """Return True if `content` should be reported at `now` (seconds)."""
        if self._last is not None:
            last, at = self._last
            if last == content and now - at < self._every_s:
                self.left_out += 1
                return False
        self._last = (content, now)
        return True

    def take_left_out(self) -> int:
        """Return the number of refused reports, and reset it to 0."""
        count, self.left_out = self.left_out, 0
        return count

    def clear(self) -> None:
        """Let the next report through."""
        self._last = None
