"""Audits run on a schedule, and use the miner's log lines about AllReduces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from miner_guard.config import Config, MinerSettings, RepoSettings
from miner_guard.eventlog.catalog import make_finding, message
from miner_guard.record.events import Event
from miner_guard.system.clock import FakeClock
from miner_guard.uploads import audit
from miner_guard.validators.facts import AllReduce
from miner_guard.watch.uploads import AuditMonitor
from tests.support.contexts import JobsLater, context

PUSHED = make_finding("upload_succeeded", tag="5.56.51", detail="-")


class Bench:
    """The monitor with a faked audit."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, **repo: Any) -> None:
        self.jobs, self.emitted, self.asked = JobsLater(), list[Event](), list[audit.Known]()
        self.report = audit.AuditReport("accepted", "epoch 56")
        patch.setattr(audit, "audit_repo", self._look)
        config = Config(
            miner=MinerSettings(profile="sn38"),
            repo=RepoSettings(**{"kind": "local", "path": str(folder), **repo}),
        )
        emit = self.emitted.append
        self.monitor = AuditMonitor(
            context(folder, config=config, clock=FakeClock(), emit=emit, jobs=self.jobs)
        )

    def _look(self, _repo: object, _chain: object, _limits: object, known: audit.Known) -> Any:
        self.asked.append(known)
        return self.report

    def finds(self, event: Event) -> None:
        assert list(self.monitor.on_event(event)) == []
        self.jobs.run()


def test_an_audit_follows_each_verified_push_and_a_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a published gradient could score zero for hours before anybody notices."""
    bench = Bench(tmp_path, monkeypatch)
    assert bench.jobs.every_s["audit"] == 600.0
    bench.finds(PUSHED)
    assert len(bench.asked) == 1
    bench.jobs.repeated["audit"]()
    assert len(bench.asked) == 2
    # A repeated verdict is not reported again.
    assert [f.level for f in bench.emitted] == ["info", "debug"]
    bench.report = audit.AuditReport("rejected", "epoch 56: too old")
    bench.jobs.repeated["audit"]()
    assert message(bench.emitted[-1]) == "AUDIT FAILED: epoch 56: too old"


@pytest.mark.parametrize("repo", [{"kind": "none"}, {"audit_every_s": 0.0}])
def test_without_a_repo_or_with_audits_off_none_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repo: dict[str, Any]
) -> None:
    bench = Bench(tmp_path, monkeypatch, **repo)
    assert "audit" not in bench.jobs.repeated
    bench.finds(PUSHED)
    assert bench.asked == []


def test_the_audit_knows_how_the_last_allreduce_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, monkeypatch)
    bench.jobs.repeated["audit"]()
    failed = make_finding("allreduce_ended", outcome="failed: no group", reason="no group")
    bench.finds(failed)
    bench.jobs.repeated["audit"]()
    bench.finds(make_finding("allreduce_ended", outcome="finished", reason=None))
    bench.jobs.repeated["audit"]()
    allreduces = [known.allreduce for known in bench.asked]
    assert allreduces == [None, AllReduce("no group"), AllReduce(None)]
