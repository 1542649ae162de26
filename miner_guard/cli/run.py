"""`miner-guard run -- CMD…`: start the miner and supervise it."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any, Optional

import typer

from miner_guard.cli import options
from miner_guard.exits import CONFIG, USAGE, Refused

CONTEXT = {"allow_interspersed_args": False}


def command(
    miner: Annotated[
        Optional[list[str]],
        typer.Argument(metavar="-- CMD…", help="The miner's command.", show_default=False),
    ] = None,
    config: options.Config = None,
    name: options.Name = options.DEFAULT_NAME,
    state_dir: options.State = None,
    attach: Annotated[
        Optional[str],
        typer.Option(
            help=(
                "Hook an unmodified miner: sn38 (subnet 38's), auto (any torch loop), log "
                "(reads its step lines)."
            ),
            show_default=False,
        ),
    ] = None,
    max_restarts: Annotated[
        Optional[int],
        typer.Option(help="Consecutive restarts before the guard declares a crash loop."),
    ] = None,
    no_restart: Annotated[
        bool, typer.Option("--no-restart", help="Never restart; exit with the miner's exit code.")
    ] = False,
    finite: Annotated[
        Optional[bool],
        typer.Option(
            "--finite/--no-finite",
            help="Whether exit code 0 means that the miner has finished. By default it does not, "
            "except with --attach auto after a complete training loop.",
            show_default=False,
        ),
    ] = None,
    expect_gpus: Annotated[
        Optional[int], typer.Option(help="How many GPUs must be present.")
    ] = None,
    no_preflight: Annotated[
        bool, typer.Option("--no-preflight", help="Skip the startup checks.")
    ] = False,
    finished_code: Annotated[
        int, typer.Option(min=0, max=255, help="Exit code to use when the miner finishes.")
    ] = 0,
) -> None:
    """Start the miner and supervise it: preflight, start, watch, stop, restart."""
    flags: dict[str, Any] = {
        "miner.attach": attach,
        "miner.finite": finite,
        "restart.max_restarts": max_restarts,
        "restart.enabled": False if no_restart else None,
        "gpu.expect": expect_gpus,
        "gpu.preflight": False if no_preflight else None,
    }
    if not miner:
        raise Refused(
            "no command to run; write it after `--`: miner-guard run -- torchrun … train.py", USAGE
        )
    place = options.open_context(
        config, name, state_dir, {k: v for k, v in flags.items() if v is not None}
    )
    options.check_command(miner[0])
    raise typer.Exit(_supervise(miner, place, finished_code))


def _supervise(miner: list[str], place: options.CommandContext, finished_code: int) -> int:
    # Imported late: neither `--help` nor a refused command line needs it.
    from miner_guard.guard.app import GuardApp, Request
    from miner_guard.guard.child import keep_files_private
    from miner_guard.guard.lock import Lock, LockHeld

    keep_files_private()
    lock = Lock(place.state, place.settings.config.miner.stop_timeout_s)
    try:
        lock.acquire()
    except LockHeld as problem:
        raise Refused(str(problem), CONFIG) from problem
    sys.stdout.flush()
    code = GuardApp(
        Request(tuple(miner), place.settings.config, place.state, finished_code), lock
    ).run()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is written, so exit now. A normal interpreter exit would stop the watchdog's thread
    # and then wait for hung jobs.
    os._exit(code)
