"""A guard over a simulated miner: the guard's own monitors, gate and restart policy, on a clock
that moves only as the miner works.

A scenario describes only what happens to the miner. The log, run.db and the
verdict are the guard's own responses, so they cannot contradict each other.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from miner_guard.checks.health import assemble, summary
from miner_guard.config import Config, GpuSettings, MinerSettings, RepoSettings
from miner_guard.guard.lock import killed_guard
from miner_guard.guard.restart import (
    HEALTHY_S,
    Again,
    Attribution,
    Failure,
    RestartPolicy,
    how_it_ended,
)
from miner_guard.rank.journal import CheckpointEntry, DecisionEntry, DiagnosisEntry
from miner_guard.rank.layout import Now
from miner_guard.record.emitter import Emitter, StoreSink
from miner_guard.record.events import event
from miner_guard.record.redaction import Redactor
from miner_guard.record.status_document import LastExit, RankProcess, RunStatus
from miner_guard.record.store import RunStore, now_rows
from miner_guard.record.words import rank_list
from miner_guard.state_dir import StateDir, write_json
from miner_guard.system.clock import FakeClock, iso_utc
from miner_guard.uploads import gate
from miner_guard.uploads.gate import decide
from miner_guard.uploads.repos import Look
from miner_guard.validators.facts import Candidate, Network, Published
from miner_guard.watch import uploads as uploads_module
from miner_guard.watch.base import Exit, Launch, Monitor
from miner_guard.watch.checkpoints import ReportsMonitor
from miner_guard.watch.curves import CurvesMonitor
from miner_guard.watch.gpu import DiagnosisMonitor
from miner_guard.watch.output import IncidentsMonitor
from miner_guard.watch.ranks import RanksMonitor
from miner_guard.watch.runner import MonitorRunner
from miner_guard.watch.state import StateMonitor
from miner_guard.watch.steps import StepsMonitor
from miner_guard.watch.uploads import UploadsMonitor
from tests.support.contexts import IdleControl, JobsAtOnce, context
from tests.support.simulated_parts import LogOnDisk, Source
from tests.support.simulated_training import COSTS, SimulatedTraining, cost_ledger

RUN_ID = "3f9c21d7a04e"
STEP_S = 15.0
"""Duration of a normal step in seconds. A test that shows no curves may use fewer, longer steps."""

_UPLOAD_EVERY = 10
_CHECKPOINT_EVERY = 200
_AUDIT_EVERY = 5
_OBSERVE_EVERY = 4
"""Number of steps between snapshots, and between repo checks."""

_GRADIENTS_BYTES = 812_345_678
_WATCHING = {"watching": True, "limit_s": 300.0}
_TICK_S = 6.0


class SimulatedGuard:
    """One run of a guard and its miner. Make things happen to it, then `write` its state."""

    def __init__(
        self, root: Path, *, ranks: int = 4, gpus: bool = True, step_s: float | None = None
    ) -> None:
        self.state, self.clock, self.step_s = StateDir(root), FakeClock(), step_s or STEP_S
        self.training = SimulatedTraining(ranks, gpus=gpus)
        self.documents: Mapping[str, Any] = {}
        self._launches = self._uploads = 0
        self._stepped_at = self._launched_at = self.clock.monotonic()
        self._miner, self._hang, self._last_exit = "running", "", LastExit()
        self._published = Published(reason=None, empty=True)
        self._jobs, self._log = JobsAtOnce(), LogOnDisk(self.state.log)
        self._store = RunStore(self.state.db)
        self._emitter = Emitter(self.clock, RUN_ID, Redactor(), [self._log, StoreSink(self._row)])
        self._attribution = Attribution(self.clock)
        self.runner = MonitorRunner(self._emitter.emit)
        self.runner.on_event = self._attribution.hear
        self._config = Config(
            miner=MinerSettings(profile="sn38"),
            repo=RepoSettings(kind="local", path=str(root / "published")),
            gpu=GpuSettings(expect=ranks),
        )
        self._policy = RestartPolicy(self._config.restart, chance=lambda: 0.0)
        self.start()

    def start(self) -> None:
        """Start a guard in this state directory: the first, or one after `die`."""
        with self._repo():
            self.runner.monitors = list(self._monitors())
        self._document()
        for each in killed_guard(self.state, None):
            self.runner.log(each)
        self.launch()

    def _monitors(self) -> Iterator[Monitor]:
        around = context(
            self.state.root,
            config=self._config,
            clock=self.clock,
            emit=self.runner.log,
            jobs=self._jobs,
            control=IdleControl(),
            status=lambda: self.documents,
            write_row=self._row,
        )
        yield UploadsMonitor(around)
        yield StepsMonitor(around)
        yield CurvesMonitor(around)
        yield RanksMonitor(around)
        yield DiagnosisMonitor(around)
        yield ReportsMonitor(around)
        yield IncidentsMonitor(around)
        yield Source(around, "health", self._health)
        yield Source(around, "hang", lambda: {**_WATCHING, "hang": self._hang or None})
        yield Source(around, "chain", lambda: {"registered": True, "incentive": 0.0123})
        yield Source(around, "costs", lambda: COSTS)
        yield StateMonitor(around)

    @contextmanager
    def _repo(self) -> Iterator[None]:
        """Make the monitors read the simulated repo while the block runs."""
        real = uploads_module.look_at
        uploads_module.look_at = self._seen_repo
        try:
            yield
        finally:
            uploads_module.look_at = real

    def _seen_repo(self, *_: Any) -> Look:
        known, now = self._published, self.clock.monotonic()
        if known.seen_at is None:
            return Look(known)
        return Look(Published(**{**vars(known), "age_s": now - known.seen_at, "seen_at": now}))

    def _row(self, statement: str, values: Sequence[Any]) -> None:
        if not self._log.full:
            self._store.write((statement, values))

    def _say(self, name: str, level: str, text: str, /, **fields: Any) -> None:
        self.runner.log(event(name, level, text, **fields))

    # what happens to the miner

    def launch(self) -> None:
        """Start the miner; its ranks report where their model is."""
        self._attribution.launched()
        self._launched_at, self._miner, self._hang = self.clock.monotonic(), "running", ""
        launched = Launch(self.training.command, 4711, self._launches, self._launched_at)
        self._launches += 1
        self.runner.launch(launched)
        command = " ".join(launched.command)
        words: dict[str, Any] = {"pid": 4711, "command": command, "attempt": launched.attempt}
        self._say("miner_started", "info", f"MINER STARTED: pid 4711: {command}", **words)
        self.clock.advance(20.0)
        facts = [self.training.facts(rank) for rank in range(self.training.ranks)]
        self.runner.entry(0, DiagnosisEntry(reports=facts).to_json())
        self.training.first = True

    def train(self, hours: float, *, loss: float | None = None) -> None:
        """Run steps until `hours` have passed; the loss falls as usual unless `loss` is given."""
        until = self.clock.monotonic() + 3600 * hours
        while self.clock.monotonic() < until:
            self._step(self.training.usual_loss() if loss is None else loss)

    def hang(self, rank: int, frame: str, *, idle_s: float = 306.0) -> None:
        """A rank stops in its dataloader; the guard detects the hang and restarts the miner."""
        while self._silent_s() < idle_s:
            self._watch(min(_TICK_S, idle_s - self._silent_s()))
        others = rank_list(r for r in range(self.training.ranks) if r != rank)
        detail = f"rank {rank} in data for {self._silent_s():.0f}s, {others} waiting in allreduce"
        self._hang = f"{detail}; at {frame}"
        silent = {"idle_s": self._silent_s(), "limit_s": _WATCHING["limit_s"]}
        story = {"detail": self._hang, "culprits": [rank], **silent}
        self._say("hang_detected", "critical", f"HANG DETECTED: {self._hang}", **story)
        self._end(Exit(137, 9, True, False, self._runtime_s()), f"hang: {self._hang}")
        self._retry(Failure(f"hang: {self._hang}", self._runtime_s()))

    def crash(self, output: str, code: int = 1) -> bool:
        """The miner prints `output` and exits; returns whether the guard has restarted it."""
        self.runner.output(output.encode())
        end = Exit(code, None, False, False, self._runtime_s())
        self._end(end, None)
        return self._retry(self._attribution.failure(end))

    def fall_behind(self) -> None:
        """The network begins an outer step, but the miner does not load its state."""
        self.training.network += 1
        network = Network(
            block=5_000_000,
            outer_step=self.training.network,
            registered=True,
            reason=None,
            seen_at=self.clock.monotonic(),
        )
        words = f"block 5000000, network outer step {self.training.network}"
        with self._repo():
            fields = {"summary": words, "network": vars(network)}
            self._say("chain_status", "info", f"CHAIN {words}", **fields)

    def fill_disk(self) -> None:
        """Fill the disk of the state directory, so that neither the log nor the ledger can grow."""
        self._log.full = True
        what, reason = "guard.jsonl", "No space left on device"
        text = f"DISK FULL: cannot write {what} ({reason}); the miner keeps running"
        self._say("disk_full", "critical", text, what=what, reason=reason)

    def die(self, hours: float) -> None:
        """SIGKILL ends the guard and its miner; nothing runs for a while."""
        self.write()
        self.clock.advance(3600 * hours)

    def wait(self, seconds: float) -> None:
        """Time passes without a step."""
        until = self.clock.monotonic() + seconds
        while self.clock.monotonic() < until:
            self._watch(_TICK_S)

    # the miner

    def _step(self, loss: float) -> None:
        seconds = self.step_s * self.training.random.gauss(1.0, 0.03)
        self.clock.advance(seconds)
        self.training.step()
        self._stepped_at = self.clock.monotonic()
        with self._repo():
            for rank in range(self.training.ranks):
                self.runner.steps(rank, [self.training.record(rank, seconds, loss, self.clock)])
            self.training.first = False
            if self._runtime_s() > HEALTHY_S:
                self._policy.healthy()
            if self.training.inner % _UPLOAD_EVERY == 0:
                self._push(loss)
            if self.training.total % _CHECKPOINT_EVERY == 0 and math.isfinite(loss):
                path = f"/data/checkpoints/step-{self.training.total}.pt"
                saved = CheckpointEntry(path=path, step=self.training.total, seconds=8.2)
                self.runner.entry(0, saved.to_json())
            self._tick()
            if self.training.total % _OBSERVE_EVERY == 0:
                self._observe()

    def _push(self, loss: float) -> None:
        outer, inner = self.training.outer, self.training.inner
        candidate = Candidate("gradient", outer, inner, loss=loss, base_outer_step=outer)
        decided = decide(
            candidate,
            gate.read(self.state.gate_inputs),
            self._config.gate,
            now=self.clock.monotonic(),
            wall=self.clock.wall(),
        )
        document = DecisionEntry(decision=decided.as_dict()).to_json()
        self.runner.entry(0, {"t": self.clock.monotonic(), **document})
        if decided.allowed:
            self._upload(decided.decision_id)

    def _upload(self, decision: str) -> None:
        self._uploads += 1
        outer, inner = self.training.outer, self.training.inner
        tag, checksum = f"5.{outer}.{inner}", f"{self.training.random.getrandbits(48):012x}"
        steps = {"outer_step": outer, "inner_step": inner}
        entry = {"kind": "upload", "decision_id": decision, "tag": tag, **steps}
        entry |= {"upload_kind": "gradient", "bytes": _GRADIENTS_BYTES, "checksum": checksum}
        self.runner.entry(0, {**entry, "phase": "started", "t": self.clock.monotonic()})
        self.clock.advance(11.4)
        self._published = Published(
            reason=None,
            seen_at=self.clock.monotonic(),
            revision=tag,
            checksum=checksum,
            size_bytes=_GRADIENTS_BYTES,
            **steps,
        )
        end = {"phase": "finished", "seconds": 11.4, "attempts": 1, "t": self.clock.monotonic()}
        self.runner.entry(0, {**entry, **end})
        if self._uploads % _AUDIT_EVERY == 1:
            rules = "12 of 12 rules"
            self._say("audit_passed", "info", f"AUDIT PASSED: {rules}", detail=rules)

    # the supervisor

    def _silent_s(self) -> float:
        return self.clock.monotonic() - self._stepped_at

    def _runtime_s(self) -> float:
        return self.clock.monotonic() - self._launched_at

    def _watch(self, seconds: float) -> None:
        self.clock.advance(seconds)
        with self._repo():
            self._tick()
            if self.clock.monotonic() % 60 < seconds:
                self._observe()

    def _end(self, end: Exit, asked: str | None) -> None:
        self._miner = "ending"
        self.runner.exit(end)
        self._last_exit = LastExit(end.code, end.signal, end.asked, end.finished, end.runtime_s)
        how = "without being asked" if asked is None else f"as requested: {asked}"
        how = f"{how_it_ended(end)} {how}"
        words: dict[str, Any] = {"how": how, "code": end.code, "runtime_s": end.runtime_s}
        level = "error" if asked is None else "info"
        self._say("miner_exited", level, f"MINER EXITED: {how}", **words)

    def _retry(self, failure: Failure) -> bool:
        decision = self._policy.failed(failure)
        if not isinstance(decision, Again):
            why, restarts = decision.why, self._policy.failures
            words = {"detail": why, "restarts": restarts}
            self._say("crash_loop", "critical", f"CRASH LOOP: {why}", **words)
            self._miner = "done"
            self._document()
            with self._repo():
                self.runner.stop()
            self._document()
            return False
        most = self._config.restart.max_restarts
        words = {"wait_s": decision.wait_s, "attempt": decision.attempt, "max_restarts": most}
        text = f"in {decision.wait_s:.0f}s (attempt {decision.attempt} of {most}): {failure.cause}"
        self._miner = "waiting"
        self._say(
            "miner_restarting", "warning", f"MINER RESTARTING {text}", **words, cause=failure.cause
        )
        self.wait(decision.wait_s)
        self.launch()
        return True

    def _tick(self) -> None:
        """One iteration of the guard: first the status, then the monitors."""
        self._document()
        now, phase = self.clock.monotonic(), "data" if self._silent_s() > self.step_s else "forward"
        at = self._stepped_at
        training = self.training
        place = (training.outer, training.inner, training.total)
        unknown = (None, None, None, None)
        header = Now("running", phase, at, at, *place, *unknown, training.total)
        running = self._miner == "running" and not self.training.first
        self.runner.tick(now, dict.fromkeys(range(self.training.ranks), header) if running else {})

    def _observe(self) -> None:
        """The guard's work once a minute: read the repo and log a snapshot."""
        self._jobs.repeated["repo"]()
        health = self._health()
        snapshot = assemble(self.documents, **health, unknown={})
        words = summary(snapshot)
        self._say("health_snapshot", "info", f"HEALTH {words}", summary=words, snapshot=snapshot)

    def _health(self) -> dict[str, Any]:
        idle = self._miner != "running" or self._silent_s() > 4 * self.step_s
        return self.training.health(idle=idle, disk_full=self._log.full)

    # what the guard writes

    def _document(self) -> None:
        running = self._miner == "running"
        run = RunStatus(
            state=self._miner,
            run_id=RUN_ID,
            keeper_pid=4700,
            guard_pid=4701,
            pid=4711 if running else None,
            command=self.training.command,
            host=socket.gethostname(),
            state_dir="/var/lib/miner-guard/sn38",
            start_command="pm2 restart sn38",
            attempt=self._launches - 1,
            restarts=self._policy.failures,
            started=iso_utc(self.clock.wall() - self._runtime_s()) if running else None,
            last_exit=self._last_exit,
            rank_processes={
                str(rank): RankProcess(4712 + rank, rank) for rank in range(self.training.ranks)
            },
        )
        with self._repo():
            parts = self.runner.snapshots()
        first = {"verdict": parts.get("verdict"), **run.to_json()}
        self.documents = {**first, **parts, "updated": iso_utc(self.clock.wall())}

    def write(self) -> StateDir:
        """Write the state and the cost ledger, as they are now."""
        self._document()
        self.state.costs.parent.mkdir(exist_ok=True)
        write_json(self.state.costs, cost_ledger(self.training.total))
        self._store.write(*now_rows(self.documents))
        return self.state

    def close(self) -> None:
        """Close run.db."""
        self._store.close()
