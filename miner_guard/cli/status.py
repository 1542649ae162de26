"""`miner-guard status`: what the running guard knows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import typer

from miner_guard.cli import options
from miner_guard.cli.exits import FAILED, NOT_RUNNING, Refused


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
    typer.echo(json.dumps(document, ensure_ascii=False, indent=1) if as_json else "\n".join(_lines(document)))


def _lines(document: Mapping[str, Any]) -> list[str]:
    """One line per fact; a part's own numbers one line each."""
    paused = ", restarts paused" if document.get("paused") else ""
    lines = [
        f"state      {document.get('state')}{paused}",
        f"run        {document.get('run_id')}, guard pid {document.get('pid')}, miner pid {document.get('miner_pid')}",
        f"attempt    {document.get('attempt')}, restarts in a row {document.get('restarts')}",
        f"started    {document.get('started') or 'not running'}",
        f"ranks      {', '.join(sorted(document.get('rank_processes') or {}, key=int)) or 'none yet'}",
    ]
    own = {
        "state",
        "paused",
        "run_id",
        "pid",
        "miner_pid",
        "attempt",
        "restarts",
        "started",
        "rank_processes",
        "command",
    }
    for key, value in document.items():
        if key not in own and value not in (None, {}, []):
            lines.append(f"{key:<10} {json.dumps(value, ensure_ascii=False)}")
    return lines
