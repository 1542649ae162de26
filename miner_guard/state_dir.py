"""The state directory: the names of the guard's files, and how they are written.

Standard library only. A file of one of these names with torn or foreign content is set aside, never
trusted; the guard leaves other files alone.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = "miner-guard"
"""Below the state home; holds one state directory per name."""

MARKER = "_MINER_GUARD_RUN"
"""Environment variable that marks every process of a run; its value is the run's id."""

STATE_DIR = "_MINER_GUARD_STATE_DIR"
"""Passes the state directory to the ranks."""

RANK_SETTINGS = "_MINER_GUARD_RANK_SETTINGS"
"""The settings that ranks need, as JSON."""


@dataclass(frozen=True)
class StateDir:
    """Paths below one state directory. Creating an instance does not touch the disk."""

    root: Path

    @property
    def log(self) -> Path:
        return self.root / "guard.jsonl"

    @property
    def flight(self) -> Path:
        return self.root / "flight"

    def flight_of(self, rank: int) -> Path:
        return self.flight / f"rank-{rank:04d}.bin"

    def stacks_of(self, rank: int) -> Path:
        """Where a rank writes its threads' stacks on request (`rank.stacks.STACKS_SIGNAL`)."""
        return self.flight / f"rank-{rank:04d}.stacks"

    def early_stacks_of(self, pid: int) -> Path:
        """The same for a process that has not called `init()` yet, and so has no rank."""
        return self.flight / f"early-{pid}.stacks"

    @property
    def memory(self) -> Path:
        """Checkpoints in this machine's memory, kept between launches; the guard removes it."""
        name = f"{zlib.crc32(os.fsencode(self.root)):08x}"
        return Path("/dev/shm") / f"miner-guard-{os.getuid()}-{name}"

    def agreement_of(self, name: str) -> Path:
        """The socket at which the ranks of a node reach their leader."""
        return self.flight / f"agree-{name}.sock"

    def collectives_of(self, rank: int) -> Path:
        """Where a rank writes its last collectives on request (`rank.collectives`)."""
        return self.flight / f"rank-{rank:04d}.collectives"

    @property
    def socket(self) -> Path:
        return self.root / "guard.sock"

    @property
    def control(self) -> Path:
        return self.root / "control.sock"

    @property
    def gate_inputs(self) -> Path:
        return self.root / "gate-inputs.json"

    @property
    def shapes(self) -> Path:
        """The model's parameter shapes, as `guard.diagnose` recorded them (`validators.shapes`)."""
        return self.root / "model-shapes.json"

    @property
    def watched(self) -> Path:
        """The repo and chain that this guard watches or last watched
        (`uploads.remembered_settings`)."""
        return self.root / "watched.json"

    @property
    def status(self) -> Path:
        return self.root / "status.json"

    @property
    def costs(self) -> Path:
        return self.root / "status" / "monitoring_costs.json"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger.sqlite3"

    @property
    def otlp_position(self) -> Path:
        """How far guard.jsonl has been exported over OTLP (`reporting.otlp_sender`)."""
        return self.root / "otlp-position.json"

    @property
    def incidents(self) -> Path:
        return self.root / "incidents"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def roster(self) -> Path:
        """The processes of the current run, for the guard that takes over from a killed one."""
        return self.root / "run.json"

    @property
    def host_facts(self) -> Path:
        """Facts about this host from the last run: GPU count, learned timeouts."""
        return self.root / "host.json"


class ForeignLink(RuntimeError):
    """The path to the state directory crosses another user's symlink; the message names it and its
    owner."""


def choose(name: str, flag: str | None, env: Mapping[str, str]) -> StateDir:
    """Choose the state directory: flag, `MINER_GUARD_STATE_DIR`, `XDG_STATE_HOME`, home, in that
    order.

    Resolves symlinks, so that a directory has a single name. Raises ForeignLink for another user's
    symlink, RuntimeError if no directory is given and there is no home.
    """
    if explicit := flag or env.get("MINER_GUARD_STATE_DIR"):
        return StateDir(_resolved(Path(explicit).expanduser().absolute()))
    base = env.get("XDG_STATE_HOME")
    root = Path(base) if base else Path.home() / ".local" / "state"
    return StateDir(_resolved((root / FOLDER / name).absolute()))


def _resolved(path: Path, links: int = 40) -> Path:
    """`path` without symlinks, following at most `links`, like the kernel. Raises ForeignLink."""
    seen = Path(path.anchor)
    for part in path.parts[1:]:
        seen = Path(os.path.normpath(seen / part)) if part == ".." else seen / part
        if not os.path.islink(seen):
            continue
        if (owner := foreign_link(seen)) is not None:
            raise ForeignLink(f"{seen} is a symlink of uid {owner}, who could point it elsewhere.")
        if not links:
            # A loop: opening the original path reports it.
            return path
        seen = _resolved(seen.parent / os.readlink(seen), links - 1)
    return seen


def foreign_link(path: Path) -> int | None:
    """The owner of the symlink at `path` if neither this user nor root; None for anything else."""
    try:
        seen = path.lstat()
    except OSError:
        return None
    return (
        seen.st_uid if stat.S_ISLNK(seen.st_mode) and seen.st_uid not in (os.geteuid(), 0) else None
    )


PRIVATE_FOLDER = 0o700
PRIVATE_FILE = 0o600
"""The guard's files quote logs, stacks and command lines: readable only by its user, whatever the
umask."""


def make_folder(path: Path) -> None:
    """Create `path` and its missing parents, private to this user. Raises OSError."""
    try:
        _make_one(path)
    except FileNotFoundError:
        if path.parent == path:
            raise
        make_folder(path.parent)
        # Once: in /proc, and where another process removes the parent, the error stays the same.
        _make_one(path)


def _make_one(path: Path) -> None:
    try:
        os.mkdir(path, PRIVATE_FOLDER)
    except FileExistsError:
        if not path.is_dir():
            raise


def open_private(path: Path, flags: int) -> int:
    """Open one of the guard's files, and make it private if other users could read it.

    Raises OSError: also for another user's symlink (ELOOP), and for a pipe or device (EINVAL),
    which could hang the writer.
    """
    # O_NONBLOCK: the open must not wait for the other end of a pipe. It has no effect on a regular
    # file.
    flags |= os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW, PRIVATE_FILE)
    except OSError as error:
        if error.errno != errno.ELOOP or foreign_link(path) is not None:
            raise
        fd = os.open(path, flags, PRIVATE_FILE)
    try:
        seen = os.fstat(fd)
        if not stat.S_ISREG(seen.st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        tighten(fd, PRIVATE_FILE)
    except OSError:
        os.close(fd)
        raise
    return fd


def tighten(fd: int, mode: int) -> int | None:
    """Remove the permissions not in `mode` from this user's open file or folder.

    Returns the old mode if it was wider. Raises OSError if it cannot be changed.
    """
    before = stat.S_IMODE(os.fstat(fd).st_mode)
    if not before & ~mode & 0o777:
        return None
    os.fchmod(fd, before & ~(0o777 & ~mode))
    return before


FileWriter = Callable[[Path, bytes | None, int], None]
"""Replaces a file (path, content, mode), or removes it if the content is None. Raises OSError."""

_diverted: FileWriter | None = None


def divert_writes(write: FileWriter | None) -> None:
    """From now on `write` writes and removes this process's files in the state directory.

    For the guard, whose threads must never wait for a disk; None restores direct writes.
    """
    global _diverted
    _diverted = write


def write_private(path: Path, data: bytes) -> None:
    """Write one of the guard's files, new or existing. Raises OSError like `open_private`."""
    if _diverted is not None:
        _diverted(path, data, PRIVATE_FILE)
        return
    with open(open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.write(data)


def remove(path: Path) -> None:
    """Remove one of the guard's files, if it exists. Raises OSError."""
    (_diverted or replace_file)(path, None, PRIVATE_FILE)


def write_atomic(path: Path, text: str, mode: int = PRIVATE_FILE) -> None:
    """Replace `path` with `text` atomically: a reader sees all of the old or all of the new. Raises
    OSError.

    `mode` 0o666 leaves read access to the umask: for files that a user requests by path.
    """
    # A path or argument may hold invalid UTF-8, which Python carries as lone surrogates.
    (_diverted or replace_file)(path, text.encode("utf-8", "replace"), mode)


def replace_file(path: Path, data: bytes | None, mode: int) -> None:
    """The direct `FileWriter`."""
    if data is None:
        path.unlink(missing_ok=True)
        return
    make_folder(path.parent)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}.tmp")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with open(fd, "wb") as file:
            file.write(data)
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def write_json(path: Path, document: Any) -> None:
    """`write_atomic` of a JSON document; non-finite numbers become null."""
    write_atomic(path, json_text(finite(document)))


def read_regular(path: Path, limit: int = -1) -> bytes:
    """The content of a file, at most `limit` bytes of it. Raises OSError, also for a pipe or device
    (EINVAL), which could hang the reader."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        return file.read(limit)


def json_text(document: Any) -> str:
    """A document of `finite` as the guard's files hold it: one line for each field at the top."""
    # Not with `indent`: that takes Python's encoder, which is 15 times slower than the one in C.
    if not isinstance(document, dict) or not document:
        return json.dumps(document, ensure_ascii=False) + "\n"
    fields = (f"{json.dumps({k: v}, ensure_ascii=False)[1:-1]}" for k, v in document.items())
    return "{\n " + ",\n ".join(fields) + "\n}\n"


def read_json(path: Path) -> Any | None:
    """The document, or None if the file is absent, unreadable or not JSON."""
    try:
        return json.loads(read_regular(path).decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


ROOM_TO_RESUME = 64 * 1024
"""Free bytes required before we treat a full disk as writable again: a short line may fit where a
longer one did not."""


def is_full(error: OSError) -> bool:
    """Whether a write failed for lack of space, and will work again once there is some."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def has_room(where: int | Path) -> bool:
    """Whether the file system of a descriptor or path has room again. Raises OSError."""
    disk = os.statvfs(where)
    return disk.f_bavail * disk.f_frsize >= ROOM_TO_RESUME


def is_at(path: Path, fd: int) -> bool:
    """Whether `path` still refers to the open file, neither removed nor replaced. Raises
    OSError."""
    try:
        seen, held = os.stat(path), os.fstat(fd)
    except FileNotFoundError:
        return False
    return (seen.st_dev, seen.st_ino) == (held.st_dev, held.st_ino)


def set_aside(path: Path) -> Path:
    """Rename a damaged file of ours out of the way; return its new path. Raises OSError."""
    aside = path.with_name(
        f"{path.name}.damaged-{time.strftime('%Y%m%dT%H%M%S')}-{time.monotonic_ns() % 10**6:06d}"
    )
    os.replace(path, aside)
    return aside


def json_number(value: float | None) -> float | str | None:
    """A measured number, with `NaN`, `Infinity` or `-Infinity` as text, which JSON lacks: null
    means "not measured"."""
    if value is None or value - value == 0:
        return value
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"


def finite(value: Any) -> Any:
    """`value` with NaN and infinities replaced by null, recursively: JSON has no such numbers."""
    kind = type(value)
    if kind is str or kind is int or kind is bool or value is None:
        return value
    if isinstance(value, float):
        return value if value - value == 0 else None
    # `dict` first: the check for an abstract Mapping takes ten times as long.
    if isinstance(value, (dict, Mapping)):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [finite(v) for v in value]
    return value
