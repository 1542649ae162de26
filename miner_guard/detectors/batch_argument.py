"""Raises the batch size by rewriting the command-line argument named in the settings. Pure.

Source 002 relaunches training on an underused GPU with a larger batch: at most three times, and
never with a batch size that ran out of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def value_of(command: Sequence[str], argument: str) -> int | None:
    """The argument's integer value; None if it is absent or not an integer. The last occurrence
    counts, as in argument parsers."""
    place = _place(command, argument)
    if place is None:
        return None
    text = (
        command[place].partition("=")[2]
        if command[place].startswith(argument + "=")
        else command[place]
    )
    return int(text) if text.isascii() and text.isdigit() else None


def rewritten(command: Sequence[str], argument: str, value: int) -> tuple[str, ...]:
    """The command with the argument's last value replaced. Raises ValueError if the command
    lacks the argument."""
    place = _place(command, argument)
    if place is None:
        raise ValueError(f"{argument} is not in the command")
    words = list(command)
    words[place] = f"{argument}={value}" if words[place].startswith(argument + "=") else str(value)
    return tuple(words)


def _place(command: Sequence[str], argument: str) -> int | None:
    """Return the index of the command-line word that holds the value; None if the argument is
    absent."""
    for index in range(len(command) - 1, -1, -1):
        if command[index].startswith(argument + "="):
            return index
        if command[index] == argument and index + 1 < len(command):
            return index + 1
    return None


@dataclass(frozen=True)
class BatchChange:
    """A change in batch size and the reason for it."""

    old: int
    new: int
    why: str


class BatchPolicy:
    """Decides when to raise the batch size, for one run of the guard."""

    def __init__(self, max_relaunches: int) -> None:
        self._max_relaunches = max_relaunches
        self._done = 0
        self._too_large: int | None = None
        self._last_good: int | None = None

    def larger(self, current: int, factor: float, why: str) -> BatchChange | None:
        """Return the next change; None if all relaunches are used up or the next size is known not
        to fit."""
        new = max(int(current * factor), current + 1)
        if self._too_large is not None:
            # After a batch that did not fit, go at most halfway towards its size.
            new = min(new, (current + self._too_large) // 2)
        if factor <= 1 or self._done >= self._max_relaunches or new <= current:
            return None
        self._done += 1
        self._last_good = current
        return BatchChange(current, new, f"{why} (relaunch {self._done} of {self._max_relaunches})")

    def out_of_memory(self, current: int) -> BatchChange | None:
        """Record that the current batch size does not fit, and never try one that large again. If
        this guard raised the batch, return to the last one that fit."""
        self._too_large = current if self._too_large is None else min(self._too_large, current)
        self._done = self._max_relaunches
        if self._last_good is None or self._last_good >= current:
            return None
        return BatchChange(
            current,
            self._last_good,
            f"batch {current} ran out of memory; the guard will not raise it again in this run",
        )
