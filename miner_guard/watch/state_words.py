"""The run's state for people: which state to show at the time of reading, and its sentence, colour,
age and next step. Every surface uses these functions, so all say the same."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miner_guard.record.status_document import OLD_S, SILENT_S, RunState, StatusDocument
from miner_guard.record.words import percentages
from miner_guard.system.clock import iso_utc, parse_iso_utc

STARTING, TRAINING, HUNG, RESTARTING = "starting", "training", "hung", "restarting"
FINISHED, REFUSED, STOPPED, GUARD_GONE = "finished", "refused", "stopped", "guard gone"
LIVES = (STARTING, TRAINING, HUNG, RESTARTING, FINISHED, REFUSED, STOPPED, GUARD_GONE)

GREEN, YELLOW, RED, GREY = "green", "yellow", "red", "grey"
WORST_FIRST = (RED, YELLOW, GREEN, GREY)
HEALTH = {RED: "failing", YELLOW: "degraded"}
"""The health that a condition's colour stands for; any other is `well`."""

YES, AT_RISK, NO, NOT_PROVEN = "yes", "at risk", "no", "not proven"

_WORDS = {YES: "EARNING", AT_RISK: "EARNING AT RISK", NO: "NOT EARNING"}
"""A training miner's first words, by whether it is earning; otherwise `TRAINING`."""

_INTERRUPTED = (STARTING, HUNG, RESTARTING)
"""Lives whose first words also say what they do to the earnings."""


def read_state(status: StatusDocument | None) -> RunState:
    """The state to show: the guard's own, unless it has ended without saying so."""
    if status is None or status == StatusDocument():
        return RunState(
            life=STOPPED,
            health="well",
            colour=GREY,
            cause="no guard has run here yet",
            next_step="start it: `miner-guard run -- CMD`",
            event="guard_started",
            key="never_run",
        )
    last = status.verdict
    if not status.gone:
        return last or RunState(
            life=STARTING, health="well", colour=GREY, cause="the guard has just started"
        )
    words = "" if last is None else f"; its last state was {first_words(last)}"
    return RunState(
        life=GUARD_GONE,
        health=HEALTH[RED],
        earning=NOT_PROVEN if last is not None and last.earning else None,
        colour=RED,
        since=status.updated,
        cause=f"the guard was killed or is stuck: it has written nothing for "
        f"{span(status.age_s)}{words}",
        next_step=find_the_guard(status.host, status.start_command),
        event="guard_killed",
        key="guard_gone",
        week={} if last is None else last.week,
        week_start=None if last is None else last.week_start,
    )


def find_the_guard(host: str | None = None, start_command: str | None = None) -> str:
    """The next step if the guard itself is silent, with the host and the start command if it has
    recorded them."""
    where = f"host {host}" if host else "the miner's machine"
    step = (
        f"on {where}, check whether the guard is running: `miner-guard status`, `pm2 status` or "
        "`systemctl status miner-guard`"
    )
    return f"{step}; start it: `{start_command}`" if start_command else step


def with_axes(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document of `read_document` as `status --json` and `/status` print it: the state as every
    surface shows it, and its four axes as `life`, `health.state`, `earning` and `as_of`."""
    state = read_state(StatusDocument.from_json(document))
    return {
        "life": state.life,
        "earning": state.earning,
        "as_of": document.get("updated"),
        **document,
        "verdict": state.to_json(),
        "health": {"state": state.health, **(document.get("health") or {})},
    }


def first_words(state: RunState) -> str:
    """The headline's first words, such as `NOT EARNING` or `HUNG, earning at risk`."""
    life, earning = str(state.life), str(state.earning)
    if life == TRAINING:
        words = _WORDS.get(earning, "TRAINING")
        return (
            f"{words}, {state.health}"
            if words in ("EARNING", "TRAINING") and state.health in (HEALTH.values())
            else words
        )
    if life in _INTERRUPTED and earning in (AT_RISK, NO):
        return f"{life.upper()}, {_WORDS[earning].lower()}"
    return life.upper()


def state_since(state: RunState, now: str = "") -> str:
    """`NOT EARNING since 12:03 UTC`, without the cause. `now`: the time of reading, ISO 8601; if
    the state began on another day, the date is included."""
    since = str(state.since or "")
    day = f"{since[:10]} " if now and now[:10] != since[:10] else ""
    when = f" since {day}{since[11:16]} UTC" if len(since) >= 16 else ""
    return f"{first_words(state)}{when}"


def headline(state: RunState, now: str = "") -> str:
    """`HUNG, earning at risk since 12:03 UTC: rank 2 in data for 912s, …`. `now`: see
    `state_since`."""
    return f"{state_since(state, now)}: {state.cause}"


def advice(state: RunState) -> str:
    """The next step, and the command that explains it; empty if there is nothing to do."""
    if not state.next_step:
        return ""
    more = f" (more: `miner-guard explain {state.event}`)" if state.event else ""
    return f"{state.next_step}{more}"


def lines_of(status: StatusDocument | None) -> list[str]:
    """The headline and, if there is anything to do, `Next: …`."""
    state = read_state(status)
    step = advice(state)
    now = "" if status is None else time_of_reading(status)
    return [headline(state, now), *([f"Next: {step}"] if step else [])]


def problem(status: StatusDocument | None) -> str | None:
    """Why the miner makes no progress, for `/healthz`, `status --check` and the heartbeat; None if
    it trains, or starts and still has time."""
    state = read_state(status)
    launched = status is not None and status.state == "running"
    starting = state.life == STARTING and launched and state.colour == GREY
    return None if state.life == TRAINING or starting else headline(state)


def now_of(status: StatusDocument) -> float | None:
    """The reader's current time, in seconds since 1970; None if the status contains no valid
    time."""
    with contextlib.suppress(ValueError):
        if status.updated is not None and math.isfinite(status.age_s):
            return parse_iso_utc(status.updated) + status.age_s
    return None


def time_of_reading(status: StatusDocument) -> str:
    """`now_of` as UTC, ISO 8601; empty if unknown."""
    now = now_of(status)
    return "" if now is None else iso_utc(now)


def is_live(status: StatusDocument) -> bool:
    """Whether the document is a running guard's: only then is any of its figures one of now."""
    return not status.gone and status.state != "done"


def freshness(status: StatusDocument) -> str:
    """The age of what is shown; empty while it is fresh."""
    if status.state == "done":
        return f"ended {span(status.age_s)} ago"
    old = status.gone or status.age_s > OLD_S
    return f"OLD: as of {span(status.age_s)} ago" if old else ""


UNWATCHED = "unwatched"
"""Stands in the strip for time in which no guard was running."""

SHARE_WORDS = {
    GREEN: "well",
    YELLOW: "degraded",
    RED: "failing",
    GREY: "starting or ended",
    UNWATCHED: "no guard",
}
_CELL_ORDER = (RED, YELLOW, UNWATCHED, GREEN, GREY)
"""Worst first. A start or an end colours a cell only if nothing else happened in it."""

CELL_S = 7200.0
CELLS = 84
"""A week of two-hour cells."""

BRIEF_SHARE = 0.05
"""A colour that lasts less than this share of a cell does not colour it: a one-minute restart must
not turn an hour red."""

_UNCOUNTED_S = 60.0
"""Up to this many seconds without a state in a cell are ignored: they come from rounding and the
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


class StateWeek:
    """Seconds spent in each state, for each cell of the last seven days. Bounded."""

    def __init__(
        self, stored: Mapping[str, Mapping[str, float]], start: float | None = None
    ) -> None:
        """`stored` and `start`: what an earlier object's `to_json` and `start` returned."""
        self._cells = {
            int(cell): {state: s for state, s in states.items() if state in SHARE_WORDS}
            for cell, states in stored.items()
            if cell.isdecimal()
        }
        self._start = start

    @property
    def start(self) -> float | None:
        """Start of the record, in seconds since 1970; None if it is empty."""
        if not self._cells:
            return None
        return max(self._start or 0.0, min(self._cells) * CELL_S)

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
        if current in SHARE_WORDS:
            known = [colours[-1]] if groups[-1] else []
            colours[-1] = min([*known, current], key=_CELL_ORDER.index)
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
    """The worst colour in a cell, ignoring brief ones unless all are brief."""
    held = {state for state, seconds in states.items() if seconds > 0}
    brief_s = BRIEF_SHARE * min(width_s, sum(states.values()))
    lasting = {state for state in held if states[state] >= brief_s} or held
    return min(lasting, key=_CELL_ORDER.index, default=UNWATCHED)


def week_of(status: StatusDocument, cells: int) -> Strip | None:
    """The last seven days at most; None if no guard has recorded any."""
    now, state = now_of(status), status.verdict
    if now is None or state is None or not state.week:
        return None
    ended = status.gone or (status.state == "done" and status.age_s > SILENT_S)
    return StateWeek(state.week, state.week_start).strip(
        now, cells, None if ended else state.colour
    )


def share_words(strip: Strip) -> str:
    """`last 4.6 h: well 93%, failing 7%`: the strip as text, for screen readers and consoles."""
    shares = percentages(strip.shares)
    words = ", ".join(f"{SHARE_WORDS[colour]} {share}" for colour, share in shares.items())
    return f"last {span(strip.end - strip.since)}: {words}"


def span(seconds: float) -> str:
    """A length of time in its largest unit: `40 s`, `15 min`, `4.6 h`, `7 days`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    if seconds < 172_800:
        return f"{seconds / 3600:.1f}".removesuffix(".0") + " h"
    return f"{seconds / 86_400:.1f}".removesuffix(".0") + " days"
