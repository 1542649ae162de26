"""Provides a guard for each test. Each test ends with a search through /proc for processes that
outlived the guard, and `explain` must name what the guard named while it ran."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from miner_guard.incidents import knowledge
from miner_guard.incidents.explain import explain_events
from miner_guard.incidents.oom import Training
from miner_guard.record.store import RunReader
from tests.faults.guarded import Guarded, guarding


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    """A guard that has not been started yet."""
    with guarding(tmp_path) as guard:
        yield guard
    assert_explained_alike(guard)


def assert_explained_alike(guard: Guarded) -> None:
    """Assert that `explain --state-dir` gives the answer that the guard gave while it ran: of the
    last attempt with an incident, one of its incidents, or a fault that has its own event, such as
    a hang."""
    events = RunReader(guard.state.db).events() if guard.state.db.exists() else ()
    attempt, named = 0, dict[int, set[str]]()
    for event in events:
        attempt += event.name == "miner_started"
        if event.name == "incident" and event.level != "info":
            named.setdefault(attempt, set()).add(str(event.fields["label"]))
    faults = {event.name for event in events if event.level != "info"}
    if named or faults & {"hang_detected", "loss_nan", "straggler"}:
        root = explain_events(events, knowledge.load(), Training()).root
        assert root is not None, faults
        told = faults.union(
            *map(knowledge.load().shown_by, faults), named.get(max(named, default=0), ())
        )
        assert {root.label, root.excerpt, f"{root.label}_detected"} & told
