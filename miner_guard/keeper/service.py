"""The keeper's channels to pm2 and systemd, which accept messages only from the process that they
started."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
from collections.abc import Mapping
from typing import Any

_WATCHDOG_EVERY_S = 5.0


class Pm2Channel:
    """pm2's IPC socket. EOF means that pm2's daemon has died."""

    def __init__(self, fd: int) -> None:
        self.socket = socket.socket(fileno=fd)
        os.set_inheritable(fd, False)
        self.socket.setblocking(False)
        self._partial = b""

    @classmethod
    def inherited(cls, env: Mapping[str, str]) -> Pm2Channel | None:
        """The channel that pm2 passed to this process, if any; Node's name for it is IPC."""
        if "pm_id" not in env or "pm_exec_path" not in env:
            return None
        try:
            fd = int(env.get("NODE_CHANNEL_FD", ""))
            return cls(fd) if stat.S_ISSOCK(os.fstat(fd).st_mode) else None
        except (ValueError, OSError):
            return None

    def receive(self) -> tuple[str, bool]:
        """Why pm2 wants the run to stop, empty if it does not; and whether the channel is
        closed."""
        try:
            data = self.socket.recv(65536)
        except BlockingIOError:
            return "", False
        except OSError:
            data = b""
        if not data:
            return "pm2's daemon is gone", True
        *lines, self._partial = (self._partial + data).split(b"\n")
        shutdown = any(line.strip() == b'"shutdown"' for line in lines)
        return "pm2 asked for a shutdown" if shutdown else "", False

    def send(self, content: Any) -> None:
        """Send one message. The socket is full if pm2 is not reading; the next one replaces it."""
        with contextlib.suppress(OSError):
            self.socket.send(json.dumps(content).encode() + b"\n")


class SystemdSocket:
    """systemd's notify socket; see sd_notify(3)."""

    def __init__(self, address: str, env: Mapping[str, str]) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket = socket.socket(
            socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        meant_for = env.get("WATCHDOG_PID", str(os.getpid()))
        watched = env.get("WATCHDOG_USEC", "").isdigit() and meant_for == str(os.getpid())
        # Twice per interval, as sd_watchdog_enabled(3) recommends.
        self.pulse_every_s = (
            min(int(env["WATCHDOG_USEC"]) / 2e6, _WATCHDOG_EVERY_S) if watched else None
        )
        """How often systemd expects `WATCHDOG=1`; None if it does not."""

    @classmethod
    def inherited(cls, env: Mapping[str, str]) -> SystemdSocket | None:
        """The socket that systemd named to this process, if any."""
        address = env.get("NOTIFY_SOCKET")
        return cls(address, env) if address else None

    def notify(self, text: bytes) -> None:
        """Send assignments, such as `READY=1`. Only the process that systemd started may."""
        # systemd restarts a service that sends no WATCHDOG=1.
        with contextlib.suppress(OSError):
            self._socket.sendto(text, self._address)
