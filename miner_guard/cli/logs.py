"""`miner-guard logs`: query the events and decisions in run.db."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Annotated, Any, Optional

import typer

from miner_guard.cli import options
from miner_guard.cli.find import find_guard
from miner_guard.eventlog.rendering import console_line, json_line
from miner_guard.exits import FAILED, USAGE, Refused
from miner_guard.record.events import LEVELS
from miner_guard.record.store import RunReader, StoredEvent
from miner_guard.record.words import visible
from miner_guard.reporting.runbook import rows
from miner_guard.state_dir import StateDir
from miner_guard.system.clock import iso_utc, parse_iso_utc

_TAIL_OF_FOLLOW = 10
_BATCH = 1024
_FOR_REPLAY = frozenset({"verdicts", "record", "document"})


def command(
    event: Annotated[
        Optional[list[str]], typer.Option("--event", "-e", help="Show only this event; repeatable.")
    ] = None,
    level: Annotated[
        str,
        typer.Option(
            "--level", "-l", help="Lowest level to show: debug, info, warning, error or critical."
        ),
    ] = "debug",
    since: options.Since = "",
    rank: Annotated[
        Optional[list[int]],
        typer.Option("--rank", "-r", min=0, help="Show only this rank; repeatable."),
    ] = None,
    lines: Annotated[
        Optional[int],
        typer.Option(
            "--lines", "-n", min=0, help="Show only the last N lines; with --follow, 10 by default."
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing new lines.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print a JSON array of events; with --follow, one event per line."
        ),
    ] = False,
    ledger: Annotated[
        Optional[str],
        typer.Option("--ledger", help="Print a ledger table: decisions, uploads or repo_age."),
    ] = None,
    emoji: Annotated[
        bool, typer.Option("--emoji/--no-emoji", help="Print an emoji before each line.")
    ] = True,
    config: options.Config = None,
    name: options.AnyName = None,
    state_dir: options.State = None,
) -> None:
    """Query the run's events. Exit 1: nothing matched."""
    state = find_guard(name, state_dir)
    known = rows()
    if known and (unknown := [each for each in event or () if each not in known]):
        raise Refused(options.unknown_event(unknown[0]), USAGE)
    if level not in LEVELS:
        raise Refused(f"unknown level {level!r}; allowed: {', '.join(LEVELS)}", USAGE)
    earliest = options.earliest(since)
    options.check_there(state)
    if ledger is not None:
        if event or rank or follow or level != "debug":
            raise Refused(
                (
                    "--ledger works only with --since, --lines and --json; the other options "
                    "filter log lines"
                ),
                USAGE,
            )
        _write(_ledger(state, ledger, earliest, lines, as_json=as_json))
        return
    if follow and lines is None and not earliest:
        lines = _TAIL_OF_FOLLOW
    reader = RunReader(state.db)
    restrictions: dict[str, Any] = {"min_level": level, "ranks": rank or ()}
    events = reader.events(
        event or (), since=earliest, limit=lines, newest=lines is not None, **restrictions
    )
    if follow:
        after = events[-1].id if events else reader.last_id()
        _follow(
            chain(events, reader.each(event or (), follow=True, after=after, **restrictions)),
            as_json=as_json,
            emoji=emoji,
        )
        return
    if reader.unread is not None:
        raise Refused(f"{state.db} cannot be read: {reader.unread}", FAILED)
    _write(_array(events) if as_json else (_line(each, emoji=emoji) for each in events))
    if not events:
        raise typer.Exit(FAILED)


def _line(event: StoredEvent, *, emoji: bool) -> bytes:
    return f"{console_line(event.record(), emoji=emoji)}\n".encode("utf-8", "replace")


def _ledger(
    state: StateDir, table: str, since: str, lines: int | None, *, as_json: bool
) -> Iterator[bytes]:
    """The ledger's rows, oldest first. Raises Refused: 64 for an unknown table, 1 if the table is
    empty."""
    ledger, from_s = RunReader(state.db), parse_iso_utc(since) if since else 0.0
    try:
        rows = ledger.rows(
            table.removesuffix("s"), since=from_s, limit=100_000 if lines is None else lines
        )
    except ValueError as error:
        raise Refused(f"--ledger: {error}", USAGE) from error
    if ledger.unread is not None:
        raise Refused(f"{state.db} cannot be read: {ledger.unread}", FAILED)
    if not rows:
        raise Refused(f"the ledger in {state.root} has no {table}", FAILED)
    # The full document of a decision is only for replays: `miner-guard gate --replay ID`.
    shown = [{key: value for key, value in row.items() if key not in _FOR_REPLAY} for row in rows]
    if as_json:
        yield (visible(json.dumps(shown, ensure_ascii=False, indent=1)) + "\n").encode()
        return
    for row in shown:
        fields = " ".join(
            f"{key}={value}" for key, value in row.items() if value is not None and key != "wall"
        )
        yield f"{iso_utc(row['wall'])} {visible(fields)}\n".encode("utf-8", "replace")


def _array(events: Iterable[StoredEvent]) -> Iterator[bytes]:
    """One JSON document with one event per line, readable by `jq '.[]'` and by people."""
    before = b"[\n"
    for each in events:
        yield before + json_line(each.record()).encode("utf-8", "replace")
        before = b",\n"
    yield b"[]\n" if before == b"[\n" else b"\n]\n"


def _write(pieces: Iterable[bytes]) -> None:
    out, pieces = sys.stdout.buffer, iter(pieces)
    while batch := list(islice(pieces, _BATCH)):
        out.write(b"".join(batch))
    out.flush()


def _follow(events: Iterable[StoredEvent], *, as_json: bool, emoji: bool) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        for each in events:
            line = f"{json_line(each.record())}\n".encode("utf-8", "replace")
            _write([line if as_json else _line(each, emoji=emoji)])
