"""The screens of `miner-guard top` and `status`: lines of text from the run's record, coloured and
repainted by rich; readable without colour."""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import termios
import textwrap
import tty
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from miner_guard.record.status_document import (
    NO_JUDGE,
    NO_REPO,
    HealthStatus,
    StatusDocument,
    StepsStatus,
    read_status,
)
from miner_guard.record.store import RunReader
from miner_guard.record.words import number, percentages, visible
from miner_guard.state_dir import StateDir
from miner_guard.system.clock import iso_utc, parse_iso_utc
from miner_guard.watch.incident import IncidentCard, latest
from miner_guard.watch.state_words import (
    GREEN,
    GREY,
    GUARD_GONE,
    RED,
    YELLOW,
    answers,
    freshness,
    is_live,
    lagging,
    read_state,
    share_words,
    span,
    time_of_reading,
    week_of,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_CELLS_OF_A_WEEK = 28
"""Each cell covers six hours, or less if the record is shorter."""

WEEK_MARKS = {GREEN: "█", YELLOW: "▅", RED: "▁", GREY: "░"}
"""The mark for each colour in a cell of the week; they can be told apart without colour."""

_NO_MARK = "·"
_STEPS_READ = 512
_EVENTS_READ = 500
_EVENTS_PRINTED = 12
_NOT_LISTED = frozenset({"inner_step", "health_snapshot"})
"""Events that the rest of the screen already shows."""

_BARS = "▁▂▃▄▅▆▇█"
_RICH = {RED: "bold red", YELLOW: "yellow", GREEN: "green", GREY: "dim"}
_STYLES = (
    (r"(?<=^gate   )BLOCKED", _RICH[RED]),
    (r"(?<=^repo   ).*\(STALE\)", _RICH[RED]),
    (r"^\S+Z (critical|error) ", _RICH[RED]),
    (r"^\S+Z warning ", _RICH[YELLOW]),
    (r"(?<=^loss   )(NaN|-?Infinity)", _RICH[RED]),
    (r"rank \d+: [^|]*BEHIND", _RICH[RED]),
    (r"rank \d+: [^|]*SLOW", _RICH[YELLOW]),
)
"""What is coloured on the screen below the headline."""

_PAST = re.compile(r"^past   (\S+)")
_CELL_STYLES = {mark: _RICH[colour] for colour, mark in WEEK_MARKS.items()}


@dataclass
class View:
    """What the keys of `top` have selected, and what else than the state is on the screen."""

    paused: bool = False
    page: int = 0
    """Which page of ranks."""

    loss: Sequence[float] = ()
    step_time: Sequence[float] = ()
    """Of the latest steps, oldest first."""

    incident: Sequence[str] = ()
    events: Sequence[str] = ()
    colour: str = GREY
    """The headline's."""

    old: bool = False
    """Whether the figures are not of now, because no guard runs."""

    def press(self, key: str) -> bool:
        """Apply a key; returns False if it quits."""
        if key in ("p", " "):
            self.paused = not self.paused
        elif key == "n":
            self.page += 1
        return key not in ("q", "Q")

    def foot(self) -> str:
        """The last line, which names the keys."""
        return f"q quit  p {'paused: p continues' if self.paused else 'pause'}  n next ranks"


def show(state: StateDir, every: float, *, once: bool) -> None:
    """Show the run live until `q` is pressed, or print one screen if `once` is set or the output is
    no terminal."""
    from rich.console import Console
    from rich.live import Live

    console, view = Console(), View()
    if once or not console.is_terminal or console.is_dumb_terminal:
        rows = read(state, (console.width, None), view)
        print_lines(rows, console.width, view)
        return
    rows = []
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            if not view.paused or not rows:
                rows = read(state, (console.width, console.height), view)
            whole = painted([*rows[:-1], view.foot()[: console.width]], view)
            live.update(whole, refresh=True)
            if not all(view.press(key) for key in pressed(every)):
                return


def read(
    state: StateDir, size: tuple[int, int | None], view: View | None = None, *, level: str = "info"
) -> list[str]:
    """The screen from the run's record; sends no request to the guard. `level`: the lowest of the
    events."""
    view, record, status = view or View(), RunReader(state.db), read_status(state)
    if status is not None and status.gone:
        # It could not log its own end: what came before is all there is.
        level = "info"
    events = record.events(min_level=level, limit=_EVENTS_READ, newest=True)
    listed = (event for event in events if event.name not in _NOT_LISTED)
    alike = [list(rows) for _, rows in groupby(listed, lambda e: (e.level, e.headline))]
    view.events = [
        f"{e.ts[:19]}Z {e.level:<8} {f'{1 + len(more)}× ' if more else ''}{e.headline}"
        for e, *more in alike
    ]
    view.loss, view.step_time = _curves(record)
    view.incident = incident_lines(latest(record))
    view.colour = read_state(status).colour or GREY
    view.old = status is not None and not is_live(status)
    return lines(status, size, view)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Read single keys; gives a function that waits so many seconds and returns what was pressed.
    Restores the terminal at the end."""
    if not sys.stdin.isatty():
        yield lambda seconds: select.select([], [], [], seconds) and ""
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed(seconds: float) -> str:
        readable, _, _ = select.select([descriptor], [], [], seconds)
        # A terminal that went away reads as nothing: quit.
        return os.read(descriptor, 64).decode(errors="replace") or "q" if readable else ""

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def print_lines(rows: Sequence[str], width: int, view: View) -> None:
    """Print the lines, coloured on a terminal unless NO_COLOR is set."""
    from rich.console import Console

    console: Console = Console(width=width, highlight=False)
    console.print(painted([row.rstrip() for row in rows], view), soft_wrap=True)


def painted(rows: Sequence[str], view: View) -> Text:
    """The lines with their colours: the headline has the state's, and old figures are dimmed."""
    from rich.text import Text

    whole = Text(no_wrap=True)
    dimmed = False
    for place, row in enumerate(rows):
        line = Text(row, style=("dim" if dimmed else "") if place else _RICH[view.colour])
        dimmed |= view.old and row.startswith("now ")
        for pattern, style in _STYLES:
            line.highlight_regex(pattern, style)
        if past := _PAST.match(row):
            for at in range(*past.span(1)):
                line.stylize(_CELL_STYLES.get(row[at], ""), at, at + 1)
        whole.append_text(line if place == len(rows) - 1 else line.append("\n"))
    return whole


def _curves(record: RunReader) -> list[list[float]]:
    steps = record.events(("inner_step",), limit=_STEPS_READ, newest=True)
    return [
        [float(v) for e in steps if isinstance(v := e.fields.get(key), (int, float))]
        for key in ("loss", "step_time_s")
    ]


def lines(
    status: StatusDocument | None, size: tuple[int, int | None], view: View | None = None
) -> list[str]:
    """The screen: with a height, exactly that many lines, of which the ranks' page leaves room for
    events; without one, everything, and the first lines uncut."""
    (width, height), view = size, view or View()
    if status is None:
        return _fitted(["no guard is running here"], width, height)
    past = past_strip(status)
    first = [*state_lines(status), *([f"past   {past}"] if past else []), head(status)]
    machine = [*_gpus(status.health, width), _host(status)]
    ranks, rows = _ranks(status, width), [*_steps(status.steps, view, width), *_uploads(status)]
    if height is None:
        rows = _fitted([_run(status), *rows, *ranks, *machine], width, None)
        rows += [*map(_on_one_line, view.incident), ""]
        rows += _fitted(view.events[-_EVENTS_PRINTED:] or ["no warnings"], width, None)
        return [*map(_on_one_line, first), "", *rows]
    whole = [row for line in first for row in _wrapped(line, width)]
    rows = [*whole, "", *rows, *machine, *view.incident[:2]]
    room = max(1, (height - len(rows) - 3) // 2)
    pages = -(-len(ranks) // room)
    at = view.page % pages if pages else 0
    if pages > 1:
        rows.append(f"ranks, slowest first, page {at + 1} of {pages} (n: next)")
    rows += [*ranks[at * room : (at + 1) * room], ""]
    remaining = height - len(rows) - 1
    rows += view.events[-remaining:] if remaining > 0 else []
    return [*_fitted(rows, width, height - 1), view.foot()[:width]]


def _fitted(rows: Sequence[str], width: int, height: int | None) -> list[str]:
    fitted = [cut(row, width) for row in rows]
    return fitted if height is None else [*fitted, *[""] * height][:height]


def incident_lines(card: IncidentCard | None) -> list[str]:
    """The last incident, as the page shows it: what happened and what it cost, and its evidence."""
    if card is None:
        return []
    evidence = [text for text in (card.frame, card.collective) if text is not None]
    words = [
        f"incident {card.title}",
        f"{iso_utc(card.noticed)[:19]}Z: {card.cost}",
        *([f"evidence: {'; '.join(evidence)}"] if evidence else []),
        # While it is open, the next step above says so.
        *([f"fix: {card.fix}"] if card.fix and card.over is not None else []),
    ]
    return [("         " if n else "") + each for n, each in enumerate(words)]


def state_lines(status: StatusDocument | None) -> list[str]:
    """The headline, which the person on call reads first, the earnings and the next step."""
    first, earns, step = answers(status)
    return [first, f"earns  {earns}", f"next   {step}"]


def past_strip(status: StatusDocument) -> str:
    """The cells of the last seven days, and their shares in words; empty if nothing is recorded."""
    week = week_of(status, _CELLS_OF_A_WEEK)
    if week is None:
        return ""
    cells = "".join(WEEK_MARKS.get(cell, _NO_MARK) for cell in week.cells)
    return f"{cells}  {share_words(week)}"


def _run(status: StatusDocument) -> str:
    """Return the line with the processes, for `kill` and `py-spy`."""
    since = f" since {status.started[:19]}Z" if status.started else ""
    paused = "; restarts paused" if status.paused else ""
    return (
        f"run    {status.run_id}, attempt {number(status.attempt)}{since}, pids: keeper "
        f"{number(status.keeper_pid)}, guard {number(status.guard_pid)}, miner "
        f"{status.pid or 'none'}{paused}"
    )


def head(status: StatusDocument) -> str:
    """Return the line with the time, the miner's life, restarts, goodput and cost of
    monitoring."""
    now, age, state = time_of_reading(status), freshness(status), read_state(status)
    words = [f"now    {f'{now[11:19]} UTC' if now else '?'}{f' ({age})' if age else ''}"]
    miner = "" if state.life == GUARD_GONE else "miner "
    words.append(f"{miner}{state.life}" + (f", {state.stage}" if state.stage else ""))
    words.append(f"restarts {number(status.restarts)}")
    if training := percentages(status.steps.goodput).get("training"):
        words.append(f"goodput {training}")
    if status.costs.share_pct is not None:
        words.append(f"monitoring {status.costs.share_pct:.2f}%")
    return "  ".join(words)


def _uploads(status: StatusDocument) -> list[str]:
    """What is published, and when the next upload is due; nothing for a miner that publishes
    nothing."""
    uploads = status.uploads
    if uploads.repo.reason in (NO_REPO, NO_JUDGE) and uploads.decision is None:
        return []
    repo, decision = uploads.repo, uploads.decision
    fresh = "fresh" if is_live(status) else "when last read"
    state = "STALE" if repo.stale else "due" if repo.due else fresh
    words = f"{number(repo.age_s, '.0f', 's')} of {number(repo.limit_s, '.0f', 's')} ({state})"
    if repo.age_s is None:
        words = f"unknown: {repo.reason or 'not read yet'}"
    inner, required = number(status.steps.inner_step), uploads.min_inner_step
    rows = [
        f"upload {inner}/{number(required)} {_when_valid(status, required)}",
        f"repo   {'empty: nothing is published' if repo.empty else words} {repo.revision or ''}",
    ]
    if decision is not None:
        word = "allowed" if decision.allowed else "BLOCKED"
        rows.append(f"gate   {word}{_ago(status, decision.decided_at)}: {decision.reason}")
        if decision.note:
            rows.append(f"       {decision.note}")
    if (push := uploads.upload) is not None:
        why = f": {push.error}" if push.error else ""
        rows.append(f"push   {push.tag} {push.outcome}{_ago(status, push.wall)}{why}")
    if (audit := uploads.audit) is not None:
        rows.append(f"audit  {audit.outcome}{_ago(status, audit.wall)}: {audit.detail}")
    return rows


def _when_valid(status: StatusDocument, required: int | None) -> str:
    """Describe whether validators would accept an upload now, or when they would. Gives no time if
    the miner is not training."""
    steps, decision, state = status.steps, status.uploads.decision, read_state(status)
    stalled = state.life != "training" or state.earning == "no" or state.health == "failing"
    upload_s, outer_s = (None, None) if stalled else (steps.eta_upload_s, steps.eta_outer_s)
    if required is None or (steps.inner_step or 0) < required:
        words = "minimum not reached" if upload_s is None else f"valid in {span(upload_s)}"
    else:
        blocked = decision is not None and decision.allowed is False
        words = "minimum reached" if stalled or blocked else "valid now"
    return words if outer_s is None else f"{words}; outer step in {span(outer_s)}"


def _ago(status: StatusDocument, wall: float | None) -> str:
    """` 3 min ago`, relative to the status; empty if a time is unknown."""
    updated = status.updated
    if wall is None or updated is None:
        return ""
    return f" {span(parse_iso_utc(updated) - wall)} ago"


def _host(status: StatusDocument) -> str:
    host, guard = status.health.host, status.health.guard
    memory = f"{_gib(host.get('memory_used_bytes'), '.1f')}/{_gib(host.get('memory_limit_bytes'))}"
    used = guard.get("memory_bytes")
    return (
        f"host   cpu {number(host.get('cpu_pct'), '.0f', '%')}, memory {memory}, "
        f"disk {_gib(host.get('disk_free_bytes'))} free, guard "
        f"{number(guard.get('cpu_pct'), '.1f', '%')} {number(used and used / 1024**2, '.0f', 'MB')}"
    )


def _gib(size: Any, spec: str = "") -> str:
    """A size in bytes as `24GB`; with a `spec`, without its unit."""
    return number(size and size / 1024**3, spec or ".0f", "" if spec else "GB")


def _steps(steps: StepsStatus, view: View, width: int) -> list[str]:
    if steps.inner_step is None and steps.last_step_age_s is None:
        return ["steps  none yet"]
    room = max(10, min(60, width - 34))
    words = [f"steps  outer {number(steps.outer_step)} inner {number(steps.inner_step)}"]
    if steps.p50_s is not None:
        p95 = "" if steps.p95_s is None else f" p95 {steps.p95_s:.3g}s"
        words.append(f"p50 {steps.p50_s:.3g}s{p95}")
    if steps.tokens_per_s is not None:
        words.append(f"{steps.tokens_per_s:,.0f} tokens/s")
    if steps.last_step_age_s is not None:
        words.append(f"last {span(steps.last_step_age_s)} ago")
    loss, seconds = (sparkline(values, room) for values in (view.loss, view.step_time))
    return [
        "  ".join(words),
        f"loss   {number(steps.loss, '.2f'):<7}  {loss}",
        f"time   {number(steps.step_time_s, '.2f', 's'):<7}  {seconds}",
    ]


def _ranks(status: StatusDocument, width: int) -> list[str]:
    """Every rank, those that keep the others waiting first; its memory where the machine has a
    GPU."""
    rows, gpus, ranks = [], status.health.gpus.gpus, status.steps.per_rank
    for rank, mark in lagging(status.steps).items():
        row = ranks[rank]
        words = [f"rank {rank}: {number(row.step_time_s, '.3g', 's')}"]
        if row.work_s is not None and len(ranks) > 1:
            words.append(f"own {row.work_s:.3g}s")
        if gpus or row.gpu_mem_gb is not None:
            words.append(number(row.gpu_mem_gb, ".1f", "GB"))
        if row.gpu_peak_gb is not None:
            words.append(f"(peak {row.gpu_peak_gb:.1f})")
        rows.append(" ".join(filter(None, (*words, mark))))
    return _in_columns(rows, width)


def _gpus(health: HealthStatus, width: int) -> list[str]:
    rows = []
    for row in health.gpus.gpus:
        use, state = row.get("utilization_ratio"), row.get("state")
        words = (
            f"gpu{row.get('index')} {number(use and 100 * use, '.0f', '%')}",
            f"{_gib(row.get('memory_used_bytes'), '.0f')}/{_gib(row.get('memory_total_bytes'))}",
            number(row.get("temperature_c"), ".0f", "C"),
            number(row.get("power_w"), ".0f", "W"),
        )
        rows.append(" ".join((*words, *([str(state).upper()] if state != "ok" else []))))
    return _in_columns(rows, width) if rows else [f"gpus   {health.without_gpu()}"]


def _in_columns(cells: list[str], width: int) -> list[str]:
    """Arrange cells in as many equal columns as fit."""
    wide = max(map(len, cells), default=0)
    count = max(1, (width + 3) // (wide + 3))
    return [
        " | ".join(f"{cell:<{wide}}" for cell in cells[at : at + count]).rstrip()
        for at in range(0, len(cells), count)
    ]


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw the last `width` values as bars scaled between their minimum and maximum."""
    finite = [value for value in values[-width:] if value - value == 0]
    if not finite:
        return ""
    low = min(finite)
    span = (max(finite) - low) or 1.0
    return "".join(_BARS[min(7, int(8 * (value - low) / span))] for value in finite)


def _on_one_line(text: str) -> str:
    return visible(text).replace("\n", " ")


def cut(line: str, width: int) -> str:
    """Truncate the line to `width` and mark where text was cut."""
    line = _on_one_line(line)
    return line if len(line) <= width else line[: width - 1] + "…"


def _wrapped(line: str, width: int) -> list[str]:
    """Wrap a line: the first lines of the screen matter most, so all of their words must stay
    visible."""
    return textwrap.wrap(
        _on_one_line(line),
        max(width, 14),
        subsequent_indent=" " * 7,
        drop_whitespace=True,
        break_on_hyphens=False,
    )
