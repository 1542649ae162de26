"""`miner-guard run -- CMD…` starts the miner and supervises it; `miner-guard ctl` talks to it."""

from __future__ import annotations

import importlib
import os
import sys
import time
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from miner_guard.cli import command, options
from miner_guard.cli.output import echo
from miner_guard.exits import CONFIG, FAILED, NOT_RUNNING, USAGE, Refused
from miner_guard.state_dir import StateDir

if TYPE_CHECKING:
    from miner_guard.guard.keeper_client import KeeperClient


@command(
    "Run",
    "miner-guard run -- torchrun --nproc_per_node=4 neurons/miner.py --netuid 38",
    "miner-guard run --attach auto --finite -- python train.py",
)
def run(
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
    expect_gpus: options.ExpectGpus = None,
    no_preflight: Annotated[
        bool, typer.Option("--no-preflight", help="Skip the startup checks.")
    ] = False,
    finished_code: options.FinishedCode = 0,
) -> None:
    """Start the miner and supervise it: preflight, start, watch, stop, restart."""
    if not miner:
        raise Refused(
            "no command to run; write it after `--`: miner-guard run -- torchrun … train.py", USAGE
        )
    flags: dict[str, Any] = {
        "miner.attach": attach,
        "miner.finite": finite,
        "restart.max_restarts": max_restarts,
        "restart.enabled": False if no_restart else None,
        "gpu.expect": expect_gpus,
        "gpu.preflight": False if no_preflight else None,
    }
    place = options.open_context(
        config, name, state_dir, {k: v for k, v in flags.items() if v is not None}
    )
    options.check_command(miner[0])
    title = place.state.root.name if name == options.DEFAULT_NAME and state_dir else name
    from miner_guard.guard.app import GuardApp, Request

    file = os.path.abspath(config or "guard.toml")
    settings = place.settings.config
    request = Request(tuple(miner), settings, place.state, finished_code, title, file)
    keeper, last_boot = take_state(place.state)
    code = GuardApp(request, keeper, last_boot).run()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is written, so exit now. A normal interpreter exit would wait for hung jobs.
    os._exit(code)


def take_state(state: StateDir) -> tuple[KeeperClient, str | None]:
    """Connect to this process's keeper and acquire the lock of the state directory. Returns the
    keeper and the boot in which the lock was last held; None for a keeper's later guards, which
    inherit the lock."""
    from miner_guard.guard import lock
    from miner_guard.guard.keeper_client import KeeperClient, KeeperGone

    # Files of this process are private to its user; the miner gets the keeper's umask.
    os.umask(0o077)
    try:
        keeper = KeeperClient.inherited()
        if keeper is not None and "lock" in keeper.hello.held:
            return keeper, None
        pid = os.getpid() if keeper is None else keeper.hello.keeper_pid
        fd, last_boot = lock.acquire(state, pid)
    except lock.LockHeld as problem:
        raise Refused(str(problem), CONFIG) from problem
    except KeeperGone as problem:
        raise Refused(str(problem), FAILED) from problem
    if keeper is None:
        raise Refused("no keeper started this process; run `python -m miner_guard`", FAILED)
    keeper.hold("lock", [fd])
    return keeper, last_boot


_SAVED_EVERY_S = 0.2


class ControlAction(str, Enum):
    """The requests that a running guard accepts."""

    checkpoint = "checkpoint"
    restart = "restart"
    pause = "pause"
    resume = "resume"
    reload = "reload"


@command("Run", "miner-guard ctl checkpoint", "miner-guard ctl restart --name miner")
def ctl(
    order: Annotated[
        ControlAction, typer.Argument(metavar="ORDER", help="What the guard is to do.")
    ],
    wait: Annotated[
        Optional[float],
        typer.Option(min=0, metavar="SECONDS", help="With checkpoint: return once it is saved."),
    ] = None,
    config: options.Config = None,
    name: options.AnyName = None,
    state_dir: options.State = None,
) -> None:
    """Ask the running guard to have a checkpoint written, to restart, pause or resume the miner,
    or to reload: hand over to the installed version while the miner trains."""
    from miner_guard.guard.control_socket import NotRunning, ask

    if order is ControlAction.reload:
        # An installation that cannot be imported must not replace one that runs.
        importlib.import_module("miner_guard.guard.app")
    state = options.find_guard(name, state_dir)
    try:
        answer = ask(state, {"do": order.value})
    except NotRunning as problem:
        raise Refused(f"{problem}; {options.start_or_name(state)}", NOT_RUNNING) from problem
    except OSError as error:
        raise Refused(f"the guard in {state.root} is not responding: {error}", FAILED) from error
    if order is not ControlAction.reload:
        options.check_version(answer)
    if "error" in answer:
        raise Refused(str(answer["error"]), FAILED)
    echo(answer["done"])
    deadline = time.monotonic() + (wait or 0.0)
    while order is ControlAction.checkpoint and wait is not None:
        saved = ask(state, {"do": "saved"})["done"]
        if saved:
            echo("saved")
            return
        if saved is None:
            raise Refused("no rank of this node looks for requests for checkpoints", FAILED)
        if time.monotonic() >= deadline:
            raise Refused(f"the ranks have not saved within {wait:g} s", FAILED)
        time.sleep(_SAVED_EVERY_S)
