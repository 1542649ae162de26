"""Trouble around a running guard that must not affect training, for the fault bar and for the soak.
Each acts on a `World` and proves that it took effect, else it raises `Invalid`."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from miner_guard.guard.control_socket import NotRunning, ask
from miner_guard.system.descriptors import address
from tests.faults.guarded import Guarded
from tests.faults.own_disk import OwnDisk
from tests.support.waiting import until


class Invalid(AssertionError):
    """The case proves nothing: the miner did not step, or the fault did not take effect."""


@dataclass
class World:
    """What the faults act on."""

    guarded: Guarded
    disk: OwnDisk | None
    """The state directory's own file system; None if none can be mounted."""

    random: random.Random
    clock: Path
    """File with the number of seconds that the run's clock is off."""

    def pids(self, who: str) -> list[int]:
        """The living processes of this kind, now."""
        front = self.guarded.processes[-1].pid
        keeper = [pid for pid, _ in _children(front)]
        below = [each for pid in keeper for each in _children(pid)]
        guard = [pid for pid, words in below if b"\0run\0" in words]
        launcher = [pid for pid, words in below if pid not in guard and self._token in words]
        deeper = [each for pid in launcher for each in _below(pid)]
        return {
            "front": [front],
            "keeper": keeper,
            "guard": guard,
            "launcher": launcher,
            # In a namespace of its own, the launcher has a parent that is no Python.
            "rank": [pid for pid, words in deeper if b"pair.py" in words][-1:],
            "helper": [pid for each in guard for pid, _ in _children(each)],
        }[who]

    @property
    def _token(self) -> bytes:
        return self.guarded.token.encode()


def _children(parent: int) -> list[tuple[int, bytes]]:
    """The children of all threads of a process, with their command lines."""
    found = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{parent}/task").iterdir():
            for pid in (thread / "children").read_text().split():
                with contextlib.suppress(OSError):
                    words = Path(f"/proc/{pid}/cmdline").read_bytes()
                    if words:
                        found.append((int(pid), words))
    return found


def _below(parent: int) -> Iterator[tuple[int, bytes]]:
    for pid, words in _children(parent):
        yield pid, words
        yield from _below(pid)


Trouble = Callable[[World], None]

FILES = ("gate-inputs.json", "guard.jsonl", "host.json", "run.db", "status/monitoring_costs.json")
"""Choose by name, whichever files exist: a seed must always choose the same file."""


def lost_file(world: World) -> None:
    path = world.guarded.state.root / world.random.choice(FILES)
    path.unlink(missing_ok=True)


def cut_file(world: World) -> None:
    path = world.guarded.state.root / world.random.choice(FILES)
    with contextlib.suppress(FileNotFoundError):
        os.truncate(path, 0)


def pipe_for_a_file(world: World) -> None:
    path = world.guarded.state.root / world.random.choice(FILES)
    path.unlink(missing_ok=True)
    with contextlib.suppress(FileExistsError, FileNotFoundError):
        os.mkfifo(path)


def undo(world: World) -> None:
    """Remove the pipes."""
    for name in FILES:
        path = world.guarded.state.root / name
        with contextlib.suppress(OSError):
            if stat.S_ISFIFO(path.lstat().st_mode):
                path.unlink()


def _disk_of(world: World) -> OwnDisk:
    if world.disk is None:
        raise Invalid("no file system can be mounted here")
    return world.disk


def full_disk(world: World) -> None:
    disk = _disk_of(world)
    with disk.full():
        if os.statvfs(disk.place).f_bavail:
            raise Invalid("the disk has room")
        time.sleep(world.random.uniform(0.5, 2.0))


def frozen_disk(world: World) -> None:
    disk = _disk_of(world)
    disk.freeze()
    time.sleep(world.random.uniform(0.5, 2.5))
    disk.thaw()


def clock_step(world: World) -> None:
    seconds = world.random.choice([-10, -3600, 3600, 86400, -86400, 800_000_000, -800_000_000])
    draft = world.clock.with_suffix(".draft")
    draft.write_text(str(seconds))
    os.replace(draft, world.clock)


def _wait_for_sockets(world: World) -> None:
    """The guard may have been replaced a moment ago."""

    def listens(path: Path) -> bool:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as caller:
            with address(path) as name:
                caller.connect(name)
            return True
        return False

    for path in (world.guarded.state.control, world.guarded.state.socket):
        try:
            until(lambda path=path: listens(path), 60.0)
        except AssertionError as error:
            raise Invalid(f"nobody listens on {path.name}") from error


def garbage_calls(world: World) -> None:
    """Callers that are no ranks, on the socket of the ranks in the state directory."""
    _wait_for_sockets(world)
    sent = 0
    with contextlib.suppress(OSError):
        for _ in range(300):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
                caller.setblocking(False)
                with address(world.guarded.state.socket) as name:
                    caller.connect(name)
                garbage = world.random.choice([b'{"token": 7}\n', b"\xff{", b"[]", b"x" * 60000])
                sent += caller.send(garbage)
    if not sent:
        raise Invalid("nobody listens for ranks")


def connection_flood(world: World) -> None:
    """Callers that say nothing, on both sockets, until their queues are full."""
    _wait_for_sockets(world)
    with contextlib.ExitStack() as held:
        for path in (world.guarded.state.control, world.guarded.state.socket):
            taken: list[socket.socket] = []
            with contextlib.suppress(BlockingIOError):
                while len(taken) < 150:
                    client = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                    client.setblocking(False)
                    with address(path) as name:
                        client.connect(name)
                    taken.append(client)
            if len(taken) < 10:
                raise Invalid(f"{path.name} took {len(taken)} callers")


def orders(world: World) -> None:
    """What an operator may send; a pause is undone at once."""
    _wait_for_sockets(world)
    for word in ("status", "checkpoint", "?", "pause", "resume"):
        try:
            ask(world.guarded.state, {"do": word}, 10.0)
        except (NotRunning, OSError, json.JSONDecodeError) as error:
            raise Invalid(f"{word}: {error!r}") from error


TROUBLES: tuple[Trouble, ...] = (
    *(lost_file, cut_file, pipe_for_a_file, full_disk, frozen_disk, clock_step),
    *(garbage_calls, connection_flood, orders),
)
