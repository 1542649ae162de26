"""The processes of the current launch: who they are, what is left of them, and zombies waiting to
be reaped."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

from miner_guard.state_dir import StateDir
from miner_guard.supervisor.process.pid_registry import PidRegistry
from miner_guard.system import processes
from miner_guard.system.cgroup import Cgroup
from miner_guard.system.clock import Clock
from miner_guard.system.processes import Process, Table

_LIST_EVERY_S = 1.0
_WRITE_EVERY_S = 10.0
_SHARE_OF_CPU = 0.002
"""Reading the processes costs at most this share of one CPU, on a host with thousands of them
too."""

_MARKED_EVERY_S = 1.0

_UNWANTED_S = 10.0
"""A zombie child this old is an orphan's: the threads that start a helper wait for it sooner."""


class ProcessTree:
    """For the supervisor's thread.

    The guard adopts orphans (PR_SET_CHILD_SUBREAPER), so what the launcher started is below the
    launcher or below the guard. A cgroup, where there is one, knows them without any search.
    """

    def __init__(self, state: StateDir, clock: Clock) -> None:
        self._state, self._clock = state, clock
        self._cgroup: Cgroup | None = None
        self._roster = PidRegistry(state)
        self.on_listed: Callable[[frozenset[Process]], None] = lambda _processes: None
        """Called with the list whenever it changes."""

        self._list_at = self._written_at = float("-inf")
        self._marked_at = float("-inf")
        self._known: frozenset[Process] = frozenset()
        self._zombies: dict[Process, float] = {}
        self._own_command = processes.command(os.getpid())
        self._helper: dict[Process, bool] = {}
        """Of each child of the guard, whether the guard started it for itself: an environment is
        read once."""

    def use_cgroup(self, cgroup: Cgroup) -> None:
        """From the next launch on the miner is a member of it."""
        self._cgroup = cgroup
        # Before its first member: a guard that is killed at once still leaves a trace of it.
        self._roster.write(self._known, cgroup)

    def open_to_join(self) -> int | None:
        """A descriptor for the launcher to join the run's cgroup; None where there is not one."""
        if self._cgroup is None:
            return None
        with contextlib.suppress(OSError):
            return self._cgroup.open_to_join()
        return None

    def look(self, launcher: Process | None) -> None:
        """Reap orphans that ended, keep the list of those that live. Raises OSError where /proc
        can't be read."""
        now = self._clock.monotonic()
        if now < self._list_at:
            return
        began = time.thread_time()
        table = self._table()
        self._reap(launcher, table, now)
        known = frozenset(self._members(launcher, table))
        if known != self._known:
            self._known, self._written_at = known, now
            self._roster.write(known, self._cgroup)
            self.on_listed(known)
        elif now - self._written_at >= _WRITE_EVERY_S:
            # Somebody may have removed it.
            self._written_at = now
            self._roster.write(known, self._cgroup)
        self._list_at = now + max(_LIST_EVERY_S, (time.thread_time() - began) / _SHARE_OF_CPU)

    def leftovers(self, launcher: Process) -> set[Process]:
        """Living processes of the launch other than the launcher: members, descendants, and those
        listed before."""
        table = self._table()
        found = self._members(launcher, table)
        found |= {
            p
            for p in self._known
            if p.pid in table and table[p.pid].process == p and table[p.pid].lives
        }
        spared = processes.ancestors(os.getpid())
        found = {process for process in found if process.pid not in spared and process != launcher}
        now = self._clock.monotonic()
        if not found or now - self._marked_at >= _MARKED_EVERY_S:
            # Parentage finds all of them. The marker is the proof of that, and costs more than the
            # rest.
            self._marked_at = now
            marked = processes.marked(str(self._state.root))
            found |= {
                process for process in marked if process.pid not in spared and process != launcher
            }
        return found

    def kill_all(self) -> None:
        """SIGKILL to all members of the run's cgroup at once; nothing where none exists."""
        if self._cgroup is not None:
            self._cgroup.kill()

    def close(self) -> None:
        """The run is over."""
        if self._cgroup is not None:
            self._cgroup.remove()

    def _table(self) -> Table:
        """What may belong to the run: with a cgroup its members and the guard's children, else all
        processes of the host."""
        if self._cgroup is None:
            return processes.table()
        pids = self._cgroup.pids() | processes.children(os.getpid())
        return {pid: seen for pid in pids if (seen := processes.stat(pid)) is not None}

    def _members(self, launcher: Process | None, table: Table) -> set[Process]:
        roots = set(self._adopted(table))
        if (
            launcher is not None
            and launcher.pid in table
            and table[launcher.pid].process == launcher
        ):
            roots.add(launcher.pid)
        found = processes.descendants(roots, table)
        if self._cgroup is not None:
            found |= {
                table[pid].process
                for pid in self._cgroup.pids()
                if pid in table and table[pid].lives
            }
        return found

    def _adopted(self, table: Table) -> list[int]:
        """Children of the guard that it did not start for itself: the launcher, and orphans that
        came to it."""
        own = os.getpid()
        children = {seen.process: seen for seen in table.values() if seen.parent == own}
        self._helper = {
            process: known for process, known in self._helper.items() if process in children
        }
        adopted: list[int] = []
        for process, seen in children.items():
            helper = self._helper.get(process)
            # A zombie has no environment any more, and a stopped reader none of its own: the
            # kernel's lock on it.
            if helper is None and seen.state not in "ZXD":
                helper = processes.is_helper(process.pid, self._own_command)
                if helper is not None:
                    self._helper[process] = helper
            if helper is False:
                adopted.append(process.pid)
        return adopted

    def _reap(self, launcher: Process | None, table: Table, now: float) -> None:
        own = os.getpid()
        zombies: dict[Process, float] = {}
        for seen in table.values():
            if seen.parent != own or seen.state != "Z" or seen.process == launcher:
                continue
            since = zombies[seen.process] = self._zombies.get(seen.process, now)
            # One that was known as an orphan has no thread of ours waiting for it.
            if self._helper.get(seen.process) is False or now - since >= _UNWANTED_S:
                # A thread of ours may have been quicker.
                with contextlib.suppress(ChildProcessError):
                    os.waitid(os.P_PID, seen.process.pid, os.WEXITED | os.WNOHANG)
        self._zombies = zombies
