"""`miner-guard demo`: runs the demo miner under the guard, from a fresh start to a summary."""

from __future__ import annotations

import dataclasses
import glob
import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from miner_guard.cli import command, options
from miner_guard.cli.output import echo
from miner_guard.demo.faults import KINDS, parse
from miner_guard.exits import CONFIG, UNAVAILABLE, USAGE, Refused
from miner_guard.state_dir import StateDir, read_json

if TYPE_CHECKING:
    from miner_guard.config import Config

DEFAULTS: dict[str, dict[str, Any]] = {
    "health": {"snapshot_every_s": 10.0, "disk_min_free_gb": 1.0},
    "repo": {"kind": "local", "refresh_every_s": 5.0},
    "restart": {"backoff_s": 1.0},
    "hang": {"min_s": 45.0},
    # The summary counts and averages the logged steps, and a fast machine takes eleven a second.
    "logs": {"step_lines_per_s": 100.0},
    "steps": {"breakdown_every": 30},
}
"""Settings that differ from those of a real run, because the demo ends within minutes. guard.toml
and the environment override them."""

_WORK = "demo"


@command("Run", "miner-guard demo", "miner-guard demo --fault slow@40 --fault hang@60:1")
def demo(
    fault: Annotated[
        Optional[list[str]],
        typer.Option(
            metavar="KIND@STEP[:RANK]",
            help=f"A fault to inject, such as slow@20:1. Kinds: {', '.join(KINDS)}. Repeatable.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of inner steps.")] = 90,
    ranks: Annotated[
        Optional[int],
        typer.Option(
            min=1, help="Number of ranks; default: one per GPU, or 2.", show_default=False
        ),
    ] = None,
    fault_repeat: Annotated[
        bool, typer.Option("--fault-repeat", help="Let a fault fire again after a restart.")
    ] = False,
    config: options.Config = None,
    name: options.Name = "demo",
    state_dir: options.State = None,
    finished_code: Annotated[
        int, typer.Option(min=0, max=255, help="Exit code to use when the demo finishes.")
    ] = 0,
) -> None:
    """Watch a small but real miner train under the guard, its uploads first blocked, then
    published."""
    ranks = ranks or len(glob.glob("/dev/nvidia[0-9]*")) or 2
    _check(fault or [], steps, ranks)
    state = options.choose_state(name, state_dir)
    settings = _settings(config, state)
    arguments = ["--steps", str(steps), "--work", str(state.root / _WORK)]
    arguments += ["--repo", json.dumps(dataclasses.asdict(settings.repo))]
    for one in fault or []:
        arguments += ["--fault", one]
    if fault_repeat:
        arguments.append("--fault-repeat")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    # Without an explicit log folder, torchrun leaves a new folder in /tmp on every start.
    launcher += ["--log-dir", str(state.root / _WORK / "torchrun")]
    miner = (sys.executable, "-u", *launcher, "-m", "miner_guard.demo.train", *arguments)
    raise typer.Exit(_run(miner, settings, state, finished_code))


def _check(faults: list[str], steps: int, ranks: int) -> None:
    for text in faults:
        try:
            fault = parse(text)
        except ValueError as error:
            raise Refused(str(error), USAGE) from error
        if fault.step > steps:
            raise Refused(
                f"fault {text!r} never fires: the demo has only {steps} steps; raise --steps", USAGE
            )
        if fault.rank is not None and fault.rank >= ranks:
            raise Refused(
                f"fault {text!r} never fires: the ranks are 0 to {ranks - 1}; raise --ranks", USAGE
            )
    if importlib.util.find_spec("torch") is None:
        from miner_guard.config import optional_deps

        raise Refused(
            f"the demo needs torch, which is not installed; {optional_deps.install('torch')}",
            UNAVAILABLE,
        )


def _settings(config: Path | None, state: StateDir) -> Config:
    from miner_guard.config import BadConfig, loading

    defaults = {
        **DEFAULTS,
        "repo": {**DEFAULTS["repo"], "path": str(state.root / _WORK / "published")},
    }
    try:
        return loading.load(config, profile=defaults, profile_origin="the demo's defaults").config
    except BadConfig as error:
        raise Refused(str(error), CONFIG) from error


def _run(miner: tuple[str, ...], settings: Config, state: StateDir, finished_code: int) -> int:
    from miner_guard.cli import screen
    from miner_guard.cli.run import take_state
    from miner_guard.demo import summary
    from miner_guard.guard.app import GuardApp, Request
    from miner_guard.record.status_document import read_status
    from miner_guard.record.store import RunReader
    from miner_guard.watch.incident import latest

    keeper, last_boot = take_state(state)
    try:
        if keeper.hello.last_guard is None:
            start_fresh(state)
    except OSError as error:
        raise Refused(
            f"cannot clear state directory {state.root}: {error}; choose another directory", CONFIG
        ) from error
    code = GuardApp(Request(miner, settings, state, finished_code), keeper, last_boot).run()
    costs = read_json(state.costs)
    record = RunReader(state.db)
    records = (event.record() for event in record.events())
    status = read_status(state)
    strip = "" if status is None else screen.past_strip(status)
    card = latest(record)
    incident = "" if card is None else card.sentence
    ledger = costs if isinstance(costs, dict) else None
    echo("\n".join(summary.lines(records, ledger, incident, strip)))
    return code


def start_fresh(state: StateDir) -> None:
    """Remove the files of an earlier demo. Raises OSError, and Refused if they belong to a real
    miner."""
    work = state.root / _WORK
    run_files = [state.flight, state.gate_inputs, state.shapes, state.costs.parent, state.incidents]
    run_files += [*state.root.glob(f"{state.log.name}*"), *state.root.glob(f"{state.db.name}*")]
    present = [path for path in run_files if path.exists()]
    if present and not work.is_dir():
        raise Refused(
            f"{present[0]} belongs to a real miner, and the demo would remove it; choose another "
            "--state-dir",
            CONFIG,
        )
    for path in [*present, work]:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    work.mkdir(parents=True, exist_ok=True)
