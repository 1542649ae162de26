"""Faults around a running guard, for random sequences and for the soak. Each fault acts on a
`World` and returns a description of what it did. No fault may raise because its object is gone."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from miner_guard.guard.control_socket import NotRunning, ask
from miner_guard.system.descriptors import address
from tests.faults.guarded import Guarded
from tests.faults.own_disk import OwnDisk


@dataclass
class World:
    """The objects that the faults act on."""

    guarded: Guarded
    disk: OwnDisk | None
    """The state directory's own file system; None if none can be mounted."""

    random: random.Random
    clock: Path
    """File with the number of seconds that the run's clock is off."""

    steps: Path
    """Where rank 0 writes a line for each step."""

    suspended: list[int] = field(default_factory=list)
    """Helpers that received SIGSTOP."""

    launches: int = 1
    """How often the faults made the guard start the miner."""

    @property
    def guard(self) -> int:
        """The keeper's pid, which a user takes for the guard's."""
        return self.guarded.processes[-1].pid

    def helpers(self) -> list[int]:
        """The deputy, and the children of the guard itself."""
        below = self._children(self.guard)
        found = [pid for pid, words in below if self._token not in words]
        for pid, words in below:
            if b"\0run\0" in words:
                found += [each for each, _ in self._children(pid)]
        return found

    def launchers(self) -> list[int]:
        """The miner's launcher, while it is alive."""
        below = self._children(self.guard)
        return [pid for pid, words in below if self._token in words and b"\0run\0" not in words]

    @property
    def _token(self) -> bytes:
        return self.guarded.token.encode()

    def _children(self, parent: int) -> list[tuple[int, bytes]]:
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

    def send(self, pid: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


Fault = Callable[[World], str]


def harmless_signal(world: World) -> str:
    names = ("SIGUSR2", "SIGCHLD", "SIGWINCH", "SIGCONT", "SIGTTOU", "SIGPIPE")
    number = signal.Signals[world.random.choice(names)]
    times = world.random.choice((1, 200))
    for _ in range(times):
        world.send(world.guard, number)
    return f"{times} x {number.name}"


def stopped_for_a_while(world: World) -> str:
    world.send(world.guard, signal.SIGSTOP)
    time.sleep(world.random.uniform(0.1, 1.5))
    world.send(world.guard, signal.SIGCONT)
    return "SIGSTOP, SIGCONT"


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()[:80]
    return "a helper that was gone"


def killed_helper(world: World) -> str:
    helpers = world.helpers()
    if not helpers:
        return "no helper to kill"
    pid = world.random.choice(helpers)
    name = _name(pid)
    world.send(pid, signal.SIGKILL)
    return f"SIGKILL to {name}"


def all_helpers_killed(world: World) -> str:
    for pid in world.helpers():
        world.send(pid, signal.SIGKILL)
    return "SIGKILL to all helpers"


def suspended_helper(world: World) -> str:
    """Suspend a helper for the rest of the sequence."""
    helpers = world.helpers()
    if not helpers:
        return "no helper to suspend"
    pid = world.random.choice(helpers)
    world.suspended.append(pid)
    world.send(pid, signal.SIGSTOP)
    return f"SIGSTOP to {_name(pid)}"


FILES = (
    "flight/rank-0000.stacks",
    "gate-inputs.json",
    "guard.jsonl",
    "host.json",
    "run.db",
    "run.db-journal",
    "status/monitoring_costs.json",
)
"""Choose by name, whichever files exist: a seed must always choose the same file."""


def lost_file(world: World) -> str:
    path = world.guarded.state.root / world.random.choice(FILES)
    path.unlink(missing_ok=True)
    return f"removed {path.name}"


def cut_file(world: World) -> str:
    path = world.guarded.state.root / world.random.choice(FILES)
    with contextlib.suppress(OSError):
        os.truncate(path, 0)
    return f"cut {path.name}"


def pipe_for_a_file(world: World) -> str:
    path = world.guarded.state.root / world.random.choice(FILES)
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    return f"a pipe in place of {path.name}"


def undo(world: World) -> None:
    """Undo the faults that last: continue suspended helpers, remove pipes."""
    while world.suspended:
        world.send(world.suspended.pop(), signal.SIGCONT)
    for name in FILES:
        path = world.guarded.state.root / name
        with contextlib.suppress(OSError):
            if stat.S_ISFIFO(path.lstat().st_mode):
                path.unlink()


def full_disk(world: World) -> str:
    if world.disk is None:
        return "no separate disk"
    with world.disk.full():
        time.sleep(world.random.uniform(0.5, 2.0))
    return "full disk"


def frozen_disk(world: World) -> str:
    if world.disk is None:
        return "no separate disk"
    world.disk.freeze()
    time.sleep(world.random.uniform(0.5, 2.5))
    world.disk.thaw()
    return "frozen disk"


def clock_step(world: World) -> str:
    seconds = world.random.choice([-10, -3600, 3600, 86400, -86400, 800_000_000, -800_000_000])
    world.clock.write_text(str(seconds))
    return f"clock {seconds:+d} s"


def output_flood(world: World) -> str:
    """Make the miner print a megabyte: the guard forwards SIGUSR1 to it."""
    world.send(world.guard, signal.SIGUSR1)
    return "a megabyte of output"


def garbage_calls(world: World) -> str:
    """Callers that are no ranks, on the socket of the ranks in the state directory."""
    with contextlib.suppress(OSError):
        for _ in range(300):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
                caller.setblocking(False)
                with address(world.guarded.state.socket) as name:
                    caller.connect(name)
                caller.send(world.random.choice([b'{"token": 7}\n', b"\xff{", b"[]", b"x" * 60000]))
    return "garbage calls"


def connection_flood(world: World) -> str:
    with contextlib.ExitStack() as held, contextlib.suppress(OSError):
        for path in (world.guarded.state.control, world.guarded.state.socket):
            for _ in range(150):
                client = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                client.setblocking(False)
                with address(path) as name:
                    client.connect(name)
    return "connections"


def order(world: World) -> str:
    """Send the guard a command, as an operator would; a pause is undone immediately."""
    what = world.random.choice(["status", "checkpoint", "pause", "resume", "?"])
    for word in (what, "resume") if what == "pause" else (what,):
        with contextlib.suppress(NotRunning, OSError, json.JSONDecodeError):
            ask(world.guarded.state, {"do": word}, 3.0)
    return f"asked for {what}"


def killed_launcher(world: World) -> str:
    for pid in world.launchers():
        world.send(pid, signal.SIGKILL)
        world.launches += 1
    return "SIGKILL to the launcher"


def ordered_restart(world: World) -> str:
    with contextlib.suppress(NotRunning, OSError, json.JSONDecodeError):
        if ask(world.guarded.state, {"do": "restart"}, 3.0).get("done"):
            world.launches += 1
    return "asked for restart"


FAULTS: tuple[Fault, ...] = (
    harmless_signal,
    stopped_for_a_while,
    killed_helper,
    all_helpers_killed,
    suspended_helper,
    lost_file,
    cut_file,
    pipe_for_a_file,
    full_disk,
    frozen_disk,
    clock_step,
    output_flood,
    garbage_calls,
    connection_flood,
    order,
)
"""Faults that must not affect training."""

RELAUNCHES: tuple[Fault, ...] = (killed_launcher, ordered_restart)
"""Faults after which the miner starts again."""
