"""`miner-guard status`: what the running guard knows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import typer

from miner_guard import logquery
from miner_guard.cli import options, screen
from miner_guard.exits import FAILED, NOT_RUNNING, Refused
from miner_guard.logquery import Query

_WIDTH = 120
_EVENTS = 8
"""Warnings and worse that are shown below."""


def command(
    config: options.Config = None,
    name: options.Name = options.DEFAULT_NAME,
    state_dir: options.State = None,
    as_json: options.Json = False,
) -> None:
    """What the running guard knows. Exit code 3 where none runs."""
    from miner_guard.supervisor.control import NotRunning, ask

    place = options.open_place(config, name, state_dir)
    try:
        document: Mapping[str, Any] = ask(place.state, {"do": "status"})["status"]
    except NotRunning as problem:
        raise Refused(f"{problem}; start it with `miner-guard run`", NOT_RUNNING) from problem
    except (OSError, KeyError, ValueError) as error:
        raise Refused(f"the guard in {place.state.root} does not answer: {error!r}", FAILED) from error
    if as_json:
        typer.echo(json.dumps(document, ensure_ascii=False, indent=1))
        return
    hits = logquery.last(place.state.log, Query(least_level="warning"), _EVENTS)
    told = [f"{hit.ts[:19]}Z {hit.level:<8} {hit.headline}"[:_WIDTH] for hit in hits]
    typer.echo("\n".join(_lines(document, told, place.settings.config.gate.min_inner_step)))


def _lines(document: Mapping[str, Any], events: list[str], min_inner_step: int) -> list[str]:
    """One screen: the run, then what `top` shows, then the last events."""
    paused = ", restarts paused" if document.get("paused") else ""
    ranks = ", ".join(sorted(document.get("rank_processes") or {}, key=int)) or "none yet"
    return [
        f"state      {document.get('state')}{paused}",
        f"run        {document.get('run_id')}, guard pid {document.get('pid')}, miner pid {document.get('miner_pid')}",
        f"attempt    {document.get('attempt')}, restarts in a row {document.get('restarts')}",
        f"started    {document.get('started') or 'not running'}",
        f"ranks      {ranks}",
        *(line.rstrip() for line in screen.overview(document, screen.Curves(), _WIDTH, min_inner_step=min_inner_step)),
        *events,
    ]
