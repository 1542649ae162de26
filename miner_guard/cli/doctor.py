"""`miner-guard doctor`: runs only the startup diagnosis."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from miner_guard.cli import command, options
from miner_guard.cli.output import echo, working
from miner_guard.exits import FAILED, OK, UNAVAILABLE, USAGE, Refused
from miner_guard.record.words import counted, visible

if TYPE_CHECKING:
    from miner_guard.checks.check import Check, Snapshot
    from miner_guard.config import Config

_FACTS = ("nvml", "torch", "cuda", "packages", "host", "repo")
"""Sections of the snapshot that `--json` prints unchanged."""

_STYLE = {"ok": "green", "warn": "yellow", "critical": "bold red", "unknown": "cyan"}


@command(
    "Understand",
    "miner-guard doctor",
    "miner-guard doctor --expect-gpus 4",
    "miner-guard doctor --alerts",
)
def doctor(
    miner: Annotated[
        Optional[list[str]],
        typer.Argument(
            metavar="-- CMD…",
            help="The command that starts the miner; doctor takes the Python interpreter from it.",
            show_default=False,
        ),
    ] = None,
    config: options.Config = None,
    name: options.Name = options.DEFAULT_NAME,
    state_dir: options.State = None,
    as_json: options.Json = False,
    expect_gpus: options.ExpectGpus = None,
    alerts: Annotated[
        bool,
        typer.Option(
            "--alerts", help="Only send a test message to every alert target; exit 1 if one fails."
        ),
    ] = False,
) -> None:
    """Check GPUs, driver, torch, node, environment and repo. Exit 0, or 69 if something is
    critical."""
    flags: dict[str, Any] = {} if expect_gpus is None else {"gpu.expect": expect_gpus}
    place = options.open_context(config, name, state_dir, flags)
    if alerts:
        _send_test(place.settings.config)
        return
    if miner:
        options.check_command(miner[0])
    from miner_guard.checks.request import PreflightRequest
    from miner_guard.guard.preflight import collect_snapshot, judge

    start = time.monotonic()
    question = PreflightRequest(
        place.settings.config, place.state, tuple(miner or ()), dict(os.environ)
    )
    with working("checking GPUs, torch, host, clock and repo"):
        snapshot = collect_snapshot(question, _pause)
    checks = judge(snapshot)
    critical = any(c.level == "critical" for c in checks)
    seconds = time.monotonic() - start
    if as_json:
        echo(
            json.dumps(
                document(snapshot, checks, seconds), indent=1, ensure_ascii=False, default=str
            )
        )
    else:
        _table(checks, seconds)
    raise typer.Exit(UNAVAILABLE if critical else OK)


def _send_test(settings: Config) -> None:
    from miner_guard.record.redaction import Redactor
    from miner_guard.show.alerts import send_test
    from miner_guard.uploads.repos import credentials

    urls = settings.alerts.urls
    if not urls:
        unread = credentials.problem(settings.repo)
        why = f"no targets, and {unread}" if unread else "no targets"
        raise Refused(
            f"{why}; set MINER_GUARD_ALERTS__URLS to a comma-separated list of Apprise URLs", USAGE
        )
    with working(f"sending to {counted(len(urls), 'target')}"):
        answer = send_test(settings.alerts)
    if answer.reason is not None:
        words = Redactor(urls).text(answer.reason)
        raise Refused(f"the test message did not reach every target: {words}", FAILED)
    echo(f"sent to {counted(answer.value, 'target')} in {answer.seconds:.1f} s")


def _pause(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def document(snapshot: Snapshot, checks: Sequence[Check], seconds: float) -> dict[str, Any]:
    """Return the snapshot and all results as a JSON document; its verdict is the worst level.
    Leaves out the environment and the command, which may contain secrets."""
    from miner_guard.checks.check import LEVELS, counts
    from miner_guard.record.redaction import Redactor
    from miner_guard.state_dir import finite

    whole = {
        "verdict": max((c.level for c in checks), key=LEVELS.index, default="unknown"),
        "counts": counts(checks),
        "expected_gpus": {"count": snapshot.expectation.count, "by": snapshot.expectation.origin},
        "checks": [dataclasses.asdict(c) for c in checks],
        **{name: getattr(snapshot, name) for name in _FACTS},
        "held_bytes": snapshot.held,
        "unread": dict(snapshot.unread),
        "seconds": seconds,
    }
    redacted: dict[str, Any] = Redactor.from_environment(os.environ).value(finite(whole))
    return redacted


def folded(checks: Sequence[Check]) -> list[Check]:
    """Return the rows of a compact table: a check that passes on several GPUs with the same wording
    gets a single row."""
    rows: list[Check] = []
    places: dict[tuple[str, str], int] = {}
    gpus: dict[int, list[int]] = {}
    for check in checks:
        if check.gpu is None or check.level != "ok":
            rows.append(check)
            continue
        words = check.seen.removeprefix(f"GPU {check.gpu}").lstrip(": ")
        place = places.setdefault((check.check, words), len(rows))
        if place == len(rows):
            rows.append(dataclasses.replace(check, seen=words))
        gpus.setdefault(place, []).append(check.gpu)
    for place, numbers in gpus.items():
        named = f"GPU {', '.join(map(str, numbers))}: {rows[place].seen}"
        rows[place] = dataclasses.replace(rows[place], seen=named)
    return rows


def _table(checks: Sequence[Check], seconds: float) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from miner_guard.checks.check import counts
    from miner_guard.record.redaction import Redactor

    secrets = Redactor.from_environment(os.environ)

    def redact(text: str) -> str:
        return visible(secrets.text(text))

    table = Table(box=None, pad_edge=False, show_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("read", overflow="fold")
    for check in folded(checks):
        style = _STYLE[check.level]
        limit = (
            f" [dim](limit: {escape(redact(check.limit))})[/]"
            if check.level != "ok" and check.limit
            else ""
        )
        table.add_row(check.check, f"[{style}]{check.level}[/]", escape(redact(check.seen)) + limit)
        if check.level != "ok" and check.next_step:
            table.add_row("", "", f"[dim]→ {escape(redact(check.next_step))}[/]")
    console = Console()
    console.print(table)
    n = counts(checks)
    console.print(
        f"{n['ok']} ok, {counted(n['warn'], 'warning')}, {n['critical']} critical, {n['unknown']} "
        f"unknown in {seconds:.1f} s"
    )
