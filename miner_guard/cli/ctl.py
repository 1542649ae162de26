"""`miner-guard ctl checkpoint|restart|pause|resume`: sends a request to the running guard."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from miner_guard.cli import options
from miner_guard.cli.echo import echo
from miner_guard.cli.find import check_version, find_guard
from miner_guard.exits import FAILED, NOT_RUNNING, Refused


class ControlAction(str, Enum):
    """The requests that a running guard accepts."""

    checkpoint = "checkpoint"
    restart = "restart"
    pause = "pause"
    resume = "resume"


def command(
    order: Annotated[
        ControlAction,
        typer.Argument(metavar="checkpoint|restart|pause|resume", help="The request to send."),
    ],
    config: options.Config = None,
    name: options.AnyName = None,
    state_dir: options.State = None,
) -> None:
    """Tell the running guard to write a checkpoint, or to restart, pause or resume the miner."""
    from miner_guard.guard.control_socket import NotRunning, ask

    state = find_guard(name, state_dir)
    try:
        answer = ask(state, {"do": order.value})
    except NotRunning as problem:
        raise Refused(f"{problem}; {options.start_or_name(state)}", NOT_RUNNING) from problem
    except OSError as error:
        raise Refused(f"the guard in {state.root} is not responding: {error}", FAILED) from error
    check_version(answer)
    if "error" in answer:
        raise Refused(str(answer["error"]), FAILED)
    echo(answer["done"])
