"""Monitoring costs: source 000's numbers and warnings, and how throttling averts its disaster."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from miner_guard.config import CostSettings
from miner_guard.costs import MonitoringCostTracker, get_global_tracker, set_global_tracker
from miner_guard.record.events import Event
from miner_guard.system.clock import FakeClock
from tests.support import requires


class Account:
    """A tracker on a fake clock, with its warnings."""

    def __init__(self, budget: CostSettings | None = None, output_dir: Path | None = None) -> None:
        self.clock = FakeClock()
        self.events: list[Event] = []
        self.tracker = MonitoringCostTracker(
            output_dir, budget=budget, clock=self.clock, report=self.events.append
        )

    def call(self, operation: str, seconds: float) -> None:
        with self.tracker.track(operation):
            self.clock.advance(seconds)

    def names(self) -> list[str]:
        return [event.name for event in self.events]


@pytest.fixture
def account() -> Account:
    return Account()


def test_shares_are_of_training_time_as_in_the_document(account: Account) -> None:
    """1000 steps at 3.5 s; operations take 2 × 180 s + 20 × 0.3 s + 5 × 3 s = 381 s, about 11%."""
    account.clock.advance(3500)
    for operation, calls, seconds in (
        ("evolution", 2, 180),
        ("details", 20, 0.3),
        ("inference", 5, 3),
    ):
        for _ in range(calls):
            account.call(operation, seconds)
    report = account.tracker.get_report()
    assert report["total_percentage"] == pytest.approx(10.886, abs=0.01)
    assert report["budget_status"] == "critical"
    assert account.tracker.is_over_budget()
    shares = {name: round(row["percentage"], 1) for name, row in report["operations"].items()}
    assert shares == {"evolution": 10.3, "details": 0.2, "inference": 0.4}


def test_an_operation_over_30_s_is_called_out_at_its_first_call(account: Account) -> None:
    account.clock.advance(100_000)
    account.call("evolution_snapshot", 31)
    assert [event.text for event in account.events] == [
        "MONITORING SLOW: evolution_snapshot took 31.0s (limit 30s)"
    ]


def test_over_5_per_cent_warns_once_and_over_10_is_critical_once(account: Account) -> None:
    account.clock.advance(1000)
    for _ in range(12):
        account.call("validation", 10)
    over = [event for event in account.events if event.name == "monitoring_over_budget"]
    assert [event.level for event in over] == ["warning", "critical"]
    assert over[0].text.startswith("MONITORING OVER BUDGET: 6.0% (limit 5%)")


def test_the_first_second_of_a_run_raises_no_alarm(account: Account) -> None:
    account.call("status", 0.5)
    assert account.names() == []
    assert not account.tracker.is_over_budget()
    assert account.tracker.get_report()["operations"].popitem()[1]["impact"] == "negligible"
    assert account.tracker.get_report()["budget_status"] == "ok"


def test_an_unfinished_call_counts(account: Account) -> None:
    account.clock.advance(100)
    with account.tracker.track("evolution_snapshot"):
        account.clock.advance(50)
        with account.tracker.track("inner"):
            account.clock.advance(10)
            report = account.tracker.get_report()
            assert report["total_time"] == 60
            assert account.tracker.is_over_budget()
    assert account.tracker.get_report()["operations"]["evolution_snapshot"]["total_time"] == 60


def test_more_monitoring_than_training_is_all_of_it(account: Account) -> None:
    """A first call at the very beginning must not show a share of a million per cent."""
    account.clock.advance(0.001)
    account.call("evolution_snapshot", 40)
    assert account.tracker.share_pct() == 100
    assert account.tracker.get_report()["operations"]["evolution_snapshot"]["percentage"] == 100


def test_without_a_ledger_the_one_liner_reports_that(tmp_path: Path) -> None:
    set_global_tracker(None)
    try:
        tracker, text = get_global_tracker({"MINER_GUARD_STATE_DIR": str(tmp_path)}), io.StringIO()
        tracker.print_summary(text)
        assert text.getvalue().startswith(
            f"no ledger at {tmp_path}/status/monitoring_costs.json: no guard is running there"
        )
        assert tracker.get_report()["budget_status"] == "unknown"
    finally:
        set_global_tracker(None)


def test_what_an_operation_raises_comes_through_and_is_paid_for(account: Account) -> None:

    def broken() -> None:
        with account.tracker.track("broken"):
            account.clock.advance(2)
            raise KeyError("inside")

    with pytest.raises(KeyError):
        broken()
    assert account.tracker.get_report()["operations"]["broken"]["total_time"] == 2


def test_the_documents_jq_commands_give_sensible_answers(tmp_path: Path) -> None:
    jq = requires.tool("jq")
    account = Account(output_dir=tmp_path / "status")
    account.clock.advance(3500)
    for operation, seconds in (("a", 1), ("b", 300), ("c", 20), ("d", 0.1)):
        account.call(operation, seconds)
    account.tracker.write()
    file = tmp_path / "status" / "monitoring_costs.json"

    def ask(program: str) -> object:
        answer = subprocess.run(
            [jq, program, str(file)], capture_output=True, text=True, check=True, timeout=30
        )
        return json.loads(answer.stdout)

    assert ask(".total_percentage") == pytest.approx(9.17, abs=0.01)
    assert ask(".budget_status") == "warning"
    top = ask(
        "{budget_status, total_percentage, top_operations: .operations | to_entries |"
        " sort_by(.value.total_time) | reverse | .[0:3]}"
    )
    assert isinstance(top, dict)
    assert [entry["key"] for entry in top["top_operations"]] == ["b", "c", "a"]
    ordered = ask(".operations | to_entries | sort_by(.value.total_time) | reverse")
    assert isinstance(ordered, list)
    assert [entry["key"] for entry in ordered] == ["b", "c", "a", "d"]


def test_the_table_has_the_columns_of_the_documents_table() -> None:
    """Source 000: Operation, Time/Call, Frequency, Cost per 1000 steps, Impact, Status."""
    account, text = Account(), io.StringIO()
    account.tracker.training_time(lambda: 3500.0, lambda: 3.5)
    account.call("evolution_snapshot", 360)
    for _ in range(5):
        account.call("live inference", 3.0)
    account.tracker.print_summary(text)
    assert [" ".join(row.split()) for row in text.getvalue().splitlines()] == [
        "Monitoring overhead: 10.71% of 3500s training (budget 5%): FAR OVER BUDGET",
        "Operation Calls Time/Call Frequency Per 1000 steps Total Background Share Impact Status",
        "evolution_snapshot 1 360.0s once 360.0s 360.0s 0s 10.29% critical active",
        "live inference 5 3.0s every 200 steps 15.0s 15.0s 0s 0.43% acceptable active",
    ]


def test_the_documents_module_name_works_in_the_documents_commands(tmp_path: Path) -> None:
    """Source 000's two examples run with their own `from monitoring_cost_tracker import …`."""
    usage = (
        "from monitoring_cost_tracker import MonitoringCostTracker\n"
        f"tracker = MonitoringCostTracker(output_dir={str(tmp_path)!r})\n"
        "with tracker.track('evolution_snapshot'):\n"
        "    pass\n"
        "print(tracker.is_over_budget(), f\"{tracker.get_report()['total_percentage']:.1f}%\")"
    )
    summary = (
        "from monitoring_cost_tracker import get_global_tracker\n"
        "tracker = get_global_tracker()\n"
        "tracker.print_summary()\n"
    )
    assert _python(usage, tmp_path).endswith("%\n")
    ledger = tmp_path / "state" / "status"
    ledger.mkdir(parents=True)
    (tmp_path / "monitoring_costs.json").rename(ledger / "monitoring_costs.json")
    assert "evolution_snapshot" in _python(summary, tmp_path / "state")


def _python(code: str, state: Path) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=requires.REPO,
        env={**os.environ, "MINER_GUARD_STATE_DIR": str(state)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return ended.stdout


def test_the_disaster_stays_in_budget_and_spares_the_cheap_operation(account: Account) -> None:
    """Source 000's disaster: 60-300 s every 500 steps at 3.5 s a step, next to a cheap operation
    every 200 steps."""
    calls = 0
    for step in range(1, 20_001):
        account.clock.advance(3.5)
        if account.tracker.due("evolution_snapshot", every_steps=500, step=step):
            account.call("evolution_snapshot", (60, 180, 300)[calls % 3])
            calls += 1
        if account.tracker.due("live_inference", every_steps=200, step=step):
            account.call("live_inference", 3)
    assert 5 <= calls < 25
    assert account.tracker.share_pct() <= 5.5
    report = account.tracker.get_report()["operations"]
    assert (report["live_inference"]["calls"], report["live_inference"]["status"]) == (
        100,
        "active",
    )
    throttled = [event for event in account.events if "throttled" in event.fields]
    assert throttled[0].fields["operation"] == "evolution_snapshot"
    assert throttled[0].fields["share_pct"] > throttled[0].fields["limit_pct"] == 5.0


def test_an_operation_that_gets_cheap_runs_as_often_as_asked_again(account: Account) -> None:
    for step in range(1, 40_001):
        account.clock.advance(3.5)
        if account.tracker.due("evolution_snapshot", every_steps=500, step=step):
            account.call("evolution_snapshot", 300 if step < 5000 else 0.5)
    levels = [event.level for event in account.events if "throttled" in event.fields]
    assert levels == ["warning", "info"]
    assert account.tracker.get_report()["operations"]["evolution_snapshot"]["status"] == "active"


def test_due_by_time_and_due_without_an_interval(account: Account) -> None:
    assert account.tracker.due("status", every_s=60)
    account.call("status", 1)
    assert not account.tracker.due("status", every_s=60)
    account.clock.advance(60)
    assert account.tracker.due("status", every_s=60)
    with pytest.raises(ValueError, match="every_s, or every_steps and step"):
        account.tracker.due("status")


def test_steps_that_count_from_0_again_are_asked_about_like_the_first_ones(
    account: Account,
) -> None:
    """Inner steps start from 0 with each outer step. Nothing was due until they had passed the last
    inner step of the previous outer step."""
    asked = [*range(401), *range(401)]
    due = [step for step in asked if account.tracker.due("eval", every_steps=200, step=step)]
    assert due == [0, 200, 400, 0, 200, 400]


def test_names_without_end_take_no_memory_without_end(account: Account) -> None:
    for number in range(10_000):
        account.tracker.record(f"operation-{number}", 0.001)
    assert len(account.tracker.get_report()["operations"]) <= 257


def test_a_failed_write_is_reported_once_and_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    account = Account(output_dir=tmp_path / "file")
    for _ in range(5):
        account.clock.advance(10)
        account.call("status", 0.1)
    assert account.names().count("guard_degraded") == 1


def test_another_process_reads_the_running_guards_ledger(tmp_path: Path) -> None:
    account = Account(output_dir=tmp_path / "status")
    account.clock.advance(1000)
    account.call("validation", 20)
    account.tracker.write()
    set_global_tracker(None)
    try:
        other = get_global_tracker({"MINER_GUARD_STATE_DIR": str(tmp_path)})
        assert other.get_report()["operations"]["validation"]["total_time"] == 20
        with other.track("own"):
            pass
        assert list(other.get_report()["operations"]) == ["own"]
    finally:
        set_global_tracker(None)


def test_the_last_seconds_of_a_process_are_in_its_file(tmp_path: Path) -> None:
    """The last 5 s of a process must be in the file."""
    program = (
        "import sys; from miner_guard import MonitoringCostTracker as T\n"
        "t = T(output_dir=sys.argv[1])\n"
        "for _ in range(7):\n    with t.track('eval'): pass\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)
    report = json.loads((tmp_path / "monitoring_costs.json").read_text())
    assert report["operations"]["eval"]["calls"] == 7
