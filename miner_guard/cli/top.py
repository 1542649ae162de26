"""`miner-guard top`: live status in the terminal."""

from __future__ import annotations

import contextlib
import time
from typing import Annotated

import typer

from miner_guard import state_dir as statedir
from miner_guard.cli import screen
from miner_guard.cli.echo import echo
from miner_guard.cli.find import open_guard
from miner_guard.cli.options import AnyName, Config, State, a_number, start_or_name
from miner_guard.cli.screen import Canvas, ShownPart
from miner_guard.cli.terminal import Terminal, has_colour, has_unicode, is_dumb, size
from miner_guard.eventlog.status_document import (
    StatusDocument,
    StepsStatus,
    read_status,
    status_age_s,
)
from miner_guard.exits import NOT_RUNNING, Refused
from miner_guard.record.store import RunReader, StoredEvent

_LAST_EVENTS = 500
_NOT_LISTED = frozenset({"inner_step", "health_snapshot"})
"""Events that are not listed at the bottom, because the rest of the screen shows them."""

_LAST_READ = 4000
_STEPS_READ = 200


def command(
    every: Annotated[
        float,
        typer.Option(
            "--every", "-d", min=0.2, callback=a_number, help="Refresh interval in seconds."
        ),
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one screen and exit.")] = False,
    plain: Annotated[bool, typer.Option("--ascii", help="Use only ASCII characters.")] = False,
    config: Config = None,
    name: AnyName = None,
    state_dir: State = None,
) -> None:
    """Show the verdict and the state of the run live: uploads, ranks, GPUs, curves, events. Press ?
    for the keys."""
    place = open_guard(config, name, state_dir)
    if read_status(place.state) is None:
        raise Refused(
            f"no guard has run in {place.state.root}; {start_or_name(place.state)}", NOT_RUNNING
        )
    ascii_only = plain or not has_unicode()
    view = View(place.state, place.settings.config.gate.min_inner_step, ascii_only=ascii_only)
    if once or is_dumb():
        echo("\n".join(line.rstrip() for line in view.lines(*size())).rstrip())
        return
    with Terminal() as terminal, contextlib.suppress(KeyboardInterrupt):
        _live(view, terminal, every)


def _live(view: View, terminal: Terminal, every: float) -> None:
    """Repaint every `every` seconds, and immediately when a key is pressed or the window is
    resized."""
    colour, shown = has_colour(), ShownPart()
    lines = view.lines(*terminal.size(), shown)
    due = time.monotonic() + every
    while True:
        terminal.paint(lines, colour=colour)
        keys = list(terminal.keys_within(max(0.0, due - time.monotonic())))
        if "quit" in keys and not shown.help:
            return
        for key in keys:
            shown = shown.after(key, page=max(1, terminal.size()[1] // 2))
        if shown.paused and not keys:
            due = time.monotonic() + every
            continue
        if time.monotonic() >= due:
            due = time.monotonic() + every
        lines = view.lines(*terminal.size(), shown)


class View:
    """Reads run.db; sends no request to the running guard."""

    def __init__(self, state: statedir.StateDir, min_inner_step: int, *, ascii_only: bool) -> None:
        self._state, self._min_inner_step, self._ascii = state, min_inner_step, ascii_only
        self._curves = curves_of(state)
        self._record, self._last_id = RunReader(state.db), 0
        self._events: list[str] = []
        self._document: StatusDocument | None = None
        self._age_s = float("inf")
        self._take(self._record.events(min_level="info", limit=_LAST_READ, newest=True))

    def _refresh(self) -> None:
        self._take(self._record.events(min_level="info", after=self._last_id))
        self._document = read_status(self._state)
        self._age_s = status_age_s(self._state)
        if self._document is not None:
            self._curves.take(self._document.steps)

    def _take(self, hits: list[StoredEvent]) -> None:
        self._last_id = hits[-1].id if hits else self._last_id
        shown_hits = [hit for hit in hits if hit.name not in _NOT_LISTED]
        rows = [f"{hit.ts[11:19]} {hit.level:<8} {hit.headline}" for hit in shown_hits]
        self._events = [*self._events, *rows][-_LAST_EVENTS:]

    def lines(self, width: int, height: int, shown: ShownPart | None = None) -> list[str]:
        """The current screen; while paused, the screen as it was before the pause."""
        shown = shown or ShownPart()
        if not shown.paused or self._document is None:
            self._refresh()
        return screen.lines(
            self._document,
            self._curves,
            self._events,
            Canvas(width, height, shown),
            age_s=self._age_s,
            min_inner_step=self._min_inner_step,
            ascii_only=self._ascii,
        )


def curves_of(state: statedir.StateDir) -> screen.CurveHistory:
    """Loss and step time from the latest logged steps."""
    curves = screen.CurveHistory()
    for hit in RunReader(state.db).events(["inner_step"], limit=_STEPS_READ, newest=True):
        curves.take(StepsStatus.from_json(hit.fields))
    return curves
