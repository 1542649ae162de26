"""`miner-guard runbook`: what an event means and what to do about it."""

from __future__ import annotations

from typing import Annotated

import typer

from miner_guard.cli.echo import echo
from miner_guard.cli.options import unknown_event
from miner_guard.exits import UNAVAILABLE, USAGE, Refused
from miner_guard.reporting.runbook import RunbookRow, rows


def command(
    event: Annotated[
        str | None,
        typer.Argument(metavar="EVENT", help="An event's name; omit it to list all events."),
    ] = None,
) -> None:
    """Show what an event means and what to do about it."""
    found = rows()
    if not found:
        raise Refused(
            "this installation has no runbook; install miner-guard from a wheel or from source",
            UNAVAILABLE,
        )
    if event is None:
        width = max(map(len, found))
        echo("\n".join(f"{row.event:<{width}}  {row.meaning}" for row in found.values()))
        return
    if event not in found:
        raise Refused(unknown_event(event), USAGE)
    echo("\n".join(_described(found[event])))


def _described(row: RunbookRow) -> list[str]:
    return [
        f"event    {row.event}",
        f"means    {row.meaning}",
        f"do       {row.action}",
        f"grep for {row.grep}",
        f"earlier  miner-guard logs --event {row.event}",
    ]
