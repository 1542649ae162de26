"""The options that every command takes (`-c`, `--name`, `--state-dir`), and how they are resolved.

A command declares them as `config: Config = None, name: Name = DEFAULT_NAME, state_dir: State =
None` and calls `open_context(config, name, state_dir)`.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from miner_guard import state_dir as statedir
from miner_guard.exits import CONFIG, FAILED, USAGE, Refused
from miner_guard.system.clock import iso_utc, parse_iso_utc

if TYPE_CHECKING:
    from miner_guard.config import RepoSettings
    from miner_guard.config.loading import Settings

DEFAULT_NAME = "miner"

MAX_COUNT = 10**15
"""Default upper limit for numeric flags: JSON has no infinity."""


_OTHERS = 5


def a_number(value: Optional[float]) -> Optional[float]:
    """The `callback=` of a numeric option: refuses numbers above `MAX_COUNT`, and NaN, which typer
    before 0.29 accepts whatever the limits. A `max=` would print fifteen zeros in the help."""
    if value is not None and value != value:
        raise typer.BadParameter("nan is not a number")
    if value is not None and value > MAX_COUNT:
        # A whole number may have more digits than a float can hold.
        shown = f"{value:g}" if abs(value) < 1e300 else "a number of 300 digits or more"
        raise typer.BadParameter(f"{shown} is not in the range x<={MAX_COUNT:g}")
    return value


Config = Annotated[
    Optional[Path],
    typer.Option("--config", "-c", help="Settings file; defaults to ./guard.toml if present."),
]
Name = Annotated[
    str, typer.Option("--name", help="Name of the miner; determines the state directory.")
]
AnyName = Annotated[
    Optional[str],
    typer.Option(
        "--name", help="Name of the miner; defaults to the running guard's.", show_default=False
    ),
]
State = Annotated[
    Optional[str], typer.Option("--state-dir", help="State directory; overrides --name.")
]
Since = Annotated[
    str,
    typer.Option("--since", help="Only newer events: 90s, 15m, 1h, 2d, or 2026-01-02T03:04 (UTC)."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


@dataclass(frozen=True)
class CommandContext:
    """A command's input: the validated settings and the state directory, which has not been read
    yet."""

    settings: Settings
    state: statedir.StateDir
    profile: str | None


def open_context(
    config: Path | None, name: str, state_dir: str | None, flags: Mapping[str, Any] | None = None
) -> CommandContext:
    """Load the settings and choose the state directory. Raises Refused: 64 for a bad flag, 78 for
    bad settings."""
    # Import here, not above: these imports take most of the start-up time, and commands such as
    # `logs` read no settings.
    from miner_guard.config import loading
    from miner_guard.validators.profiles import chosen

    try:
        # Load twice: the first pass only determines which profile applies.
        first = loading.load(config, flags=flags).config
        profile = chosen(first.miner)
        document = None if profile is None else settings_of_profile(profile)
        loaded = loading.load(
            config,
            profile=document,
            profile_origin=f"profile {profile}",
            dotenv=_dotenv(first.repo),
            flags=flags,
        )
    except loading.BadConfig as error:
        raise Refused(
            str(error), USAGE if isinstance(error, loading.BadFlag) else CONFIG
        ) from error
    return CommandContext(loaded, choose_state(name, state_dir), profile)


def _dotenv(repo: RepoSettings) -> tuple[str, Mapping[str, str]] | None:
    """The miner's `.env` if it contains the guard's keys, because pm2's filter_env removes secrets
    from the environment."""
    if repo.credentials != "dotenv":
        return None
    from miner_guard.uploads.repos.base import RepoError
    from miner_guard.uploads.repos.credentials import find

    try:
        return repo.credentials_file or ".env", find(repo)
    except RepoError:
        # Commands that open the repo report the file's error; commands that need no key continue.
        return None


def settings_of_profile(profile: str) -> Mapping[str, Any]:
    """Return a profile's defaults for guard.toml. Raises Refused (78) if the profile is invalid."""
    from miner_guard.validators.profiles import load_profile

    try:
        return load_profile(profile).settings
    except (OSError, ValueError) as error:
        raise Refused(f"profile: {error}", CONFIG) from error


def choose_state(name: str, state_dir: str | None) -> statedir.StateDir:
    """Choose the state directory without reading any settings. Raises Refused (78) for an invalid
    name."""
    if os.sep in name or name in ("", ".", ".."):
        raise Refused(
            f"--name {name!r} is not a valid directory name; use letters, digits and dashes", CONFIG
        )
    try:
        return statedir.choose(name, state_dir, os.environ)
    except statedir.Untrusted as error:
        raise Refused(f"state directory refused: {error}", CONFIG) from error
    except RuntimeError as error:
        # HOME is not set and the host does not know the user, as in a container with an arbitrary
        # uid.
        raise Refused(
            f"no state directory: {error} Pass --state-dir, or set HOME", CONFIG
        ) from error


def start_or_name(state: statedir.StateDir) -> str:
    """Return advice for when no guard is running: start a guard, or name one whose state directory
    is next to this one."""
    start = "start it with `miner-guard run`"
    folder = state.root.parent
    if folder.name != statedir.FOLDER:
        return start
    try:
        others = sorted(
            p.name
            for p in folder.iterdir()
            if p != state.root and statedir.StateDir(p).db.is_file()
        )
    except OSError:
        return start
    if not others:
        return start
    more = "" if len(others) <= _OTHERS else f" and {len(others) - _OTHERS} more"
    return (
        f"{start}, or pass the --name of a guard that ran here: {', '.join(others[:_OTHERS])}{more}"
    )


def check_there(state: statedir.StateDir) -> None:
    """Raises Refused (1) if the state directory does not exist, which means that no guard has run
    there."""
    if not state.root.is_dir():
        raise Refused(
            f"state directory {state.root} does not exist; "
            "pass the --name or --state-dir that you passed to `run`",
            FAILED,
        )


def earliest(since: str) -> str:
    """Return the ISO time for `--since`; empty if it sets no limit. Raises Refused (64)."""
    try:
        return _since_text(since, time.time()) if since else ""
    except ValueError as error:
        raise Refused(f"--since: {error}", USAGE) from error


def check_command(program: str) -> None:
    """Raises Refused (64) for a program that can't be started."""
    # Imported late: it is slow, and commands such as `logs` start no program.
    import shutil

    if shutil.which(program) is None:
        problem = "is not executable" if os.path.exists(program) else "was not found"
        first, _, rest = program.partition(" ")
        shell = "=" in first or (rest and shutil.which(first))
        step = (
            "wrap a shell command as: sh -c 'COMMAND'"
            if shell
            else "check the spelling and the PATH, or pass its full path"
        )
        raise Refused(f"command {program!r} {problem}; {step}", USAGE)


def unknown_event(name: str) -> str:
    """The message for an event name that the runbook lacks, with the closest names."""
    import difflib

    from miner_guard.reporting.runbook import rows

    near = difflib.get_close_matches(name, rows(), n=3, cutoff=0.0)
    sure = difflib.get_close_matches(name, rows(), n=2)
    meant = f"did you mean {' or '.join(sure)}?" if sure else f"nearest: {', '.join(near)};"
    return f"unknown event {name!r}; {meant} miner-guard runbook lists all {len(rows())} events"


_MIDNIGHT = "0000-00-00T00:00:00.000000"
"""Supplies the hour, minute or second that a shortened time leaves out."""

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def _since_text(text: str, now: float) -> str:
    """Convert `90s`, `15m`, `1h`, `2d` or an ISO time to the ISO time of the earliest line. Raises
    ValueError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhdw])", text.strip())
    if match:
        return iso_utc(max(0.0, now - float(match[1]) * _UNITS[match[2]]))
    if re.fullmatch(r"\d{4}-\d\d-\d\d(T\d\d(:\d\d(:\d\d(\.\d{1,6})?)?)?)?Z?", text.strip()):
        given = text.strip().rstrip("Z")
        whole = f"{given}{_MIDNIGHT[len(given) :]}Z"
        with contextlib.suppress(ValueError):
            parse_iso_utc(whole)
            return whole
    raise ValueError(f"{text!r} is not a time; use 90s, 15m, 1h, 2d, or 2026-01-02T03:04 (UTC)")
