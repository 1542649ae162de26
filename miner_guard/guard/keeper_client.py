"""The guard's end of the link to its keeper, which owns the miner, the output and the signals."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from miner_guard.guard.loop import Loop
from miner_guard.guard.states import StopRequest
from miner_guard.keeper.link import KEEPER_FD, MAX_PACKET_BYTES, OUTPUT, message
from miner_guard.keeper.teardown import TERM_TO_KILL_S
from miner_guard.system.descriptors import ready
from miner_guard.system.processes import Process

_ANSWER_S = 30.0
"""How long the keeper may take to answer; it takes milliseconds unless the host is suspended."""

_SLICE_S = 0.05
"""Time per delivery of output to the monitors, so that the supervisor's loop stays responsive."""

_MAX_PRINT = 32768
_SHORT_OF_MEMORY = (errno.ENOBUFS, errno.ENOMEM)
"""Errors of a socket whose other end is still there."""

_PAUSE_S = 0.05


class KeeperGone(Exception):
    """The keeper has been killed, or never started this process."""


@dataclass(frozen=True)
class Hello:
    """What the keeper tells a new guard."""

    keeper_pid: int
    last_guard: Mapping[str, Any] | None = None
    """`pid` of the guard before this one, and `how` it ended; None for the keeper's first."""

    saved: Mapping[str, Any] = field(default_factory=dict)
    """What the guards before this one saved."""

    held: Mapping[str, tuple[Sequence[int], Any]] = field(default_factory=dict)
    """The descriptors that the guards before this one gave the keeper to hold, by name, each with
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

        self.kill_at: float | None = None
        """When whatever is left gets SIGKILL, in monotonic seconds; None if nobody asked it to
        stop."""

        self.stop_request: StopRequest | None = None
        """The request that ends this launch; None if nobody has requested a stop."""

        self.healthy = False
        """The launch ran long enough to reset the failure count."""

    @property
    def pid(self) -> int:
        return self.process.pid


def _supported(kind: type, content: Mapping[str, Any]) -> dict[str, Any]:
    """The values that this version knows: after `ctl reload`, the keeper is an earlier one."""
    names = {each.name for each in fields(kind)}
    return {name: value for name, value in content.items() if name in names}


class KeeperClient:
    """Talks to the keeper. Sending is safe in any thread; everything else belongs to the loop's."""

    def __init__(self, link: socket.socket) -> None:
        """Wait for the keeper's first message. Raises KeeperGone."""
        self._socket = link
        self._loop: Loop | None = None
        self._mutex = threading.Lock()
        self._saved: dict[str, Any] = {}
        self._held: deque[tuple[str, Any]] = deque()
        self.miner: KeptMiner | None = None
        self.dropped_bytes = self.unchecked = 0
        self.stuck = False
        self.on_output: Callable[[bytes], None] = lambda _data: None
        self.on_stop: Callable[[str], None] = lambda _why: None
        self.on_degraded: Callable[[str], None] = lambda _what: None
        self.on_gone: Callable[[], None] = lambda: None
        self.hello = Hello(**_supported(Hello, self._wait_for("hello")))
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
        loop.soon(self._receive)

    # --- to the keeper ---

    def tell(self, name: str, content: Any = True, fds: Sequence[int] = ()) -> None:
        """Send a message. Those without a method of their own: `beat`, the loop is making
        progress; `stopping`, the guard acts on a stop request; `reload`, this process exits next,
        to be replaced; `notify`, an assignment for systemd; `pm2`, a message for pm2."""
        data = message(name, content)
        while True:
            # If the keeper is gone, the loop notices it by EOF.
            with self._mutex, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                try:
                    socket.send_fds(self._socket, [data], fds)
                except OSError as error:
                    if error.errno not in _SHORT_OF_MEMORY:
                        raise
                    time.sleep(_PAUSE_S)
                    continue
            return

    def launch(self, request: Mapping[str, Any]) -> KeptMiner:
        """Start the miner. Raises OSError with the reason if the kernel refuses."""
        self.tell("launch", request)
        launched = self._wait_for("launched", "launch_failed")
        if isinstance(launched, Mapping):
            self.miner = KeptMiner(launched)
            return self.miner
        raise OSError(*launched)

    def stop(self, grace_s: float) -> None:
        """Send the launcher its signal, and SIGKILL to whatever remains after `grace_s`."""
        if self.miner is not None and self.miner.kill_at is None:
            self.miner.kill_at = time.monotonic() + grace_s + TERM_TO_KILL_S
            self.tell("stop", grace_s)

    def concluded(self) -> None:
        """Tell the keeper that the last launch has been wrapped up."""
        self.miner = None
        self.tell("concluded")

    def save(self, **values: Any) -> None:
        """Keep values for the next guard, should this one die."""
        changed = {name: value for name, value in values.items() if self._saved.get(name) != value}
        if changed:
            self._saved.update(changed)
            self.tell("save", changed)

    def print_line(self, text: str) -> None:
        """Print whole lines, between those of the miner."""
        for start in range(0, len(text), _MAX_PRINT):
            self.tell("print", text[start : start + _MAX_PRINT])

    def hold(self, name: str, fds: Sequence[int], note: Any = None) -> None:
        """Make the keeper hold these descriptors too, so that they outlive this guard."""
        self.tell("hold", [name, note], fds)

    def drop(self, name: str) -> None:
        """Make the keeper close the descriptors that it holds as `name`."""
        self.tell("drop", name)

    def done(self, code: int) -> None:
        """Tell the keeper that this process exits next, with `code`; return when everything
        printed has been passed on, or when nobody reads it."""
        self.tell("done", code)
        with contextlib.suppress(KeeperGone):
            self.dropped_bytes, self.unchecked = self._wait_for("flushed")

    # --- from the keeper ---

    def _receive(self) -> None:
        """Handle what has arrived, for `_SLICE_S` at most."""
        over, pieces, size = time.monotonic() + _SLICE_S, list[bytes](), 0
        try:
            while (each := self._held.popleft() if self._held else self._next()) is not None:
                is_output = each[0] == "output"
                if is_output:
                    pieces.append(each[1])
                    size += len(each[1])
                if not is_output or size >= MAX_PACKET_BYTES:
                    self._pass_on(pieces)
                    size = 0
                if not is_output:
                    self._handle(*each)
                if time.monotonic() > over:
                    break
            self._pass_on(pieces)
        except KeeperGone:
            self._pass_on(pieces)
            if self._loop is not None:
                self._loop.unwatch(self._socket.fileno())
            self.on_gone()
        finally:
            if self._held and self._loop is not None:
                self._loop.soon(self._receive)

    def _next(self) -> tuple[str, Any] | None:
        """Receive one message; None if there is none. Raises KeeperGone."""
        try:
            data = self._socket.recv(MAX_PACKET_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno in _SHORT_OF_MEMORY:
                return None
            data = b""
        if not data:
            raise KeeperGone("the keeper is gone")
        if data[:1] == OUTPUT:
            return "output", data[1:]
        ((name, content),) = json.loads(data).items()
        return name, content

    def _wait_for(self, *names: str) -> Any:
        """Wait for an answer; other messages are handled later, in order. Raises KeeperGone."""
        deadline = time.monotonic() + _ANSWER_S
        while True:
            while (each := self._next()) is not None:
                if each[0] in names:
                    if self._loop is not None:
                        self._loop.soon(self._receive)
                    return each[1]
                self._held.append(each)
            if not ready([self._socket], max(0.0, deadline - time.monotonic())):
                raise KeeperGone(f"the keeper did not answer within {_ANSWER_S:.0f} s")

    def _pass_on(self, pieces: list[bytes]) -> None:
        """Pass on the output of one turn as one piece: its lines share their time of arrival."""
        if pieces:
            output = b"".join(pieces)
            pieces.clear()
            self.on_output(output)

    def _handle(self, name: str, content: Any) -> None:
        if name == "stop":
            self.on_stop(content)
        elif name in ("exited", "ended") and self.miner is not None:
            ending = Ending(**_supported(Ending, content))
            self.miner.exit = self.miner.exit or ending
            if name == "ended":
                self.miner.ended = ending
        elif name == "stats":
            self.dropped_bytes, self.unchecked, self.stuck = content
        elif name == "degraded":
            self.on_degraded(content)
