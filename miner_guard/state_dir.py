"""The state directory: names the guard's files, and writes and reads them.

Standard library only. If a file with one of these names has torn or foreign content, the guard sets
it aside and never trusts it. It does not touch other files.
"""

from __future__ import annotations

import errno
import json
import os
import pwd
import shlex
import stat
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = "miner-guard"
"""Folder under the state home that holds one state directory per name."""

MARKER = "_MINER_GUARD_RUN"
"""Environment variable that marks every process of a run. Its value is the id of the run."""

STATE_DIR = "_MINER_GUARD_STATE_DIR"
"""Environment variable that passes the state directory to the ranks."""

RANK_SETTINGS = "_MINER_GUARD_RANK_SETTINGS"
"""Environment variable that passes the ranks the settings they need, as JSON."""


@dataclass(frozen=True)
class StateDir:
    """Paths under one state directory. Creating an instance does not touch the disk."""

    root: Path

    @property
    def log(self) -> Path:
        return self.root / "guard.jsonl"

    @property
    def flight(self) -> Path:
        return self.root / "flight"

    def stacks_of(self, rank: int) -> Path:
        """The file where a rank writes its threads' stacks on request
        (`rank.dumps.STACKS_SIGNAL`)."""
        return self.flight / f"rank-{rank:04d}.stacks"

    def early_stacks_of(self, pid: int) -> Path:
        """The file where a process that has no rank yet, because it has not called `init()`,
        writes its threads' stacks on request."""
        return self.flight / f"early-{pid}.stacks"

    @property
    def memory(self) -> Path:
        """Folder in /dev/shm that keeps checkpoints between launches. The guard removes it."""
        name = f"{zlib.crc32(os.fsencode(self.root)):08x}"
        return Path("/dev/shm") / f"miner-guard-{os.getuid()}-{name}"

    def collectives_of(self, rank: int) -> Path:
        """The file where a rank writes its last collectives on request (`rank.dumps`)."""
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
        """The model's parameter shapes, recorded by `guard.diagnose` (`validators.shapes`)."""
        return self.root / "model-shapes.json"

    @property
    def costs(self) -> Path:
        return self.root / "status" / "monitoring_costs.json"

    @property
    def db(self) -> Path:
        """The record of the run (`record.store`)."""
        return self.root / "run.db"

    @property
    def incidents(self) -> Path:
        return self.root / "incidents"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def host_facts(self) -> Path:
        """Facts about this host from the last run, such as the GPU count."""
        return self.root / "host.json"


class Untrusted(RuntimeError):
    """Another user could have prepared the state directory, whose files name processes to kill and
    where credentials are sent. The message names the path, the owner and what to do."""


def choose(name: str, flag: str | None, env: Mapping[str, str]) -> StateDir:
    """Choose the state directory from the flag, `MINER_GUARD_STATE_DIR`, `XDG_STATE_HOME` or the
    home directory, in that order.

    Resolves symlinks, so that each directory has a single name. Raises Untrusted for another user's
    directory or symlink, and RuntimeError if no directory is given and the user has no home
    directory.
    """
    if explicit := flag or env.get("MINER_GUARD_STATE_DIR"):
        path = Path(explicit).expanduser()
    else:
        base = env.get("XDG_STATE_HOME")
        path = (Path(base) if base else Path.home() / ".local" / "state") / FOLDER / name
    root = _resolved(path.absolute())
    if (reason := distrust(root)) is not None:
        raise Untrusted(reason)
    return StateDir(root)


def distrust(root: Path) -> str | None:
    """Why another user could have prepared the files in `root`, and what to do; None if nobody else
    could, or if there is no such directory."""
    try:
        info = os.lstat(root)
    except OSError:
        # Opening a file in it will report that.
        return None
    if not stat.S_ISDIR(info.st_mode):
        return None
    mode = stat.S_IMODE(info.st_mode)
    if info.st_uid != os.geteuid():
        return (
            f"{root} belongs to {_user(info.st_uid)}, but this command runs as "
            f"{_user(os.geteuid())}. Run it as the owner, or choose another directory with "
            "--state-dir."
        )
    if not mode & _OTHERS_WRITE or (not mode & stat.S_ISVTX and not any(os.scandir(root))):
        return None
    return (
        f"other users can write to {root} (owner {_user(info.st_uid)}, mode {mode:04o}), so its "
        "files may not be yours. Choose another directory with --state-dir, or look through its "
        f"files and run `chmod 700 {shlex.quote(str(root))}`."
    )


def _user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


_OTHERS_WRITE = 0o022


def _resolved(path: Path) -> Path:
    """Resolve the symlinks in `path`, one after the other, as the kernel does. Raises Untrusted."""
    for _ in range(40):
        link = next((each for each in (*reversed(path.parents), path) if each.is_symlink()), None)
        if link is None:
            return Path(os.path.normpath(path))
        if (owner := foreign_link(link)) is not None:
            raise Untrusted(
                f"{link} is a symlink owned by {_user(owner)}, who could redirect it. Choose a "
                "--state-dir that avoids it."
            )
        path = link.parent / os.readlink(link) / path.relative_to(link)
    # The symlinks form a loop. Opening the path will report that.
    return path


def foreign_link(path: Path) -> int | None:
    """The uid that owns the symlink at `path`; None if that is this user or root, or if `path` is
    not a symlink."""
    try:
        info = path.lstat()
    except OSError:
        return None
    return (
        info.st_uid if stat.S_ISLNK(info.st_mode) and info.st_uid not in (os.geteuid(), 0) else None
    )


PRIVATE_FOLDER = 0o700
PRIVATE_FILE = 0o600
"""Only the guard's user may read its files, whatever the umask, because they quote logs, stacks and
command lines."""


def make_folder(path: Path) -> None:
    """Create `path` and its missing parents, private to this user. Raises OSError."""
    for folder in (*reversed(path.parents), path):
        if not folder.is_dir():
            folder.mkdir(PRIVATE_FOLDER, exist_ok=True)


def open_private(path: Path, flags: int) -> int:
    """Open one of the guard's files, and make it private if other users could read it.

    Raises OSError, including for another user's symlink (ELOOP) and for a pipe or a device
    (EINVAL), which could hang the writer.
    """
    # With O_NONBLOCK, the open does not wait for the other end of a pipe. For a regular file it has
    # no effect.
    flags |= os.O_CLOEXEC | os.O_NONBLOCK
    if foreign_link(path) is not None:
        flags |= os.O_NOFOLLOW
    fd = os.open(path, flags, PRIVATE_FILE)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        tighten(fd, PRIVATE_FILE)
    except OSError:
        os.close(fd)
        raise
    return fd


def tighten(fd: int, mode: int) -> int | None:
    """Remove all permissions that are not in `mode` from an open file or folder.

    Returns the old mode if it allowed more, otherwise None. Raises OSError if the mode cannot be
    changed.
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
    """Make this process write and remove its files in the state directory through `write`.

    The guard needs this, because its threads must never wait for a disk. None restores direct
    writes.
    """
    global _diverted
    _diverted = write


def remove(path: Path) -> None:
    """Remove one of the guard's files, if it exists. Raises OSError."""
    (_diverted or replace_file)(path, None, PRIVATE_FILE)


def write_atomic(path: Path, content: str | bytes, mode: int = PRIVATE_FILE) -> None:
    """Replace the content of `path` atomically: a reader sees either all of the old
    content or all of the new. Raises OSError.

    With `mode` 0o666 the umask decides who may read the file; use that for files that a user
    requests by path.
    """
    # A path or an argument may contain bytes that are not UTF-8, which Python represents as lone
    # surrogates.
    data = content.encode("utf-8", "replace") if isinstance(content, str) else content
    (_diverted or replace_file)(path, data, mode)


def replace_file(path: Path, data: bytes | None, mode: int) -> None:
    """The `FileWriter` that writes directly to the disk."""
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
    """Write a JSON document with `write_atomic`. Non-finite numbers become null."""
    write_atomic(path, json_text(finite(document)))


def read_regular(path: Path, limit: int = -1, *, guard_file: bool = False) -> bytes:
    """Read a file, up to `limit` bytes if `limit` is not negative. Raises OSError, including for a
    pipe or a device (EINVAL), which could hang the reader.

    `guard_file`: one of the guard's files, which may name processes to kill and where credentials
    are sent; then also for a symlink (ELOOP) and for a file that another user owns or could have
    written (EPERM).
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_NOFOLLOW if guard_file else 0)
    with open(os.open(path, flags), "rb") as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        if guard_file and (info.st_uid != os.geteuid() or info.st_mode & _OTHERS_WRITE):
            owner = f"{_user(info.st_uid)}, mode {stat.S_IMODE(info.st_mode):04o}"
            raise OSError(errno.EPERM, f"Another user could have written it ({owner})", str(path))
        return file.read(limit)


def json_text(document: Any) -> str:
    """Format a document the way the guard's files do. It must not contain non-finite numbers."""
    return json.dumps(document, ensure_ascii=False, indent=1) + "\n"


def read_json(path: Path) -> Any | None:
    """Read one of the guard's JSON documents; None if it is absent, unreadable, not JSON, or could
    have been written by another user."""
    try:
        return json.loads(read_regular(path, guard_file=True).decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


ROOM_TO_RESUME = 64 * 1024
"""How many bytes must be free before the guard writes to a full disk again: otherwise it could
write a short line right after a longer one did not fit."""


def is_full(error: OSError) -> bool:
    """Return True if a write failed for lack of space and may succeed later."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def has_room(where: int | Path) -> bool:
    """Return True if the file system of a descriptor or path has room again. Raises OSError."""
    disk = os.statvfs(where)
    return disk.f_bavail * disk.f_frsize >= ROOM_TO_RESUME


def is_at(path: Path, fd: int) -> bool:
    """Return True if `path` still refers to the open file, neither removed nor replaced.
    Raises OSError."""
    try:
        named, held = os.stat(path), os.fstat(fd)
    except FileNotFoundError:
        return False
    return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)


def set_aside(path: Path) -> Path:
    """Rename one of the guard's files out of the way; returns its new path. Raises OSError."""
    aside = path.with_name(
        f"{path.name}.damaged-{time.strftime('%Y%m%dT%H%M%S')}-{time.monotonic_ns() % 10**6:06d}"
    )
    os.replace(path, aside)
    return aside


def json_number(value: float | None) -> float | str | None:
    """Convert a measured number for JSON, which lacks NaN and infinities: those become the strings
    `NaN`, `Infinity` and `-Infinity`, because null means "not measured"."""
    if value is None or value - value == 0:
        return value
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"


def finite(value: Any) -> Any:
    """Replace NaN and infinities in `value` with None, recursively, because JSON has no such
    numbers."""
    kind = type(value)
    if kind is str or kind is int or kind is bool or value is None:
        return value
    if isinstance(value, float):
        return value if value - value == 0 else None
    # Check for `dict` first: the check for an abstract Mapping takes ten times as long.
    if isinstance(value, (dict, Mapping)):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [finite(v) for v in value]
    return value
