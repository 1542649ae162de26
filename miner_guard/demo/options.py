"""The demo miner's command-line options."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from miner_guard.config import RepoSettings
from miner_guard.demo import faults
from miner_guard.demo.faults import Fault
from miner_guard.state_dir import STATE_DIR


@dataclass(frozen=True)
class Options:
    """The options of `python -m miner_guard.demo.train`."""

    work: Path
    """Folder for checkpoints, staged uploads and the published repo."""

    steps: int = 90
    """Inner steps in the whole run."""

    inner_steps_per_outer: int = 75
    """DiLoCo's H. Must exceed the gate's minimum inner step, or the gate would block every
    upload."""

    upload_steps: int = 15
    """Inner steps between uploads. In source 004, the gate blocks the upload at 15."""

    batch_size: int = 4
    effective_batch_size: int = 16
    checkpoint_every: int = 20
    repo: RepoSettings = field(default_factory=RepoSettings)
    """Where the demo publishes; by default the folder `published` in `work`."""

    faults: tuple[Fault, ...] = ()
    fault_repeat: bool = False


def parse(arguments: list[str] | None = None) -> Options:
    """Parse a command line. Exits with code 2 and the reason for an invalid option."""
    parser = argparse.ArgumentParser(
        prog="python -m miner_guard.demo.train", description="A small real miner."
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=_default_work(),
        help="folder for checkpoints, uploads and the published repo",
    )
    for name, text in (
        ("steps", "total inner steps in the run"),
        ("inner-steps-per-outer", "inner steps between outer steps"),
        ("upload-steps", "inner steps between uploads"),
        ("batch-size", "samples per micro-batch per rank"),
        ("effective-batch-size", "samples per inner step across all ranks"),
        ("checkpoint-every", "inner steps between checkpoints"),
    ):
        default = getattr(Options, name.replace("-", "_"))
        parser.add_argument(
            f"--{name}", type=_at_least_one, default=default, help=f"{text} (default {default})"
        )
    parser.add_argument(
        "--fault",
        dest="faults",
        type=_fault,
        action="append",
        default=[],
        metavar="KIND@STEP[:RANK]",
    )
    parser.add_argument(
        "--repo", type=_repo, help="the [repo] section as JSON (default: a folder under --work)"
    )
    parser.add_argument(
        "--fault-repeat", action="store_true", help="let faults fire again after a restart"
    )
    values = vars(parser.parse_args(arguments))
    repo = values["repo"] or RepoSettings(kind="local", path=str(values["work"] / "published"))
    return Options(**{**values, "faults": tuple(values["faults"]), "repo": repo})


def _default_work() -> Path:
    state = os.environ.get(STATE_DIR)
    return Path(state) / "demo" if state else Path(".demo") / "work"


def _repo(text: str) -> RepoSettings:
    try:
        return RepoSettings(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a valid [repo] section in JSON: {error}"
        ) from error


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not allowed: must be at least 1")
    return value


def _fault(text: str) -> Fault:
    try:
        return faults.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
