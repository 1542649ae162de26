"""Up to seven days of verdicts as a strip of cells, as on a status page. Pure.

The guard adds up the seconds while it runs (`VerdictWeek`), so that no reader has to search a week
of logs. Time during which no guard was running has no verdict: it is `unwatched`, and counts
towards no other state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from miner_guard.detectors.verdict_conditions import STATES, UNKNOWN

UNWATCHED = "unwatched"
"""The state for time in which no guard was running."""

WORST_FIRST = (*STATES[:-1], UNWATCHED, STATES[-1])

CELL_S = 7200.0
CELLS = 84
"""A week of two-hour cells."""

BRIEF_SHARE = 0.05
"""A state that lasts less than this share of a cell does not colour it: a one-minute restart must
not turn an hour red."""

_UNCOUNTED_S = 60.0
"""Up to this many seconds without a verdict in a cell are ignored: they come from rounding and the
guard's startup."""


@dataclass(frozen=True)
class Strip:
    """Cells of equal length, oldest first, up to the present, and the share of time in each
    state."""

    start: float
    """Start of the first cell, seconds since 1970."""

    since: float
    """When the record starts; this falls in the first cell."""

    end: float
    """When the strip was made; this falls in the last cell."""

    cell_s: float
    cells: Sequence[str]
    """For each cell, the worst state that held for a noticeable part of it."""

    shares: dict[str, float]
    """Share of the time from `since` to `end`, by state, largest first; empty if nothing was
    recorded."""


class VerdictWeek:
    """Seconds spent in each state, for each cell of the last seven days. Bounded."""

    def __init__(
        self, stored: Mapping[str, Mapping[str, float]], start: float | None = None
    ) -> None:
        """`stored` and `start`: what an earlier object's `to_json` and `start` returned."""
        self._cells = {
            int(cell): {state: s for state, s in states.items() if state in WORST_FIRST}
            for cell, states in stored.items()
            if cell.isdecimal()
        }
        self._start = start

    @property
    def start(self) -> float | None:
        """Start of the record, in seconds since 1970; None if it is empty.

        If an older guard did not store the start, it is estimated by assuming that the first cell
        was recorded up to its end.
        """
        if not self._cells:
            return None
        first = min(self._cells)
        if self._start is not None:
            return max(self._start, first * CELL_S)
        return (first + 1) * CELL_S - min(CELL_S, sum(self._cells[first].values()))

    def to_json(self) -> dict[str, dict[str, float]]:
        """Return the seconds spent in each state, by cell; cells are numbered from 1970."""
        return {
            str(cell): {state: round(seconds) for state, seconds in states.items()}
            for cell, states in sorted(self._cells.items())
        }

    def add(self, state: str, start: float, end: float) -> None:
        """Record that `state` held from `start` to `end`, in seconds since 1970."""
        if self._start is None:
            self._start = start if self.start is None else self.start
        for cell, seconds in _parts(start, end):
            states = self._cells.setdefault(cell, {})
            states[state] = states.get(state, 0.0) + seconds
        newest = int(end // CELL_S)
        for cell in [cell for cell in self._cells if not newest - CELLS < cell <= newest]:
            del self._cells[cell]

    def correct(self, before: str, after: str, start: float, end: float) -> None:
        """Replace `before` with `after` from `start` to `end`: a hang, for example, is only
        detected some time after it begins."""
        for cell, seconds in _parts(start, end):
            states = self._cells.get(cell, {})
            moved = min(seconds, states.get(before, 0.0))
            if moved > 0:
                states[before] -= moved
                states[after] = states.get(after, 0.0) + moved

    def strip(self, now: float, cells: int = CELLS, current: str | None = None) -> Strip | None:
        """The strip from the record's start to `now`, in at most `cells` cells; None if there is no
        record. `current`, if worse, colours the last cell no matter how briefly it has held."""
        oldest = (int(now // CELL_S) - CELLS + 1) * CELL_S
        if self.start is None or (since := max(self.start, oldest)) >= now:
            return None
        first, last = int(since // CELL_S), int(now // CELL_S)
        width = next(n for n in range(1, CELLS + 1) if last - first < n * cells)
        groups = []
        for begin in range(first, last + 1, width):
            states = _sum([self._cells.get(begin + n, {}) for n in range(width)])
            end = min(now, (begin + width) * CELL_S)
            groups.append(_with_unwatched(states, end - max(since, begin * CELL_S)))
        totals = _sum(groups)
        whole = sum(totals.values())
        ordered = sorted(totals.items(), key=lambda item: -item[1])
        colours = [_worst(group, width * CELL_S) for group in groups]
        if current in WORST_FIRST:
            known = [colours[-1]] if groups[-1] else []
            colours[-1] = min([*known, current], key=WORST_FIRST.index)
        shares = {state: seconds / whole for state, seconds in ordered if seconds > 0}
        return Strip(first * CELL_S, since, now, width * CELL_S, colours, shares)


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


def _with_unwatched(states: Mapping[str, float], elapsed_s: float) -> dict[str, float]:
    """Seconds in each state, including time without a verdict."""
    missing = elapsed_s - sum(states.values())
    return {**states, UNWATCHED: missing} if missing >= _UNCOUNTED_S else dict(states)


def _worst(states: Mapping[str, float], width_s: float) -> str:
    """The worst state in a cell, ignoring brief states unless all are brief. Unknown is not bad
    news: it only colours a cell in which no other state lasted longer."""
    held = {state for state, seconds in states.items() if seconds > 0}
    lasting = {state for state in held if states[state] >= BRIEF_SHARE * width_s} or held
    if max(lasting, key=lambda state: states[state], default=UNKNOWN) != UNKNOWN:
        lasting -= {UNKNOWN}
    return min(lasting, key=WORST_FIRST.index, default=UNWATCHED)
