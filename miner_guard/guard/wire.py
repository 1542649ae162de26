"""The guard's end of the wire (`rank.wire`): listens for ranks, which hand over their records.

The keeper holds the listening socket, the connections and the records, so that they outlive this
guard: the next one continues where it ended, and a rank that connects in between just waits.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from miner_guard.guard.keeper_client import KeeperClient
from miner_guard.guard.loop import Loop
from miner_guard.rank import layout
from miner_guard.rank.layout import Identity, process_start
from miner_guard.rank.wire import peer
from miner_guard.record.events import Event, degraded
from miner_guard.system.clock import Once
from miner_guard.system.descriptors import address

_BACKLOG = 4096
_MAX_HELLO = 4096
_PAUSE_S = 0.05
_MAX_UNGREETED = 256
"""How many connections may be open without a first message. A rank sends it as it connects."""

_NAME = "wire"


@dataclass
class Caller:
    """A rank that has connected."""

    identity: Identity
    connection: socket.socket
    memory: int
    """The descriptor of its record."""

    def record(self) -> str:
        """A name for its record, which a rank that connects again hands over again."""
        return f"record {os.fstat(self.memory).st_ino}"


class WireListener:
    """Listens for ranks. Supervisor thread only."""

    def __init__(
        self,
        loop: Loop,
        keeper: KeeperClient,
        report: Callable[[Event], None],
        held: Sequence[Any] = (),
    ) -> None:
        """`held`: the descriptor and the address of the socket that an earlier guard opened. Raises
        OSError."""
        self._loop, self._report = loop, report
        self._once = Once()
        self._ungreeted: list[socket.socket] = []
        self.on_caller: Callable[[Caller], None] = lambda _caller: None
        if held:
            (descriptor,), self.address = held
            self._listener = socket.socket(fileno=descriptor)
        else:
            self.address = f"miner-guard-{secrets.token_hex(8)} {secrets.token_hex(16)}"
            """The value of the environment variable that leads ranks here."""

            self._listener = _listening("\0" + self.address.partition(" ")[0])
            keeper.hold(_NAME, [self._listener.fileno()], self.address)
        self._listeners = [self._listener]
        self._watch(self._listener)

    def open_path(self, path: Path) -> Callable[[], None]:
        """Listen at `path` too, for ranks in another network namespace; returns a function that
        stops it. Raises OSError."""
        # A socket that is already there belongs to a dead guard, because this guard holds the lock.
        path.unlink(missing_ok=True)
        with address(path) as name:
            listener = _listening(name)
        os.chmod(path, 0o600)
        self._listeners.append(listener)
        self._watch(listener)

        def close() -> None:
            self._listeners.remove(listener)
            self._loop.unwatch(listener.fileno())
            listener.close()

        return close

    def _watch(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._loop.watch(listener.fileno(), lambda: self._accept(listener))

    def poll(self) -> None:
        """Greet every rank that has connected."""
        for listener in list(self._listeners):
            self._accept(listener)
        for connection in list(self._ungreeted):
            self._greet(connection)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError:
                # No descriptor is free. The caller waits, and must not keep the loop spinning.
                time.sleep(_PAUSE_S)
                return
            connection.setblocking(False)
            if not _may_call(peer(connection)[1]):
                connection.close()
                continue
            if len(self._ungreeted) >= _MAX_UNGREETED:
                oldest = self._ungreeted.pop(0)
                self._loop.unwatch(oldest.fileno())
                oldest.close()
            self._ungreeted.append(connection)
            self._loop.watch(connection.fileno(), functools.partial(self._greet, connection))
            self._greet(connection)

    def _greet(self, connection: socket.socket) -> None:
        try:
            hello, fds, _, _ = socket.recv_fds(connection, _MAX_HELLO, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            hello, fds = b"", []
        self._ungreeted.remove(connection)
        self._loop.unwatch(connection.fileno())
        caller = self._understood(hello, connection, fds)
        if caller is None:
            connection.close()
            for fd in fds:
                os.close(fd)
        else:
            self.on_caller(caller)

    def _understood(
        self, hello: bytes, connection: socket.socket, fds: Sequence[int]
    ) -> Caller | None:
        try:
            document = json.loads(hello.partition(b"\n")[0])
            token = str(document["token"])
            identity = Identity.from_dict(document)
            version, memory = document["layout"], fds[0]
        except (ValueError, KeyError, TypeError, IndexError):
            return None
        if not secrets.compare_digest(token, self.address.partition(" ")[2]):
            return None
        if version != layout.VERSION:
            if self._once.first():
                self._report(
                    degraded(
                        f"rank {identity.rank} keeps its record in layout {version}, and this "
                        f"guard reads layout {layout.VERSION}, so its steps are not seen; install "
                        "the same version of miner-guard in both environments"
                    )
                )
            return None
        # The kernel knows the pid in this process's namespace.
        pid = peer(connection)[0] or identity.pid
        start = identity.process_start
        if not start:
            with contextlib.suppress(OSError):
                start = process_start(pid)
        return Caller(replace(identity, pid=pid, process_start=start), connection, memory)

    def close(self) -> None:
        """Stop listening."""
        for each in (*self._listeners, *self._ungreeted):
            self._loop.unwatch(each.fileno())
            each.close()
        self._listeners, self._ungreeted = [], []


def _listening(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.bind(name)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _may_call(uid: int) -> bool:
    """Whether a process of this user may be a rank. A guard that root runs may have started its
    miner as another user, who has the token then."""
    return os.geteuid() == 0 or uid in (os.geteuid(), 0)
