"""A guard over a simulated miner: the guard's own monitors, gate and restart policy, on a clock
that moves only as the miner works.

A scenario says only what happens to the miner. The log, status.json, the ledger and the verdict are
the guard's own answers to that, so they cannot contradict each other.
"""

from __future__ import annotations

import math
import random
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from miner_guard.config import Config, GpuSettings, LogSettings, MinerSettings, RepoSettings
from miner_guard.detectors.verdict_memory import Memory
from miner_guard.eventlog.catalog import make_finding
from miner_guard.eventlog.emitter import Emitter
from miner_guard.eventlog.formatters import rank_list
from miner_guard.eventlog.jsonl import JsonlSink
from miner_guard.eventlog.redact import Redactor
from miner_guard.eventlog.run_status import LastExit, RankProcess, RunStatus
from miner_guard.flight_recorder.journal import CheckpointEntry, DecisionEntry
from miner_guard.flight_recorder.layout import FLAG_FIRST, FLAG_LOSS_ON_CPU
from miner_guard.flight_recorder.records import Now, StepRecord
from miner_guard.health.snapshot import assemble, summary
from miner_guard.monitors import uploads as uploads_module
from miner_guard.monitors.base import Context, Exit, Launch, Monitor
from miner_guard.monitors.curves import CurvesMonitor
from miner_guard.monitors.diagnosis import DiagnosisMonitor
from miner_guard.monitors.incidents import IncidentsMonitor
from miner_guard.monitors.ranks import RanksMonitor
from miner_guard.monitors.reports import ReportsMonitor
from miner_guard.monitors.runner import MonitorRunner
from miner_guard.monitors.steps import StepsMonitor
from miner_guard.monitors.uploads import UploadsMonitor
from miner_guard.monitors.verdict import VerdictMonitor
from miner_guard.rank.introspection import diagnosis_codec
from miner_guard.state_dir import StateDir, write_json
from miner_guard.supervisor.attribution import Attribution, how_it_ended
from miner_guard.supervisor.restart import Again, Failure, RestartPolicy
from miner_guard.supervisor.startup.predecessor import killed_guard
from miner_guard.system.clock import FakeClock, iso_utc
from tests.support.contexts import IdleControl, JobsAtOnce, context
from uploads import inputs as gate_inputs
from uploads.gate import decide
from uploads.ledger import Ledger
from validators.facts import Candidate, Network, Published

RUN_ID = "3f9c21d7a04e"
STEP_S = 15.0
"""Seconds of a usual step. A test that shows no curves may make them longer and so fewer."""

_INNER_STEPS = 100
_UPLOAD_EVERY = 10
_CHECKPOINT_EVERY = 200
_AUDIT_EVERY = 5
_OBSERVE_EVERY = 4
"""Steps between two snapshots and two checks of the repo."""

_GIB = 1024**3
_GRADIENTS_BYTES = 812_345_678
_HANG_LIMIT_S = 300.0
_TICK_S = 6.0
_OWN = {"cpu_pct": 0.4, "memory_bytes": 58 * 2**20, "events_dropped": 0, "entries_lost": 0}
_NO_DRIVER = {"gpus": [], "state": "absent", "reason": "NVML Shared Library Not Found"}


class _Source(Monitor):
    """Stands for a monitor that measures the host, the chain or the guard's cost."""

    def __init__(self, around: Context, name: str, read: Callable[[], Mapping[str, Any]]) -> None:
        super().__init__(around)
        self.name = name
        self._read = read

    def snapshot(self) -> Mapping[str, Any]:
        return self._read()


class _Log:
    """guard.jsonl, on a disk that may be full."""

    def __init__(self, path: Path) -> None:
        self._sink = JsonlSink(path, LogSettings())
        self.full = False

    def write(self, record: Mapping[str, Any]) -> None:
        """Append the record, unless the disk is full."""
        if not self.full:
            self._sink.write(record)


class SimulatedGuard:
    """A run of a guard and its miner. Let things happen to it, then `write` what it knows."""

    def __init__(
        self, root: Path, *, ranks: int = 4, gpus: bool = True, step_s: float | None = None
    ) -> None:
        self.state, self.clock, self.step_s = StateDir(root), FakeClock(), step_s or STEP_S
        self.slow_rank: int | None = None
        self.documents: Mapping[str, Any] = {}
        self._ranks, self._gpus, self._random = ranks, gpus, random.Random(7)
        self._total = self._inner = self._launches = self._uploads = 0
        self._outer = self._network = 56
        self._stepped_at = self._launched_at = self.clock.monotonic()
        self._miner, self._hang, self._last_exit = "running", "", LastExit()
        self._published = Published(reason=None, empty=True)
        self._jobs, self._log = JobsAtOnce(), _Log(self.state.log)
        self._ledger = Ledger(self.state.ledger)
        self._emitter = Emitter(self.clock, RUN_ID, Redactor(), [self._log])
        self._attribution = Attribution(self.clock)
        self.runner = MonitorRunner(self._emitter.emit)
        self.runner.on_finding = self._attribution.hear
        self._config = Config(
            miner=MinerSettings(profile="sn38"),
            repo=RepoSettings(kind="local", path=str(root / "published")),
            gpu=GpuSettings(expect=ranks),
        )
        self._policy = RestartPolicy(self._config.restart, chance=lambda: 0.0)
        self.start()

    @property
    def memory(self) -> Memory:
        """What the verdict remembers."""
        monitor = self.runner.monitors[-1]
        assert isinstance(monitor, VerdictMonitor)
        return monitor._memory

    def start(self) -> None:
        """Start a guard in this state directory: the first, or one after `die`."""
        with self._repo():
            self.runner.monitors = list(self._monitors())
        self._document()
        for finding in killed_guard(self.state):
            self.runner.finding(finding)
        self.launch()

    def _monitors(self) -> Iterator[Monitor]:
        around = context(
            self.state.root,
            config=self._config,
            clock=self.clock,
            emit=self.runner.finding,
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
        yield _Source(around, "health", self._health)
        yield _Source(around, "hang", self._hang_status)
        yield _Source(around, "chain", lambda: {"registered": True, "incentive": 0.0123})
        yield _Source(around, "costs", self._costs)
        yield VerdictMonitor(around)

    @contextmanager
    def _repo(self) -> Iterator[None]:
        """Within this block the monitors read the simulated repo."""
        real = uploads_module.look_at
        uploads_module.look_at = self._seen_repo
        try:
            yield
        finally:
            uploads_module.look_at = real

    def _seen_repo(self, *_: Any) -> Published:
        known, now = self._published, self.clock.monotonic()
        if known.seen_at is None:
            return known
        return Published(**{**vars(known), "age_s": now - known.seen_at, "seen_at": now})

    def _row(self, statement: str, values: Sequence[Any]) -> None:
        if not self._log.full:
            self._ledger.write(statement, values)

    # what happens to the miner

    def launch(self) -> None:
        """Start the miner; its ranks report where their model is."""
        self._attribution.launched()
        self._launched_at, self._miner, self._hang = self.clock.monotonic(), "running", ""
        launched = Launch(self._command(), 4711, self._launches, self._launched_at)
        self._launches += 1
        self.runner.launch(launched)
        words = {"pid": 4711, "command": " ".join(self._command()), "attempt": self._launches - 1}
        self.runner.finding(make_finding("miner_started", **words))
        self.clock.advance(20.0)
        for part in diagnosis_codec.pack([self._facts(rank) for rank in range(self._ranks)]):
            self.runner.entry(0, {"kind": "diagnosis", "report": part})
        self._first = True

    def train(self, hours: float, *, loss: float | None = None) -> None:
        """Steps until `hours` have passed; the loss falls as usual unless `loss` is given."""
        until = self.clock.monotonic() + 3600 * hours
        while self.clock.monotonic() < until:
            self._step(self._usual_loss() if loss is None else loss)

    def hang(self, rank: int, frame: str, *, idle_s: float = 306.0) -> None:
        """A rank stops in its dataloader; the guard finds it, ends the launch and restarts it."""
        while self._silent_s() < idle_s:
            self._watch(min(_TICK_S, idle_s - self._silent_s()))
        others = rank_list(r for r in range(self._ranks) if r != rank)
        detail = f"rank {rank} in data for {self._silent_s():.0f}s, {others} waiting in allreduce"
        self._hang = f"{detail}; at {frame}"
        silent = {"idle_s": self._silent_s(), "limit_s": _HANG_LIMIT_S}
        self.runner.finding(
            make_finding("hang_detected", detail=self._hang, culprits=[rank], **silent)
        )
        self._end(Exit(137, 9, True, False, self._runtime_s()), f"hang: {self._hang}")
        self._retry(Failure(f"hang: {self._hang}", self._runtime_s()))

    def crash(self, output: str, code: int = 1) -> bool:
        """The miner prints `output` and ends; returns whether the guard has restarted it."""
        self.runner.output(output.encode())
        end = Exit(code, None, False, False, self._runtime_s())
        self._end(end, None)
        return self._retry(self._attribution.failure(end))

    def fall_behind(self) -> None:
        """The network begins an outer step, and the miner does not load its state."""
        self._network += 1
        network = Network(
            block=5_000_000,
            outer_step=self._network,
            registered=True,
            reason=None,
            seen_at=self.clock.monotonic(),
        )
        words = f"block 5000000, network outer step {self._network}"
        finding = make_finding("chain_status", summary=words, network=vars(network))
        with self._repo():
            self.runner.finding(finding)

    def fill_disk(self) -> None:
        """The disk of the state directory is full: neither the log nor the ledger can grow."""
        self._log.full = True
        reason = "No space left on device"
        self.runner.finding(make_finding("disk_full", what="guard.jsonl", reason=reason))

    def die(self, hours: float) -> None:
        """SIGKILL ends the guard and its miner; nothing runs for a while."""
        self.write()
        self.clock.advance(3600 * hours)

    def wait(self, seconds: float) -> None:
        """Time passes; no rank steps."""
        until = self.clock.monotonic() + seconds
        while self.clock.monotonic() < until:
            self._watch(_TICK_S)

    # the miner

    def _command(self) -> tuple[str, ...]:
        return ("torchrun", "--nproc_per_node", str(self._ranks), "miner.py")

    def _usual_loss(self) -> float:
        return 2.6 + 2.4 * math.exp(-self._total / 900) + self._random.gauss(0, 0.03)

    def _step(self, loss: float) -> None:
        seconds = self.step_s * self._random.gauss(1.0, 0.03)
        self.clock.advance(seconds)
        self._total += 1
        self._inner += 1
        if self._inner > _INNER_STEPS and self._network == self._outer:
            self._outer, self._network, self._inner = self._outer + 1, self._network + 1, 1
        self._stepped_at = self.clock.monotonic()
        with self._repo():
            for rank in range(self._ranks):
                self.runner.steps(rank, [self._record(rank, seconds, loss)])
            self._first = False
            if self._runtime_s() > self._config.restart.healthy_s:
                self._policy.healthy()
            if self._inner % _UPLOAD_EVERY == 0:
                self._push(loss)
            if self._total % _CHECKPOINT_EVERY == 0 and math.isfinite(loss):
                path = f"/data/checkpoints/step-{self._total}.pt"
                saved = CheckpointEntry(path=path, step=self._total, seconds=8.2)
                self.runner.entry(0, saved.to_json())
            self._tick()
            if self._total % _OBSERVE_EVERY == 0:
                self._observe()

    def _record(self, rank: int, seconds: float, loss: float) -> StepRecord:
        waits = 0.4 + 0.02 * self._random.random()
        backward = 0.6 * (seconds - waits)
        if self.slow_rank is not None:
            backward = 0.35 * seconds
            waits = 0.4 if rank == self.slow_rank else 0.42 * seconds
        forward = seconds - waits - backward - 0.1
        end = self.clock.monotonic()
        flags = (FLAG_FIRST if self._first else 0) | (0 if self._gpus else FLAG_LOSS_ON_CPU)
        return StepRecord(
            number=self._total,
            outer_step=self._outer,
            inner_step=self._inner,
            total_steps=self._total,
            start=end - seconds,
            end=end,
            wall=self.clock.wall(),
            loss=loss,
            lr=2.1e-5,
            allocated_bytes=18.4 * _GIB if self._gpus else 0.0,
            flags=flags,
            phases={"forward": forward, "backward": backward, "collective": waits},
        )

    def _facts(self, rank: int) -> dict[str, Any]:
        """What the rank's diagnosis reports."""
        facts = {"rank": rank, "local_rank": rank, "host": socket.gethostname()}
        facts |= {"world_size": self._ranks, "pid": 4712 + rank, "cuda_available": self._gpus}
        if not self._gpus:
            return {**facts, "model_device": "cpu"}
        device = {"model_device": f"cuda:{rank}", "gpu_count": self._ranks}
        return {**facts, **device, "uuid": f"GPU-{rank}", "device_name": "NVIDIA A10G"}

    def _push(self, loss: float) -> None:
        candidate = Candidate(
            "gradient", self._outer, self._inner, loss=loss, base_outer_step=self._outer
        )
        decided = decide(
            candidate,
            gate_inputs.read(self.state.gate_inputs),
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
        tag, checksum = f"5.{self._outer}.{self._inner}", f"{self._random.getrandbits(48):012x}"
        steps = {"outer_step": self._outer, "inner_step": self._inner}
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
            self.runner.finding(make_finding("audit_passed", detail="12 of 12 rules"))

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
        how = "without being asked" if asked is None else f"as asked: {asked}"
        words = {"how": f"{how_it_ended(end)} {how}", "code": end.code, "runtime_s": end.runtime_s}
        exited = make_finding("miner_exited", **words)
        self.runner.finding(exited if asked is None else exited.at("info"))

    def _retry(self, failure: Failure) -> bool:
        decision = self._policy.failed(failure)
        if not isinstance(decision, Again):
            why, restarts = decision.why, self._policy.failures
            self.runner.finding(make_finding("crash_loop", detail=why, restarts=restarts))
            self._miner = "done"
            self._document()
            with self._repo():
                self.runner.stop()
            self._document()
            return False
        most = self._config.restart.max_restarts
        attempt = {"attempt": decision.attempt, "max_restarts": most, "cause": failure.cause}
        restarting = make_finding("miner_restarting", wait_s=decision.wait_s, **attempt)
        self._miner = "waiting"
        self.runner.finding(restarting)
        self.wait(decision.wait_s)
        self.launch()
        return True

    def _tick(self) -> None:
        """One turn of the guard: the status, then the monitors."""
        self._document()
        now, phase = self.clock.monotonic(), "data" if self._silent_s() > self.step_s else "forward"
        at = self._stepped_at
        header = Now(
            "running",
            phase,
            at,
            at,
            self._outer,
            self._inner,
            self._total,
            None,
            None,
            None,
            None,
            self._total,
            0,
            0,
            0,
        )
        running = self._miner == "running" and not self._first
        self.runner.tick(now, dict.fromkeys(range(self._ranks), header) if running else {})

    def _observe(self) -> None:
        """What the guard does once a minute: it reads the repo and logs a snapshot."""
        self._jobs.repeated["repo"]()
        health = self._health()
        snapshot = assemble(
            self.documents,
            host=health["host"],
            gpus=health["gpus"],
            guard=health["guard"],
            unknown={},
        )
        words = summary(snapshot)
        self.runner.finding(make_finding("health_snapshot", summary=words, snapshot=snapshot))

    # what the guard measures

    def _health(self) -> dict[str, Any]:
        busy = dict.fromkeys(range(self._ranks), 0.97)
        if self.slow_rank is not None:
            busy |= {rank: 0.58 for rank in busy if rank != self.slow_rank}
        if self._miner != "running" or self._silent_s() > 4 * self.step_s:
            busy = dict.fromkeys(busy, 0.0)
        rows = [
            {
                "index": gpu,
                "uuid": f"GPU-{gpu}",
                "state": "ok",
                "memory_used_bytes": 18.4 * _GIB,
                "memory_total_bytes": 24 * _GIB,
                "utilization_ratio": busy[gpu],
                "temperature_c": 88.0 if gpu == self.slow_rank else 71.0,
                "power_w": 310.0,
            }
            for gpu in range(self._ranks)
        ]
        free = 0 if self._log.full else 310 * _GIB
        host = {
            "cpu_pct": 41.0,
            "memory_used_bytes": 30 * _GIB,
            "memory_limit_bytes": 256 * _GIB,
            "disk_free_bytes": free,
            "disk_free_by_folder_bytes": {"state": free},
        }
        gpus = {"gpus": rows, "state": "ok", "reason": None} if self._gpus else _NO_DRIVER
        return {"gpus": gpus, "host": host, "guard": dict(_OWN)}

    def _hang_status(self) -> dict[str, Any]:
        return {"watching": True, "limit_s": _HANG_LIMIT_S, "hang": self._hang or None}

    def _costs(self) -> dict[str, Any]:
        return {"share_pct": 0.21, "budget_pct": 5.0, "budget_status": "ok"}

    # what the guard writes

    def _document(self) -> None:
        running = self._miner == "running"
        run = RunStatus(
            state=self._miner,
            run_id=RUN_ID,
            pid=4700,
            miner_pid=4711 if running else None,
            command=self._command(),
            host=socket.gethostname(),
            state_dir="/var/lib/miner-guard/sn38",
            start_command="pm2 restart sn38",
            attempt=self._launches - 1,
            restarts=self._policy.failures,
            started=iso_utc(self.clock.wall() - self._runtime_s()) if running else None,
            last_exit=self._last_exit,
            rank_processes={
                str(rank): RankProcess(4712 + rank, rank) for rank in range(self._ranks)
            },
        )
        with self._repo():
            parts = self.runner.snapshots()
        first = {"verdict": parts.get("verdict"), **run.to_json()}
        self.documents = {**first, **parts, "updated": iso_utc(self.clock.wall())}

    def write(self) -> StateDir:
        """Write status.json and the cost ledger, as they are now."""
        self._document()
        operations = {
            "guard.hook": _cost(self._total, 0.0003 * self._total, 0.0),
            "guard.loop": _cost(self._total, 0.0, 0.02 * self._total),
            "validation": _cost(self._total // 100 + 1, 0.9 * (self._total // 100 + 1), 0.0),
        }
        costs = self._costs()
        document = {"operations": operations, "budget_status": costs["budget_status"]}
        document |= {"total_percentage": costs["share_pct"]}
        self.state.costs.parent.mkdir(exist_ok=True)
        write_json(self.state.costs, {**document, "budget_percentage": costs["budget_pct"]})
        write_json(self.state.status, self.documents)
        return self.state

    def close(self) -> None:
        """Close the ledger."""
        self._ledger.close()


def _cost(calls: int, blocking_s: float, background_s: float) -> dict[str, Any]:
    return {
        "calls": calls,
        "total_time": blocking_s,
        "background_time": background_s,
        "percentage": blocking_s / 100,
        "impact": "negligible",
        "status": "active",
    }
