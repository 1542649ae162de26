"""A dedicated cgroup (v2) for the miner, if the kernel and the container allow one.

Processes inherit membership and keep it: a process cannot escape by forking twice, starting a new
session or clearing its environment. With the list of members and `cgroup.kill` (Linux 5.14), the
guard needs no process search. Only v2 offers this; the guard does not touch a v1 hierarchy.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "miner-guard-"


class Cgroup:
    """A child of the guard's cgroup. It enables no controllers, because the limits of the guard's
    cgroup apply to it too."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, state_dir: str, run_id: str) -> Cgroup:
        """Create this run's group. Raises OSError with the reason if that is impossible."""
        path = _own_group() / f"{_prefix_of(state_dir)}{run_id}"
        path.mkdir(exist_ok=True)
        group = cls(path)
        try:
            os.close(group.open_to_join())
        except OSError:
            group.remove()
            raise
        return group

    @classmethod
    def beside(cls, state_dir: str) -> list[Cgroup]:
        """Return the cgroups left behind by earlier guards that used this state directory. Lists
        the folder where this guard would create its own cgroup."""
        try:
            return [cls(path) for path in _own_group().glob(f"{_prefix_of(state_dir)}*")]
        except OSError:
            return []

    def open_to_join(self) -> int:
        """Open a descriptor for joining: a process that writes `0` to it becomes a member, and its
        children inherit the membership. Raises OSError."""
        return os.open(self.path / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)

    def pids(self) -> set[int]:
        """The pids of the members, including those of cgroups that the miner created under this
        one. Raises OSError."""
        found: set[int] = set()
        for group in self._groups():
            # A group may be removed during the walk.
            with contextlib.suppress(FileNotFoundError):
                found.update(map(int, (group / "cgroup.procs").read_bytes().split()))
        return found

    def kill(self) -> bool:
        """Send SIGKILL to all members at once, including any that are being forked. Returns
        False if the kernel does not support it (before Linux 5.14)."""
        try:
            (self.path / "cgroup.kill").write_text("1")
        except OSError:
            return False
        return True

    def remove(self) -> None:
        """Remove the cgroup if it is empty. Otherwise the kernel refuses, and the next guard tries
        again."""
        for group in sorted(self._groups(), key=lambda path: len(path.parts), reverse=True):
            with contextlib.suppress(OSError):
                group.rmdir()

    def _groups(self) -> Iterator[Path]:
        yield self.path
        for where, folders, _ in os.walk(self.path):
            yield from (Path(where, name) for name in folders)


def _prefix_of(state_dir: str) -> str:
    return f"{_PREFIX}{hashlib.blake2s(os.fsencode(state_dir), digest_size=6).hexdigest()}-"


def _own_group() -> Path:
    """The path of this process's cgroup in the v2 hierarchy. Raises OSError if no such hierarchy is
    mounted."""
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        own = next((line[3:].rstrip("\n") for line in file if line.startswith("0::")), None)
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        mounts = [line.split() for line in file]
    for fields in mounts:
        if own is not None and fields[fields.index("-") + 1] == "cgroup2":
            return Path(fields[4]) / os.path.relpath(own, fields[3])
    raise FileNotFoundError("no cgroup v2 hierarchy is mounted")
