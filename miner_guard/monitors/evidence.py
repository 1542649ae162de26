"""Collects evidence of a hang before the guard stops the miner: stacks, kernel states, flight
record tails, the last output.

Collection runs in a job thread with a deadline; the folder records what could not be collected.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from miner_guard.detectors.collectives import Late, late
from miner_guard.detectors.stack_frames import (
    innermost_user_frame,
    outside_the_collective,
    waits_for_ranks,
)
from miner_guard.rank.dumps import STACKS_SIGNAL, asking
from miner_guard.rank.flight import BadFlight, FlightReader
from miner_guard.rank.layout import Identity, Now, ranks_elsewhere
from miner_guard.record.redaction import Redactor
from miner_guard.state_dir import (
    StateDir,
    finite,
    open_private,
    read_json,
    read_regular,
    write_json,
    write_private,
)
from miner_guard.system import processes
from miner_guard.system.sockets import address

_STORY = "hang.json"
_COLLECTIVES_S = 2.0
_TAIL_STEPS = 64
_FAULTHANDLER_S = 1.0

STATES = {
    "R": "running",
    "S": "sleeping: it is waiting for something (a lock, a socket, another rank)",
    "D": (
        "uninterruptible (D state): it is blocked in the kernel on a disk, a network or a driver; "
        "SIGKILL does not help"
    ),
    "T": "stopped by a signal (SIGSTOP, SIGTSTP) or a debugger; SIGCONT lets it continue",
    "t": "stopped by a debugger",
    "Z": "ended, but its parent has not reaped it",
}


@dataclass(frozen=True)
class Subject:
    """One rank at the time of the hang."""

    rank: int
    identity: Identity
    now: Now | None
    gone: bool


@dataclass(frozen=True)
class Gathered:
    """The evidence that could be collected."""

    stacks_of: tuple[int, ...]
    late: Late | None
    """The ranks that are late to a collective, according to torch's Flight Recorder."""


def identity_of(state: StateDir, rank: int) -> Identity | None:
    """The identity stored in the rank's current flight record; None if it can't be read."""
    try:
        flight = FlightReader(state.flight_of(rank))
    except (OSError, BadFlight):
        return None
    identity = flight.identity
    flight.close()
    return identity


def header_of(state: StateDir, rank: int) -> Now | None:
    """The rank's latest header; None if it can't be read."""
    try:
        flight = FlightReader(state.flight_of(rank))
    except (OSError, BadFlight):
        return None
    now = flight.now()
    flight.close()
    return now


def subjects(state: StateDir, ranks: Mapping[int, Now]) -> list[Subject]:
    """One subject for each rank whose flight record is readable, ordered by rank."""
    found: list[Subject] = []
    for rank, now in sorted(ranks.items()):
        identity = identity_of(state, rank)
        if identity is not None:
            process = processes.Process(identity.pid, identity.process_start)
            found.append(Subject(rank, identity, now, not processes.alive(process)))
    return found


class Scene:
    """An ongoing hang and its evidence folder."""

    def __init__(self, state: StateDir, folder: Path, who: list[Subject], timeout_s: float) -> None:
        """`timeout_s`: how long collecting the stacks may take. Raises OSError if the folder can't
        be created."""
        # Goes through this process's file writer: an unresponsive disk raises here, so no thread
        # blocks in the direct writes that follow.
        write_json(folder / _STORY, {})
        self._state, self._folder, self._who = state, folder, who
        self._deadline = time.monotonic() + timeout_s
        self._sources: dict[int, str] = {}
        self._frames: dict[int, str] = {}
        self._waiting: dict[int, bool] = {}

    def frames(self) -> Mapping[int, str]:
        """Store every rank's stacks; returns, by rank, the innermost frame of the miner's code,
        such as `loops.py:14`."""
        self._sources = _stacks(self._state, self._folder, self._who, self._deadline)
        for subject in self._who:
            dump = _read_stacks(_stack_file(self._folder, subject))
            frame = innermost_user_frame(dump)
            if frame is not None:
                self._frames[subject.rank] = frame
                self._waiting[subject.rank] = waits_for_ranks(dump)
        return self._frames

    def behind(self) -> tuple[int, ...]:
        """The ranks outside the collective that the others are waiting in, according to the stacks
        that `frames` stored. Empty unless every rank's stacks are known. A rank that is alone on
        its node counts if it is in no collective and other nodes run ranks."""
        if len(self._waiting) != len(self._who):
            return ()
        if len(self._who) == 1 and ranks_elsewhere([self._who[0].identity]):
            return tuple(rank for rank, waits in self._waiting.items() if not waits)
        return outside_the_collective(self._waiting)

    def store(self, story: Mapping[str, Any], output: bytes, redactor: Redactor) -> Gathered:
        """Write the remaining evidence to the folder. Raises OSError if a write fails."""
        kernel = {subject.rank: _kernel_view(subject) for subject in self._who}
        behind = late(_collectives(self._state, self._folder, self._who))
        for subject in self._who:
            _flight_tail(self._state, self._folder, subject)
        text = redactor.text(output.decode("utf-8", "replace"))
        write_private(self._folder / "output.log", text.encode("utf-8", "replace"))
        document = {
            **story,
            "late_in_collective": None if behind is None else asdict(behind),
            "ranks": {
                subject.rank: {
                    "pid": subject.identity.pid,
                    "gone": subject.gone,
                    "kernel": kernel[subject.rank],
                    "now": None if subject.now is None else asdict(subject.now),
                    "stacks": self._sources.get(subject.rank),
                    "frame": self._frames.get(subject.rank),
                }
                for subject in self._who
            },
        }
        write_json(self._folder / _STORY, redactor.value(finite(document)))
        had = [
            rank for rank, source in self._sources.items() if source in ("py-spy", "faulthandler")
        ]
        return Gathered(tuple(had), behind)


def frame_of(stacks: Path) -> str | None:
    """The innermost frame of the miner's code in a stack dump; None if it has no such frame."""
    return innermost_user_frame(_read_stacks(stacks))


def _read_stacks(stacks: Path) -> str:
    """The file's text; empty if it can't be read."""
    try:
        return stacks.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _kernel_view(subject: Subject) -> dict[str, Any]:
    """Every thread's state and kernel wait location, from /proc."""
    pid = subject.identity.pid
    seen = processes.stat(pid)
    if subject.gone or seen is None:
        return {"state": "gone"}
    threads: dict[str, dict[str, str]] = {}
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            threads[task.name] = {
                "wchan": _read(task / "wchan"),
                "syscall": _read(task / "syscall"),
            }
    kernel_stack = _read(Path(f"/proc/{pid}/stack"))
    return {
        "state": STATES.get(seen.state, seen.state),
        "threads": threads,
        "kernel_stack": kernel_stack,
    }


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError as error:
        return f"unknown: {error.strerror}"


def _stacks(state: StateDir, folder: Path, who: list[Subject], deadline: float) -> dict[int, str]:
    """Write each rank's stacks to a file. Returns, by rank, the tool that produced them or why
    there are none."""
    sources = {subject.rank: "gone" for subject in who}
    living = [subject for subject in who if not subject.gone]
    spies = {
        subject.rank: spy(_stack_file(folder, subject), subject.identity.pid) for subject in living
    }
    for subject in living:
        child, path = spies[subject.rank], _stack_file(folder, subject)
        if child is not None and wait_for_spy(child, deadline) and path.stat().st_size:
            sources[subject.rank] = "py-spy"
        else:
            process = processes.Process(subject.identity.pid, subject.identity.process_start)
            sources[subject.rank] = faulthandler(state.stacks_of(subject.rank), path, process)
    return sources


def _collectives(state: StateDir, folder: Path, who: list[Subject]) -> dict[int, list[Any]]:
    """The latest collectives of each rank that responds in time. A rank that holds the GIL cannot
    respond."""
    asked = {
        s.rank: state.collectives_of(s.rank)
        for s in who
        if not s.gone and _ask(state.collectives_of(s.rank))
    }
    deadline = time.monotonic() + _COLLECTIVES_S
    while time.monotonic() < deadline and not all(path.exists() for path in asked.values()):
        time.sleep(0.02)
    traces: dict[int, list[Any]] = {}
    for rank, path in asked.items():
        document = read_json(path)
        if isinstance(document, dict) and isinstance(document.get("entries"), list):
            traces[rank] = document["entries"]
            write_private(folder / f"collectives-rank-{rank:04d}.json", read_regular(path))
    return traces


def _ask(path: Path) -> bool:
    """Ask a rank for its collectives; False if it is not listening (it has exited or does not use
    torch.distributed) or is too busy."""
    path.unlink(missing_ok=True)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own, address(asking(path)) as name:
            return own.sendto(b"?", socket.MSG_DONTWAIT, name) == 1
    except OSError:
        return False


def _stack_file(folder: Path, subject: Subject) -> Path:
    return folder / f"stacks-rank-{subject.rank:04d}.txt"


def spy(path: Path, pid: int) -> subprocess.Popen[bytes] | None:
    """Start py-spy, which writes the stacks of `pid` to `path`; None if it is not installed or does
    not start."""
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        return None
    with open(open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        try:
            return subprocess.Popen(
                [program, "dump", "--pid", str(pid)],
                stdout=file,
                stderr=subprocess.DEVNULL,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            return None


def wait_for_spy(child: subprocess.Popen[bytes], deadline: float) -> bool:
    """Wait for py-spy until `deadline` (monotonic), then kill it. Returns whether it succeeded."""
    try:
        return child.wait(timeout=max(0.0, deadline - time.monotonic())) == 0
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=1.0)
        return False


def faulthandler(source: Path, path: Path, process: processes.Process) -> str:
    """Signal the process to append its stacks to `source`, and copy them to `path`. Returns
    `faulthandler` on success, else `none:` and the reason. Signals only a process that announced
    its handler in `source`: without a handler, the signal would kill it."""
    try:
        before = read_regular(source)
    except OSError:
        return "none: py-spy did not run, and the hook registered no signal handler"
    if before.split(b"\n", 1)[0] != b"pid %d" % process.pid:
        return "none: py-spy did not run, and the stacks file belongs to another process"
    if not processes.catches(process.pid, STACKS_SIGNAL):
        return "none: py-spy did not run, and the program removed the signal handler or exec'd"
    if not processes.send(process, STACKS_SIGNAL):
        return "none: the rank is gone"
    deadline = time.monotonic() + _FAULTHANDLER_S
    written = b""
    while time.monotonic() < deadline and not written.endswith(b"\n"):
        time.sleep(0.05)
        written = read_regular(source)[len(before) :]
    if not written:
        return "none: the rank did not respond to the signal"
    write_private(path, written)
    return "faulthandler"


def _flight_tail(state: StateDir, folder: Path, subject: Subject) -> None:
    try:
        flight = FlightReader(state.flight_of(subject.rank))
    except (OSError, BadFlight):
        return
    now = flight.now()
    written = now.steps_written if now is not None else 0
    steps = [asdict(step) for step in flight.steps(max(0, written - _TAIL_STEPS))]
    flight.close()
    lines = [json.dumps(finite(step)) for step in steps]
    write_private(
        folder / f"flight-rank-{subject.rank:04d}.jsonl", ("\n".join(lines) + "\n").encode()
    )
