"""`miner-guard status`: the state of the running guard."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from miner_guard.cli import options, screen
from miner_guard.cli.echo import echo
from miner_guard.cli.find import check_version, open_guard
from miner_guard.cli.screen import CurveHistory
from miner_guard.cli.screen_text import cut
from miner_guard.cli.terminal import has_unicode
from miner_guard.cli.top import curves_of
from miner_guard.config import HangSettings
from miner_guard.eventlog.status_document import StatusDocument, UploadsStatus
from miner_guard.exits import FAILED, NOT_RUNNING, Refused
from miner_guard.record.store import RunReader
from miner_guard.system.clock import iso_utc

_WIDTH = 120
_EVENTS = 8
"""How many events at warning level or above to show at the bottom."""


def command(
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
) -> None:
    """Show what the running guard knows. Exit code 3 if no guard is running."""
    from miner_guard.guard.control_socket import NotRunning, ask

    place = open_guard(config, name, state_dir)
    try:
        answer = ask(place.state, {"do": "status"})
        document: Mapping[str, Any] = answer["status"]
    except NotRunning as problem:
        advice = options.start_or_name(place.state)
        raise Refused(f"{problem}; {_last_end(place.state.db)}{advice}", NOT_RUNNING) from problem
    except (OSError, KeyError, ValueError) as error:
        raise Refused(
            f"the guard in {place.state.root} is not responding: {error!r}", FAILED
        ) from error
    status = StatusDocument.from_json({"updated": iso_utc(time.time()), **document})
    check_version(answer)
    if check:
        _check(status, place.settings.config.hang)
        return
    if as_json:
        echo(json.dumps(document, ensure_ascii=False, indent=1))
        return
    hits = RunReader(place.state.db).events(min_level="warning", limit=_EVENTS, newest=True)
    events = [cut(f"{hit.ts[:19]}Z {hit.level:<8} {hit.headline}", _WIDTH) for hit in hits]
    echo(
        "\n".join(
            _lines(
                status, curves_of(place.state), events, place.settings.config.gate.min_inner_step
            )
        )
    )


def _check(status: StatusDocument, hang: HangSettings) -> None:
    """Give the same answer as `/healthz`, for a container or Kubernetes probe that runs a command.
    Raises Refused (1) if the miner is not making progress."""
    from miner_guard.reporting import progress

    if (problem := progress.problem(status, 0.0, time.time(), hang)) is not None:
        raise Refused(problem, FAILED)
    echo("progressing")


def _last_end(db: Path) -> str:
    """Describe how the last guard ended, such as `the last one: 2026-01-02T03:04:05Z GUARD STOPPED:
    exit code 75, …; `. Empty if no guard has run."""
    for hit in RunReader(db).events(["guard_started", "guard_stopped"], limit=1, newest=True):
        if hit.name == "guard_stopped":
            return f"the last one: {hit.ts[:19]}Z {hit.headline}; "
        return f"the last one started {hit.ts[:19]}Z and was killed before it could log why; "
    return ""


def _lines(
    status: StatusDocument, curves: CurveHistory, events: list[str], min_inner_step: int
) -> list[str]:
    """Return one screen: the run, then the lines that `top` shows, then the last warnings."""
    paused = "  restarts paused" if status.paused else ""
    since = f" since {status.started[:19]}Z" if status.started else ""
    ranks = ", ".join(sorted(status.rank_processes, key=int)) or "none yet"
    return [
        *screen.verdict_lines(status),
        *screen.week_lines(status, 0.0, ascii_only=not has_unicode()),
        screen.head(status, 0.0) + paused,
        f"run    {status.run_id}, attempt {status.attempt}{since}, guard pid {status.pid}, miner "
        f"pid {status.miner_pid}, ranks {ranks}",
        *(
            line.rstrip()
            for line in screen.overview(status, curves, _WIDTH, min_inner_step=min_inner_step)
        ),
        *(cut(line, _WIDTH) for line in _last(status.uploads)),
        *(["", "last warnings", *events] if events else ["", "no warnings"]),
    ]


def _last(uploads: UploadsStatus) -> Iterator[str]:
    """The latest upload, audit, incident and restart; the gate's decision is shown above them."""
    upload, audit, incident, restart = (
        uploads.upload,
        uploads.audit,
        uploads.incident,
        uploads.restart,
    )
    rows: list[tuple[str, float | None, Sequence[str | None]]] = []
    if upload is not None:
        rows.append(("upload", upload.wall, (upload.tag, upload.outcome, upload.error)))
    if audit is not None:
        rows.append(("audit", audit.wall, (audit.outcome, audit.detail)))
    if incident is not None:
        rows.append(("incident", incident.wall, (incident.label,)))
    if restart is not None:
        rows.append(("restart", restart.wall, (restart.cause,)))
    for name, wall, words in rows:
        when = "" if wall is None else f" at {iso_utc(wall)[:19]}Z"
        yield f"last {name}{when}: {': '.join(word for word in words if word is not None)}"
