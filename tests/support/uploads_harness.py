"""The uploads monitor, with everything around it faked except the files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from miner_guard.config import Config, GateSettings, MinerSettings, RepoSettings
from miner_guard.rank.journal import DecisionEntry, parse
from miner_guard.record.events import Event
from miner_guard.record.store import RunStore
from miner_guard.state_dir import StateDir
from miner_guard.system.clock import FakeClock
from miner_guard.uploads import gate as gating
from miner_guard.uploads.gate import decide
from miner_guard.uploads.repos import Look
from miner_guard.validators.facts import Candidate, Published
from miner_guard.watch import uploads as module
from tests.support.contexts import JobsLater, context
from tests.support.driven_steps import make_step


class Bench:
    """One monitor with everything around it faked except the files."""

    def __init__(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        repo: str = "local",
        audit_every_s: float | None = 0.0,
        **gate: Any,
    ) -> None:
        self.clock, self.jobs, self.emitted = FakeClock(), JobsLater(), list[Event]()
        place = {"outer_step": 56, "inner_step": 50, "revision": "5.56.50"}
        self.repo = Published(age_s=600.0, reason=None, checksum="c0", **place)  # type: ignore[arg-type]
        monkeypatch.setattr(module, "look_at", lambda *_: Look(self.repo))
        config = Config(
            miner=MinerSettings(profile="sn38"),
            gate=GateSettings(**gate),
            repo=RepoSettings(kind=repo, path=str(tmp_path), audit_every_s=audit_every_s),  # type: ignore[arg-type]
        )
        self.state = StateDir(tmp_path / "state")
        self.store = RunStore(self.state.db, self.emitted.append)
        self.monitor = module.UploadsMonitor(
            context(
                self.state.root,
                config=config,
                clock=self.clock,
                emit=self.emitted.append,
                jobs=self.jobs,
                write_row=lambda *row: self.store.write(row),  # type: ignore[arg-type]
            )
        )
        self.jobs.run()

    def look(self) -> None:
        self.jobs.repeated["repo"]()

    def tick(self, seconds: float = 1.0) -> list[Event]:
        self.clock.advance(seconds)
        events = list(self.monitor.on_tick(self.clock.monotonic(), {}))
        self.jobs.run()
        return events

    def step(self, inner: int, seconds: float, flags: int = 0) -> list[Event]:
        start = self.clock.monotonic()
        self.clock.advance(seconds)
        step = make_step(inner, start, seconds, outer_step=56, flags=flags)
        return list(self.monitor.on_steps(0, [step]))

    def entry(self, **entry: Any) -> list[Event]:
        parsed = parse({"t": self.clock.monotonic(), **entry})
        assert parsed is not None
        return list(self.monitor.on_entry(0, parsed))

    def decide(self, inner: int, kind: str = "gradient") -> Mapping[str, Any]:
        known = gating.read(self.state.gate_inputs)
        decided = decide(
            Candidate(kind, 56, inner, loss=3.4),
            known,
            self.monitor.context.config.gate,
            now=self.clock.monotonic(),
            wall=self.clock.wall(),
        )
        return DecisionEntry(decision=decided.as_dict()).to_json()

    def push(self, phase: str, **more: Any) -> list[Event]:
        place = {"outer_step": 56, "inner_step": 51, "tag": "5.56.51", "upload_kind": "gradient"}
        sent = {"decision_id": "d1", "seconds": 12.0, "bytes": 1000, "error": None, **more}
        return self.entry(kind="upload", phase=phase, **place, **sent)

    def messages(self, event: str) -> list[str]:
        return [f.text for f in self.emitted if f.name == event]
