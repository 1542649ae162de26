"""Evidence of a hang: stacks of ranks and of processes before `init()`, the collectives that
they wait in, and the folder that keeps it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from miner_guard.rank.dumps import STACKS_SIGNAL, asking
from miner_guard.rank.flight import BadFlight, FlightReader
from miner_guard.rank.layout import Identity, Now, ranks_elsewhere
from miner_guard.record.redaction import Redactor
from miner_guard.record.words import rank_list
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
from miner_guard.system.processes import Process
from miner_guard.system.sockets import address

_THREAD = re.compile(r"^(?:Thread|Current thread) ")
_PY_SPY = re.compile(r"^ {2,}.+ \((?P<file>[^()]+\.pyx?):(?P<line>\d+)\)$")
_FAULTHANDLER = re.compile(r'^ {2}File "(?P<file>[^"]+)", line (?P<line>\d+) in ')

_LIBRARIES = frozenset(
    {
        "torch",
        "torchvision",
        "transformers",
        "accelerate",
        "lightning",
        "lightning_fabric",
        "pytorch_lightning",
        "deepspeed",
        "datasets",
        "numpy",
        "miner_guard",
        "boto3",
        "botocore",
        "urllib3",
        "requests",
        "huggingface_hub",
        "aiohttp",
        "websockets",
        "websocket",
        "bittensor",
        "async_substrate_interface",
        "substrateinterface",
        "tqdm",
        "fsspec",
        "s3transfer",
        "httpx",
        "httpcore",
    }
)
"""py-spy shortens file names to start at the package, so the first component identifies the
library."""


def innermost_user_frame(dump: str) -> str | None:
    """Return the training thread's location, such as `loops.py:14`, from a py-spy or faulthandler
    dump; None if the dump has no frames.

    This is the main thread's innermost frame outside the standard library and known libraries, or
    simply its innermost frame if all of them are in libraries.
    """
    frames = [
        match
        for line in _training_thread(dump)
        if (match := _PY_SPY.match(line) or _FAULTHANDLER.match(line))
    ]
    for match in frames:
        if not _library(match["file"]):
            return _name(match)
    return _name(frames[0]) if frames else None


def waits_for_ranks(dump: str) -> bool:
    """Return whether the miner's code has called torch.distributed and has not returned from it, so
    the rank is waiting for the others."""
    for line in _training_thread(dump):
        match = _PY_SPY.match(line) or _FAULTHANDLER.match(line)
        if match is None:
            continue
        if "torch/distributed/" in match["file"]:
            return True
        if not _library(match["file"]):
            return False
    return False


def outside_the_collective(waiting: Mapping[int, bool]) -> tuple[int, ...]:
    """The ranks that the others are waiting for; empty if all ranks or none are waiting in
    torch.distributed. `waiting` maps each rank to True if it is waiting there."""
    outside = tuple(sorted(rank for rank, waits in waiting.items() if not waits))
    return outside if len(outside) < len(waiting) else ()


def _training_thread(dump: str) -> list[str]:
    threads: list[list[str]] = []
    for line in dump.splitlines():
        if _THREAD.match(line):
            threads.append([line])
        elif threads:
            threads[-1].append(line)
    if not threads:
        return dump.splitlines()
    return next(iter(_of_main(threads)), threads[0])


def _of_main(threads: Iterable[list[str]]) -> Iterable[list[str]]:
    # faulthandler does not name threads; the main thread handles the signal.
    return (
        thread
        for thread in threads
        if '"MainThread"' in thread[0] or thread[0].startswith("Current thread")
    )


def _library(file: str) -> bool:
    if "site-packages/" in file or "dist-packages/" in file or file.startswith("<"):
        return True
    if re.search(r"/lib/python3\.\d+/", file):
        return True
    first = file.partition("/")[0].removesuffix(".py")
    return first in sys.stdlib_module_names or first in _LIBRARIES


def _name(match: re.Match[str]) -> str:
    return f"{match['file'].rpartition('/')[2]}:{match['line']}"


@dataclass(frozen=True)
class Late:
    """The ranks that have not entered the collective that the others are waiting in."""

    ranks: tuple[int, ...]
    detail: str


def late(traces: Mapping[int, Sequence[Mapping[str, Any]]]) -> Late | None:
    """Return the ranks that are behind: those whose last collective in a process group has a lower
    sequence number than the others'. If the numbers are equal, return the ranks whose GPU has not
    started the collective that other GPUs have started.

    `traces` maps a rank to its entries with `collective_seq_id`, `process_group`, `profiling_name`
    and `state`, oldest first. The sequence number counts what the CPU has enqueued, so it stays
    equal even when one GPU is stuck in a kernel; torch records what a GPU has started only with
    TORCH_NCCL_ENABLE_TIMING=1. None if no rank is behind, or if fewer than two ranks have entries.
    """
    last: dict[tuple[str, str], dict[int, _Last]] = {}
    for rank, entries in traces.items():
        for entry in entries:
            if entry.get("is_p2p") or entry.get("collective_seq_id") is None:
                continue
            name = str(entry.get("profiling_name"))
            # `nccl:…` and `gloo:…` count separately within one group.
            group = (str(entry.get("process_group")), name.partition(":")[0])
            state = str(entry.get("state"))
            number = int(entry["collective_seq_id"])
            last.setdefault(group, {})[rank] = _Last(number, name, state)
    for ranks in last.values():
        furthest = max(ranks.values(), key=lambda each: each.number)
        behind = tuple(sorted(r for r, each in ranks.items() if each.number < furthest.number))
        if behind:
            late_ones = ", ".join(f"rank {r} is at collective {ranks[r].number}" for r in behind)
            return Late(behind, f"{late_ones}, {_waiting(ranks, behind, furthest)}")
    for ranks in last.values():
        furthest = next(iter(ranks.values()))
        behind = tuple(sorted(r for r, each in ranks.items() if each.state == "scheduled"))
        if behind and any(each.state == "started" for each in ranks.values()):
            whose = f"on {rank_list(behind)}, the GPU has not started it"
            return Late(behind, f"{_waiting(ranks, behind, furthest)}; {whose}")
    return None


@dataclass(frozen=True)
class _Last:
    """A rank's last collective in one group."""

    number: int
    name: str
    state: str
    """`scheduled`, `started` or `completed`, according to the GPU's events."""


def _waiting(ranks: Mapping[int, _Last], behind: tuple[int, ...], furthest: _Last) -> str:
    waiting = [str(rank) for rank in sorted(ranks) if rank not in behind]
    wait = f"rank {waiting[0]} waits" if len(waiting) == 1 else f"ranks {','.join(waiting)} wait"
    return f"{wait} in collective {furthest.number} ({furthest.name})"


_OURS = re.compile(r"\d{8}T\d{6}-\w+")


def incident_folder(state: StateDir, wall_s: float, label: str) -> Path:
    """Return `incidents/YYYYMMDDTHHMMSS-LABEL`, in UTC, without creating the folder."""
    return state.incidents / f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(wall_s))}-{label}"


def prune_incidents(state: StateDir, keep: int) -> None:
    """Remove all but the newest `keep` evidence folders; leave other names alone. Raises
    OSError."""
    if not state.incidents.is_dir():
        return
    ours = sorted(path for path in state.incidents.iterdir() if _OURS.fullmatch(path.name))
    for path in ours[: max(0, len(ours) - keep)]:
        if path.is_dir() and not path.is_symlink():
            # Another job thread may prune at the same time.
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(path)


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


_MAX_PROCESSES = 16
_MAX_NAMED = 4


@dataclass(frozen=True)
class Place:
    """What one of the miner's processes is executing."""

    pid: int
    state: str
    """The process state as in /proc: `T` means stopped."""

    frame: str | None
    """The innermost frame in the miner's code; None without stacks."""


def places(state: StateDir, folder: Path, launcher: int, timeout_s: float) -> list[Place]:
    """Find the code that `launcher` and its Python descendants are executing, and write their
    stacks to `folder`. Processes without children come first. Raises OSError."""
    deadline = time.monotonic() + timeout_s
    among = processes.table()
    tree = processes.descendants([launcher], among)
    parents = {among[process.pid].parent for process in tree}
    # A launcher only waits for its ranks, so processes without children come first.
    ordered = sorted(tree, key=lambda process: (process.pid in parents, process.pid))
    found = []
    for process in _of_python(ordered, state)[:_MAX_PROCESSES]:
        path = folder / f"stacks-pid-{process.pid}.txt"
        seen = processes.stat(process.pid)
        if seen is None:
            continue
        # A stopped process responds to no signal.
        written = seen.state != "T" and _written(state, path, process, deadline)
        if written or seen.state == "T":
            found.append(Place(process.pid, seen.state, frame_of(path) if written else None))
    return found


def _of_python(tree: Iterable[Process], state: StateDir) -> list[Process]:
    return [
        process
        for process in tree
        if state.early_stacks_of(process.pid).exists() or "python" in processes.command(process.pid)
    ]


def _written(state: StateDir, path: Path, process: Process, deadline: float) -> bool:
    """Have the process write its stacks to `path`; if that fails, let py-spy do it. Returns True if
    either succeeded."""
    source = state.early_stacks_of(process.pid)
    if faulthandler(source, path, process) == "faulthandler":
        return True
    child = spy(path, process.pid)
    return child is not None and wait_for_spy(child, deadline) and path.stat().st_size > 0


def described_places(found: Iterable[Place]) -> str:
    """Describe the source locations for the event's line, such as `train.py:14 (pid 4711)`, and say
    which processes are stopped. Empty if there is nothing to name."""
    rows = [place for place in found if place.frame is not None or place.state == "T"]
    words = []
    for place in rows[:_MAX_NAMED]:
        stopped = "its process is stopped (state T)" if place.state == "T" else ""
        where = " and ".join(filter(None, (place.frame, stopped)))
        words.append(f"{where} (pid {place.pid})")
    return ", ".join(words)
