"""`miner-guard status`, `top`, `logs` and `report`: a run as its record shows it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from miner_guard import state_dir as statedir
from miner_guard.cli import command, options
from miner_guard.cli.output import echo, working, writing
from miner_guard.exits import FAILED, NOT_RUNNING, UNAVAILABLE, USAGE, Refused
from miner_guard.record.store import RunReader, StoredEvent
from miner_guard.record.words import visible
from miner_guard.state_dir import StateDir
from miner_guard.system.clock import iso_utc, parse_iso_utc

_WIDTH = 120

_TAIL_OF_FOLLOW = 10
_ONLY_JSON = frozenset({"verdicts"})


@command(
    "See",
    "miner-guard status",
    "miner-guard status --json | jq .verdict",
    "miner-guard status --host miner-1:9838,miner-2:9838",
)
def status(
    config: options.Config = None,
    name: options.AnyName = None,
    state_dir: options.State = None,
    as_json: options.Json = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Only check whether the miner is making progress; if not, print why and exit "
            "with code 1.",
        ),
    ] = False,
    host: Annotated[
        Optional[list[str]],
        typer.Option(
            metavar="HOST[:PORT],…",
            help="Ask the HTTP ports of guards on other machines, with http.token; lists "
            "the worst first.",
        ),
    ] = None,
) -> None:
    """Show the state of a run, even after its guard has ended; without a name, of every guard of
    yours that is running. Exit code 3 if none is."""
    if host:
        from miner_guard.cli import fleet

        token = options.open_context(
            config, options.DEFAULT_NAME, state_dir
        ).settings.config.http.token
        raise typer.Exit(fleet.show(host, token, as_json=as_json, check=check))
    if not (as_json or check or options.is_named(name, state_dir)):
        from miner_guard.record import status_document

        guards = status_document.running_guards()
        if len(guards) > 1:
            _list(guards)
            return
    from miner_guard.cli import screen
    from miner_guard.record.status_document import StatusDocument, listens, read_document
    from miner_guard.watch.state_words import answers, is_live, problem, with_axes

    state = options.find_guard(name, state_dir)
    record, document = RunReader(state.db), read_document(state)
    if not document and listens(state):
        # The guard has not written its state yet.
        document = {"state": "starting"}
    if not document:
        if record.last_id() == 0 and record.unread is not None:
            raise Refused(f"{state.db} cannot be read: {record.unread}", FAILED)
        raise Refused(
            f"no guard has run in {state.root}; {options.start_or_name(state)}", NOT_RUNNING
        )
    shown = StatusDocument.from_json(document)
    live = is_live(shown)
    started = record.events(["guard_started"], limit=1, newest=True)
    if live and started:
        options.check_version(started[0].fields)
    if check:
        # The same answer as `/healthz`, for a probe that runs a command.
        words = problem(shown) if live else answers(shown)[0]
        if words is not None:
            raise Refused(words, FAILED if live else NOT_RUNNING)
        echo("progressing")
    elif as_json:
        echo(json.dumps(with_axes(document), ensure_ascii=False, indent=1))
    else:
        view = screen.View()
        rows = screen.read(state, (_WIDTH, None), view, level="warning")
        screen.print_lines(rows, _WIDTH, view)
    if not live:
        raise typer.Exit(NOT_RUNNING)


def _list(running: list[StateDir]) -> None:
    """One line per running guard, the one that needs a person first."""
    from miner_guard.cli import screen
    from miner_guard.record.status_document import read_status
    from miner_guard.watch.state_words import urgency

    guards = [(state, read_status(state)) for state in running]
    for state, status in sorted(guards, key=lambda guard: urgency(guard[1])):
        echo("  ".join([options.flag(state), *screen.state_lines(status)]))


@command("See", "miner-guard top", "miner-guard top --once | head -n 2")
def top(
    every: Annotated[
        float, options.at_least(0.2, "Refresh interval in seconds.", "--every", "-d")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one screen and exit.")] = False,
    config: options.Config = None,
    name: options.AnyName = None,
    state_dir: options.State = None,
) -> None:
    """Show the state of the run live: uploads, ranks, GPUs, curves, events. Keys: q
    quits, p pauses, n shows the next ranks."""
    from miner_guard.cli import screen

    state = options.find_guard(name, state_dir)
    if not state.db.is_file():
        raise Refused(
            f"no guard has run in {state.root}; {options.start_or_name(state)}", NOT_RUNNING
        )
    with contextlib.suppress(KeyboardInterrupt):
        screen.show(state, every, once=once)


@command(
    "See",
    "miner-guard logs --level warning -n 20",
    "miner-guard logs --event verdict_changed --since 1d",
    "miner-guard logs --event inner_step --rank 0 --follow",
)
def logs(
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
        Optional[str], typer.Option("--ledger", help="Print a ledger table: decisions or uploads.")
    ] = None,
    emoji: Annotated[
        bool, typer.Option("--emoji/--no-emoji", help="Print an emoji before each line.")
    ] = True,
    config: options.Config = None,
    name: options.AnyName = None,
    state_dir: options.State = None,
) -> None:
    """Query the run's events. Exit 1: nothing matched."""
    from miner_guard.record.events import LEVELS

    state = options.find_guard(name, state_dir)
    if event:
        from miner_guard.show import runbook

        allowed = runbook.rows()
        for unknown in (name for name in event if allowed and name not in allowed):
            raise options.unknown_name("event", unknown, allowed)
    if level not in LEVELS:
        raise Refused(f"unknown level {level!r}; allowed: {', '.join(LEVELS)}", USAGE)
    earliest = options.earliest(since)
    options.check_there(state)
    if ledger is not None:
        if event or rank or follow or level != "debug":
            raise Refused(
                "--ledger works only with --since, --lines and --json; the other options "
                "filter log lines",
                USAGE,
            )
        _ledger(state, ledger, earliest, lines, as_json=as_json)
        return
    record = RunReader(state.db)

    if follow and lines is None and not earliest:
        lines = _TAIL_OF_FOLLOW
    restrictions: dict[str, Any] = {"min_level": level, "ranks": rank or ()}
    rows = record.events(
        event or (), since=earliest, limit=lines, newest=lines is not None, **restrictions
    )
    if follow:
        after = rows[-1].id if rows else record.last_id()
        new = record.each(event or (), follow=True, after=after, **restrictions)
        with contextlib.suppress(KeyboardInterrupt):
            for row in chain(rows, new):
                _write([_line(row, as_json=as_json, emoji=emoji) + "\n"])
        return
    if record.unread is not None:
        raise Refused(f"{state.db} cannot be read: {record.unread}", FAILED)
    texts = (_line(row, as_json=as_json, emoji=emoji) for row in rows)
    if as_json:
        # One document with one event per line, readable by `jq '.[]'` and by people.
        _write(["[\n", ",\n".join(texts), "\n]\n"] if rows else ["[]\n"])
    else:
        _write(f"{text}\n" for text in texts)
    if not rows:
        raise typer.Exit(FAILED)


def _line(event: StoredEvent, *, as_json: bool, emoji: bool) -> str:
    from miner_guard.record.lines import console_line, json_line

    record = event.record()
    return json_line(record) if as_json else console_line(record, emoji=emoji)


def _write(texts: Iterable[str]) -> None:
    out = sys.stdout.buffer
    for text in texts:
        out.write(text.encode("utf-8", "replace"))
    out.flush()


def _ledger(state: StateDir, table: str, since: str, lines: int | None, *, as_json: bool) -> None:
    """Print the ledger's rows, oldest first. Raises Refused: 64 for an unknown table, 1 if it is
    empty."""
    record, from_s = RunReader(state.db), parse_iso_utc(since) if since else 0.0
    try:
        rows = record.rows(
            table.removesuffix("s"), since=from_s, limit=100_000 if lines is None else lines
        )
    except ValueError as error:
        raise Refused(f"--ledger: {error}", USAGE) from error
    if record.unread is not None:
        raise Refused(f"{state.db} cannot be read: {record.unread}", FAILED)
    if not rows:
        raise Refused(f"the ledger in {state.root} has no {table}", FAILED)
    if as_json:
        shown = [
            {k: json.loads(v) if k in _ONLY_JSON else v for k, v in row.items()} for row in rows
        ]
        _write([visible(json.dumps(shown, ensure_ascii=False, indent=1)) + "\n"])
        return
    for row in rows:
        fields = " ".join(
            f"{k}={v}"
            for k, v in row.items()
            if v is not None and k != "wall" and k not in _ONLY_JSON
        )
        _write([f"{iso_utc(row['wall'])} {visible(fields)}\n"])


@command(
    "See",
    "miner-guard report -o day.html --since 1d",
    "miner-guard report -o help.tar.gz --bundle --since 6h",
    "miner-guard report -o runs/miner --export tensorboard",
)
def report(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file (or --export folder) to write.")
    ],
    since: options.Since = "",
    bundle: Annotated[
        bool,
        typer.Option(
            "--bundle", help="Write a .tar.gz of all that support asks for, secrets removed."
        ),
    ] = False,
    export: Annotated[
        Optional[str],
        typer.Option(metavar="tensorboard|wandb", help="Write the run's metrics for this program."),
    ] = None,
    project: Annotated[
        str, typer.Option("--project", help="--export wandb: name of the project.")
    ] = "miner-guard",
    online: Annotated[
        bool,
        typer.Option("--online", help="--export wandb: upload instead of writing offline files."),
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="--export: continue as the guard writes.")
    ] = False,
    config: options.Config = None,
    name: options.AnyName = None,
    state_dir: options.State = None,
) -> None:
    """Write one self-contained HTML page about the run: curves, uploads, costs, incidents. Or pack
    it for support, or export its metrics."""
    if export not in (None, "tensorboard", "wandb"):
        raise Refused(f"--export takes tensorboard or wandb, not {export!r}", USAGE)
    place = options.open_guard(config, name, state_dir)
    earliest = options.earliest(since or ("2d" if bundle else ""))
    options.check_there(place.state)
    if bundle:
        _bundle(place, output, earliest)
    elif export is not None:
        _export(place.state, export, output, earliest=earliest, way=(project, online, follow))
    else:
        _page(place, output, earliest)


def _page(place: options.CommandContext, output: Path, earliest: str) -> None:
    from miner_guard.show.page import render

    with working("reading the record"):
        text = render(place.state, gate=place.settings.config.gate, since=earliest)
    with writing(output):
        statedir.write_atomic(output, text, 0o666)
    echo(f"wrote {output} ({len(text.encode()) / 1024:.0f} KB)")


def _bundle(place: options.CommandContext, output: Path, earliest: str) -> None:
    from miner_guard.record.redaction import Redactor
    from miner_guard.show.bundle import collect, pack
    from miner_guard.uploads.repos.credentials import beside

    settings = place.settings.config
    files = collect(place.state, earliest, place.settings)
    redactor = Redactor.for_guard(beside(os.environ, settings.repo), settings)
    with writing(output), working("collecting and redacting"):
        manifest = pack(output, files, redactor)
    for row in manifest["files"]:
        echo(f"{row['bytes']:>9}  {row['name']}  {row['what']}")
    echo(f"wrote {output} ({output.stat().st_size / 1024:.0f} KB); review it before you share it")


def _export(
    state: StateDir, kind: str, output: Path, *, earliest: str, way: tuple[str, bool, bool]
) -> None:
    from miner_guard.config import optional_deps
    from miner_guard.show import export

    project, online, follow = way
    events = RunReader(state.db).each(export.EVENTS, since=earliest, follow=follow)
    writer = export.to_tensorboard(output)
    if kind == "wandb":
        writer = export.to_wandb(output, project, online=online)
    count = 0
    try:
        with writer as write, contextlib.suppress(KeyboardInterrupt), working(f"to {output}"):
            for point in export.points(events):
                write(point)
                count += 1
    except ImportError as error:
        raise Refused(
            f"{kind} is not installed ({error}); {optional_deps.install(kind)}", UNAVAILABLE
        ) from error
    except OSError as error:
        raise Refused(f"{output} cannot be written: {error.strerror or error}", FAILED) from error
    echo(f"wrote {count} points to {output}")
    if not count:
        raise typer.Exit(FAILED)
