"""`miner-guard logs`: query guard.jsonl and its rotated files."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Optional

import typer

from miner_guard.cli import options
from miner_guard.cli.echo import echo
from miner_guard.cli.find import find_guard
from miner_guard.eventlog import query as logquery
from miner_guard.eventlog.catalog import CATALOGUE, LEVELS
from miner_guard.eventlog.follow import Follower
from miner_guard.eventlog.query import Hit, Query, Seen
from miner_guard.eventlog.rendering import visible
from miner_guard.exits import FAILED, USAGE, Refused
from miner_guard.record.words import counted
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
    """Query guard.jsonl and its rotated files. Exit 1: nothing matched."""
    state = find_guard(name, state_dir)
    query, seen = _query(event or [], level, since, rank or []), Seen()
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
        _write(_ledger(state, ledger, query.since, lines, as_json=as_json))
        return
    log = state.log
    if follow:
        _follow(log, query, lines, as_json=as_json, emoji=emoji)
        return
    hits = (
        logquery.search(log, query, seen)
        if lines is None
        else iter(logquery.last(log, query, lines, seen))
    )
    if as_json:
        _write(_array(hits))
    else:
        _write(f"{hit.console(emoji=emoji)}\n".encode("utf-8", "replace") for hit in hits)
    if seen.unreadable:
        echo(f"miner-guard: skipped {counted(seen.unreadable, 'unreadable line')}", err=True)
    if seen.hits == 0:
        raise typer.Exit(FAILED)


def _ledger(
    state: StateDir, table: str, since: str, lines: int | None, *, as_json: bool
) -> Iterator[bytes]:
    """The ledger's rows, oldest first. Raises Refused: 64 for an unknown table, 1 if the table is
    empty."""
    from miner_guard.record.store import RunReader

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


def _query(events: list[str], level: str, since: str, ranks: list[int]) -> Query:
    if unknown := [name for name in events if name not in CATALOGUE]:
        raise Refused(options.unknown_event(unknown[0]), USAGE)
    if level not in LEVELS:
        raise Refused(f"unknown level {level!r}; allowed: {', '.join(LEVELS)}", USAGE)
    return Query(frozenset(events), level, options.earliest(since), frozenset(ranks))


def _array(hits: Iterable[Hit]) -> Iterator[bytes]:
    """One JSON document with one event per line, readable by `jq '.[]'` and by people."""
    before = b"[\n"
    for hit in hits:
        yield before + hit.raw
        before = b",\n"
    yield b"[]\n" if before == b"[\n" else b"\n]\n"


def _write(pieces: Iterable[bytes]) -> None:
    out, pieces = sys.stdout.buffer, iter(pieces)
    while batch := list(islice(pieces, _BATCH)):
        out.write(b"".join(batch))
    out.flush()


def _follow(log: Path, query: Query, lines: int | None, *, as_json: bool, emoji: bool) -> None:
    # Open the follower first: a line written in between may then appear twice, but none is lost.
    follower = Follower(log, query)
    count = _TAIL_OF_FOLLOW if lines is None and not query.since else lines
    earlier = (
        logquery.search(log, query) if count is None else iter(logquery.last(log, query, count))
    )
    with contextlib.suppress(KeyboardInterrupt):
        for hit in chain(earlier, follower.hits()):
            _write(
                [
                    hit.raw + b"\n"
                    if as_json
                    else f"{hit.console(emoji=emoji)}\n".encode("utf-8", "replace")
                ]
            )
