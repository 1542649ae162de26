"""Chooses a guard if the command line names none: the running one, wherever its state directory
is."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from miner_guard import __version__
from miner_guard.cli.echo import echo
from miner_guard.cli.options import DEFAULT_NAME, CommandContext, choose_state, open_context
from miner_guard.exits import USAGE, Refused
from miner_guard.state_dir import StateDir, distrust
from miner_guard.system.sockets import address

_DEMO = Path(".demo", "state")
"""The state directory of `make demo`, in the source tree."""

_MAX_NAMED = 8


def find_guard(name: str | None, state_dir: str | None) -> StateDir:
    """Choose the state directory by the first of these that applies: the flags or the environment,
    the only running guard, the default directory, the guard that ran last.

    Reports the choice on stderr if the flags don't determine it. Raises Refused: 64 if several
    guards are running, 78 for an invalid name.
    """
    usual = choose_state(DEFAULT_NAME if name is None else name, state_dir)
    named = name is not None or state_dir is not None or "MINER_GUARD_STATE_DIR" in os.environ
    if named or listens(usual):
        return usual
    running = running_guards()
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


def open_guard(config: Path | None, name: str | None, state_dir: str | None) -> CommandContext:
    """`options.open_context` for the chosen guard."""
    return open_context(config, DEFAULT_NAME, str(find_guard(name, state_dir).root))


def check_version(answer: Mapping[str, Any]) -> None:
    """Warn on stderr when the guard that answered runs a different version from this command: an
    update takes effect only when the guard restarts."""
    theirs = answer.get("version")
    if theirs != __version__:
        version = "an older version" if theirs is None else f"version {theirs}"
        echo(
            f"the running guard is {version}, but this command is version {__version__}; restart "
            "the guard to update it",
            err=True,
        )


def running_guards() -> list[StateDir]:
    """Find this user's running guards by the lock files that their processes hold open."""
    roots = {path.parent for pid in _guard_pids() for path in _open_files(pid) if _is_lock(path)}
    return [
        state
        for root in sorted(roots)
        if distrust(root) is None and listens(state := StateDir(root))
    ]


def flag(state: StateDir) -> str:
    """Return the flag that points other commands at this guard."""
    usual = choose_state(DEFAULT_NAME, None).root
    if state.root.parent == usual.parent:
        return f"--name {state.root.name}"
    return f"--state-dir {state.root}"


def _guard_pids() -> Iterator[int]:
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            words = Path("/proc", entry, "cmdline").read_bytes()
        except OSError:
            continue
        if b"miner-guard" in words or b"miner_guard" in words:
            yield int(entry)


def _open_files(pid: int) -> Iterator[Path]:
    folder = f"/proc/{pid}/fd"
    try:
        # Fails for another user's process.
        numbers = os.listdir(folder)
    except OSError:
        return
    for number in numbers:
        try:
            yield Path(os.readlink(f"{folder}/{number}"))
        except OSError:
            continue


def _is_lock(path: Path) -> bool:
    return path.is_absolute() and path == StateDir(path.parent).lock


def listens(state: StateDir) -> bool:
    """Return True if a guard is running in this state directory."""
    try:
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client,
            address(state.control) as name,
        ):
            client.settimeout(1.0)
            client.connect(name)
    except OSError:
        return False
    return True


def _last_ended(usual: StateDir) -> StateDir | None:
    """Return the state directory whose guard wrote last, among the demo's and those next to
    the default one; None if there is none."""
    try:
        roots = [*usual.root.parent.iterdir(), _DEMO.absolute()]
    except OSError:
        roots = [_DEMO.absolute()]
    ages = {}
    for root in roots:
        if distrust(root) is not None:
            continue
        try:
            ages[root] = StateDir(root).db.stat().st_mtime
        except OSError:
            continue
    return StateDir(max(ages, key=ages.__getitem__)) if ages else None
