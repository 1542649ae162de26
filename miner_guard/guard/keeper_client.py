"""The guard's end of the link to its keeper, which owns the miner, the output and the signals."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miner_guard.guard.loop import Loop
from miner_guard.keeper.link import KEEPER_FD, message
from miner_guard.keeper.teardown import TERM_TO_KILL_S
from miner_guard.system.descriptors import ready
from miner_guard.system.processes import Process

_ANSWER_S = 30.0
"""How long the keeper may take to answer; it takes milliseconds unless the host is suspended."""

_SLICE_S = 0.05
"""Time per delivery of output to the monitors, so that the supervisor's loop stays responsive."""


class KeeperGone(Exception):
    """The keeper has been killed, or never started this process."""


@dataclass(frozen=True)
class Hello:
    """What the keeper tells a new guard."""

    keeper_pid: int
    first: bool = True
    """Whether this is the first guard of its keeper."""

    last_guard: Mapping[str, Any] | None = None
    """`pid` of the guard before this one, and `how` it ended."""

    saved: Mapping[str, Any] = field(default_factory=dict)
    """What the guard before this one saved."""

    held: Mapping[str, tuple[Sequence[int], Any]] = field(default_factory=dict)
    """The descriptors that the guard before this one gave the keeper to hold, by name, each with
    its note."""

    miner: Mapping[str, Any] | None = None
    """The running launch: `pid`, `start`, `attempt`, and `at`, in monotonic seconds."""

    stop: str | None = None
    """The reason of a stop that has been requested."""

    pm2: bool = False
    systemd: bool = False


@dataclass
class Ending:
    """How the keeper ended a launch."""

    code: int
    signal: int | None = None
    killed: Sequence[tuple[int, str]] = ()
    """Processes other than the launcher that got a signal, with their command lines."""

    killed_count: int = 0
    stuck: Sequence[tuple[int, str]] = ()
    """Processes that survived SIGKILL, with the reason."""


class KeptMiner:
    """One launch of the miner, as the keeper reports it."""

    def __init__(self, launched: Mapping[str, Any]) -> None:
        self.process = Process(launched["pid"], launched["start"])
        self.attempt: int = launched["attempt"]
        self.started: float = launched["at"]
        """Monotonic seconds."""

        self.exit: Ending | None = None
        """How the launcher ended; None while it is running."""

        self.ended: Ending | None = None
        """Set once every process of the launch is gone, or can't be killed."""

        self.asked_at: float | None = None
        self.grace_s = 0.0

    @property
    def pid(self) -> int:
        return self.process.pid

    def waits_for(self) -> str:
        """A human-readable description of what is still running and what happens next."""
        if self.exit is not None:
            return "the processes that the launcher left behind get SIGTERM, then SIGKILL"
        if self.left_s() <= 0.0:
            return f"the remaining descendants of pid {self.pid} have been sent SIGKILL"
        return f"pid {self.pid} got SIGTERM and is still running; SIGKILL is next"

    def left_s(self) -> float:
        """Upper bound on the seconds until SIGKILL."""
        if self.asked_at is None:
            return 0.0
        return max(0.0, self.grace_s + TERM_TO_KILL_S - (time.monotonic() - self.asked_at))


class KeeperClient:
    """Talks to the keeper. Sending is safe in any thread; everything else belongs to the loop's."""

    def __init__(self, link: socket.socket) -> None:
        """Wait for the keeper's first message. Raises KeeperGone."""
        self._socket = link
        self._loop: Loop | None = None
        self._mutex = threading.Lock()
        self._buffer = b""
        self._at = self._needs = 0
        """Where the next message begins; bytes of output that follow the last one."""

        self._saved: dict[str, Any] = {}
        self._held: deque[tuple[str, Any]] = deque()
        self.miner: KeptMiner | None = None
        self.dropped_bytes = self.unchecked = 0
        self.stuck = False
        self.on_output: Callable[[bytes], None] = lambda _data: None
        self.on_stop: Callable[[str], None] = lambda _why: None
        self.on_degraded: Callable[[str], None] = lambda _what: None
        self.on_blind: Callable[[str], None] = lambda _why: None
        self.on_gone: Callable[[], None] = lambda: None
        self.hello = Hello(**self._wait_for("hello"))
        for fds, _ in self.hello.held.values():
            for fd in fds:
                os.set_inheritable(fd, False)
        if self.hello.miner is not None:
            self.miner = KeptMiner(self.hello.miner)

    @classmethod
    def inherited(cls) -> KeeperClient | None:
        """The link that this process's keeper opened; None if no keeper started it. Raises
        KeeperGone."""
        link = os.environ.pop(KEEPER_FD, "")
        if not link.isdigit():
            return None
        os.set_inheritable(int(link), False)
        return cls(socket.socket(fileno=int(link)))

    def watch(self, loop: Loop) -> None:
        """Handle messages in this loop from now on."""
        self._loop = loop
        loop.watch(self._socket.fileno(), self._receive)
        loop.soon(self._drain)

    # --- to the keeper ---

    def _send(self, name: str, content: Any = True) -> None:
        data = message(name, content)
        # If the keeper is gone, the loop notices it by EOF.
        with self._mutex, contextlib.suppress(OSError):
            self._socket.sendall(data)

    def launch(self, request: Mapping[str, Any]) -> KeptMiner:
        """Start the miner. Raises OSError with the reason if the kernel refuses."""
        self._send("launch", request)
        launched = self._wait_for("launched")
        if isinstance(launched, Mapping):
            self.miner = KeptMiner(launched)
            return self.miner
        raise OSError(*launched)

    def stop(self, grace_s: float) -> None:
        """Send the launcher SIGTERM, and SIGKILL to whatever remains after `grace_s`."""
        if self.miner is not None and self.miner.asked_at is None:
            self.miner.asked_at, self.miner.grace_s = time.monotonic(), grace_s
            self._send("stop", grace_s)

    def stopping(self) -> None:
        """Tell the keeper that the guard acts on a stop request."""
        self._send("stopping")

    def concluded(self) -> None:
        """Tell the keeper that the last launch has been wrapped up."""
        self.miner = None
        self._send("concluded")

    def beat(self) -> None:
        """Tell the keeper that the loop is making progress."""
        self._send("beat")

    def save(self, **values: Any) -> None:
        """Keep values for the next guard, should this one die."""
        changed = {name: value for name, value in values.items() if self._saved.get(name) != value}
        if changed:
            self._saved.update(changed)
            self._send("save", changed)

    def print_line(self, line: str) -> None:
        """Print whole lines, between those of the miner."""
        self._send("print", line)

    def notify(self, text: str) -> None:
        """Send systemd one assignment."""
        self._send("notify", text)

    def tell_pm2(self, content: Any) -> None:
        """Send pm2 one message."""
        self._send("pm2", content)

    def hold(self, name: str, fds: Sequence[int], note: Any = None) -> None:
        """Make the keeper hold these descriptors too, so that they outlive this guard."""
        with self._mutex, contextlib.suppress(OSError):
            socket.send_fds(self._socket, [message("hold", [name, len(fds), note])], fds)

    def drop(self, name: str) -> None:
        """Make the keeper close the descriptors that it holds as `name`."""
        self._send("drop", name)

    def done(self, code: int) -> None:
        """Tell the keeper that this process exits next, with `code`; return when everything
        printed has been passed on, or when nobody reads it."""
        self._send("done", code)
        with contextlib.suppress(KeeperGone):
            self._wait_for("flushed")

    # --- from the keeper ---

    def _receive(self) -> None:
        assert self._loop is not None
        if not self._read():
            self._loop.unwatch(self._socket.fileno())
            self.on_gone()
            return
        self._drain()

    def _drain(self) -> None:
        """Handle what has arrived, for `_SLICE_S` at most."""
        assert self._loop is not None
        over = time.monotonic() + _SLICE_S
        try:
            while (each := self._held.popleft() if self._held else self._next()) is not None:
                self._handle(*each)
                if time.monotonic() > over:
                    break
        finally:
            # Continue even after a failure.
            if self._held or self._at < len(self._buffer):
                self._loop.after(0.0, self._drain_rest)

    def _drain_rest(self) -> None:
        if self._held or self._whole():
            self._drain()

    def _whole(self) -> bool:
        """Whether the buffer holds a whole message."""
        if self._needs:
            return len(self._buffer) - self._at >= self._needs
        return self._buffer.find(b"\n", self._at) >= 0

    def _read(self) -> bool:
        try:
            data = self._socket.recv(1 << 18)
        except OSError:
            data = b""
        self._buffer = self._buffer[self._at :] + data
        self._at = 0
        return bool(data)

    def _next(self) -> tuple[str, Any] | None:
        """Take the next whole message from the buffer."""
        if not self._needs:
            end = self._buffer.find(b"\n", self._at)
            if end < 0:
                return None
            ((name, content),) = json.loads(self._buffer[self._at : end]).items()
            self._at = end + 1
            if name != "output":
                return name, content
            self._needs = content
        end = self._at + self._needs
        if len(self._buffer) < end:
            return None
        data, self._at, self._needs = self._buffer[self._at : end], end, 0
        return "output", data

    def _wait_for(self, name: str) -> Any:
        """Wait for an answer; other messages are handled later, in order. Raises KeeperGone."""
        deadline = time.monotonic() + _ANSWER_S
        names = (name, "launch_failed") if name == "launched" else (name,)
        while True:
            while (each := self._next()) is not None:
                if each[0] in names:
                    if self._loop is not None and (self._held or self._whole()):
                        self._loop.soon(self._drain)
                    return each[1]
                self._held.append(each)
            if not ready([self._socket], max(0.0, deadline - time.monotonic()))[0]:
                raise KeeperGone(f"the keeper did not answer within {_ANSWER_S:.0f} s")
            if not self._read():
                raise KeeperGone("the keeper is gone")

    def _handle(self, name: str, content: Any) -> None:
        if name == "output":
            self.on_output(content)
        elif name == "stop":
            self.on_stop(content)
        elif name in ("exited", "ended") and self.miner is not None:
            ending = Ending(**content)
            self.miner.exit = self.miner.exit or ending
            if name == "ended":
                self.miner.ended = ending
        elif name == "stats":
            self.dropped_bytes, self.unchecked, self.stuck = content
        elif name == "degraded":
            self.on_degraded(content)
        elif name == "blind":
            self.on_blind(content)
