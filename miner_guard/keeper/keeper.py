"""The keeper: starts the miner and the guard, passes output and signals on, and ends every process
at a stop.

It decides nothing: the guard, its other child, tells it when to launch and when to stop. If the
guard dies or hangs, the keeper starts another one, and training continues. It touches no disk.
Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from miner_guard.exits import FAILED
from miner_guard.keeper.front import Signals, become_subreaper, in_front_of
from miner_guard.keeper.link import KEEPER_FD, Link
from miner_guard.keeper.relay import Relay
from miner_guard.keeper.service import Pm2Channel, SystemdSocket
from miner_guard.keeper.teardown import (
    MAX_NAMED,
    TERM_TO_KILL_S,
    UNKILLABLE_S,
    Teardown,
    end_descendants,
    reap,
    why_stuck,
)
from miner_guard.system import children, processes
from miner_guard.system.children import Backoff, signal_at_parents_death
from miner_guard.system.processes import HELPER, Process

SILENT_S = 10.0
"""The guard counts as hung if no heartbeat arrives for this long. It sends one a second."""

_FIRST_BEAT_S = 120.0
"""The same for a guard that is starting: it imports its packages from a disk that may be slow."""

_ANSWER_S = 5.0
"""Time for the guard to take up a stop request. After that the keeper stops the miner itself."""

_LAST_WORDS_S = 20.0
"""Time for the guard, after the miner has ended, to send alerts and write the final status."""

_LEAVE_S = 15.0
"""Time for a guard that has sent `done` to exit. On a dead disk it never does."""

STACKS_SIGNAL = signal.SIGUSR2
"""Makes the guard dump the stacks of all its threads to stderr."""

RELOADED = "replaced by `miner-guard ctl reload`"

_STACKS_S = 0.5
_DRAIN_S = 5.0
_PAUSED_S = 3.0
_MAX_DEATHS = 10
"""The keeper ends the run when this many guards in a row died soon after they were started."""

_FLOOD_BYTES = 65536
_RETRY_S = 1.0
_CLEANUP_S = 2.0


class MinerLaunch:
    """One launch of the miner, until the guard has concluded it."""

    def __init__(
        self, request: Mapping[str, Any], popen: subprocess.Popen[bytes], teardown: Teardown
    ) -> None:
        self.request, self.popen, self.teardown = request, popen, teardown
        self.launched = {
            "pid": teardown.launcher.pid,
            "start": teardown.launcher.start,
            "attempt": request["attempt"],
            "at": time.monotonic(),
        }
        self.stop_requested = self.exit_told = False
        self.step_at = float("inf")
        """When `_step_miner` acts next, in monotonic seconds."""

        self.drain_until: float | None = None
        self.ended: dict[str, Any] | None = None
        """How it ended, once every process is gone or can't be killed."""

    @property
    def reaped(self) -> bool:
        """Whether the launcher has ended, according to `waitpid`, because /proc may be hidden."""
        return self.popen.returncode is not None

    def exit(self) -> dict[str, Any]:
        """How the launcher ended. A code as a shell reports it: 128 + n for signal n."""
        status = self.popen.returncode if self.reaped else -signal.SIGKILL
        code = status if status >= 0 else 128 - status
        return {"code": code, "signal": -status if status < 0 and self.reaped else None}


class Keeper:
    """Runs one command line of the guard until its run ends."""

    def __init__(
        self, guard_command: Sequence[str], front: socket.socket, systemd: SystemdSocket | None
    ) -> None:
        """`front` leads to the process that pm2 or systemd started, which talks to `systemd`."""
        self._command = list(guard_command)
        self._front, self._systemd = front, systemd
        self._selector = selectors.DefaultSelector()
        self._signals = Signals()
        self._link = Link()
        self._told: set[str] = set()
        self._relay = Relay(self._link_output, self._signals.wakeup.wake)
        self._pm2 = Pm2Channel.inherited(os.environ)
        self._pulsed_at = 0.0
        self._exit_code: int | None = None
        # The miner.
        self._miner: MinerLaunch | None = None
        self._launches = 0
        self._helpers: dict[Process, bool] = {}
        self._told_stats: tuple[int, int, bool] = (0, 0, False)
        # The guard.
        self._guard: subprocess.Popen[bytes] | None = None
        self._start_at = self._heard_at = 0.0
        self._beats = self._hung = self._reload = False
        self._last_guard: Mapping[str, Any] | None = None
        self._deaths = 0
        self._backoff = Backoff()
        self._saved: dict[str, Any] = {}
        self._done: tuple[int, float] | None = None
        """The exit code in the guard's `done`, and until when (monotonic) to wait for its exit."""

        # A stop.
        self._stop: tuple[str, float] | None = None
        self._stop_answered = False
        self._pending_exit_code: int | None = None
        """The exit code, once the keeper itself ends the run."""

        self._turned_at = time.monotonic()

    def run(self) -> int:
        """Keep the run until its end; returns the exit code."""
        wakeup = self._signals.wakeup
        self._selector.register(wakeup.reading, selectors.EVENT_READ, wakeup.clear)
        self._selector.register(self._front, selectors.EVENT_READ, self._front_gone)
        if self._pm2 is not None:
            self._selector.register(self._pm2.socket, selectors.EVENT_READ, self._hear_pm2)
        if not become_subreaper():
            self._tell_degraded("the kernel refused PR_SET_CHILD_SUBREAPER; orphans escape")
        while self._exit_code is None:
            self._turn()
        self._leave()
        return self._exit_code

    # --- the loop ---

    def _link_output(self, data: bytes) -> None:
        self._link.output(data)
        # A few lines wait for the next turn, within a second: a turn for each would cost more.
        if self._link.waiting >= _FLOOD_BYTES:
            self._signals.wakeup.wake()

    def _front_gone(self) -> None:
        """End the run: pm2 or systemd takes it for dead, and may start the next one."""
        # EOF tells the guard, which then writes its last events.
        self._drop_link()
        end_descendants()
        os._exit(FAILED)

    def _turn(self) -> None:
        if (link := self._link.socket) is not None:
            write = selectors.EVENT_WRITE if self._link.pending else 0
            self._selector.modify(link, selectors.EVENT_READ | write, self._hear_guard)
        for key, _ in self._selector.select(self._wait_s()):
            key.data()
        for number in self._signals.take():
            self._on_signal(number)
        self._reap()
        now = time.monotonic()
        if now - self._turned_at > _PAUSED_S:
            # The keeper or the whole host was suspended, so the guard could not send either.
            self._heard_at = now
        self._turned_at = now
        self._step_miner(now)
        self._watch_stop(now)
        self._watch_guard(now)
        stats = self._relay.dropped_bytes, self._link.unchecked, self._relay.stuck
        if stats != self._told_stats and self._link.socket is not None:
            self._told_stats = stats
            self._link.tell("stats", stats)
        self._link.send()

    def _wait_s(self) -> float:
        due = self._turned_at + 1.0
        if self._miner is not None:
            due = min(due, self._miner.step_at)
        if self._guard is None and self._pending_exit_code is None:
            due = min(due, max(self._start_at, self._turned_at + 0.01))
        return max(0.0, due - time.monotonic())

    def _on_signal(self, number: int) -> None:
        if number in (signal.SIGUSR1, signal.SIGUSR2):
            if self._miner is not None and not self._miner.reaped:
                os.kill(self._miner.popen.pid, number)
        else:
            self._ask_stop(signal.Signals(number).name)

    def _reap(self) -> None:
        for pid, status in reap():
            code = os.waitstatus_to_exitcode(status)
            if self._miner is not None and pid == self._miner.popen.pid:
                self._miner.popen.returncode = code
                self._miner.teardown.launcher_ended()
                self._miner.step_at = 0.0
            elif self._guard is not None and pid == self._guard.pid:
                self._guard.returncode = code
                self._guard_ended(code)

    # --- the guard ---

    def _start_guard(self) -> None:
        self._heard_at = time.monotonic()
        self._beats = self._hung = self._reload = False
        try:
            theirs = self._link.open()
        except OSError as error:
            self._guard_failed(f"cannot start the guard: {error.strerror}")
            return
        assert self._link.socket is not None
        self._selector.register(self._link.socket, selectors.EVENT_READ, self._hear_guard)
        held = (fd for each in self._link.held.values() for fd in each.fds)
        self._tell_state()
        try:
            self._guard = subprocess.Popen(
                self._command,
                env={**os.environ, KEEPER_FD: str(theirs.fileno())},
                pass_fds=[theirs.fileno(), *held],
                start_new_session=True,
                preexec_fn=children.continue_when_the_parent_dies,
            )
        except OSError as error:
            self._drop_link()
            self._guard_failed(f"cannot start the guard: {error.strerror}")
        finally:
            theirs.close()

    def _tell_state(self) -> None:
        """Tell a new guard what it has to know before anything else."""
        miner = self._miner
        self._link.tell(
            "hello",
            {
                "keeper_pid": os.getppid(),
                "last_guard": self._last_guard,
                "saved": self._saved,
                "held": self._link.held,
                "miner": None if miner is None else miner.launched,
                "stop": None if self._stop is None else self._stop[0],
                "pm2": self._pm2 is not None,
                "systemd": self._systemd is not None,
            },
        )
        if miner is not None and miner.exit_told:
            self._link.tell_in_order("exited", miner.exit())
        if miner is not None and miner.ended is not None:
            self._link.tell_in_order("ended", miner.ended)

    def _drop_link(self) -> None:
        if self._link.socket is not None:
            self._selector.unregister(self._link.socket)
            self._link.close()

    def _guard_ended(self, code: int) -> None:
        guard, self._guard = self._guard, None
        assert guard is not None
        # Its last messages may still be unread.
        self._hear_guard()
        self._drop_link()
        if self._done is not None:
            self._exit_code = self._done[0] if code < 0 else code
        elif self._pending_exit_code is not None:
            return
        elif not self._launches and code >= 0 and not self._reload:
            # It refused to start: a usage error, a bad setting, a failed preflight.
            self._exit_code = code
        elif self._stop is not None:
            self._end_run(0)
        else:
            how = f"signal {processes.signal_name(-code)}" if code < 0 else f"exit code {code}"
            if self._hung:
                how = f"it sent no heartbeat for {SILENT_S:.0f}s"
            self._end_helpers()
            self._guard_failed(RELOADED if self._reload else how, guard.pid)

    def _guard_failed(self, how: str, pid: int | None = None) -> None:
        """Plan the next guard. Nobody watches the miner until it runs, so one that worked until
        something killed it is replaced at once."""
        now = time.monotonic()
        wait_s = 0.0 if self._beats else self._backoff.ended(now - self._heard_at)
        self._start_at = now + wait_s
        self._deaths = 0 if self._beats else self._deaths + 1
        self._last_guard = {"pid": pid, "how": how}
        if self._deaths >= _MAX_DEATHS:
            self._print(f"the guard died {self._deaths} times in a row; stopping the miner")
            self._end_run(FAILED)

    def _print(self, text: str) -> None:
        self._relay.print_line(f"miner-guard: {text}\n")

    def _end_helpers(self) -> None:
        """End the helper processes of a guard that is gone."""
        table = processes.table()
        helpers = [p.pid for p, helper in self._judge_children(table).items() if helper]
        for each in processes.descendants(helpers, table):
            with contextlib.suppress(OSError):
                processes.send(each, signal.SIGKILL)

    def _watch_guard(self, now: float) -> None:
        if self._guard is None:
            if (
                self._pending_exit_code is None
                and self._exit_code is None
                and now >= self._start_at
            ):
                self._start_guard()
        elif self._done is not None:
            if now >= self._done[1]:
                self._exit_code = self._done[0]
        elif now - self._heard_at > (SILENT_S if self._beats else _FIRST_BEAT_S):
            self._end_hung_guard()

    def _end_hung_guard(self) -> None:
        """Kill the guard, after it has dumped the stacks of all its threads to stderr."""
        if self._guard is None or self._hung:
            return
        self._print("the supervisor's loop is hung; stacks of all threads:")
        self._hung = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._guard.pid, STACKS_SIGNAL)
            time.sleep(_STACKS_S)
            os.kill(self._guard.pid, signal.SIGKILL)

    def _hear_guard(self) -> None:
        try:
            for order in self._link.receive():
                for name, content in order.items():
                    # A guard of a later version may send messages that this keeper does not know.
                    getattr(self, f"_do_{name}", lambda _content: None)(content)
        except EOFError:
            # A guard without its socket is about to exit; if it does not, it counts as hung.
            self._drop_link()
            self._do_beat(True)

    def _do_beat(self, _content: Any) -> None:
        self._heard_at, self._beats = time.monotonic(), True

    def _do_save(self, content: Mapping[str, Any]) -> None:
        self._saved.update(content)

    def _do_hold(self, content: tuple[str, Any]) -> None:
        self._link.hold(*content)

    def _do_drop(self, name: str) -> None:
        self._link.drop(name)

    def _do_print(self, line: str) -> None:
        self._relay.print_line(line)

    def _do_notify(self, text: str) -> None:
        # A full socket means that the process in front is suspended; the next text replaces it.
        if self._systemd is not None:
            with contextlib.suppress(OSError):
                self._front.send(text.encode(), socket.MSG_DONTWAIT)

    def _do_pm2(self, content: Any) -> None:
        if self._pm2 is not None:
            self._pm2.send(content)

    def _do_reload(self, _content: Any) -> None:
        self._reload = True

    def _do_stopping(self, _content: Any) -> None:
        self._stop_answered = True

    def _do_concluded(self, _content: Any) -> None:
        self._miner = None

    def _do_done(self, code: int) -> None:
        self._relay.finish(_CLEANUP_S)
        self._link.tell("flushed", [self._relay.dropped_bytes, self._link.unchecked])
        self._link.send()
        self._done = code, time.monotonic() + _LEAVE_S

    # --- the miner ---

    def _do_launch(self, request: Mapping[str, Any]) -> None:
        if self._miner is not None or self._pending_exit_code is not None:
            self._link.tell("launch_failed", [0, "the last launch has not ended"])
            return
        try:
            popen = self._spawn(request)
        except OSError as error:
            self._link.tell("launch_failed", [error.errno, error.strerror or str(error)])
            return
        entry = processes.stat(popen.pid)
        launcher = Process(popen.pid, 0) if entry is None else entry.process
        # A guard of an earlier version names no signal.
        number = signal.Signals[request.get("stop_signal", "SIGTERM")]
        self._miner = MinerLaunch(request, popen, Teardown(self._members, launcher, number))
        self._launches += 1
        self._link.tell("launched", self._miner.launched)

    def _spawn(self, request: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        keeper = os.getpid()

        def in_child() -> None:
            signal_at_parents_death(signal.SIGTERM)
            if os.getppid() != keeper:
                os._exit(1)

        stdout = stderr = -1
        try:
            stdout, stderr = self._relay.open()
            return subprocess.Popen(
                request["command"],
                env=request["env"],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=in_child,
            )
        finally:
            for fd in {stdout, stderr} - {-1}:
                os.close(fd)

    def _do_stop(self, grace_s: float) -> None:
        if self._miner is not None and not self._miner.stop_requested and not self._miner.reaped:
            self._miner.stop_requested, self._miner.step_at = True, 0.0
            self._miner.teardown.ask(grace_s)

    def _step_miner(self, now: float) -> None:
        miner = self._miner
        if miner is None or miner.ended is not None:
            return
        if miner.drain_until is None:
            if now < miner.step_at:
                return
            try:
                again = miner.teardown.step()
            except OSError as error:
                # Failing to look at a process does not prove that it is gone.
                why = error.strerror or str(error)
                self._tell_degraded(f"cannot inspect the miner's processes ({why}); retrying")
                again = _RETRY_S
            if again is not None:
                miner.step_at = now + again
                if miner.reaped and not miner.exit_told:
                    # The launcher is gone, but not what it started.
                    miner.exit_told = True
                    self._link.tell_in_order("exited", miner.exit())
                return
            miner.drain_until = miner.step_at = now + _DRAIN_S
            self._relay.end_sources()
        if self._relay.pending and now < miner.drain_until:
            # The relay ends the wait.
            return
        killed = miner.teardown.killed
        miner.ended = {
            **miner.exit(),
            "killed": [[process.pid, words] for process, words in killed[: MAX_NAMED + 1]],
            "killed_count": len(killed),
            "stuck": [[process.pid, why_stuck(process)] for process in miner.teardown.stuck],
        }
        miner.step_at = float("inf")
        self._link.tell_in_order("ended", miner.ended)
        if self._pending_exit_code is not None:
            self._exit_code = self._pending_exit_code

    def _tell_degraded(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self._link.tell("degraded", what)

    def _members(self) -> set[Process]:
        """The live processes of the launch: the keeper's descendants except the guard and helpers
        that a guard left behind. Raises OSError."""
        table = processes.table()
        adopted = [p.pid for p, helper in self._judge_children(table).items() if not helper]
        members = processes.descendants(adopted, table)
        hidden = processes.hidden_children(table)
        if self._miner is not None and not self._miner.reaped:
            members.add(self._miner.teardown.launcher)
            hidden.discard(self._miner.popen.pid)
        hidden.discard(0 if self._guard is None else self._guard.pid)
        return members | {Process(pid, 0) for pid in hidden}

    def _judge_children(self, table: processes.Table) -> dict[Process, bool]:
        """For each child except the guard: whether it is a helper of a guard."""
        guard = 0 if self._guard is None else self._guard.pid
        launcher = None if self._miner is None else self._miner.teardown.launcher
        judged: dict[Process, bool] = {}
        for pid, entry in table.items():
            if entry.parent != os.getpid() or pid == guard:
                continue
            helper = False if entry.process == launcher else self._helpers.get(entry.process)
            if helper is None:
                # Reading the environment of a process in D state can block on a kernel lock.
                helper = entry.state not in "ZXD" and HELPER in processes.environment(pid)
            judged[entry.process] = helper
        self._helpers = judged
        return judged

    # --- a stop ---

    def _ask_stop(self, why: str) -> None:
        self._link.tell("stop", why)
        if self._stop is None:
            self._stop = why, time.monotonic()
            if self._guard is None:
                self._end_run(0)

    def _hear_pm2(self) -> None:
        assert self._pm2 is not None
        why, gone = self._pm2.receive()
        if gone:
            self._selector.unregister(self._pm2.socket)
        if why:
            self._ask_stop(why)

    def _watch_stop(self, now: float) -> None:
        every_s = None if self._systemd is None else self._systemd.pulse_every_s
        if every_s is not None and now - self._pulsed_at >= every_s:
            self._pulsed_at = now
            self._do_notify("WATCHDOG=1")
        if self._stop is None or self._pending_exit_code is not None or self._done is not None:
            return
        waited = now - self._stop[1]
        longest_s = self._grace_s() + TERM_TO_KILL_S + UNKILLABLE_S + _LAST_WORDS_S
        deaf = not self._stop_answered and self._beats and waited >= _ANSWER_S
        if deaf or waited >= longest_s:
            self._end_hung_guard()
            self._end_run(FAILED)

    def _grace_s(self) -> float:
        return 0.0 if self._miner is None else float(self._miner.request["grace_s"])

    def _end_run(self, code: int) -> None:
        """Stop the miner and exit, without a guard."""
        if self._pending_exit_code is None:
            self._pending_exit_code = code
            if self._miner is None or self._miner.ended is not None:
                self._exit_code = code
            else:
                self._do_stop(self._grace_s())

    def _leave(self) -> None:
        """End whatever is left."""
        if self._guard is not None and self._guard.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._guard.pid, signal.SIGKILL)
        deadline = time.monotonic() + _CLEANUP_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if not (remaining := self._members()):
                    break
                for process in remaining:
                    processes.send(process, signal.SIGKILL)
            time.sleep(0.02)
            self._reap()
        self._relay.finish(1.0)


def keep() -> int:
    """Run this process's own command line as the guard's, under a keeper in this process; returns
    the exit code."""
    children.open_standard_streams()
    children.settle_signals()
    command = [sys.executable, *sys.orig_argv[1:]]
    return in_front_of(lambda front, systemd: Keeper(command, front, systemd).run())
