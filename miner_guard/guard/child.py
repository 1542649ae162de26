"""Starts the miner's launcher as a child of the guard, in a new session. The kernel signals it when
the guard dies."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from miner_guard.system.children import signal_at_parents_death
from miner_guard.system.helpers import reap_miners
from miner_guard.system.processes import Process, stat

PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> bool:
    """Make the kernel hand all orphaned descendants to this process, so that a process that forks
    twice does not escape. Returns False if the kernel refuses."""
    return bool(_libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


_PRIVATE = 0o077

_given_umask: int | None = None


def keep_files_private() -> None:
    """Make this process's files private to its user; the miner still gets the guard's original
    umask."""
    global _given_umask
    before = os.umask(_PRIVATE)
    if _given_umask is None:
        _given_umask = before


class Child:
    """One launch of the miner."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        stdout: int,
        stderr: int,
        join: int | None = None,
    ) -> None:
        """Start the launcher. Main thread only: the kernel sends the parent-death signal when the
        thread that forked ends. Raises OSError.

        `join`: descriptor of the cgroup to join, from `Cgroup.open_to_join`; this call closes it.
        """
        guard = os.getpid()

        def in_child() -> None:
            if join is not None:
                # If the cgroup refuses the process, the guard finds it by its parent, as on hosts
                # without cgroups.
                with contextlib.suppress(OSError):
                    os.write(join, b"0")
            signal_at_parents_death(signal.SIGTERM)
            if os.getppid() != guard:
                # The guard died between fork and prctl, so the kernel would never signal this
                # process.
                os._exit(1)

        try:
            self._popen = subprocess.Popen(
                list(command),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=in_child,
                umask=-1 if _given_umask is None else _given_umask,
            )
        finally:
            if join is not None:
                os.close(join)
        self.pid = self._popen.pid
        try:
            seen = stat(self.pid)
        except OSError:
            # The guard could not identify the process later, because it does not know when the
            # process started.
            self._popen.kill()
            self._popen.wait()
            raise
        self.process = seen.process if seen is not None else Process(self.pid, 0)

    def code(self) -> int | None:
        """The exit code, or 128 + n if signal n killed the launcher; None while it is running."""
        if self._popen.returncode is None:
            self._popen.returncode = self._reaped()
        code = self._popen.returncode
        return code if code is None or code >= 0 else 128 - code

    def _reaped(self) -> int | None:
        """Reap the launcher if it has ended, and return its return code, otherwise None. Its CPU
        time counts as the miner's, not as the guard's."""
        try:
            status = reap_miners(self.pid)
        except ChildProcessError:
            # Something else reaped it, so its status is lost; `Popen.poll` returns 0 here too.
            return 0
        return None if status is None else os.waitstatus_to_exitcode(status)

    @property
    def signal(self) -> int | None:
        """The number of the signal that killed the launcher; None if it is still running or exited
        on its own."""
        code = self._popen.returncode
        return -code if code is not None and code < 0 else None

    def send(self, number: int) -> None:
        """Send signal `number` to the launcher only, not to its children."""
        # No other process can get the pid until the launcher is reaped, which
        # `Popen.send_signal` would do.
        if self.code() is None:
            os.kill(self.pid, number)
