"""Finds the current launch's processes, including those that outlive the launcher, and reaps
orphans."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping

from miner_guard.guard.orphan_cleanup import PidRegistry
from miner_guard.state_dir import StateDir
from miner_guard.system import processes
from miner_guard.system.cgroup import Cgroup
from miner_guard.system.clock import Clock
from miner_guard.system.helpers import HelperFilter, reap_miners
from miner_guard.system.processes import Process, Table

_LIST_EVERY_S = 1.0
_WRITE_EVERY_S = 10.0
"""Interval at which run.json is rewritten. It is also the longest time without a search,
because the guard may miss a sign that processes have changed."""

_SHARE_OF_CPU = 0.002
"""Scanning processes uses at most this share of one CPU, even on a host with thousands of them."""

_MARKED_EVERY_S = 1.0

_UNWANTED_S = 10.0
"""Reap any zombie child this old. It can't be a helper: the thread that started the helper would
have reaped it sooner."""


class ProcessTree:
    """Finds the launch's processes. Supervisor thread only.

    The guard adopts orphans (PR_SET_CHILD_SUBREAPER), so every process that the launcher started is
    a descendant of the launcher or of the guard. If the launch has a cgroup, its list of members
    makes a search unnecessary.
    """

    def __init__(self, state: StateDir, clock: Clock) -> None:
        self._state, self._clock = state, clock
        self._cgroup: Cgroup | None = None
        self._in_cgroup: set[int] = set()
        """The cgroup's members at the last search."""

        self._registry = PidRegistry(state)
        self.on_listed: Callable[[frozenset[Process]], None] = lambda _processes: None
        """Called with the launch's live processes whenever they change."""

        self._list_at = self._written_at = float("-inf")
        self._latest_pid = -1
        self._child_ended = self._undecided = False
        self._marked_at = float("-inf")
        self._known: frozenset[Process] = frozenset()
        self._zombies: dict[Process, float] = {}
        self._filter = HelperFilter()
        self._helper: Mapping[Process, bool | None] = {}
        """For each child of the guard: whether it is one of the guard's helpers; None if that is
        not known yet."""

    def use_cgroup(self, cgroup: Cgroup) -> None:
        """Put the miner into this cgroup from the next launch on."""
        self._cgroup = cgroup
        # Record the cgroup before it has a member, so that the next guard finds it even if this one
        # is killed right after the launch.
        self._registry.write(self._known, cgroup)

    def open_to_join(self) -> int | None:
        """Open a descriptor that lets the launcher join the run's cgroup. Returns None if there is
        no cgroup or the call fails."""
        if self._cgroup is None:
            return None
        with contextlib.suppress(OSError):
            return self._cgroup.open_to_join()
        return None

    def child_ended(self) -> None:
        """Note that a child of the guard has ended (SIGCHLD)."""
        self._child_ended = True

    def refresh(self, launcher: Process | None) -> None:
        """Reap orphans that have ended and update the list of live processes.

        Skips the search if no process has started on the host and no child has ended since the last
        one. Raises OSError if /proc can't be read.
        """
        now = self._clock.monotonic()
        if now < self._list_at:
            return
        latest = processes.latest_pid()
        if not self._may_have_changed(latest, now):
            return
        self._search(launcher, now)
        self._latest_pid, self._child_ended = latest, False

    def _may_have_changed(self, latest_pid: int, now: float) -> bool:
        return (
            latest_pid != self._latest_pid
            or self._child_ended
            or self._undecided
            or bool(self._zombies)
            or now - self._written_at >= _WRITE_EVERY_S
        )

    def _search(self, launcher: Process | None, now: float) -> None:
        began = time.thread_time()
        table = self._table()
        self._reap(launcher, table, now)
        known = frozenset(self._members(launcher, table))
        if known != self._known:
            self._known, self._written_at = known, now
            self._registry.write(known, self._cgroup)
            self.on_listed(known)
        elif now - self._written_at >= _WRITE_EVERY_S:
            # Someone may have removed the file.
            self._written_at = now
            self._registry.write(known, self._cgroup)
        self._list_at = now + max(_LIST_EVERY_S, (time.thread_time() - began) / _SHARE_OF_CPU)

    def leftovers(self, launcher: Process) -> set[Process]:
        """Live processes of the launch except the launcher: members of its cgroup, descendants, and
        those that an earlier search found."""
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
            # The search above should find all processes. The search by marker confirms that, but
            # costs more per process.
            self._marked_at = now
            known = {process.pid for process in found}
            everyone = table if self._cgroup is None else processes.table()
            others = {pid: seen for pid, seen in everyone.items() if pid not in known}
            marked = processes.marked(str(self._state.root), others)
            found |= {
                process for process in marked if process.pid not in spared and process != launcher
            }
        return found

    def kill_all(self) -> None:
        """Send SIGKILL to all members of the run's cgroup at once; a no-op without a cgroup."""
        if self._cgroup is not None:
            self._cgroup.kill()

    def close(self) -> None:
        """Remove the run's cgroup."""
        if self._cgroup is not None:
            self._cgroup.remove()

    def _table(self) -> Table:
        """The processes to search: the members of the cgroup and the guard's children, or all
        processes of the host if there is no cgroup."""
        if self._cgroup is None:
            return processes.table()
        self._in_cgroup = self._cgroup.pids()
        # Leave out the children that other threads started: they are the guard's helpers.
        pids = self._in_cgroup | processes.children_of_thread(os.getpid(), os.getpid())
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
        found |= {
            table[pid].process for pid in self._in_cgroup if pid in table and table[pid].lives
        }
        return found

    def _adopted(self, table: Table) -> list[int]:
        """Children of the guard that are not its helpers: the launcher and adopted orphans."""
        children = [seen for seen in table.values() if seen.parent == os.getpid()]
        self._helper = self._filter.judge(children)
        self._undecided = any(
            self._helper[seen.process] is None and seen.state not in "ZXD" for seen in children
        )
        return [process.pid for process, helper in self._helper.items() if helper is False]

    def _reap(self, launcher: Process | None, table: Table, now: float) -> None:
        own = os.getpid()
        zombies: dict[Process, float] = {}
        for seen in table.values():
            if seen.parent != own or seen.state != "Z" or seen.process == launcher:
                continue
            since = zombies[seen.process] = self._zombies.get(seen.process, now)
            helper = self._helper.get(seen.process)
            # No thread of the guard waits for a process that is known to be an orphan.
            if helper is False or now - since >= _UNWANTED_S:
                # A thread of the guard may have reaped it first.
                with contextlib.suppress(ChildProcessError):
                    if helper:
                        os.waitpid(seen.process.pid, os.WNOHANG)
                    else:
                        reap_miners(seen.process.pid)
        self._zombies = zombies
