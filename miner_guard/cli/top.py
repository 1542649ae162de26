"""`miner-guard top`: status, live in the terminal."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from miner_guard import state_dir as statedir
from miner_guard.cli import screen
from miner_guard.cli.echo import echo
from miner_guard.cli.find import open_guard
from miner_guard.cli.options import AnyName, Config, State, a_number, start_or_name
from miner_guard.eventlog import query
from miner_guard.eventlog.catalog import CATALOGUE
from miner_guard.eventlog.follow import Follower
from miner_guard.eventlog.query import Hit, Query
from miner_guard.eventlog.status_document import StepsStatus, read_status
from miner_guard.exits import NOT_RUNNING, Refused

_LAST_EVENTS = 40
_SHOWN = frozenset(CATALOGUE) - {"inner_step", "health_snapshot"}
"""Events listed at the bottom; the screen itself shows the others."""

_LAST_READ = 4000
_STEPS_READ = 200


def command(
    every: Annotated[
        float,
        typer.Option(
            "--every", "-d", min=0.2, callback=a_number, help="Refresh interval in seconds."
        ),
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one screen and end.")] = False,
    plain: Annotated[bool, typer.Option("--ascii", help="Letters of ASCII only.")] = False,
    config: Config = None,
    name: AnyName = None,
    state_dir: State = None,
) -> None:
    """What the running guard knows, live: the way to the next upload, ranks, GPUs, curves, events.
    q ends it."""
    place = open_guard(config, name, state_dir)
    if read_status(place.state) is None:
        raise Refused(
            f"no guard has run in {place.state.root}; {start_or_name(place.state)}", NOT_RUNNING
        )
    ascii_only = plain or "utf" not in (sys.stdout.encoding or "").lower()
    view = View(place.state, place.settings.config.gate.min_inner_step, ascii_only=ascii_only)
    if once or not sys.stdout.isatty():
        echo("\n".join(line.rstrip() for line in view.lines(*_size())).rstrip())
        return
    with _full_screen(), contextlib.suppress(KeyboardInterrupt):
        _paint(view.lines(*_size()))
        while not _quit_within(every):
            _paint(view.lines(*_size()))


class View:
    """Reads status.json and follows guard.jsonl; sends no request to the running guard."""

    def __init__(self, state: statedir.StateDir, min_inner_step: int, *, ascii_only: bool) -> None:
        self._state, self._least, self._ascii = state, min_inner_step, ascii_only
        self._curves = curves_of(state)
        self._follower = Follower(state.log, Query(least_level="info"))
        self._events: list[str] = []
        self._take(query.last(state.log, Query(least_level="info"), _LAST_READ))

    def _take(self, hits: list[Hit]) -> None:
        wanted = [hit for hit in hits if hit.event in _SHOWN]
        rows = [f"{hit.ts[11:19]} {hit.level:<8} {hit.headline}" for hit in wanted]
        self._events = [*self._events, *rows][-_LAST_EVENTS:]

    def lines(self, width: int, height: int) -> list[str]:
        """The current screen."""
        self._take(self._follower.poll())
        document = read_status(self._state)
        if document is not None:
            self._curves.take(document.steps)
        return screen.lines(
            document,
            self._curves,
            self._events,
            width=width,
            height=height,
            age_s=_age(self._state.status),
            min_inner_step=self._least,
            ascii_only=self._ascii,
        )


def curves_of(state: statedir.StateDir) -> screen.CurveHistory:
    """The latest logged steps."""
    curves = screen.CurveHistory()
    for hit in query.last(state.log, Query(events=frozenset({"inner_step"})), _STEPS_READ):
        curves.take(StepsStatus.from_json(hit.record()))
    return curves


def _age(path: Path) -> float:
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return float("inf")


def _size() -> tuple[int, int]:
    try:
        size = os.get_terminal_size(sys.stdout.fileno())
        return max(40, size.columns or 80), max(10, size.lines or 24)
    except OSError:
        return 80, 24


@contextlib.contextmanager
def _full_screen() -> Iterator[None]:
    """The terminal's alternate screen, cursor hidden, echo off; always restores the previous
    screen."""
    keys = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None
    sys.stdout.write("\x1b[?1049h\x1b[?25l\x1b[2J")
    try:
        if keys is not None:
            tty.setcbreak(sys.stdin)
        yield
    finally:
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()
        if keys is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, keys)


def _quit_within(seconds: float) -> bool:
    """Wait this long for a key that quits; True as soon as it is pressed."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if not sys.stdin.isatty():
            time.sleep(left)
        elif select.select([sys.stdin], [], [], left)[0]:
            keys = os.read(sys.stdin.fileno(), 64)
            if not keys or b"q" in keys.lower():
                return True
    return False


_painted: list[str] = []


def _paint(lines: list[str]) -> None:
    """Sends only changed lines: over a slow ssh a screen is a few dozen bytes."""
    global _painted
    whole = len(lines) != len(_painted)
    changed = [
        f"\x1b[{row};1H{line}\x1b[K"
        for row, line in enumerate(lines, 1)
        if whole or line != _painted[row - 1]
    ]
    _painted = lines
    sys.stdout.write(("\x1b[2J" if whole else "") + "".join(changed))
    sys.stdout.flush()
