"""Seven days of verdicts as a strip of cells, like a status page. Pure.

The guard adds up the seconds while it runs (`VerdictWeek`), so that no reader has to search a week
of log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from miner_guard.detectors.verdict_conditions import STATES

NO_DATA = "no data"
"""The state of a cell in which no guard ran."""

CELL_S = 7200.0
CELLS = 84
"""A week of cells of two hours."""

_BRIEF_SHARE = 0.05
"""A state that lasts less than this share of a cell does not colour it: a one-minute restart must
not turn an hour red."""


@dataclass(frozen=True)
class Strip:
    """Equal cells up to now, oldest first, and the share of each state."""

    start: float
    """Seconds since 1970."""

    cell_s: float
    cells: Sequence[str]
    """The worst state that held for a noticeable part of the cell."""

    shares: dict[str, float]
    """Share of the time with data, by state, the largest first; empty without any."""


class VerdictWeek:
    """Seconds of each state in each cell of the last seven days. Bounded."""

    def __init__(self, stored: Mapping[str, Mapping[str, float]]) -> None:
        """`stored`: what `to_json` returned earlier."""
        self._cells = {
            int(cell): {state: s for state, s in states.items() if state in STATES}
            for cell, states in stored.items()
            if cell.isdecimal()
        }

    def to_json(self) -> dict[str, dict[str, float]]:
        """By cell, numbered from 1970: seconds by state."""
        return {
            str(cell): {state: round(seconds) for state, seconds in states.items()}
            for cell, states in sorted(self._cells.items())
        }

    def add(self, state: str, start: float, end: float) -> None:
        """Record that `state` held from `start` to `end`, in seconds since 1970."""
        for cell, seconds in _parts(start, end):
            states = self._cells.setdefault(cell, {})
            states[state] = states.get(state, 0.0) + seconds
        newest = int(end // CELL_S)
        for cell in [cell for cell in self._cells if not newest - CELLS < cell <= newest]:
            del self._cells[cell]

    def correct(self, before: str, after: str, start: float, end: float) -> None:
        """Replace `before` by `after` from `start` to `end`: a hang, for example, is found late."""
        for cell, seconds in _parts(start, end):
            states = self._cells.get(cell, {})
            moved = min(seconds, states.get(before, 0.0))
            if moved > 0:
                states[before] -= moved
                states[after] = states.get(after, 0.0) + moved

    def strip(self, now: float, cells: int = CELLS, current: str | None = None) -> Strip:
        """The strip up to `now` in `cells` cells, a divisor of `CELLS`. `current` shows in the last
        one however briefly it has held."""
        width = CELLS // cells
        first = int(now // CELL_S) - CELLS + 1
        groups = [
            _sum([self._cells.get(first + width * group + n, {}) for n in range(width)])
            for group in range(cells)
        ]
        totals = _sum(groups)
        whole = sum(totals.values())
        ordered = sorted(totals.items(), key=lambda item: -item[1]) if whole > 0 else ()
        colours = [_worst(group, width * CELL_S) for group in groups]
        if current is not None:
            colours[-1] = min(colours[-1], current, key=_badness)
        shares = {state: seconds / whole for state, seconds in ordered if seconds > 0}
        return Strip(first * CELL_S, width * CELL_S, colours, shares)


def _parts(start: float, end: float) -> list[tuple[int, float]]:
    """The cells between two times, with the seconds in each; at most a week of them."""
    first, last = int(start // CELL_S), int(end // CELL_S)
    cells = range(max(first, last - CELLS), last + 1)
    return [
        (cell, seconds)
        for cell in cells
        if (seconds := min(end, (cell + 1) * CELL_S) - max(start, cell * CELL_S)) > 0
    ]


def _sum(cells: Sequence[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for states in cells:
        for state, seconds in states.items():
            total[state] = total.get(state, 0.0) + seconds
    return total


def _badness(state: str) -> int:
    """Smaller is worse; no data is the best."""
    return STATES.index(state) if state in STATES else len(STATES)


def _worst(states: Mapping[str, float], width_s: float) -> str:
    """The worst state of a cell, ignoring brief ones if something else fills it."""
    held = {state for state, seconds in states.items() if seconds > 0}
    lasting = {state for state in held if states[state] >= _BRIEF_SHARE * width_s}
    return min(lasting or held, key=_badness, default=NO_DATA)
