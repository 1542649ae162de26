"""`miner-guard costs` and the monitor `costs`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miner_guard.cli.main import run
from miner_guard.costs import set_global_tracker
from miner_guard.rank.journal import CostEntry
from miner_guard.rank.layout import StepRecord
from miner_guard.record.events import Event
from miner_guard.system.clock import FakeClock
from miner_guard.watch.base import Exit, Launch
from miner_guard.watch.costs import CostsMonitor
from tests.support.contexts import context
from tests.support.present_state import write_status
from tests.support.simulated_ranks import headers

EXAMPLE = "--every 500 --seconds 180 --step-time 3.5"


@pytest.fixture
def costs(tmp_path: Path) -> Callable[[str], int]:
    """Run `miner-guard costs …`; returns its exit code."""
    return lambda line: run(["costs", *line.split(), "--state-dir", str(tmp_path)])


@pytest.fixture
def emitted() -> list[Event]:
    return []


@pytest.fixture
def monitor(tmp_path: Path, emitted: list[Event]) -> Iterator[CostsMonitor]:
    yield CostsMonitor(context(tmp_path, emit=emitted.append))
    set_global_tracker(None)


def _step(
    number: int, seconds: float, phases: dict[str, float] | None = None, nested: float = 0.0
) -> StepRecord:
    return StepRecord(
        number=number,
        outer_step=1,
        inner_step=number,
        total_steps=number,
        end=seconds,
        loss=1.0,
        phases=phases or {},
        nested_in_monitor_s=nested,
    )


def test_estimate_gives_the_documents_10_1_per_cent_and_exit_1(
    costs: Callable[[str], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert costs(f"estimate evolution --steps 2487 {EXAMPLE}") == 1
    out = capsys.readouterr().out
    assert "evolution: 4.9 calls of 180s = 882s in 8704s of training" in out
    assert "overhead 10.1% (budget 5%): FAR OVER BUDGET" in out


def test_estimate_fills_in_the_documents_checklist(
    costs: Callable[[str], int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Source 000 asks eight questions before any monitoring feature is enabled."""
    assert costs(f"estimate evolution_snapshot {EXAMPLE}") == 1
    out = capsys.readouterr().out
    assert "NEVER IN PRODUCTION: far too expensive, only for research" in out
    assert out.partition("checklist\n")[2].splitlines() == [
        "[x] time per call: 180s",
        "[x] how often: every 500 steps",
        "[x] cost per 1000 steps: 360s",
        "[x] share of training time: 10.3%",
        "[ ] below 5% of training time: no",
        "[ ] cheaper: 87.5s per call would fit, or one call every 1029 steps: "
        "sample 10-20 examples, not 100",
        "[ ] alternative: run it on a checkpoint, after training",
        "[ ] in the cost ledger: no calls recorded here: "
        'wrap it in tracker.track("evolution_snapshot")',
    ]


def test_nothing_fits_a_budget_of_0(
    costs: Callable[[str], int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advice was to run it "every None steps"."""
    monkeypatch.setenv("MINER_GUARD_COSTS__BUDGET_PCT", "0")
    assert costs(f"estimate evolution_snapshot {EXAMPLE}") == 1
    out = capsys.readouterr().out
    assert "\nto fit the budget, run it after training\n" in out
    assert "\n[ ] cheaper: nothing fits a budget of 0%\n" in out
    assert "None" not in out


def test_the_documents_decision_framework(
    costs: Callable[[str], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert costs("known") == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if not line.startswith(" ")] == [
        "ALWAYS SAFE",
        "USE CAUTIOUSLY",
        "NEVER IN PRODUCTION",
    ]
    assert "  evolution snapshot: 60-300s per call, every 500 steps; far too expensive" in out
    assert costs("known --json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["advice"] for row in rows if row["operation"] == "validation loss"} == {
        "USE CAUTIOUSLY"
    }


def test_the_recommended_configurations_are_the_documents(
    costs: Callable[[str], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert costs("presets") == 0
    presets = json.loads(capsys.readouterr().out)
    budgets = {name: preset["monitoring_budget"] for name, preset in presets.items()}
    assert budgets == {"production": 5.0, "research": 15.0, "final_evaluation": 2.0}
    assert presets["production"]["eval_steps"] == 200
    assert not presets["production"]["enable_evolution"]


def test_estimate_within_budget_is_exit_0_and_json(
    costs: Callable[[str], int], capsys: pytest.CaptureFixture[str]
) -> None:
    cheap = "--steps 1000 --every 200 --seconds 3 --step-time 3.5"
    assert costs(f"estimate {cheap} --json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert round(answer["overhead_pct"], 1) == 0.4
    assert answer["budget_status"] == "ok"


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        (b'{"operations": 5}', 1, "is not a cost ledger"),
        (b'{"operations": {"a": {"seconds": NaN}}}', 1, "is not a cost ledger"),
        (b"\x00garbage", 3, "can't be read"),
    ],
)
@pytest.mark.parametrize("flag", ["", "--json"])
def test_a_file_that_is_not_a_ledger_is_reported_without_a_traceback(
    costs: Callable[[str], int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: bytes,
    code: int,
    words: str,
    flag: str,
) -> None:
    (tmp_path / "status").mkdir()
    (tmp_path / "status" / "monitoring_costs.json").write_bytes(content)
    write_status(tmp_path, {"steps": {"p50_s": None}})
    assert costs(flag) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err
    assert costs("estimate --every 5 --seconds 1") == 64


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("estimate", 64, "needs --every"),
        ("estimate --every 5 --seconds 1 --step-time 0", 64, "--step-time"),
        ("estimate --every 5 --seconds 1 --step-time nan", 64, "--step-time"),
        ("estimate --every 5 --seconds inf --step-time 3", 64, "--seconds"),
        (f"estimate --every {'9' * 400} --seconds 1 --step-time 3", 64, "--every"),
    ],
)
def test_invalid_requests_are_refused(
    costs: Callable[[str], int],
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    code: int,
    words: str,
) -> None:
    assert costs(arguments) == code
    assert words in capsys.readouterr().err


def test_phases_are_entered_once_each(monitor: CostsMonitor) -> None:
    """Of 5 s in the monitor phase, 3 s belong to a validation nested in it: `monitor` keeps 2 s,
    and the total is 5 s."""
    monitor.on_launch(Launch(["x"], 1, 0, 1000.0))
    monitor.on_steps(
        0, [_step(0, 100.0, {"monitor": 5.0, "val_loss": 3.0, "forward": 50.0}, nested=3.0)]
    )
    report = monitor.tracker.get_report()
    assert {name: row["total_time"] for name, row in report["operations"].items()} == {
        "monitor": 2.0,
        "validation": 3.0,
    }
    assert report["total_percentage"] == pytest.approx(100 * 5 / 95, abs=1e-3)


def test_the_account_knows_the_time_of_a_step(monitor: CostsMonitor) -> None:
    """The cost table needs it for the columns of source 000's table: frequency, and cost per 1000
    steps."""
    monitor.on_launch(Launch(["x"], 1, 0, 1000.0))
    assert monitor.tracker.get_report()["step_time"] is None
    monitor.on_steps(
        0, [_step(n, 10.0, {"val_loss": 2.0} if n % 5 == 0 else {}) for n in range(10)]
    )
    assert monitor.tracker.get_report()["step_time"] == pytest.approx(9.6)


def test_only_the_lead_rank_is_counted(monitor: CostsMonitor) -> None:
    for rank in (0, 1):
        monitor.on_steps(rank, [_step(0, 10.0)])
        monitor.on_entry(rank, CostEntry(operation="guard.hook", seconds=0.5, count=64))
    row = monitor.tracker.get_report()["operations"]["guard.hook"]
    assert (row["total_time"], row["calls"]) == (0.5, 64)
    assert monitor.snapshot()["guard_blocking_pct"] == pytest.approx(100 * 0.5 / 9.5, abs=1e-3)


def test_after_a_new_rendezvous_the_present_ranks_bear_the_cost(monitor: CostsMonitor) -> None:
    """Otherwise monitoring would seem free, because the leading rank has gone to another node."""
    monitor.on_steps(0, [_step(0, 10.0)])
    monitor.on_tick(10.0, headers(4, 5))
    monitor.on_steps(4, [_step(1, 10.0, {"inference": 3.0})])
    monitor.on_entry(4, CostEntry(operation="guard.hook", seconds=0.5, count=64))
    operations = monitor.tracker.get_report()["operations"]
    assert {name: row["total_time"] for name, row in operations.items() if row["total_time"]} == {
        "inference": 3.0,
        "guard.hook": 0.5,
    }
    assert monitor.tracker.training_s() == pytest.approx(20.0 - 3.5)


def test_an_expensive_call_of_a_rank_is_called_out(
    monitor: CostsMonitor, emitted: list[Event], tmp_path: Path
) -> None:
    monitor.on_steps(0, [_step(0, 1750.0)])
    monitor.on_entry(0, CostEntry(operation="evolution_snapshot", seconds=180.0))
    assert [event.text.partition(":")[0] for event in emitted] == [
        "MONITORING SLOW",
        "MONITORING OVER BUDGET",
    ]
    list(monitor.on_stop())
    document: dict[str, Any] = json.loads(
        (tmp_path / "status" / "monitoring_costs.json").read_text()
    )
    assert document["budget_status"] == "critical"
    assert document["operations"]["guard.loop"]["background_time"] > 0


def test_the_guards_helpers_are_counted_once_and_never_backwards(tmp_path: Path) -> None:
    """Otherwise an open page, which the HTTP port's process renders, would seem to cost nothing."""
    status: dict[str, Any] = {}
    monitor = CostsMonitor(context(tmp_path, status=lambda: status))
    readings: list[dict[str, Any] | None] = [{"helpers_cpu_s": 2.0}, None, {"helpers_cpu_s": 5.0}]
    for turn, reading in enumerate(readings):
        status["health"] = {"guard": reading}
        monitor.on_tick(20.0 * turn, {})
    row = monitor.tracker.get_report()["operations"]["guard.helpers"]
    set_global_tracker(None)
    assert (row["background_time"], row["total_time"]) == (5.0, 0.0)


def test_time_in_which_the_miner_does_not_run_is_not_training_time(monitor: CostsMonitor) -> None:
    clock = monitor.context.clock
    assert isinstance(clock, FakeClock)
    monitor.on_launch(Launch(["x"], 1, 0, clock.monotonic()))
    clock.advance(50)
    monitor.on_exit(Exit(1, None, False, False, 50.0))
    clock.advance(1000)
    assert monitor.tracker.training_s() == 50


def test_an_open_operation_is_warned_about_while_it_runs(
    monitor: CostsMonitor, emitted: list[Event]
) -> None:
    clock = monitor.context.clock
    assert isinstance(clock, FakeClock)
    since = clock.monotonic()
    monitor.on_steps(0, [_step(number, 3.5) for number in range(100)])
    open_call = replace(headers(0)[0], operation="evolution_snapshot", operation_since=since)
    for _ in range(60):
        clock.advance(1.0)
        monitor.on_tick(clock.monotonic(), {0: open_call})
    assert [event.text for event in emitted] == [
        "MONITORING OVER BUDGET: 5.1% (limit 5%)",
        "MONITORING SLOW: in evolution_snapshot for 31s (limit 30s)",
        "MONITORING OVER BUDGET: 10.3% (limit 10%)",
    ]
    assert monitor.tracker.get_report()["operations"]["evolution_snapshot"]["total_time"] == 60
    monitor.on_tick(clock.monotonic(), headers(0))
    assert "evolution_snapshot" not in monitor.tracker.get_report()["operations"]
