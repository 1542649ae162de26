"""A week of verdicts as a strip of cells, like a status page. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from miner_guard.detectors.verdict import STATES

NO_DATA = "no data"
"""The state of a cell in which no guard ran."""

_BRIEF_SHARE = 0.05
"""A state shorter than this share of a cell does not colour it: a restart of a minute must not
turn an hour red."""


@dataclass(frozen=True)
class Stretch:
    """A verdict that held from `start` to `end`, seconds since 1970."""

    start: float
    end: float
    state: str


@dataclass(frozen=True)
class Strip:
    """Equal cells over a range of time, oldest first, and the share of each state."""

    start: float
    end: float
    cells: Sequence[str]
    """The worst state that held for a noticeable part of the cell."""

    shares: dict[str, float]
    """Share of the time with data, by state; empty without any."""

    def span_of(self, cell: int) -> tuple[float, float]:
        """Start and end of a cell, seconds since 1970."""
        width = (self.end - self.start) / len(self.cells)
        return self.start + cell * width, self.start + (cell + 1) * width


def strip(stretches: Sequence[Stretch], start: float, end: float, cells: int) -> Strip:
    """The strip from `start` to `end` in `cells` cells. `stretches`: in order, without overlap."""
    width = (end - start) / cells
    seconds: list[dict[str, float]] = [{} for _ in range(cells)]
    totals: dict[str, float] = {}
    for stretch in stretches:
        first, last = max(stretch.start, start), min(stretch.end, end)
        if last <= first:
            continue
        totals[stretch.state] = totals.get(stretch.state, 0.0) + last - first
        for cell in range(int((first - start) / width), cells):
            left = start + cell * width
            held = min(last, left + width) - max(first, left)
            if held <= 0:
                break
            seconds[cell][stretch.state] = seconds[cell].get(stretch.state, 0.0) + held
    whole = sum(totals.values())
    shares = {state: part / whole for state, part in totals.items()} if whole > 0 else {}
    colours = [_worst(cell, width) for cell in seconds]
    if stretches and stretches[-1].end >= end:
        # However brief, the verdict of now must not be missing from the strip below it.
        colours[-1] = min(colours[-1], stretches[-1].state, key=_badness)
    return Strip(start, end, colours, shares)


def _badness(state: str) -> int:
    """Smaller is worse; no data is the best."""
    return STATES.index(state) if state in STATES else len(STATES)


def _worst(cell: dict[str, float], width: float) -> str:
    """The worst state of a cell, ignoring brief ones where something else fills it."""
    lasting = {state for state, held in cell.items() if held >= _BRIEF_SHARE * width}
    for state in STATES:
        if state in (lasting or cell):
            return state
    return NO_DATA


def stretches_of(
    changes: Sequence[tuple[float, str]], seen: Sequence[float], end: float, gap_s: float
) -> list[Stretch]:
    """The stretches between changes of verdict; each also ends where the guard fell silent.

    `changes`: time and new state, in order. `seen`: times in order at which the guard is known to
    have run; after `gap_s` without one, it did not.
    """
    found: list[Stretch] = []
    for place, (time, state) in enumerate(changes):
        until = changes[place + 1][0] if place + 1 < len(changes) else end
        start = time
        for number in range(bisect.bisect_left(seen, time), len(seen)):
            if seen[number] >= until:
                break
            before = seen[number - 1] if number and seen[number - 1] > start else start
            if seen[number] - before > gap_s:
                found.append(Stretch(start, before, state))
                start = seen[number]
        last_seen = seen[bisect.bisect_left(seen, until) - 1] if seen else start
        stop = until if until - max(last_seen, start) <= gap_s else max(last_seen, start)
        found.append(Stretch(start, stop, state))
    return [stretch for stretch in found if stretch.end > stretch.start]
