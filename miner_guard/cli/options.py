"""The options that every command takes (`-c`, `--name`, `--state-dir`), and what they choose: the
settings, and the guard that a command talks to."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from miner_guard import __version__
from miner_guard import state_dir as statedir
from miner_guard.cli.output import echo
from miner_guard.exits import CONFIG, FAILED, USAGE, Refused
from miner_guard.state_dir import StateDir, distrust
from miner_guard.system.clock import iso_utc

if TYPE_CHECKING:
    from miner_guard.config import RepoSettings
    from miner_guard.config.loading import Settings

DEFAULT_NAME = "miner"

MAX_COUNT = 10**15
"""Upper limit for numeric flags: JSON has no infinity."""

_DEMO = Path(".demo", "state")
"""The state directory of `make demo`, in the source tree."""

_MAX_NAMED = 8
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def at_least(low: float, words: str, *names: str) -> Any:
    """A numeric option. Refuses numbers above `MAX_COUNT`, and NaN, which typer before 0.29 accepts
    whatever the limits. A `max=` would print fifteen zeros in the help."""
    return typer.Option(*names, min=low, callback=_checked, help=words)


def _checked(value: Optional[float]) -> Optional[float]:
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
ExpectGpus = Annotated[
    Optional[int], typer.Option(help="How many GPUs must be present.", show_default=False)
]
FinishedCode = Annotated[
    int, typer.Option(min=0, max=255, help="Exit code to use when the miner finishes.")
]


@dataclass(frozen=True)
class CommandContext:
    """The validated settings and the state directory, which has not been read yet."""

    settings: Settings
    state: StateDir
    profile: str | None


def open_context(
    config: Path | None, name: str, state_dir: str | None, flags: Mapping[str, Any] | None = None
) -> CommandContext:
    """Load the settings and choose the state directory. Raises Refused: 64 for a bad flag, 78 for
    bad settings."""
    # `logs` and others read no settings, so they don't wait for these imports.
    from miner_guard.config import BadConfig, BadFlag, loading
    from miner_guard.validators.profiles import chosen

    try:
        loaded = loading.load(config, flags=flags)
        profile = chosen(loaded.config.miner)
        dotenv = _dotenv(loaded.config.repo)
        if profile is not None or dotenv is not None:
            # Only settings say which profile and which .env apply below them.
            loaded = loading.load(
                config,
                profile=None if profile is None else settings_of_profile(profile),
                profile_origin=f"profile {profile}",
                dotenv=dotenv,
                flags=flags,
            )
    except BadConfig as error:
        raise Refused(str(error), USAGE if isinstance(error, BadFlag) else CONFIG) from error
    return CommandContext(loaded, choose_state(name, state_dir), profile)


def open_guard(config: Path | None, name: str | None, state_dir: str | None) -> CommandContext:
    """`open_context` for the guard that `find_guard` chooses."""
    return open_context(config, DEFAULT_NAME, str(find_guard(name, state_dir).root))


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


def settings_of_profile(profile: str, *, checked: bool = False) -> Mapping[str, Any]:
    """Return a profile's defaults for guard.toml. Raises Refused (78) if the profile is invalid."""
    from miner_guard.validators.profiles import load_profile

    try:
        return load_profile(profile, checked=checked).settings
    except (OSError, ValueError) as error:
        raise Refused(f"profile: {error}", CONFIG) from error


def choose_state(name: str, state_dir: str | None) -> StateDir:
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
        # HOME is not set and the host does not know the user, as in a container with any uid.
        raise Refused(
            f"no state directory: {error} Pass --state-dir, or set HOME", CONFIG
        ) from error


def check_there(state: StateDir) -> None:
    """Raises Refused (1) if the state directory does not exist: no guard has run there."""
    if not state.root.is_dir():
        raise Refused(
            f"state directory {state.root} does not exist; "
            "pass the --name or --state-dir that you passed to `run`",
            FAILED,
        )


def earliest(since: str, now: float | None = None) -> str:
    """Convert `--since` to a UTC time in ISO format; empty if it sets no limit. Raises Refused."""
    text = since.strip()
    if not text:
        return ""
    if match := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhdw])", text):
        now = time.time() if now is None else now
        return iso_utc(max(0.0, now - float(match[1]) * _SECONDS[match[2]]))
    with contextlib.suppress(ValueError):
        moment = datetime.fromisoformat(text.removesuffix("Z"))
        return iso_utc(
            (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()
        )
    raise Refused(
        f"--since: {since!r} is not a time; use 90s, 15m, 1h, 2d, or 2026-01-02T03:04 (UTC)", USAGE
    )


def check_command(program: str) -> None:
    """Raises Refused (64) for a program that can't be started."""
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


def unknown_name(kind: str, name: str, names: Iterable[str]) -> Refused:
    """The refusal of a name that the guard never uses, with the closest of `names`."""
    import difflib

    names = sorted(names)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.0)
    sure = difflib.get_close_matches(name, names, n=2)
    meant = f"did you mean {' or '.join(sure)}?" if sure else f"nearest: {', '.join(near)};"
    return Refused(f"unknown {kind} {name!r}; {meant} ops/runbook.md lists all events", USAGE)


def find_guard(name: str | None, state_dir: str | None) -> StateDir:
    """Choose the state directory by the first of these that applies: the flags or the environment,
    the only running guard, the default directory, the guard that ran last.

    Reports the choice on stderr if the flags don't determine it. Raises Refused: 64 if several
    guards are running, 78 for an invalid name.
    """
    usual = choose_state(DEFAULT_NAME if name is None else name, state_dir)
    from miner_guard.record.status_document import listens

    if is_named(name, state_dir) or listens(usual):
        return usual
    from miner_guard.record import status_document

    running = status_document.running_guards()
    if len(running) > 1:
        raise Refused(
            f"{len(running)} guards are running here; name one: "
            + " · ".join(flag(state) for state in running[:_MAX_NAMED]),
            USAGE,
        )
    if running:
        echo(f"using the running guard: {flag(running[0])}", err=True)
        return running[0]
    if usual.db.is_file() or (last := _last_ended(usual)) is None:
        return usual
    echo(f"no guard is running; using the last one: {flag(last)}", err=True)
    return last


def is_named(name: str | None, state_dir: str | None) -> bool:
    """Return True if the flags or the environment name a guard."""
    return name is not None or state_dir is not None or "MINER_GUARD_STATE_DIR" in os.environ


def flag(state: StateDir) -> str:
    """Return the flag that points other commands at this guard."""
    if state.root.parent == choose_state(DEFAULT_NAME, None).root.parent:
        return f"--name {state.root.name}"
    return f"--state-dir {state.root}"


def start_or_name(state: StateDir) -> str:
    """Return advice for when no guard is running in `state`."""
    if state.db.is_file():
        return "start it with `miner-guard run`"
    return "start it with `miner-guard run`, or pass the --name or --state-dir that you gave it"


def check_version(answer: Mapping[str, Any]) -> None:
    """Warn on stderr when the guard that answered runs a different version from this command: an
    update takes effect only when the guard is replaced."""
    theirs = answer.get("version")
    if theirs != __version__:
        version = "an older version" if theirs is None else f"version {theirs}"
        echo(
            f"the running guard is {version}, but this command is version {__version__}; run "
            "`miner-guard ctl reload` to update it, while the miner trains",
            err=True,
        )


def _last_ended(usual: StateDir) -> StateDir | None:
    """Return the state directory that a guard wrote last, among the demo's and those next to the
    default one; None if there is none."""
    folder = usual.root.parent
    roots = [*(folder.iterdir() if folder.is_dir() else ()), _DEMO.absolute()]
    ages = {}
    for root in roots:
        if distrust(root) is not None:
            continue
        try:
            ages[root] = StateDir(root).db.stat().st_mtime
        except OSError:
            continue
    return StateDir(max(ages, key=ages.__getitem__)) if ages else None
