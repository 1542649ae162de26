"""Assembles a supervisor, runs it and shuts it down. The only module that knows all its
components."""

from __future__ import annotations

import contextvars
import faulthandler
import functools
import importlib
import os
import pkgutil
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miner_guard import __version__, state_dir, watch
from miner_guard.checks.request import PreflightRequest
from miner_guard.config import Config
from miner_guard.exits import CRASH_LOOP, FAILED, OK, UNAVAILABLE
from miner_guard.guard import control, environment, lock
from miner_guard.guard.control import Status, run_status
from miner_guard.guard.control_socket import ControlSocket
from miner_guard.guard.disk import DiskWriter
from miner_guard.guard.engines import (
    NOTICE_EVERY_S,
    Engine,
    PreemptionNotices,
    ServiceManagers,
    current_start_command,
)
from miner_guard.guard.flights import Flights
from miner_guard.guard.jobs import JobSchedule
from miner_guard.guard.keeper_client import KeeperClient
from miner_guard.guard.loop import Loop
from miner_guard.guard.preflight import GpuMemoryWait, PreflightRunner
from miner_guard.guard.states import LaunchSpec, StopRequest, Then
from miner_guard.guard.supervisor import Supervisor
from miner_guard.guard.wire import WireListener
from miner_guard.keeper.front import stop_signals
from miner_guard.keeper.keeper import RELOADED, STACKS_SIGNAL
from miner_guard.keeper.teardown import ABANDONED_GRACE_S
from miner_guard.record.emitter import ConsoleSink, Emitter, StoreSink
from miner_guard.record.events import Event, degraded, event
from miner_guard.record.redaction import Redactor
from miner_guard.record.words import defect, raised_at
from miner_guard.state_dir import StateDir
from miner_guard.system import children
from miner_guard.system.clock import Once, SystemClock
from miner_guard.system.probe import end_helpers
from miner_guard.system.processes import HELPER
from miner_guard.uploads.repos.credentials import beside
from miner_guard.watch.base import Context, Monitor
from miner_guard.watch.host import HostMonitor
from miner_guard.watch.runner import MonitorRunner

_LAST_WORDS_S = 2.0
_KEEPER_GONE_S = 1.0
_ANSWER_S = 0.2
"""Time for the answer to `ctl reload` before this process exits."""

_SWITCH_S = 0.0002
"""Thread switch interval. The default of 5 ms would delay the output writer during a flood."""

_GAVE_UP = (UNAVAILABLE, CRASH_LOOP)
_HELPERS_END_S = 0.5

_FLUSH_S = 10.0
_FLUSH_ASKED_S = 2.0
"""How long the shutdown waits for all alerts to be sent: `_FLUSH_S` if the guard gave up,
`_FLUSH_ASKED_S` otherwise, because an operator who requested the stop needs no alert about it."""


@dataclass(frozen=True)
class Request:
    """The arguments to `miner-guard run`."""

    command: Sequence[str]
    config: Config
    state: StateDir
    finished_code: int = 0
    name: str = ""
    """The miner's name; by default the state directory's."""

    settings_file: str | None = None
    """The guard.toml that the settings come from; need not exist."""


class GuardApp:
    """All components of a running guard."""

    def __init__(
        self, request: Request, keeper: KeeperClient, last_boot: str | None = None
    ) -> None:
        """`last_boot`: the boot in which the state directory was last used."""
        self.request, self.keeper, self._last_boot = request, keeper, last_boot
        self.clock = SystemClock()
        self.run_id = str(keeper.hello.saved.get("run_id") or secrets.token_hex(6))
        self._defects = Once()
        self._ended = False
        self.env = dict(os.environ)
        # Mark the guard's helper processes, so that no part of the guard mistakes them for the
        # miner's.
        os.environ[HELPER] = str(os.getpid())
        self.loop = Loop(self.clock, self._defect)
        self.runner = MonitorRunner(self.log)
        keeper.on_output = self.runner.output
        keeper.on_stop, keeper.on_gone = self._stop, self._keeper_gone
        keeper.on_degraded = self._degraded
        self.redactor = Redactor.for_guard(beside(self.env, request.config.repo), request.config)
        self.disk = DiskWriter(request.state, request.config.logs, self.report)
        self.emitter = self._emitter()
        self.wire = WireListener(self.loop, keeper, self.log, keeper.hello.held.get("wire", ()))
        self.flights = Flights(self.wire, self.runner, self.loop, keeper=keeper, report=self.log)
        spec = LaunchSpec(
            request.command,
            self._environment,
            request.config,
            request.state,
            self.run_id,
            request.finished_code,
        )
        self.supervisor = Supervisor(
            spec, self.clock, self.loop, runner=self.runner, keeper=keeper, flights=self.flights
        )
        self.startup = PreflightRunner(self._question(), self.report, self.loop.soon)
        self.supervisor.before_first = self.startup.begin
        self.supervisor.on_stopping = self._stopping
        self.runner.on_event = self.supervisor.attribution.hear
        self.jobs = JobSchedule(self.clock, self.report)
        self.status = Status(self.clock, self.disk.row)
        self.managers, self.engine = ServiceManagers(keeper), Engine.of(self.env)
        self._start_command = current_start_command(self.env)
        self._closers: list[Callable[[], None]] = []

    def _environment(self, launch: int) -> dict[str, str]:
        """The miner's environment for one launch; launches are numbered from 0."""
        request = self.request
        return environment.of_miner(
            self.env,
            request.config,
            request.state,
            command=request.command,
            run_id=self.run_id,
            launch=launch,
            wire=self.wire.address,
        )

    def _question(self) -> PreflightRequest:
        request = self.request
        # The probes see the miner's environment; the marker identifies them as the guard's.
        probes = {**self._environment(0), HELPER: str(os.getpid())}
        return PreflightRequest(request.config, request.state, request.command, probes, torch=False)

    def _stopping(self) -> None:
        self.keeper.tell("stopping")
        self.startup.cancel()
        self.managers.stopping()

    def _emitter(self) -> Emitter:
        logs = self.request.config.logs
        console = ConsoleSink(self.keeper.print_line, logs)
        return Emitter(
            self.clock, self.run_id, self.redactor, [console, self.disk, StoreSink(self.disk.row)]
        )

    def _defect(self, error: Exception) -> None:
        # Deduplicate by code location: the message may contain a number that changes each time.
        if self._defects.first((type(error), raised_at(error))):
            self._degraded(f"internal error: {defect(error)}; further occurrences are suppressed")

    def _degraded(self, what: str) -> None:
        self.log(degraded(what))

    def log(self, event: Event) -> None:
        """Log one event. May be called from any thread."""
        self.emitter.emit(event)

    def report(self, event: Event) -> None:
        """Log one event and deliver it to the monitors. May be called from any thread."""
        if self._ended:
            self.log(event)
        else:
            # Take the log context along: the loop's thread does not know which job reports this.
            context = contextvars.copy_context()
            self.loop.soon(lambda: context.run(self.runner.log, event))

    def run(self) -> int:
        """Supervise until the run ends; returns the exit code."""
        children.settle_signals()
        faulthandler.register(STACKS_SIGNAL)
        sys.setswitchinterval(_SWITCH_S)
        state = self.request.state
        events, killed = [*lock.make_private(state)], [*self._killed_guard()]
        replaced = self.keeper.hello.saved.get("version") if self._reloaded() else None
        instead = f", in place of version {replaced}" if replaced else ""
        pid = self.keeper.hello.keeper_pid
        facts: dict[str, Any] = {"version": __version__, "pid": pid, "guard_pid": os.getpid()}
        text = f"GUARD STARTED: version {__version__}, keeper pid {pid}, state {state.root}"
        text += instead + (f", under {self.engine}" if self.engine.job else "")
        facts |= {"state_dir": str(state.root), "replaced": replaced}
        facts |= {"engine": self.engine.name, "node": self.engine.node}
        self.log(event("guard_started", "info", text, **facts))
        now = self.clock.monotonic()
        told = now - self.keeper.hello.saved.get("told_of_killed_guard", float("-inf"))
        if killed and told >= self.request.config.alerts.cooldown_s:
            self.keeper.save(told_of_killed_guard=now)
            events, killed = events + killed, []
        for each in killed:
            self.log(each)
        for each in events:
            # Once there are monitors: alerts are one of them.
            self.report(each)
        self.disk.start()
        state_dir.divert_writes(self.disk.replace)
        self._prepare()
        try:
            code = self.supervisor.run()
            self._leave_failed_node(code)
        finally:
            self._shutdown()
        reason = self.supervisor.reason
        text = f"GUARD STOPPED: exit code {code}, {reason}"
        self.log(event("guard_stopped", "info", text, exit_code=code, reason=reason))
        if unwritten := self.disk.settle(_LAST_WORDS_S):
            what = f"not written within {_LAST_WORDS_S:g} s of shutdown: {', '.join(unwritten)}"
            self._degraded(f"{what}; the disk is not responding")
        self.keeper.done(code)
        # The guard learns only now how much output the reader of its stdout never consumed.
        self.supervisor.report_missed_output()
        # Keep writes diverted: an exit handler must not wait for a dead disk either.
        self.disk.close(0.0 if unwritten else _LAST_WORDS_S)
        self.loop.attempt(self.runner.finish)
        self.loop.attempt(lambda: end_helpers(_HELPERS_END_S))
        return code

    def _leave_failed_node(self, code: int) -> None:
        """Ask the engine for another machine if the guard gave up because this one has failed."""
        why = self.supervisor.node_fault or self.startup.node_fault
        taken = self.engine.leave_node(why) if why and code in _GAVE_UP else None
        if taken is not None:
            text = f"HOST WARNING: {taken}: {why}"
            self.runner.log(event("host_warning", "critical", text, what=why, taken=taken))

    def _reloaded(self) -> bool:
        last = self.keeper.hello.last_guard
        return last is not None and last["how"] == RELOADED

    def _reload(self) -> None:
        """End this process soon; the keeper starts the version that is installed then, which
        continues the record."""
        self.loop.after(_ANSWER_S, self._make_room)

    def _make_room(self) -> None:
        # The keeper holds the ranks' connections and records for the next guard.
        self.keeper.save(version=__version__)
        self.keeper.tell("reload")
        self.jobs.close()
        for close in reversed(self._closers):
            self.loop.attempt(close)
        if not self.disk.close(_LAST_WORDS_S):
            self.flights.commit()
        self.loop.attempt(lambda: end_helpers(_HELPERS_END_S))
        os._exit(OK)

    def _killed_guard(self) -> Iterator[Event]:
        """Yield an event if the guard before this one was killed."""
        last = self.keeper.hello.last_guard
        if self._reloaded():
            return
        if last is None:
            yield from lock.killed_guard(self.request.state, self._last_boot)
            return
        training = "no miner was running" if self.keeper.miner is None else "the miner kept running"
        pid, why = last["pid"], last["how"]
        text = f"GUARD KILLED: the guard before this one (pid {pid}): {why}; {training}"
        yield event("guard_killed", "warning", text, pid=pid, seen=None, why=why)

    def _prepare(self) -> None:
        self._hear_signals()
        self.keeper.watch(self.loop)
        self.keeper.tell("beat")
        self.keeper.save(run_id=self.run_id)
        if self.keeper.hello.last_guard is None:
            lock.end_orphans(self.request.state, self.log)
        # Start the preflight after the orphan cleanup: otherwise it would see an earlier run's
        # processes. Its probes run while the guard creates the monitors.
        if self.keeper.hello.last_guard is None:
            self.startup.start()
        self.runner.monitors = load_monitors(self._context(), self.log)
        children.settle_memory()
        self._watch_gpu_memory()
        # A notice comes from a job's thread.
        notices = PreemptionNotices(
            self.env, self.report, lambda: self.loop.soon(self.flights.ask_checkpoint)
        )
        if notices.active:
            self.jobs.every("preemption notice", NOTICE_EVERY_S, notices.look, first_after_s=1.0)
        self._open("guard.sock", lambda: self.wire.open_path(self.request.state.socket))
        self._open("control.sock", self._control_socket)
        self.jobs.start()
        self.loop.after(0.0, self._pulse)
        self.loop.every(1.0, self._pulse)

    def _watch_gpu_memory(self) -> None:
        health = next((m for m in self.runner.monitors if isinstance(m, HostMonitor)), None)
        if health is None:
            return
        settle = self.request.config.gpu.memory_settle_s
        gpus = GpuMemoryWait(
            health.gpu_memory_levels, settle, self.clock, report=self.report, soon=self.loop.soon
        )
        self.jobs.once("GPU memory before the launch", gpus.remember)
        self.supervisor.before_next = gpus.wait
        self._closers.append(gpus.close)

    def _hear_signals(self) -> None:
        for number in stop_signals():
            self.loop.on_signal(number, functools.partial(self._stop, number.name))
        if (why := self.keeper.hello.stop) is not None:
            self._stop(why)

    def _stop(self, why: str) -> None:
        self.supervisor.request_stop(StopRequest(why, Then.STOP))

    def _context(self) -> Context:
        return Context(
            self.request.config,
            self.request.state,
            self.clock,
            self.run_id,
            self.report,
            self.jobs,
            self.supervisor,
            lambda: self.status.latest,
            self.flights,
            self.redactor,
            self.request.name or self.request.state.root.name,
            self.disk.row,
        )

    def _open(self, name: str, make: Callable[[], Callable[[], None]]) -> None:
        """Open a socket, which `make` does and returns a function that closes it."""
        try:
            self._closers.append(make())
        except OSError as error:
            why = error.strerror or error
            self._degraded(f"cannot create {name}: {why}; the miner runs without it")

    def _control_socket(self) -> Callable[[], None]:
        def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
            return control.answer(self.supervisor, request, self._document, self._reload)

        return ControlSocket(self.request.state, self.loop.soon, answer).close

    def _keeper_gone(self) -> None:
        """End the run without its keeper: the process in front of it does the same, but may have
        been killed too."""
        self._degraded("the keeper was killed; the run ends")
        launch = self.supervisor.launch
        listed = () if launch is None else (launch.process,)
        lock.end_marked(self.request.state, listed, grace_s=ABANDONED_GRACE_S)
        self.disk.close(_KEEPER_GONE_S)
        os._exit(FAILED)

    def _pulse(self) -> None:
        self.keeper.tell("beat")
        self.disk.check()
        if self.disk.idle:
            self.flights.commit()
        if not self._ended:
            self.jobs.check()
        self.clock.monotonic()
        if self.status.due((self.runner.deliveries, self.supervisor.state)):
            self.status.update(self._document())
        if self.supervisor.launches:
            self.managers.ready()
        self.managers.pulse(self.status.latest, self.clock.monotonic())

    def _document(self) -> dict[str, Any]:
        # The command line and the text that monitors quote may contain secrets.
        parts = self.runner.snapshots()
        # Put first what the person on call needs first.
        first = {"verdict": parts.get("verdict")}
        document: dict[str, Any] = self.redactor.value(
            {
                **first,
                **run_status(self.supervisor, self._start_command).to_json(),
                "name": self.request.name or self.request.state.root.name,
                "settings_file": self.request.settings_file,
                **parts,
            }
        )
        return document

    def _shutdown(self) -> None:
        self.loop.drain()
        self._ended = True
        # Update the status first, so that the monitors' final output, including the last HEALTH
        # line, shows the exit and not the state before it. Twice, because the judge of the run's
        # state reads the document that the first update leaves.
        steps: tuple[Callable[[], object], ...] = (
            lambda: self.status.update(self._document()),
            lambda: self.status.update(self._document()),
            self.runner.stop,
            self._linger,
            lambda: self.status.update(self._document()),
            self.jobs.close,
            *reversed(self._closers),
            self.flights.close,
            self.wire.close,
        )
        for work in steps:
            self.loop.attempt(work)
            self.keeper.tell("beat")
        self.loop.close()

    def _linger(self) -> None:
        """Run the loop until the monitors have sent their last messages, but do not wait for a dead
        webhook."""
        within_s = _FLUSH_S if self.supervisor.exit_code in _GAVE_UP else _FLUSH_ASKED_S
        over = self.loop.after(within_s, lambda: None)
        while self.runner.lingers() and self.clock.monotonic() < over:
            self.loop.after(0.05, lambda: None)
            self.loop.turn()
        if self.runner.lingers():
            self._degraded(f"not all alerts were sent within {within_s:g} s of shutdown")


_SHOWING = ("miner_guard.show.alerts", "miner_guard.show.monitors")
"""The other modules of `show/` draw, and need not be in the guard's memory."""


def load_monitors(context: Context, report: Callable[[Event], None]) -> list[Monitor]:
    """Create all watchers, every class of `watch/` and `show/` that derives from `Monitor`, in the
    order of their calls; one that can't be created is reported and skipped."""
    modules = [m.name for m in pkgutil.iter_modules(watch.__path__, f"{watch.__name__}.")]
    for name in (*modules, *_SHOWING):
        importlib.import_module(name)
    monitors: list[Monitor] = []
    ours = {kind for kind in _below(Monitor) if kind.__module__.startswith("miner_guard.")}
    for kind in sorted(ours, key=lambda kind: (kind.order, kind.__module__, kind.__name__)):
        try:
            monitors.append(kind(context))
        except Exception as error:  # noqa: BLE001 - a bug in a watcher must not stop the miner; it is reported
            what = (
                f"cannot start monitor {kind.name}: {type(error).__name__}: {error}; "
                "the others keep running"
            )
            report(degraded(what))
    return monitors


def _below(kind: type[Monitor]) -> Iterator[type[Monitor]]:
    """The classes with a name of their own that derive from `kind`."""
    for derived in kind.__subclasses__():
        if "name" in vars(derived):
            yield derived
        yield from _below(derived)
