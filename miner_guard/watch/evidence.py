"""Evidence of a hang: stacks of ranks and of processes before `init()`, the collectives that
they wait in, and the folder that keeps it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from miner_guard.rank.dumps import STACKS_SIGNAL
from miner_guard.rank.layout import Identity, Now, ranks_elsewhere
from miner_guard.record.words import rank_list
from miner_guard.state_dir import (
    StateDir,
    open_private,
    read_json,
    read_regular,
    write_atomic,
    write_json,
)
from miner_guard.system import processes
from miner_guard.system.processes import Process
from miner_guard.watch.base import Context, Records

_THREAD = re.compile(r"^(?:Thread|Current thread) ")
_PY_SPY = re.compile(r"^ {2,}.+ \((?P<file>[^()]+\.pyx?):(?P<line>\d+)\)$")
_FAULTHANDLER = re.compile(r'^ {2}File "(?P<file>[^"]+)", line (?P<line>\d+) in ')
_LIBRARY = re.compile(
    r"^<|(?:site|dist)-packages/|/lib/python3\.\d+/"
    r"|^(?:torch|torchvision|transformers|accelerate|lightning|lightning_fabric|pytorch_lightning"
    r"|deepspeed|datasets|numpy|miner_guard|boto3|botocore|urllib3|requests|huggingface_hub|aiohttp"
    r"|websockets?|bittensor|async_substrate_interface|substrateinterface|tqdm|fsspec|s3transfer"
    r"|httpx|httpcore)(?:/|\.py)"
)
"""py-spy shortens file names to start at the package, so the first component identifies the
library."""


def _frames(dump: str) -> list[re.Match[str]]:
    """The training thread's frames in a py-spy or faulthandler dump, innermost first."""
    threads: list[list[str]] = [[]]
    for line in dump.splitlines():
        if _THREAD.match(line):
            threads.append([])
        threads[-1].append(line)
    # faulthandler does not name threads; the main thread handles the signal.
    main = (
        lines
        for lines in threads
        if lines and ('"MainThread"' in lines[0] or lines[0].startswith("Current thread"))
    )
    thread = next(main, threads[min(1, len(threads) - 1)])
    return [m for line in thread if (m := _PY_SPY.match(line) or _FAULTHANDLER.match(line))]


def _library(file: str) -> bool:
    first = file.partition("/")[0].removesuffix(".py")
    return _LIBRARY.search(file) is not None or first in sys.stdlib_module_names


def innermost_user_frame(dump: str) -> str | None:
    """The training thread's location, such as `loops.py:14`; None if the dump has no frames.

    This is the main thread's innermost frame outside the standard library and known libraries, or
    simply its innermost frame if all of them are in libraries.
    """
    frames = _frames(dump)
    frame = next((f for f in frames if not _library(f["file"])), frames[0] if frames else None)
    return None if frame is None else f"{frame['file'].rpartition('/')[2]}:{frame['line']}"


def waits_for_ranks(dump: str) -> bool:
    """Return whether the miner's code has called torch.distributed and has not returned from it, so
    the rank is waiting for the others."""
    for frame in _frames(dump):
        if "torch/distributed/" in frame["file"]:
            return True
        if not _library(frame["file"]):
            return False
    return False


Traces = Mapping[int, Sequence[Mapping[str, Any]]]
"""Each rank's latest collectives from torch's Flight Recorder, oldest first: `collective_seq_id`,
`process_group`, `profiling_name`, `state` and `time_created_ns`."""


def by_group(traces: Traces) -> dict[tuple[str, str], dict[int, list[Mapping[str, Any]]]]:
    """Each rank's numbered collectives by process group and backend: `nccl:…` and `gloo:…` count
    separately within one group."""
    groups: dict[tuple[str, str], dict[int, list[Mapping[str, Any]]]] = {}
    for rank, entries in traces.items():
        for entry in entries:
            if not entry.get("is_p2p") and entry.get("collective_seq_id") is not None:
                backend = str(entry.get("profiling_name")).partition(":")[0]
                group = (str(entry.get("process_group")), backend)
                groups.setdefault(group, {}).setdefault(rank, []).append(entry)
    return groups


def late(traces: Traces) -> tuple[list[int], str] | None:
    """Return the ranks that hold up a collective, and how; None if no rank does, or if fewer than
    two ranks have entries. They are behind in sequence numbers or, if all numbers are equal, in
    another operation than the others: of two operations, the one that fewer ranks are in, or that
    no rank has called before. No ranks, if that does not decide.

    The number counts what the CPU has enqueued, so it stays equal even when one GPU is stuck in a
    kernel.
    """
    for ranks in by_group(traces).values():
        last = {rank: entries[-1] for rank, entries in ranks.items()}
        numbers = {rank: int(entry["collective_seq_id"]) for rank, entry in last.items()}
        names = {rank: str(entry.get("profiling_name")) for rank, entry in last.items()}
        furthest = max(numbers, key=lambda rank: numbers[rank])
        behind = sorted(r for r, number in numbers.items() if number < numbers[furthest])
        if behind:
            waiting = sorted(numbers.keys() - set(behind))
            who = f"{rank_list(waiting)} wait{'s' if len(waiting) == 1 else ''}"
            detail = ", ".join(f"rank {r} is at collective {numbers[r]}" for r in behind)
            return behind, f"{detail}, {who} in collective {numbers[furthest]} ({names[furthest]})"
        count = Counter(names.values())
        if len(count) > 1:
            before = {str(e.get("profiling_name")) for rows in ranks.values() for e in rows[:-1]}
            weight = {name: (count[name], name in before) for name in count}
            most = max(weight.values())
            odd = sorted(rank for rank, name in names.items() if weight[name] < most)
            each = (f"{rank_list([r for r in names if names[r] == n])} in {n}" for n in count)
            return odd, f"the ranks are in different collectives: {', '.join(each)}"
    return None


_COLLECTIVES_S = 2.0


def collectives(state: StateDir, records: Records, ranks: Iterable[int]) -> dict[int, list[Any]]:
    """The latest collectives of each rank that responds within two seconds. A rank that holds the
    GIL, or that does not use torch.distributed, cannot respond. Raises OSError."""
    dumps: dict[int, Path] = {}
    for rank in ranks:
        path = state.collectives_of(rank)
        path.unlink(missing_ok=True)
        if records.ask_collectives(rank):
            dumps[rank] = path
    deadline = time.monotonic() + _COLLECTIVES_S
    while time.monotonic() < deadline and not all(path.exists() for path in dumps.values()):
        time.sleep(0.02)
    documents = {rank: read_json(path) for rank, path in dumps.items()}
    return {
        rank: document["entries"]
        for rank, document in documents.items()
        if isinstance(document, dict) and isinstance(document.get("entries"), list)
    }


_RAS_S = 11.0
"""NCCL waits 10 s at most for its other processes."""


def nccl_report() -> bytes:
    """What NCCL (from 2.24) says of its communicators and of the ranks that do not answer, by the
    protocol of its client `ncclras`; empty if no rank of this node serves it."""
    host, _, port = os.environ.get("NCCL_RAS_ADDR", "localhost:28028").rpartition(":")
    deadline, report = time.monotonic() + _RAS_S, b""
    # It may end in the middle.
    with contextlib.suppress(OSError, ValueError), contextlib.ExitStack() as opened:
        ras = opened.enter_context(socket.create_connection((host.strip("[]"), int(port)), 1.0))
        ras.sendall(b"CLIENT PROTOCOL 2\n")
        if not ras.recv(1024).upper().startswith(b"SERVER PROTOCOL"):
            return b""
        ras.sendall(b"VERBOSE STATUS\n")
        while (left_s := deadline - time.monotonic()) > 0 and len(report) < 1 << 20:
            ras.settimeout(left_s)
            if not (more := ras.recv(1 << 16)):
                break
            report += more
    return report


MAX_INCIDENTS = 50
"""Evidence folders to keep; each takes up to about 1 MB per rank."""

_OURS = re.compile(r"\d{8}T\d{6}-\w+")


def incident_folder(state: StateDir, wall_s: float, label: str) -> Path:
    """Return `incidents/YYYYMMDDTHHMMSS-LABEL`, in UTC, without creating the folder."""
    return state.incidents / f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(wall_s))}-{label}"


def prune_incidents(state: StateDir) -> None:
    """Remove all but the newest `MAX_INCIDENTS` evidence folders; leave other names alone. Raises
    OSError."""
    if not state.incidents.is_dir():
        return
    ours = sorted(path for path in state.incidents.iterdir() if _OURS.fullmatch(path.name))
    for path in ours[:-MAX_INCIDENTS]:
        if path.is_dir() and not path.is_symlink():
            # Another job thread may prune at the same time.
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(path)


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


@dataclass
class Subject:
    """One process at the time of the hang: a rank's, or one before `init()`."""

    process: Process
    handled: Path
    """The file to which its own signal handler appends its stacks."""

    rank: int | None = None
    identity: Identity | None = None
    now: Now | None = None
    gone: bool = False
    stacks: str = "gone"
    """The tool that wrote its stacks, or `none:` and the reason."""

    frame: str | None = None
    """The innermost frame in the miner's code; None without stacks."""

    waits: bool | None = None
    """Whether it is waiting for the other ranks; None without stacks."""

    stopped: bool = False
    """Whether the process is in state T, stopped by SIGSTOP or a debugger."""

    def kernel_state(self) -> str:
        """What its main thread does, as the kernel sees it, in words."""
        status = None if self.gone else processes.stat(self.process.pid)
        return "gone" if status is None else STATES.get(status.state, status.state)

    def document(self) -> dict[str, Any]:
        """Its entry in hang.json."""
        return {
            "pid": self.process.pid,
            "gone": self.gone,
            "kernel": {"state": self.kernel_state()},
            "now": None if self.now is None else asdict(self.now),
            "stacks": self.stacks,
            "frame": self.frame,
        }


def subjects(state: StateDir, records: Records) -> list[Subject]:
    """One subject for each rank, ordered by rank."""
    headers, per_rank = records.headers(), []
    for rank, one in sorted(records.identities().items()):
        process = Process(one.pid, one.process_start)
        gone = not processes.alive(process)
        per_rank.append(Subject(process, state.stacks_of(rank), rank, one, headers.get(rank), gone))
    return per_rank


class Scene:
    """An ongoing hang and its evidence folder."""

    def __init__(
        self, context: Context, folder: Path, who: Sequence[Subject], timeout_s: float
    ) -> None:
        """`timeout_s`: how long collecting the stacks may take. Raises OSError if the folder can't
        be created."""
        # Goes through this process's file writer: an unresponsive disk raises here, so no thread
        # blocks in the direct writes that follow.
        write_json(folder / "hang.json", {})
        self._context, self._state, self._who = context, context.state, who
        self.folder = folder
        self._deadline = time.monotonic() + timeout_s
        self._dump([subject for subject in who if not subject.gone])
        living = [s.rank for s in who if not s.gone and s.rank is not None]
        self._traces = collectives(self._state, context.records, living)
        self.late = late(self._traces)

    def frames(self) -> dict[int, str]:
        """By rank, the innermost frame of the miner's code, such as `loops.py:14`."""
        return {s.rank: s.frame for s in self._who if s.rank is not None and s.frame is not None}

    def behind(self) -> tuple[int, ...]:
        """The ranks outside the collective that the others are waiting in, according to their
        stacks. Empty if all ranks or none wait, or unless every rank's stacks are known. A rank
        that is alone on its node counts if it is in no collective and other nodes run ranks."""
        outside = tuple(s.rank for s in self._who if s.waits is False and s.rank is not None)
        waiting = sum(bool(s.waits) for s in self._who)
        elsewhere = ranks_elsewhere([s.identity for s in self._who if s.identity is not None])
        alone = len(self._who) == 1 and elsewhere > 0
        complete = len(outside) + waiting == len(self._who)
        return outside if complete and (waiting or alone) else ()

    def before_init(self, launcher: int) -> list[Subject]:
        """What `launcher` and its Python descendants are executing while no rank is known; those
        without children come first. Raises OSError."""
        among = processes.table()
        tree = processes.descendants([launcher], among)
        parents = {among[process.pid].parent for process in tree}
        # A launcher only waits for its ranks, so processes without children come first.
        ordered = sorted(tree, key=lambda process: (process.pid in parents, process.pid))
        candidates = [Subject(each, self._state.early_stacks_of(each.pid)) for each in ordered]
        python = [
            s
            for s in candidates
            if s.handled.exists() or "python" in processes.command(s.process.pid)
        ]
        return self._dump(python[:_MAX_PROCESSES])

    def store(self, story: Mapping[str, Any]) -> None:
        """Write the remaining evidence to the folder. Raises OSError if a write fails."""
        for rank, entries in self._traces.items():
            write_json(self.folder / f"collectives-rank-{rank:04d}.json", {"entries": entries})
        if report := nccl_report():
            write_atomic(self.folder / "nccl-ras.txt", report)
        late = None if self.late is None else dict(zip(("ranks", "detail"), self.late, strict=True))
        document = {
            **story,
            "late_in_collective": late,
            "ranks": {subject.rank: subject.document() for subject in self._who},
        }
        write_json(self.folder / "hang.json", self._context.redactor.value(document))

    def _dump(self, living: list[Subject]) -> list[Subject]:
        """Have py-spy write each process's stacks to its file, or else the process itself."""
        names = (f"pid-{s.process.pid}" if s.rank is None else f"rank-{s.rank:04d}" for s in living)
        paths = [self.folder / f"stacks-{name}.txt" for name in names]
        spies = [_spy(s.process, path) for s, path in zip(living, paths, strict=True)]
        for subject, path, child in zip(living, paths, spies, strict=True):
            spied = child is not None and _finished(child, self._deadline) and path.stat().st_size
            subject.stacks = "py-spy" if spied else _faulthandler(subject, path)
            status = processes.stat(subject.process.pid)
            subject.stopped = status is not None and status.state == "T"
            if not subject.stacks.startswith("none"):
                text = path.read_text(encoding="utf-8", errors="replace")
                subject.frame = innermost_user_frame(text)
                subject.waits = None if subject.frame is None else waits_for_ranks(text)
        return living


_MAX_PROCESSES = 16
_FAULTHANDLER_S = 1.0


def _spy(process: Process, path: Path) -> subprocess.Popen[bytes] | None:
    """Start py-spy; None if it is not installed or does not start."""
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        return None
    command = [program, "dump", "--pid", str(process.pid)]
    null = subprocess.DEVNULL
    with open(open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        try:
            return subprocess.Popen(
                command, stdout=file, stderr=null, stdin=null, start_new_session=True
            )
        except OSError:
            return None


def _finished(child: subprocess.Popen[bytes], deadline: float) -> bool:
    """Wait for py-spy until `deadline` (monotonic), then kill it. Returns whether it succeeded."""
    try:
        return child.wait(timeout=max(0.0, deadline - time.monotonic())) == 0
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=1.0)
        return False


def _faulthandler(subject: Subject, path: Path) -> str:
    """Signal the process to append its stacks to its file, and copy them to `path`. Returns
    `faulthandler`, or `none:` and the reason. Signals only a process that announced its handler
    there: without a handler, the signal would kill it."""
    process = subject.process
    try:
        before = read_regular(subject.handled)
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
        written = read_regular(subject.handled)[len(before) :]
    if not written:
        return "none: the rank did not respond to the signal"
    write_atomic(path, written)
    return "faulthandler"


_MAX_NAMED = 4


def described_places(candidates: Iterable[Subject]) -> str:
    """Describe the source locations for the event's line, such as `train.py:14 (pid 4711)`, and say
    which processes are stopped. Empty if there is nothing to name."""
    words = []
    for each in [s for s in candidates if s.frame is not None or s.stopped][:_MAX_NAMED]:
        stopped = "its process is stopped (state T)" if each.stopped else ""
        where = " and ".join(filter(None, (each.frame, stopped)))
        words.append(f"{where} (pid {each.process.pid})")
    return ", ".join(words)
