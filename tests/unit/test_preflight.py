"""The preflight: what it waits for, what it remembers, and what prevents a start."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miner_guard.checks.check import Check, Expectation, Snapshot
from miner_guard.checks.request import PreflightRequest
from miner_guard.config import Config, GpuSettings
from miner_guard.guard.preflight import preflight, refusal
from miner_guard.record.events import Event
from miner_guard.state_dir import StateDir
from miner_guard.system.clock import FakeClock
from tests.support.snapshots import healthy


class Looking:
    """A preflight with given snapshots, whose clock moves only while it waits."""

    def __init__(self, tmp_path: Path, looks: list[Snapshot], **gpu: Any) -> None:
        self.clock, self.events, self.waited = FakeClock(), [], 0.0  # type: ignore[var-annotated]
        self.looks = looks
        self.state = StateDir(tmp_path)
        self.question = PreflightRequest(Config(gpu=GpuSettings(**gpu)), self.state, (), {})
        self.stop_after = float("inf")

    def wait(self, seconds: float) -> bool:
        self.clock.advance(seconds)
        self.waited += seconds
        return self.waited >= self.stop_after

    def collect(self, _question: PreflightRequest, _wait: Callable[[float], bool]) -> Snapshot:
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def run(self) -> Any:
        emit: Callable[[Event], None] = self.events.append
        return preflight(self.question, emit, self.wait, clock=self.clock, collect=self.collect)


@pytest.mark.parametrize(
    ("machine", "gpus"),
    [
        (healthy(), 4),
        (
            healthy(
                4,
                env={"CUDA_VISIBLE_DEVICES": "0,1"},
                expectation=Expectation(2, "the GPUs present"),
            ),
            2,
        ),
    ],
    ids=["all", "masked"],
)
def test_a_healthy_machine_starts_at_once_and_its_gpus_are_remembered(
    tmp_path: Path, machine: Snapshot, gpus: int
) -> None:
    looking = Looking(tmp_path, [machine])
    outcome = looking.run()
    assert outcome.go, [c for c in outcome.checks if c.level == "critical"]
    assert looking.waited == 0
    assert re.fullmatch(r"PREFLIGHT: \d+ ok(, \d+ unknown)?", looking.events[-1].text)
    assert f'"gpu_count": {gpus}' in looking.state.host_facts.read_text()


def test_a_machine_without_a_driver_is_unknown_unless_the_settings_ask_for_its_cpu(
    tmp_path: Path,
) -> None:
    """`doctor` once called everything "ok" on a machine that had lost its driver."""
    nvml = {"state": "absent", "code": 12, "reason": "NVML Shared Library Not Found", "gpus": []}
    torch = {"torch_version": "2.5.1", "cuda_version": None, "cuda_available": False}
    for count, level in ((None, "unknown"), (0, "ok")):
        bare = replace(
            healthy(), nvml=nvml, torch=torch, expectation=Expectation(count, "no source")
        )
        looking = Looking(tmp_path, [bare])
        outcome = looking.run()
        about = [c for c in outcome.checks if c.check.startswith(("driver.", "gpu.", "cuda."))]
        assert {c.check: c.level for c in about} == {"driver.nvml": level, "cuda.available": level}
        assert all(bool(c.next_step) == (level == "unknown") for c in about)
        assert outcome.go
        assert len(looking.events) == 1, "each start need not repeat it"


def test_missing_gpus_are_waited_for_and_reported_once(tmp_path: Path) -> None:
    looking = Looking(tmp_path, [healthy(3), healthy(3), healthy(4)])
    assert looking.run().go
    assert looking.waited == 10
    assert [f.fields.get("check") for f in looking.events[:-1]] == ["gpu.count", "cuda.count", None]
    assert {f.name for f in looking.events} == {"preflight"}
    assert looking.events[-2].fields["what"] == "cuda.count, gpu.count"


def test_gpus_that_stay_away_stop_the_start_after_the_wait_and_are_not_remembered(
    tmp_path: Path,
) -> None:
    looking = Looking(tmp_path, [healthy(3)], preflight_wait_s=300)
    outcome = looking.run()
    assert not outcome.go
    assert 295 <= looking.waited <= 305
    assert looking.events[-1].level == "critical"
    assert not looking.state.host_facts.exists()


def test_what_waiting_cannot_fix_is_not_waited_for(tmp_path: Path) -> None:
    bad = healthy(4, env={"CUDA_VISIBLE_DEVICES": "0"})
    looking = Looking(tmp_path, [bad])
    assert not looking.run().go
    assert looking.waited == 0
    assert Looking(tmp_path, [bad], preflight="warn").run().go


def test_a_stop_ends_the_wait(tmp_path: Path) -> None:
    looking = Looking(tmp_path, [healthy(3)])
    looking.stop_after = 5
    assert not looking.run().go
    assert looking.waited == 5


def test_a_refusal_names_every_critical_check() -> None:
    """`driver.nvml … and 2 more` once hid that no GPU was there."""
    checks = [
        Check("driver.nvml", "critical", "libnvidia-ml.so.1 is missing", "NVML initialises"),
        Check("gpu.count", "critical", "0 GPUs", "8, according to --expect-gpus"),
        *(Check(f"c.{n}", "critical", "bad") for n in range(4)),
    ]
    assert refusal(checks) == (
        "driver.nvml: libnvidia-ml.so.1 is missing; gpu.count: 0 GPUs (expected 8, according to "
        "--expect-gpus); c.0: bad; c.1: bad; and 2 more"
    )
