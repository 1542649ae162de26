"""Runs a real guard, for tests that inject faults into it or its miner."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from miner_guard.state_dir import StateDir
from tests.support.waiting import until

REPO = Path(__file__).resolve().parents[2]
MINERS = Path(__file__).with_name("miners")
MARK = "_MINER_GUARD_TEST_MARK"
"""Names the test in the environment of its processes. A name with TOKEN in it would have its value
redacted."""


def when(record: Mapping[str, Any]) -> float:
    """The time of an event, in seconds since 1970."""
    return datetime.fromisoformat(record["ts"].replace("Z", "+00:00")).timestamp()


def stat_of(pid: int | str) -> list[str]:
    """The fields of /proc/PID/stat after the name: state, parent, … Raises OSError once the process
    is gone."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def lives(pid: int | str) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return stat_of(pid)[0] not in "ZX"
    except OSError:
        return False


def living(needle: str) -> list[tuple[int, str]]:
    """Living processes with `needle` in their command line or environment."""
    found: list[tuple[int, str]] = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            command = Path(f"/proc/{name}/cmdline").read_bytes()
            words = command + Path(f"/proc/{name}/environ").read_bytes()
        except OSError:
            continue
        if needle.encode() in words and lives(name):
            found.append((int(name), command.replace(b"\0", b" ").decode(errors="replace")))
    return found


def kill_at_once(*pids: int) -> None:
    """Kill processes that would react to each other's death."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)


def keepers(pids: Sequence[int]) -> list[int]:
    """Those that are below no other: a guard runs the same command line as the process in front of
    its keeper."""

    def parent(pid: int) -> int:
        with contextlib.suppress(OSError):
            return int(stat_of(pid)[1])
        return 0

    return [pid for pid in pids if not {parent(pid), parent(parent(pid))} & {*pids}]


class Guarded:
    """`miner-guard run` supervising a command, with its state directory and everything that it has
    logged."""

    def __init__(self, folder: Path) -> None:
        self.state = StateDir(folder / "state")
        self.python = sys.executable
        self.entry: str | None = None
        """A script to run instead of `-m miner_guard`: a guard with a built-in defect."""
        self.token = uuid.uuid4().hex
        self.processes: list[subprocess.Popen[bytes]] = []
        self.output = folder / "output.log"
        self._read = b""
        """The part of guard.jsonl parsed into `_events`."""

        self._events: list[dict[str, Any]] = []

    def start(
        self,
        command: Sequence[str],
        *flags: str,
        settings: dict[str, Any] | None = None,
        **popen: Any,
    ) -> subprocess.Popen[bytes]:
        """Start a guard; its output goes to `self.output` unless `stdout` is given."""
        own = {
            f"MINER_GUARD_{key.upper().replace('.', '__')}": str(value)
            for key, value in (settings or {}).items()
        }
        env = {
            **os.environ,
            "MINER_GUARD_GPU__PREFLIGHT": "false",
            MARK: self.token,
            "PYTHONPATH": str(REPO),
            **own,
            **popen.pop("env", {}),
        }
        if "stdout" not in popen:
            popen["stdout"] = self.output.open("ab")
            popen["stderr"] = subprocess.STDOUT
        entry = ["-m", "miner_guard"] if self.entry is None else [self.entry]
        line = [
            self.python,
            *entry,
            "run",
            "--state-dir",
            str(self.state.root),
            *flags,
            "--",
            *command,
        ]
        process = subprocess.Popen(line, env=env, stdin=subprocess.DEVNULL, **popen)
        self.processes.append(process)
        return process

    def run(self, *command: str | Path, seconds: float = 120.0, **start: Any) -> int:
        """Supervise a command until it ends; returns the guard's exit code."""
        return self.start([*map(str, command)], **start).wait(seconds)

    def miner(self, name: str, *arguments: object) -> list[str]:
        """The command for one of the small miners next to this file; its processes carry the test's
        token."""
        return [sys.executable, "-u", str(MINERS / f"{name}.py"), *map(str, arguments), self.token]

    @property
    def events(self) -> list[dict[str, Any]]:
        """Every line of guard.jsonl. Parses only new lines, because tests ask many times a
        second."""
        try:
            text = self.state.log.read_bytes()
        except FileNotFoundError:
            return []
        if not text.startswith(self._read):
            self._read, self._events = b"", []
        new = text[len(self._read) : text.rfind(b"\n") + 1]
        self._events += [json.loads(line) for line in new.splitlines()]
        self._read += new
        return list(self._events)

    def named(self, event: str, line: str = "") -> list[dict[str, Any]]:
        """The events of this name whose line begins so."""
        return [e for e in self.events if e["event"] == event and e["msg"].startswith(line)]

    @property
    def guard_pid(self) -> int:
        """The pid of the latest guard."""
        self.wait_for("guard_started")
        return int(self.named("guard_started")[-1]["guard_pid"])

    @property
    def keeper_pid(self) -> int:
        """The keeper behind the last process in front of it; `processes` holds the latter."""
        front = self.processes[-1].pid
        return int(Path(f"/proc/{front}/task/{front}/children").read_text().split()[0])

    def kill_everything_that_watches(self) -> None:
        """Kill the process in front, the keeper and the guard at once: nobody ends the miner."""
        kill_at_once(self.keeper_pid, self.guard_pid, self.processes[-1].pid)
        self.processes[-1].wait(60)

    @property
    def miner_pid(self) -> int:
        """The pid of the latest launch's launcher."""
        self.wait_for("miner_started")
        return int(self.named("miner_started")[-1]["pid"])

    def wait_for(
        self, event: str, count: int = 1, seconds: float = 60.0, *, line: str = ""
    ) -> dict[str, Any]:
        """Wait for the `count`th event of this name whose line begins so."""
        found: list[dict[str, Any]] = until(
            lambda: e if len(e := self.named(event, line)) >= count else None,
            seconds,
            lambda: f"{count} x {event}: {self.tail()}",
        )
        return found[count - 1]

    def tail(self) -> str:
        return self.output.read_text(errors="replace")[-3000:] if self.output.exists() else ""

    def stop(self, number: int = signal.SIGINT, seconds: float = 60.0) -> int:
        """Send a signal to the last guard; returns its exit code."""
        self.processes[-1].send_signal(number)
        return self.processes[-1].wait(seconds)

    def assert_nothing_left(self, seconds: float = 10.0) -> None:
        """Assert that no process of this run is alive, by the token: processes that cleared their
        environment still carry it."""
        deadline = time.monotonic() + seconds
        while left := living(self.token):
            assert time.monotonic() < deadline, f"left: {left}"
            time.sleep(0.05)

    def clean(self) -> None:
        """Clean up after a test, whatever its result."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait(10)
        for pid, _ in living(self.token):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@contextlib.contextmanager
def guarding(folder: Path) -> Iterator[Guarded]:
    """A guard that has not been started yet; none of its processes outlives the block."""
    guard = Guarded(folder)
    try:
        yield guard
        if all(process.poll() is not None for process in guard.processes):
            guard.assert_nothing_left()
    finally:
        guard.clean()
