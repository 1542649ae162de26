"""Finds the rank that the others wait for. Total step time cannot reveal it, because collectives
make the step equally long on every rank.

The culprit is the rank with the least visible waiting. Score = (the others' median wait − the
culprit's) / step; 0.10 warns, 0.20 is critical, over a window of 20 steps, two windows in a row.
Separately timed waiting (phase `collective`) is the better evidence. If the miner's collectives run
inside forward and backward (FSDP gathers there), those phases count as waiting too: a rank that is
late elsewhere gets through them fastest. In that case, another phase of that rank, or its time
outside every phase (an unnamed data loader), must explain the lateness; otherwise the fastest rank
would be blamed in a miner that waits outside all phases. Finally, the others may wait outside every
phase (in the gathers of an unnamed forward pass, or in the first synchronisation with a GPU). Then
only a named phase without collectives, such as `data`, can explain the lateness.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from miner_guard.config import StepSettings

OUTSIDE = "no named phase"
"""Name for the part of a step outside all phases."""

_WAITS: tuple[tuple[str, ...], ...] = (
    ("collective",),
    ("collective", "forward", "backward"),
    ("collective", "forward", "backward", "optimizer", OUTSIDE),
)

_OWN = (
    "data",
    "forward",
    "backward",
    "optimizer",
    "monitor",
    "inference",
    "val_loss",
    "other",
    OUTSIDE,
)

_WINDOWS_IN_ROW = 2
_MAX_PENDING = 256


@dataclass(frozen=True)
class Straggler:
    """The rank that the others waited for during one window."""

    rank: int
    score: float
    wait_s: float | None
    """The culprit's median wait; None if the ranks wait outside all phases, where they also do
    their own work."""

    others_wait_s: float | None
    step_s: float
    phase: str | None
    """The phase in which the culprit is slower than the others; None if no phase stands out."""

    phase_s: float
    others_phase_s: float
    steps: int

    def detail(self) -> str:
        """Describe the evidence."""
        waits = (
            ""
            if self.wait_s is None or self.others_wait_s is None
            else f": it waits {self.wait_s:.2f}s in collectives, "
            f"the others wait {self.others_wait_s:.2f}s"
        )
        text = (
            f"is busy longer than the others by {self.score:.0%} of a {self.step_s:.2f}s step "
            f"(over {self.steps} steps{waits})"
        )
        if self.phase is not None:
            text += (
                f"; slow in {self.phase}: {self.phase_s:.2f}s, others {self.others_phase_s:.2f}s"
            )
        return text


_MAY_WAIT = ("collective", "allreduce", "forward", "backward")
"""Phases in which a rank may wait for the others: DDP reduces in backward, FSDP gathers in both."""


def work_seconds(steps: Mapping[int, tuple[float, Mapping[str, float]]]) -> dict[int, float]:
    """Return, by rank, the seconds of a step that the rank did not spend waiting for the others.
    `steps` gives the duration and phases of each rank's step.

    The rank with the least time in the phases of `_MAY_WAIT` waits least; any other rank's wait is
    the time that it spends there beyond that minimum.
    """
    waits = {
        rank: sum(phases.get(name, 0.0) for name in _MAY_WAIT)
        for rank, (_, phases) in steps.items()
    }
    shortest_wait = min(waits.values(), default=0.0)
    return {
        rank: max(0.0, seconds - (waits[rank] - shortest_wait))
        for rank, (seconds, _) in steps.items()
    }


@dataclass
class _Window:
    seconds: dict[int, list[float]] = field(default_factory=dict)
    phases: dict[int, list[Mapping[str, float]]] = field(default_factory=dict)
    count: int = 0


class StragglerWatch:
    """Judges all ranks. Memory: one window, plus up to 256 steps that some ranks have yet to
    reach."""

    def __init__(self, settings: StepSettings) -> None:
        self._settings = settings
        self._pending: dict[int, dict[int, tuple[float, Mapping[str, float]]]] = {}
        self._window = _Window()
        self._suspect: int | None = None
        self._in_row = 0
        self.named: int | None = None
        self.named_steps = 0

    def observe(
        self, rank: int, step: int, seconds: float, phases: Mapping[str, float], *, ranks: int
    ) -> Iterator[Straggler | tuple[int, int]]:
        """Record one rank's step; `ranks` is the number of ranks.

        Yields a Straggler for each window that has one, and (rank, steps) when a reported straggler
        is cleared.
        """
        if ranks < 2:
            return
        row = self._pending.setdefault(step, {})
        row[rank] = (seconds, phases)
        if len(row) < ranks:
            if len(self._pending) > _MAX_PENDING:
                del self._pending[min(self._pending)]
            return
        del self._pending[step]
        self._add(row)
        if self._window.count >= self._settings.straggler_window:
            window, self._window = self._window, _Window()
            yield from self._close(window)

    def _add(self, row: Mapping[int, tuple[float, Mapping[str, float]]]) -> None:
        for rank, (seconds, phases) in row.items():
            self._window.seconds.setdefault(rank, []).append(seconds)
            outside = max(0.0, seconds - sum(phases.values()))
            self._window.phases.setdefault(rank, []).append({**phases, OUTSIDE: outside})
        self._window.count += 1

    def _close(self, window: _Window) -> Iterator[Straggler | tuple[int, int]]:
        found = judge(window.seconds, window.phases, self._settings)
        suspect = found.rank if found is not None else None
        self._in_row = (
            self._in_row + 1
            if suspect is not None and suspect == self._suspect
            else int(suspect is not None)
        )
        self._suspect = suspect
        if self.named is not None:
            self.named_steps += window.count
            if suspect != self.named:
                yield self.named, self.named_steps
                self.named = None
        if found is not None and self._in_row >= _WINDOWS_IN_ROW:
            if self.named is None:
                self.named_steps = self._in_row * window.count
            self.named = found.rank
            yield found


def judge(
    seconds: Mapping[int, Sequence[float]],
    phases: Mapping[int, Sequence[Mapping[str, float]]],
    settings: StepSettings,
) -> Straggler | None:
    """Return the straggler of one window, or None. Waiting in phases is measured in two ways, and
    the stronger result wins; if neither gives one, the fallback is the time in which waiting can't
    be ruled out."""
    step = statistics.median(value for values in seconds.values() for value in values)
    best: Straggler | None = None
    for names in _WAITS:
        measured = OUTSIDE not in names
        if best is not None and not measured:
            break
        waits = {
            rank: statistics.median(sum(row.get(n, 0.0) for n in names) for row in rows)
            for rank, rows in phases.items()
        }
        culprit = min(waits, key=lambda r: (waits[r], r))
        others = statistics.median(wait for rank, wait in waits.items() if rank != culprit)
        gap = others - waits[culprit]
        score = gap / step if step > 0 else 0.0
        if score < settings.straggler_warn_ratio or gap < settings.straggler_min_s:
            continue
        phase, own, theirs = _slow_phase(culprit, phases, exclude=names)
        if len(names) > 1 and own - theirs < 0.5 * gap:
            continue
        if best is None or score > best.score:
            best = Straggler(
                culprit,
                score,
                waits[culprit] if measured else None,
                others if measured else None,
                step,
                phase,
                own,
                theirs,
                len(seconds[culprit]),
            )
    return best


def _slow_phase(
    culprit: int, phases: Mapping[int, Sequence[Mapping[str, float]]], exclude: Sequence[str]
) -> tuple[str | None, float, float]:
    """The phase in which the culprit's median most exceeds the others' (theirs / own < 0.75)."""
    worst: tuple[str | None, float, float] = (None, 0.0, 0.0)
    for name in _OWN:
        if name in exclude:
            continue
        medians = {
            rank: statistics.median(row.get(name, 0.0) for row in rows)
            for rank, rows in phases.items()
        }
        own = medians.pop(culprit)
        theirs = statistics.median(medians.values())
        if own > 0 and theirs / own < 0.75 and own - theirs > worst[1] - worst[2]:
            worst = (name, own, theirs)
    return worst
