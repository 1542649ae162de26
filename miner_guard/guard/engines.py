"""Reports to the service managers that run the guard: to pm2 through its IPC socket, to systemd
through its notify socket."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from miner_guard.guard.environment import under_pm2
from miner_guard.guard.keeper_client import KeeperClient
from miner_guard.record.status_document import StatusDocument
from miner_guard.record.words import known

_MONITOR_EVERY_S = 5.0
_UNIT = re.compile(r"/([^/\n]+\.service)\s*$", re.MULTILINE)
"""The unit's name at the end of a line of /proc/self/cgroup."""


class ServiceManager(Protocol):
    """Receives the guard's lifecycle events. No method blocks or raises."""

    def ready(self) -> None:
        """The miner has started."""

    def pulse(self, status: Mapping[str, Any], now: float) -> None:
        """Called about once a second with the status document."""

    def stopping(self) -> None:
        """The guard has started shutting down."""


def service_managers(keeper: KeeperClient) -> list[ServiceManager]:
    """The service managers that started this guard's keeper."""
    managers: list[ServiceManager] = []
    if keeper.hello.pm2:
        managers.append(Pm2(keeper.tell_pm2))
    if keeper.hello.systemd:
        managers.append(Systemd(keeper.notify))
    return managers


def start_command(env: Mapping[str, str], argv: Sequence[str], cgroup: str, folder: str) -> str:
    """The shell command that starts this guard again.

    `argv` is the guard's command line, `cgroup` the text of /proc/self/cgroup, `folder` the working
    directory.
    """
    if under_pm2(env):
        return f"pm2 restart {shlex.quote(env.get('name') or env['pm_id'])}"
    if "NOTIFY_SOCKET" in env and (unit := _UNIT.search(cgroup)) is not None:
        user = "--user " if "/user@" in cgroup else ""
        return f"systemctl {user}restart {unit[1]}"
    program = Path(argv[0])
    words = ["python", "-m", "miner_guard"] if program.name == "__main__.py" else [program.name]
    return f"cd {shlex.quote(folder)} && {shlex.join([*words, *argv[1:]])}"


def own_start_command(env: Mapping[str, str]) -> str | None:
    """`start_command` of this process; None if its command line or folder cannot be read."""
    with contextlib.suppress(OSError, IndexError):
        cgroup = Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="replace")
        return start_command(env, sys.argv, cgroup, os.getcwd())
    return None


class Pm2:
    """Tells pm2 what `pm2 monit` and `pm2 jlist` show."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        self._send = send
        self._shown: dict[str, Any] = {}
        self._shown_at = float("-inf")

    def ready(self) -> None:
        self._send("ready")

    def pulse(self, status: Mapping[str, Any], now: float) -> None:
        """Send the values that `pm2 monit` and `pm2 jlist` show."""
        shown = monitor_values(status)
        if shown == self._shown or now - self._shown_at < _MONITOR_EVERY_S:
            return
        self._shown, self._shown_at = shown, now
        self._send(
            {
                "type": "axm:monitor",
                "data": {name: {"value": value} for name, value in shown.items()},
            }
        )

    def stopping(self) -> None:
        """Send nothing: pm2 has requested the stop itself."""


def monitor_values(document: Mapping[str, Any]) -> dict[str, Any]:
    """Values by name, as pm2 shows them; "unknown" for a value that is not known."""
    status = StatusDocument.from_json(document)
    steps = status.steps
    outer, inner, step_s = steps.outer_step, steps.inner_step, steps.step_time_s
    return {
        "State": str(status.state),
        "Outer step": "unknown" if outer is None else outer,
        "Inner step": "unknown" if inner is None else inner,
        "Loss": known(steps.loss, ".3f"),
        "Step time": "unknown" if step_s is None else f"{step_s:.1f} s",
        "Restarts": status.restarts or 0,
        "Hang": status.hang.hang or "none",
    }


class Systemd:
    """Tells systemd when the guard is ready or stopping, and its status line. See sd_notify(3)."""

    def __init__(self, send: Callable[[str], None]) -> None:
        self._send = send
        self._line = ""

    def ready(self) -> None:
        self._send("READY=1")

    def pulse(self, status: Mapping[str, Any], now: float) -> None:
        line = ", ".join(f"{name} {value}" for name, value in monitor_values(status).items())
        if line != self._line:
            self._line = line
            self._send(f"STATUS={line}")

    def stopping(self) -> None:
        self._send("STOPPING=1")
