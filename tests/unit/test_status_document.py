"""The present state's model: readers survive any file, and writers use the model's names."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from miner_guard.config import Config
from miner_guard.record.status_document import (
    ChainStatus,
    HealthStatus,
    Section,
    StatusDocument,
    read_status,
)
from miner_guard.state_dir import StateDir
from miner_guard.uploads.chain import ChainReading
from miner_guard.uploads.chain import as_fields as chain_fields
from miner_guard.watch.chain import ChainMonitor
from miner_guard.watch.host import HostMonitor
from tests.support.contexts import JobsNever, context
from tests.support.present_state import write_status


def test_what_another_version_wrote_is_read_as_far_as_it_is_known() -> None:
    status = StatusDocument.from_json(
        {
            "restarts": None,
            "steps": None,
            "uploads": {"repo": [], "decision": {"allowed": False, "new": 1}},
            "ranks": {"cpu_fallback": {"0": {"verdict": "suspected"}}},
        }
    )
    assert status.restarts is None
    assert status.steps.p50_s is None
    assert status.uploads.repo.age_s is None
    assert status.uploads.decision is not None
    assert status.uploads.decision.allowed is False
    assert status.ranks.cpu_fallback["0"].verdict == "suspected"
    assert StatusDocument.from_json(status.to_json()).to_json() == status.to_json()


def test_a_missing_or_torn_file_is_not_a_document(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    assert read_status(state) is None
    state.db.write_text("no database")
    assert read_status(state) is None
    state.db.unlink()
    write_status(state.root, {"state": "running"})
    status = read_status(state)
    assert status is not None
    assert (status.state, status.gone, status.age_s < 5) == ("running", False, True)


def _names(section: type[Section]) -> set[str]:
    return {field.name for field in fields(section)}


def test_monitors_write_the_fields_that_readers_read(tmp_path: Path) -> None:
    """A field must not be renamed on one side only. The other sections are written through the
    model."""
    config = Config()
    health = HostMonitor(context(tmp_path, config=config, jobs=JobsNever()))
    chain = ChainMonitor(context(tmp_path, config=config, jobs=JobsNever()))
    assert _names(HealthStatus) == set(health.snapshot())
    assert {"block", "reason"} <= set(chain.snapshot()) & _names(ChainStatus)
    looked = chain_fields(ChainReading(reason=None))
    assert _names(ChainStatus) - {"reason", "outer_step", "unpaid"} <= {*looked, *chain.snapshot()}
