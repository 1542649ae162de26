"""GPU faults over successive samples: reported once when they appear and once when they clear, but
not for readings that fluctuate."""

from __future__ import annotations

from typing import Any

import pytest

from miner_guard.checks.gpu import Faults, of_row
from miner_guard.record.events import Event

HEALTHY: dict[str, Any] = {
    "index": 0,
    "state": "ok",
    "error": None,
    "uuid": "GPU-0",
    "name": "NVIDIA A100-SXM4-80GB",
    "memory_used_bytes": 4 << 20,
    "memory_total_bytes": 80 << 30,
    "utilization_ratio": 0.97,
    "temperature_c": 55,
    "power_w": 310.0,
    "throttle": [],
    "ecc_uncorrected": 0,
    "rows_uncorrected": 0,
    "remap_pending": False,
    "remap_failed": False,
    "pcie_width": 16,
    "pcie_width_max": 16,
    "fabric_waits": None,
    "mig": 0,
    "unread": {},
    "xids": [],
}


def observed(faults: Faults, now: float, **changes: Any) -> list[Event]:
    return list(faults.observe([{**HEALTHY, **changes}], now))


@pytest.mark.parametrize("throttle", [[], ["idle", "SW power cap"]])
def test_a_healthy_gpu_says_nothing_in_a_day_of_samples(throttle: list[str]) -> None:
    faults = Faults()
    assert not any(observed(faults, 10.0 * n, throttle=throttle) for n in range(8640))


@pytest.mark.parametrize(
    ("fault", "level", "words"),
    [
        ({"ecc_uncorrected": 1}, "critical", "GPU 0 1 uncorrected ECC errors"),
        ({"remap_pending": True}, "warning", "a row remap is pending"),
        (
            {"remap_pending": True, "rows_uncorrected": 4},
            "critical",
            "GPU FAULT: GPU 0 a row remap is pending",
        ),
        ({"remap_failed": True}, "critical", "row remapping failed"),
        ({"state": "lost", "error": "x"}, "critical", "GPU 0 is lost: it has fallen off the bus"),
        ({"state": "gone", "error": "x"}, "critical", "GPU 0 is no longer there"),
    ],
)
def test_a_fault_is_reported_once_and_its_end_once(
    fault: dict[str, Any], level: str, words: str
) -> None:
    faults = Faults()
    found = [f for n in range(9) for f in observed(faults, 10.0 * n, **(fault if n > 4 else {}))]
    assert [(f.name, f.level) for f in found] == [("gpu_fault", level)]
    assert words in found[0].text
    assert [f.level for f in observed(faults, 200.0)] == ["info"]


@pytest.mark.parametrize(
    ("fault", "unread"),
    [
        ({"ecc_uncorrected": 1}, {"ecc_uncorrected": None}),
        (
            {"state": "lost", "error": "GPU is lost"},
            {"state": "unreadable", "error": "No Permission"},
        ),
    ],
)
def test_a_fault_that_can_no_longer_be_read_is_not_reported_as_recovered(
    fault: dict[str, Any], unread: dict[str, Any]
) -> None:
    faults = Faults()
    assert [f.name for f in observed(faults, 0.0, **fault)] == ["gpu_fault"]
    assert observed(faults, 10.0, **unread) == []
    assert [f.level for f in observed(faults, 20.0)] == ["info"]


def test_throttling_counts_from_six_samples_in_ten_minutes() -> None:
    faults = Faults()
    sparse = [observed(faults, 130.0 * n, throttle=["HW thermal"]) for n in range(20)]
    assert not any(sparse)
    dense = [observed(faults, 5000 + 10.0 * n, throttle=["HW slowdown"]) for n in range(8)]
    assert [len(s) for s in dense] == [0, 0, 0, 0, 0, 1, 0, 0]
    assert dense[5][0].level == "warning"
    assert "GPU 0 throttled (HW slowdown) in 6 samples over the last 50 s" in dense[5][0].text
    assert [f.level for f in observed(faults, 6000.0)] == ["info"]


def test_a_narrow_link_must_be_seen_twice_and_under_load() -> None:
    faults = Faults()
    idle = {"pcie_width": 4, "utilization_ratio": 0.0}
    assert not any(observed(faults, 10.0 * n, **idle) for n in range(5))
    assert "gpu.pcie" not in {c.check for c in of_row({**HEALTHY, **idle})}, "nobody can know"
    assert not observed(faults, 100.0, pcie_width=4)
    assert not observed(faults, 110.0)
    assert not observed(faults, 120.0, pcie_width=4)
    assert [f.name for f in observed(faults, 130.0, pcie_width=4)] == ["gpu_fault"]


def test_half_of_the_lanes_are_well_unless_other_gpus_have_all_of_them() -> None:
    """Cloud machines give a T4 or an A10G eight of its sixteen lanes."""
    half = {**HEALTHY, "pcie_width": 8}
    whole = {**HEALTHY, "index": 1}
    levels = [
        next(c.level for c in of_row(half, rows) if c.check == "gpu.pcie")
        for rows in ([half], [half, half], [half, whole], [half, {**whole, "name": "T4"}])
    ]
    assert levels == ["ok", "ok", "warn", "ok"]


@pytest.mark.parametrize(
    ("xid", "level"), [(79, "critical"), (48, "critical"), (94, "warning"), (63, "warning")]
)
@pytest.mark.parametrize("state", ["ok", "gone"])
def test_an_xid_is_a_fault_of_its_weight_also_of_a_gpu_that_is_gone(
    xid: int, level: str, state: str
) -> None:
    changes = {"state": state, "error": "", "xids": [xid]}
    fault = observed(Faults(), 0.0, **changes)[-1]
    assert (fault.level, fault.fields["check"]) == (level, "gpu.xid")
    assert f"Xid {xid}" in fault.text
    assert not observed(Faults(), 0.0, xids=[92]), "it asks for nothing"


@pytest.mark.parametrize("field", [n for n in HEALTHY if n not in ("index", "state", "unread")])
def test_an_unreadable_value_is_neither_healthy_nor_a_fault(field: str) -> None:
    row = {**HEALTHY, field: None, "unread": {field: "Insufficient Permissions"}}
    checks = {c.check: c for c in of_row(row)}
    assert checks["gpu.state"].level == "unknown"
    assert field in checks["gpu.state"].seen
    assert {c.level for n, c in checks.items() if n != "gpu.state"} <= {"ok"}
    assert set(checks) <= {c.check for c in of_row(HEALTHY)}
