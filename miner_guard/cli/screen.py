"""The screen of `miner-guard top`: plain lines from the present state and the latest events. Pure;
readable without colour."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from miner_guard.checks.snapshot import number
from miner_guard.cli.screen_text import cut, duration, progress_bar, sparkline, wrapped
from miner_guard.eventlog.status_document import HealthStatus, StatusDocument, StepsStatus
from miner_guard.record.words import percentages
from miner_guard.system.clock import parse_iso_utc
from miner_guard.watch.state import (
    DEGRADED,
    EARNING,
    NOT_EARNING,
    STOPPED,
    UNKNOWN,
    UNWATCHED,
    advice,
    headline,
    is_silent,
    miner_state,
    share_words,
    shown,
    time_of_reading,
    week_of,
)

_CELLS_OF_A_WEEK = 28
"""Each cell covers six hours, or less if the record is shorter."""

WEEK_MARKS = {EARNING: "█#", DEGRADED: "▅+", UNKNOWN: "??", NOT_EARNING: "▁!", STOPPED: "xx"}
"""The mark for each verdict in a cell of the week, in Unicode and in ASCII. The marks can be told
apart without colour."""

_NO_MARK = "·."
_GIB = 1024**3
_OLD_S = 7.0
"""A status older than this is marked as old, because even an idle guard writes one every five
seconds."""

_KEPT = 512
_CELLS = 9


@dataclass
class CurveHistory:
    """The loss and step time of each step since `top` started."""

    loss: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    step_time: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _last: int = -1

    def take(self, steps: StepsStatus) -> None:
        """Add the newest step, once."""
        if steps.total_steps is None or steps.total_steps == self._last:
            return
        self._last = steps.total_steps
        for curve, value in ((self.loss, steps.loss), (self.step_time, steps.step_time_s)):
            if isinstance(value, (int, float)):
                curve.append(float(value))


@dataclass(frozen=True)
class ShownPart:
    """The view that the user has selected with the keys."""

    help: bool = False
    paused: bool = False
    by_number: bool = False
    """Sort the ranks by number; otherwise the slowest comes first."""

    scrolled: int = 0
    """How many newer events follow the last event shown."""

    def after(self, key: str, page: int = 10) -> ShownPart:
        """The view after a key press; `page` is the number of lines that PgUp scrolls."""
        if self.help:
            return replace(self, help=False)
        steps = {"up": 1, "down": -1, "page up": page, "page down": -page}
        if key in steps:
            return replace(self, scrolled=max(0, self.scrolled + steps[key]))
        if key == "help":
            return replace(self, help=True)
        if key == "pause":
            return replace(self, paused=not self.paused)
        return replace(self, by_number=not self.by_number) if key == "sort" else self


@dataclass(frozen=True)
class Canvas:
    """The screen's size in columns and lines, and the view that the user has selected."""

    width: int
    height: int
    shown: ShownPart = ShownPart()


HELP = (
    "keys of miner-guard top",
    "",
    "q              quit",
    "space, p       pause the screen; press again to continue",
    "up, down, k, j scroll the events by one",
    "PgUp, PgDn     scroll them by half a screen",
    "s              sort ranks by number, or slowest first",
    "?              this help; any key closes it",
    "",
    "the `week` line: up to seven days; each cell covers 2 h or more and shows the worst verdict:",
    *(
        f"  {marks[0]} (--ascii: {marks[1]})  {state}"
        for state, marks in {**WEEK_MARKS, UNWATCHED: _NO_MARK}.items()
    ),
)


def lines(
    status: StatusDocument | None,
    curves: CurveHistory,
    events: Sequence[str],
    canvas: Canvas,
    *,
    age_s: float,
    min_inner_step: int,
    ascii_only: bool = False,
) -> list[str]:
    """Return exactly `canvas.height` lines, none wider than the canvas. Events fill the remaining
    lines."""
    width, height, shown = canvas.width, canvas.height, canvas.shown
    if shown.help:
        top = list(HELP)
        events = ()
    elif status is None:
        top = ["no guard is running here", ""]
    else:
        rows = overview(
            status,
            curves,
            width,
            min_inner_step=min_inner_step,
            ascii_only=ascii_only,
            by_number=shown.by_number,
        )
        first = [
            *verdict_lines(status, age_s),
            *week_lines(status, age_s, ascii_only=ascii_only),
            head(status, age_s),
        ]
        top = [*(line for long in first for line in wrapped(long, width)), "", *rows, ""]
    room = max(0, height - len(top) - 1)
    body = [*top[: height - 1], *_events(events, room, shown)] if room > 1 else top
    padded = [cut(line, width, ascii_only=ascii_only) for line in body[:height]]
    return padded + [""] * (height - len(padded))


def _events(events: Sequence[str], room: int, shown: ShownPart) -> list[str]:
    """A title and the newest events that fit, or earlier ones if the user has scrolled."""
    if shown.help:
        return []
    count = max(0, room)
    end = max(min(len(events), count), len(events) - shown.scrolled)
    where = f", {len(events) - end} newer below" if end < len(events) else ""
    title = f"last events{where}{' (paused: space continues)' if shown.paused else ''}"
    return [title, *events[max(0, end - count) : end]]


def overview(
    status: StatusDocument,
    curves: CurveHistory,
    width: int,
    *,
    min_inner_step: int,
    ascii_only: bool = False,
    by_number: bool = False,
) -> list[str]:
    """Return the lines for steps, uploads, ranks, GPUs and host. `status` shows the same lines."""
    rows = [
        *_steps(status.steps, curves, width, ascii_only),
        *_uploads(status, min_inner_step, ascii_only),
    ]
    rows += [*_ranks(status.steps, by_number=by_number), *_gpus(status.health), _host(status)]
    return [cut(line, width, ascii_only=ascii_only) for line in rows]


def verdict_lines(status: StatusDocument, age_s: float = 0.0) -> list[str]:
    """Return the verdict, which the person on call reads first, and the next step."""
    verdict = shown(status, age_s)
    step = advice(verdict)
    return [
        headline(verdict, time_of_reading(status, age_s)),
        *([f"next   {step}"] if step else []),
    ]


def week_lines(status: StatusDocument, age_s: float, *, ascii_only: bool = False) -> list[str]:
    """Return the last seven days of verdicts as one line, followed by their shares in words."""
    week = week_of(status, age_s, _CELLS_OF_A_WEEK)
    if week is None:
        return []
    cells = "".join(WEEK_MARKS.get(cell, _NO_MARK)[ascii_only] for cell in week.cells)
    return [f"week   {cells}  {share_words(week)}"]


def head(status: StatusDocument, age_s: float) -> str:
    """Return the line with the time, miner state, restarts, goodput and cost of monitoring."""
    now = time_of_reading(status, age_s)
    words = [f"now    {f'{now[11:19]} UTC' if now else '?'}{_staleness(status, age_s)}"]
    words.append(f"miner {miner_state(status, age_s)}")
    words.append(f"restarts {number(status.restarts)}")
    words.append(f"goodput {percentages(status.steps.goodput).get('training', '?')}")
    words.append(f"monitoring {number(status.costs.share_pct, '.2f', '%')}")
    return "  ".join(words)


def _staleness(status: StatusDocument, age_s: float) -> str:
    if status.state == "done":
        return f" (ended {duration(age_s)} ago)"
    old = age_s > _OLD_S and not is_silent(status, age_s)
    return f" (OLD: as of {duration(age_s)} ago)" if old else ""


def _steps(steps: StepsStatus, curves: CurveHistory, width: int, ascii_only: bool) -> list[str]:
    room = max(10, min(60, width - 34))
    place = f"outer {number(steps.outer_step)} inner {number(steps.inner_step)}"
    speed = f"p50 {number(steps.p50_s, '.3g', 's')} p95 {number(steps.p95_s, '.3g', 's')}"
    last = (
        f"last {duration(steps.last_step_age_s)} ago, {number(steps.tokens_per_s, ',.0f')} tokens/s"
    )
    return [
        f"steps  {place}  {speed}  {last}",
        (
            f"loss   {number(steps.loss, '.4f'):<7}  "
            f"{sparkline(curves.loss, room, ascii_only=ascii_only)}"
        ),
        f"time   {number(steps.step_time_s, '.2f', 's'):<7}  "
        f"{sparkline(curves.step_time, room, ascii_only=ascii_only)}",
    ]


def _uploads(status: StatusDocument, required: int, ascii_only: bool) -> list[str]:
    steps, uploads = status.steps, status.uploads
    repo, decision = uploads.repo, uploads.decision
    inner = steps.inner_step
    # Prefer the running guard's value: this terminal's settings may differ.
    required = (uploads.forecast and uploads.forecast.min_inner_step) or required
    bar = progress_bar(inner or 0, required, 20, ascii_only=ascii_only)
    age, limit = repo.age_s, repo.limit_s
    state = "STALE" if repo.stale else "due" if repo.due else "fresh"
    known = (
        f"{number(age, ',.0f', 's')} of {number(limit, ',.0f', 's')} ({state}) "
        f"{repo.revision or ''}"
    )
    unseen = (
        "empty: nothing is published" if repo.empty else f"unknown: {repo.reason or 'not read yet'}"
    )
    rows = [
        (f"upload {bar} {number(inner)}/{required} {_when_valid(status, required)}"),
        f"repo   {known if age is not None else unseen}",
    ]
    if decision is not None:
        word = "allowed" if decision.allowed else "BLOCKED"
        rows.append(f"gate   {word}{_ago(status, decision.decided_at)}: {decision.reason}")
        if decision.note:
            rows.append(f"       {decision.note}")
    costs = uploads.forecast and uploads.forecast.waiting_costs_s
    if costs:
        words = f"waiting for inner step {required} means {duration(costs)} without a score"
        rows.append(f"       {words}")
    return rows


def _when_valid(status: StatusDocument, required: int) -> str:
    """Describe whether validators would accept an upload now, or when they would. Gives no time if
    the verdict says that the miner is not earning or has stopped."""
    steps, decision = status.steps, status.uploads.decision
    stalled = status.verdict is not None and status.verdict.state in (NOT_EARNING, STOPPED)
    outer = "" if stalled else f"; outer step in {duration(steps.eta_outer_s)}"
    if isinstance(steps.inner_step, int) and steps.inner_step >= required:
        if decision is not None and decision.allowed is False:
            return f"minimum reached, but blocked{outer}"
        why = status.verdict.state if stalled and status.verdict is not None else None
        return f"minimum reached, but {why}" if why else f"valid now{outer}"
    return "minimum not reached" if stalled else f"valid in {duration(steps.eta_upload_s)}{outer}"


def _ago(status: StatusDocument, wall: float | None) -> str:
    """` 3m ago`, relative to the status; empty if a time is unknown."""
    updated = status.updated
    if wall is None or updated is None:
        return ""
    return f" {duration(parse_iso_utc(updated) - wall)} ago"


def _ranks(steps: StepsStatus, *, by_number: bool) -> list[str]:
    """Return the ranks, by default sorted by work time, longest first, so that the screen never
    omits a straggler."""
    ranks = list(steps.per_rank.items())
    if not by_number:
        ranks.sort(key=lambda item: -(item[1].work_s or 0.0))
    rows = []
    for rank, row in ranks:
        memory = row.gpu_mem_gb
        memory_words = "mem ?" if memory is None else number(memory, ".1f", "GB")
        if row.gpu_peak_gb is not None:
            memory_words += f" (peak {row.gpu_peak_gb:.1f})"
        own = "" if row.work_s is None else f" own {number(row.work_s, '.3g', 's')}"
        rows.append(f"rank {rank}: {number(row.step_time_s, '.3g', 's')}{own} {memory_words}")
    return _in_threes(rows)


def _in_threes(cells: list[str]) -> list[str]:
    """Arrange cells in at most three lines of three; the last cell counts those that don't fit."""
    if len(cells) > _CELLS:
        cells = [*cells[: _CELLS - 1], f"and {len(cells) - _CELLS + 1} more"]
    return [" | ".join(cells[place : place + 3]) for place in range(0, len(cells), 3)]


def _gpus(health: HealthStatus) -> list[str]:
    rows = []
    for row in health.gpus.gpus:
        used, total, busy = (
            row.get("memory_used_bytes"),
            row.get("memory_total_bytes"),
            row.get("utilization_ratio"),
        )
        memory = (
            f"{number(used and used / _GIB, '.0f')}/{number(total and total / _GIB, '.0f', 'G')}"
        )
        heat = (
            f"{number(row.get('temperature_c'), '.0f', 'C')} "
            f"{number(row.get('power_w'), '.0f', 'W')}"
        )
        bad = "" if row.get("state") == "ok" else f" {str(row.get('state')).upper()}"
        rows.append(
            f"gpu{row.get('index')} {number(busy and 100 * busy, '.0f', '%')} {memory} {heat}{bad}"
        )
    if not rows:
        return [f"gpus   {health.without_gpu()}"]
    return _in_threes(rows)


def _host(status: StatusDocument) -> str:
    host = status.health.host
    used, limit, disk = (
        host.get(key) for key in ("memory_used_bytes", "memory_limit_bytes", "disk_free_bytes")
    )
    guard = status.health.guard
    own = (
        f"guard {number(guard.get('cpu_pct'), '.1f', '%')} "
        f"{number(_mib(guard.get('memory_bytes')), '.0f', 'MB')}"
    )
    return (
        f"host   cpu {number(host.get('cpu_pct'), '.0f', '%')}, memory "
        f"{number(used and used / _GIB, '.1f')}/{number(limit and limit / _GIB, '.0f', 'GB')}, "
        f"disk {number(disk and disk / _GIB, '.0f', 'GB')} free, {own}"
    )


def _mib(value: Any) -> float | None:
    return value / 1024**2 if isinstance(value, (int, float)) else None
