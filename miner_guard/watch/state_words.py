"""The run's state for people: which state to show at the time of reading, and its sentence, colour,
age and next step. Every surface uses these functions, so all say the same."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from miner_guard.record.status_document import OLD_S, RunState, StatusDocument, StepsStatus
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
    earning, why = _of_the_repo(status)
    return RunState(
        life=GUARD_GONE,
        health=HEALTH[RED],
        earning=earning,
        earning_why=why,
        colour=RED,
        since=status.updated,
        cause=f"the guard was killed or is stuck: it has written nothing for "
        f"{span(status.age_s)}{words}{_of_the_miner(status)}",
        next_step=f"start it: `{status.start_command or 'miner-guard run -- CMD'}`; "
        f"{f'on host {status.host}, ' if status.host else ''}`dmesg | tail` shows whether the "
        "kernel killed it",
        event="guard_killed",
        key="guard_gone",
    )


def _of_the_miner(status: StatusDocument) -> str:
    """Whether the miner of a guard that is gone still runs."""
    if status.pid is None:
        return ""
    runs = {True: "still runs", False: "no longer runs", None: "may still run: check its pid"}
    return f"; its miner (pid {status.pid}) {runs[status.miner_runs]}"


def _of_the_repo(status: StatusDocument) -> tuple[str | None, str]:
    """Whether a miner without a guard earns, as far as the age of its files shows."""
    repo, last = status.uploads.repo, status.verdict
    if last is None or last.earning is None:
        return None, "" if last is None else str(last.earning_why or "")
    if repo.age_s is None:
        return NOT_PROVEN, ""
    why = f"the files last seen in the repo are {span(repo.age_s)} old"
    return NO if repo.stale else NOT_PROVEN, why


FIND_THE_GUARD = (
    "on the miner's machine, check whether the guard is running: `miner-guard status`, "
    "`pm2 status` or `systemctl status miner-guard`"
)
"""The next step where a port does not answer."""


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


def state_since(state: RunState, now: str) -> str:
    """`NOT EARNING since 12:03 UTC`, without the cause. `now`: the time of reading, ISO 8601; if
    the state began on another day, the date is included. Empty: unknown."""
    since = str(state.since or "")
    day = f"{since[:10]} " if now and now[:10] != since[:10] else ""
    word = "at" if state.life in (FINISHED, REFUSED) else "since"
    when = f" {word} {day}{since[11:16]} UTC" if len(since) >= 16 else ""
    return f"{first_words(state)}{when}"


def headline(state: RunState, now: str) -> str:
    """`HUNG, earning at risk since 12:03 UTC: rank 2 in data for 912s, …`. `now`: see
    `state_since`."""
    return f"{state_since(state, now)}: {state.cause}"


def earning_words(state: RunState) -> str:
    """Whether the miner earns, and what shows it: `not proven: no audit has judged the files`."""
    return ": ".join(filter(None, (state.earning, state.earning_why))) or "unknown"


NOTHING = "nothing to do"


def advice(state: RunState) -> str:
    """The next step, and the command that explains it."""
    if not state.next_step:
        return NOTHING
    more = f" (more: `miner-guard explain {state.event}`)" if state.event else ""
    return f"{state.next_step}{more}"


def urgency(status: StatusDocument | None) -> int:
    """The place of a guard in a list of guards, worst first."""
    return WORST_FIRST.index(read_state(status).colour or GREY)


def answers(status: StatusDocument | None) -> tuple[str, str, str]:
    """What every screen and message begins with: the headline, whether the miner earns, and the
    next step."""
    state = read_state(status)
    now = "" if status is None else time_of_reading(status)
    return headline(state, now), earning_words(state), advice(state)


def problem(status: StatusDocument | None) -> str | None:
    """Why the miner makes no progress, for `/healthz`, `status --check` and the heartbeat; None if
    it trains, or starts and still has time."""
    state = read_state(status)
    launched = status is not None and status.state == "running"
    starting = state.life == STARTING and launched and state.colour == GREY
    return None if state.life == TRAINING or starting else answers(status)[0]


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


_BEHIND_S = 30.0
"""A rank whose last step is this much older than another rank's is hung or gone."""

_SLOWER = 1.2


def lagging(steps: StepsStatus) -> dict[str, str]:
    """The ranks that keep the others waiting, as `BEHIND` or `SLOW`; then the rest as an empty
    text, those with the most work of their own first."""
    ranks = steps.per_rank
    youngest_s = min((row.last_step_age_s or 0.0 for row in ranks.values()), default=0.0)
    work_s = sorted(row.work_s or 0.0 for row in ranks.values())
    usual_s = work_s[len(work_s) // 2] if work_s else 0.0
    marks = {}
    for rank, row in sorted(
        ranks.items(), key=lambda item: (-(item[1].work_s or 0.0), int(item[0]))
    ):
        slow = (row.work_s or 0.0) > _SLOWER * usual_s > 0
        behind = (row.last_step_age_s or 0.0) - youngest_s > _BEHIND_S
        marks[rank] = "BEHIND" if behind else "SLOW" if slow else ""
    return dict(sorted(marks.items(), key=lambda item: item[1] != "BEHIND"))


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

WEEK_S = 7 * 86_400.0
CELLS = 84
"""Cells of a strip: two hours each in a week."""

_MIN_CELL_S = 5.0

BRIEF_SHARE = 0.05
"""A colour that lasts less than this share of a cell does not colour it: a one-minute restart must
not turn an hour red."""

MAX_CHANGES = 500

Changes = Sequence[tuple[float, str]]
"""When (seconds since 1970) which colour began, oldest first; each holds until the next."""


def with_change(changes: Changes, colour: str, since: float) -> Changes:
    """The changes of the last week if `colour` holds from `since` on, whatever they said of that
    time before: a hang, for example, is only detected some time after it begins."""
    earlier = [change for change in changes if change[0] < since]
    if not earlier or earlier[-1][1] != colour:
        earlier.append((since, colour))
    old = sum(time < since - WEEK_S for time, _ in earlier)
    return earlier[max(0, old - 1) :][-MAX_CHANGES:]


@dataclass(frozen=True)
class Strip:
    """Cells of equal length, oldest first, up to the present, and the share of time in each
    colour."""

    start: float
    """When the record starts, at most a week ago; seconds since 1970."""

    end: float
    cells: Sequence[str]
    """For each cell, the worst colour that held for a noticeable part of it."""

    shares: dict[str, float]
    """Share of the time, by colour, largest first."""

    @property
    def cell_s(self) -> float:
        return (self.end - self.start) / len(self.cells)


def strip_of(changes: Changes, end: float, cells: int, current: str | None = None) -> Strip | None:
    """The strip up to `end`, in at most `cells` cells; None if there is no record. `current`, if
    worse, colours the last cell no matter how briefly it has held."""
    if not changes or (start := max(changes[0][0], end - WEEK_S)) >= end:
        return None
    count = max(1, min(cells, int((end - start) / _MIN_CELL_S)))
    edges = [start + n * (end - start) / count for n in range(count + 1)]
    held = [_held(changes, *edge) for edge in pairwise(edges)]
    colours = [_worst(colours) for colours in held]
    if current in SHARE_WORDS:
        colours[-1] = min([colours[-1], current], key=_CELL_ORDER.index)
    shares = {c: s / (end - start) for c, s in _held(changes, start, end).items() if s > 0}
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return Strip(start, end, colours, dict(ordered))


def _held(changes: Changes, start: float, end: float) -> dict[str, float]:
    """Seconds of each colour between two times."""
    held: dict[str, float] = {}
    ends = [*(time for time, _ in changes[1:]), end]
    for (began, colour), ended in zip(changes, ends, strict=True):
        seconds = min(ended, end) - max(began, start)
        if seconds > 0:
            held[colour] = held.get(colour, 0.0) + seconds
    return held


def _worst(held: Mapping[str, float]) -> str:
    """The worst colour in a cell, ignoring brief ones."""
    brief_s = BRIEF_SHARE * sum(held.values())
    lasting = [colour for colour, seconds in held.items() if seconds >= brief_s]
    return min(lasting, key=_CELL_ORDER.index, default=UNWATCHED)


def week_of(status: StatusDocument, cells: int) -> Strip | None:
    """The last seven days at most, up to the end of a run that has ended; None if no guard has
    recorded any."""
    now, state = now_of(status), status.verdict
    if now is None or state is None:
        return None
    changes: Changes = [(float(time), colour) for time, colour in state.changes]
    written = now - status.age_s
    if status.gone:
        changes = with_change(changes, UNWATCHED, written)
    return strip_of(
        changes,
        written if status.state == "done" else now,
        cells,
        None if status.gone or status.state == "done" else state.colour,
    )


def share_words(strip: Strip) -> str:
    """`last 4.6 h: well 93%, failing 7%`: the strip as text, for screen readers and consoles."""
    shares = percentages(strip.shares)
    words = ", ".join(f"{SHARE_WORDS[colour]} {share}" for colour, share in shares.items())
    return f"last {span(strip.end - strip.start)}: {words}"


def span(seconds: float) -> str:
    """A length of time in its largest unit: `40 s`, `15 min`, `4.6 h`, `7 days`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    if seconds < 172_800:
        return f"{seconds / 3600:.1f}".removesuffix(".0") + " h"
    return f"{seconds / 86_400:.1f}".removesuffix(".0") + " days"
