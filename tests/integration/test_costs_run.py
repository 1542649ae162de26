"""Source 000's disaster, reproduced in a much faster real run: the guard warns, keeps one ledger,
and lets the operation wait if it asks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from miner_guard.record.store import RunReader
from tests.faults.guarded import guarding

MINER = """
import time
import miner_guard

guard = miner_guard.init()
tracker = miner_guard.get_global_tracker()
for step in range(1, 201):
    time.sleep(0.02)
    guard.step(outer_step=1, inner_step=step, loss=1.0)
    if {EVOLUTION}:
        with tracker.track("evolution_snapshot"):
            time.sleep(0.4)
    if tracker.due("status", every_steps=10, step=step):
        with tracker.track("status"):
            pass
guard.close(finished=True)
"""


def _run(folder: Path, evolution: str, **settings: Any) -> tuple[dict[str, Any], list[str]]:
    """The ledger and the events of one run of the miner."""
    script = folder / "miner.py"
    script.write_text(MINER.replace("{EVOLUTION}", evolution))
    with guarding(folder) as guard:
        assert guard.run(sys.executable, script, settings=settings) == 0, guard.tail()
    ledger = json.loads(guard.state.costs.read_text())
    return ledger, [hit.text for hit in RunReader(guard.state.db).events()]


@pytest.fixture(scope="module")
def unthrottled(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[str]]:
    folder = tmp_path_factory.mktemp("costs")
    return _run(folder, "step % 20 == 0", **{"costs.operation_warn_s": 0.3})


def test_it_is_reported_and_the_ledger_has_its_cost(
    unthrottled: tuple[dict[str, Any], list[str]],
) -> None:
    ledger, events = unthrottled
    words = " ".join(events)
    assert "MONITORING OVER BUDGET" in words
    assert "MONITORING THROTTLED" not in words
    evolution = ledger["operations"]["evolution_snapshot"]
    assert evolution["calls"] == 10
    assert evolution["total_time"] == pytest.approx(4.0, rel=0.3)
    assert ledger["budget_status"] == "critical"
    assert {"guard.hook", "guard.loop", "guard.helpers", "status"} <= ledger["operations"].keys()
    assert ledger["operations"]["guard.hook"]["percentage"] < 2, (
        "steps of 20 ms; at one second it is a fiftieth of that"
    )


def test_it_waits_if_it_asks(unthrottled: tuple[dict[str, Any], list[str]], tmp_path: Path) -> None:
    ledger, events = _run(tmp_path, 'tracker.due("evolution_snapshot", every_steps=20, step=step)')
    assert " ".join(events).count("MONITORING THROTTLED") == 1
    assert 1 <= ledger["operations"]["evolution_snapshot"]["calls"] <= 4
    assert ledger["operations"]["status"]["calls"] == 20, "what is cheap runs as often as asked"
    assert ledger["total_percentage"] < unthrottled[0]["total_percentage"] / 3
