"""Dumps what a rank is doing at the supervisor's request: the stacks of all threads, even while the
rank hangs inside C code, and the last collectives, which identify the late rank.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import signal
from _signal import getsignal as _getsignal  # type: ignore[import-not-found]
from collections.abc import Callable
from pathlib import Path
from typing import IO

from miner_guard.rank.environment import loaded_module
from miner_guard.state_dir import StateDir, make_folder, open_private, write_atomic

STACKS_SIGNAL = signal.SIGUSR2
"""A rank that receives this signal appends the stacks of all its threads to
`flight/rank-NNNN.stacks`.

Send it only if that file exists and its first line names the rank's pid: the signal kills a process
that has no handler for it.
"""

WITHOUT = "only py-spy can read the stacks if it hangs"
"""The consequence for the operator if the program uses the signal itself."""

_NUMBER = int(STACKS_SIGNAL)
_registered = False
"""Whether this process has registered the guard's handler."""

_early: tuple[Path, IO[bytes]] | None = None
"""The file that this process dumps its stacks to until it has a rank; None unless `begin_early`
opened one."""


class SignalTaken(Exception):
    """The program handles the signal itself."""


def register(path: Path) -> IO[bytes]:
    """Make STACKS_SIGNAL dump stacks to `path`. Returns the file, which must stay open. Raises
    SignalTaken, OSError."""
    global _registered
    if taken() or (_caught() and not _registered):
        raise SignalTaken(f"the program uses {STACKS_SIGNAL.name}, so {WITHOUT}")
    make_folder(path.parent)
    fd = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    file = open(fd, "wb", buffering=0)  # noqa: SIM115 - open as long as the process: the handler writes to it
    file.write(b"pid %d\n" % os.getpid())
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
    _registered = True
    _end_early(path)
    return file


def begin_early(state_dir: str | None) -> None:
    """Until this process has a rank, dump its stacks to a file named after its pid, because it may
    hang before `init()`. Does nothing without a state directory or a guard, or if the program uses
    the signal itself."""
    global _early
    if not state_dir or _early is not None:
        return
    path = StateDir(Path(state_dir)).early_stacks_of(os.getpid())
    try:
        _early = path, register(path)
    except (SignalTaken, OSError):
        # This loses only evidence of a hang before `init()`. If the cause persists, the rank's
        # guard reports it.
        return
    atexit.register(path.unlink, missing_ok=True)


def _end_early(registered: Path) -> None:
    """Remove the early file after the rank's own file has replaced it."""
    global _early
    if _early is not None and _early[0] != registered:
        (path, file), _early = _early, None
        file.close()
        path.unlink(missing_ok=True)


def taken() -> bool:
    """Return whether the program handles or ignores the signal through Python's `signal` module,
    which does not show faulthandler's handlers."""
    # `check` runs at every step; `signal.getsignal` would take 35 times as long, because it wraps
    # the result in an enum.
    return bool(_getsignal(_NUMBER) != 0)


class StackDumps:
    """Keeps this rank ready to dump its stacks until the program uses the signal itself."""

    def __init__(self, report: Callable[[str, str], None]) -> None:
        """`report(subject, what)` reports what went wrong."""
        self._report = report
        self._file: IO[bytes] | None = None

    def begin(self, path: Path) -> None:
        """Dump stacks to `path` from now on. Raises SignalTaken, OSError."""
        self._file = register(path)

    def check(self) -> None:
        """If the program now handles the signal itself, make the supervisor stop sending it. Call
        this at each step. Raises OSError."""
        if self._file is not None and _getsignal(_NUMBER) != 0:
            file, self._file = self._file, None
            # A file that names no process gets no signal.
            file.truncate(0)
            self._report("stacks", f"the program now uses {STACKS_SIGNAL.name}, so {WITHOUT}")


def _caught() -> bool:
    """Return whether the process has a handler for the signal. If Python's `signal` module shows
    none, the program has registered it with faulthandler."""
    with open("/proc/self/status", "rb") as status:
        mask = next((int(line.split()[1], 16) for line in status if line.startswith(b"SigCgt:")), 0)
    return bool(mask >> (STACKS_SIGNAL - 1) & 1)


_LAST = 64
"""How many of the latest collectives to keep from each dump."""

_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""The first dumps NCCL's collectives and exists only in torch's CUDA builds; the second dumps
gloo's."""


def write_collectives(path: Path) -> None:
    """Replace `path` by the last collectives, or the reason why they can't be read."""
    try:
        document = _last_collectives()
    except Exception as error:  # noqa: BLE001 - a torch build without the recorder must not end this thread; the file gives the reason
        document = {"error": f"{type(error).__name__}: {error}"}
    with contextlib.suppress(OSError):
        write_atomic(path, json.dumps(document, default=str))


def _last_collectives() -> dict[str, object]:
    recorders = loaded_module("torch._C._distributed_c10d")
    if recorders is None:
        raise LookupError("the program has not imported torch.distributed")
    keys = (
        "collective_seq_id",
        "process_group",
        "profiling_name",
        "state",
        "is_p2p",
        "time_created_ns",
    )
    entries: list[dict[str, object]] = []
    dumps = [dump for name in _RECORDERS if (dump := getattr(recorders, name, None)) is not None]
    if not dumps:
        raise LookupError(f"this torch has none of {', '.join(_RECORDERS)}")
    for dump in dumps:
        latest = json.loads(dump()).get("entries", [])[-_LAST:]
        entries += [{key: entry.get(key) for key in keys} for entry in latest]
    return {"entries": entries}
