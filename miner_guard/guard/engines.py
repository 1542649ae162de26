"""Reports to the service managers that run the guard: to pm2 through its IPC socket, to systemd
through its notify socket."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import socket
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from miner_guard.eventlog.status_document import StatusDocument
from miner_guard.guard.environment import under_pm2
from miner_guard.guard.loop import Loop
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


def service_managers(
    env: Mapping[str, str], loop: Loop, on_gone: Callable[[str], None]
) -> list[ServiceManager]:
    """The service managers that started this guard. When one of them dies or asks the guard to
    stop, `on_gone` is called with the reason."""
    found: list[ServiceManager] = []
    if under_pm2(env) and (channel := _channel(env)) is not None:
        found.append(Pm2(channel, loop, on_gone))
    if address := env.get("NOTIFY_SOCKET"):
        found.append(Systemd(address, env))
    return found


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


def _channel(env: Mapping[str, str]) -> int | None:
    """pm2's socket, which Node calls its IPC channel."""
    try:
        fd = int(env.get("NODE_CHANNEL_FD", ""))
        return fd if stat.S_ISSOCK(os.fstat(fd).st_mode) else None
    except (ValueError, OSError):
        return None


class Pm2:
    """Talks to pm2 over its IPC socket. EOF means that pm2's daemon has died; the guard then stops
    cleanly."""

    def __init__(self, channel: int, loop: Loop, on_gone: Callable[[str], None]) -> None:
        self._socket = socket.socket(fileno=channel)
        os.set_inheritable(channel, False)
        self._socket.setblocking(False)
        self._loop = loop
        self._on_gone = on_gone
        self._partial = b""
        self._shown: dict[str, Any] = {}
        self._shown_at = float("-inf")
        loop.watch(channel, self._readable)

    def _readable(self) -> None:
        try:
            data = self._socket.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.unwatch(self._socket.fileno())
            self._on_gone("pm2's daemon is gone")
            return
        *lines, self._partial = (self._partial + data).split(b"\n")
        if any(_is_shutdown(line) for line in lines):
            self._on_gone("pm2 asked for a shutdown")

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

    def _send(self, message: Any) -> None:
        # The socket is full if pm2 is not reading; the next update carries the values.
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps(message).encode() + b"\n")


def _is_shutdown(line: bytes) -> bool:
    try:
        return bool(json.loads(line) == "shutdown")
    except ValueError:
        return False


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
    """Notifies systemd when the guard is ready or stopping, sends its status line, and keeps the
    watchdog from expiring. See sd_notify(3)."""

    def __init__(self, address: str, env: Mapping[str, str]) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket = socket.socket(
            socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        meant_for = env.get("WATCHDOG_PID", str(os.getpid()))
        watched = env.get("WATCHDOG_USEC", "").isdigit() and meant_for == str(os.getpid())
        # Send WATCHDOG=1 twice per interval, as sd_watchdog_enabled(3) recommends.
        self._every_s = int(env["WATCHDOG_USEC"]) / 2e6 if watched else None
        self._last = float("-inf")
        self._line = ""

    def ready(self) -> None:
        self._send("READY=1")

    def pulse(self, status: Mapping[str, Any], now: float) -> None:
        line = ", ".join(f"{name} {value}" for name, value in monitor_values(status).items())
        if line != self._line:
            self._line = line
            self._send(f"STATUS={line}")
        if self._every_s is not None and now - self._last >= min(self._every_s, _MONITOR_EVERY_S):
            self._last = now
            self._send("WATCHDOG=1")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def _send(self, text: str) -> None:
        # Ignore failures: systemd restarts a guard that sends no WATCHDOG=1.
        with contextlib.suppress(OSError):
            self._socket.sendto(text.encode(), self._address)
