"""GPU faults over successive samples: reported once when they appear and once when they clear, but
not for readings that fluctuate."""

from __future__ import annotations

from typing import Any

import pytest

from miner_guard.checks.faults import Faults, of_events
from miner_guard.checks.gpu import of_row
from miner_guard.record.events import Event

HEALTHY: dict[str, Any] = {
    "index": 0,
    "state": "ok",
    "error": None,
    "uuid": "GPU-0",
    "name": "NVIDIA A100-SXM4-80GB",
    "pci_bus": "00000000:10:00.0",
    "capability": "8.0",
    "memory_used_bytes": 4 << 20,
    "memory_reserved_bytes": 600 << 20,
    "memory_total_bytes": 80 << 30,
    "utilization_ratio": 0.97,
    "memory_busy_ratio": 0.4,
    "temperature_c": 55,
    "slowdown_c": 89,
    "power_w": 310.0,
    "power_limit_w": 400.0,
    "power_default_w": 400.0,
    "sm_clock_mhz": 1410,
    "sm_clock_max_mhz": 1410,
    "memory_clock_mhz": 1593,
    "throttle_bits": 0,
    "throttle": [],
    "ecc_uncorrected": 0,
    "ecc_corrected": 0,
    "rows_corrected": 0,
    "rows_uncorrected": 0,
    "remap_pending": False,
    "remap_failed": False,
    "recovery_action": "none",
    "pcie_generation": 4,
    "pcie_generation_max": 4,
    "pcie_width": 16,
    "pcie_width_max": 16,
    "pcie_replays": 0,
    "nvlinks_up": 12,
    "nvlinks": 12,
    "peers": 3,
    "fabric": None,
    "persistence": 1,
    "compute_mode": 0,
    "mig": 0,
    "processes": 0,
    "unread": {},
    "xids": [],
}


def observed(faults: Faults, now: float, **changes: Any) -> list[Event]:
    return list(faults.observe([{**HEALTHY, **changes}], now))


def test_a_healthy_gpu_says_nothing_in_a_day_of_samples() -> None:
    faults = Faults()
    assert not any(observed(faults, 10.0 * n) for n in range(8640))


def test_a_fault_is_reported_once_and_its_end_once() -> None:
    faults = Faults()
    events = [f for n in range(10) for f in observed(faults, 10.0 * n, ecc_uncorrected=n // 5)]
    assert [f.name for f in events] == ["gpu_fault"]
    assert [f.name for f in observed(faults, 200.0)] == ["gpu_recovered"]


def test_a_lost_gpu_keeps_what_stood_before_and_is_reported_itself() -> None:
    faults = Faults()
    observed(faults, 0.0, ecc_uncorrected=1)
    lost = observed(faults, 10.0, state="lost", error="GPU is lost in uuid")
    assert [f.text.partition(";")[0] for f in lost] == [
        "GPU FAULT: GPU 0 is lost: it has fallen off the bus (GPU is lost in uuid)"
    ]
    assert lost[0].level == "critical"


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
    assert [f.name for f in observed(faults, 20.0)] == ["gpu_recovered"]


def test_cards_without_a_bridge_have_links_that_count_only_where_other_cards_have_theirs() -> None:
    bare = [
        {**HEALTHY, "index": n, "uuid": f"GPU-{n}", "nvlinks": 4, "nvlinks_up": 0} for n in range(2)
    ]
    faults = Faults()
    assert list(faults.observe(bare, 0.0)) == []
    one_down = [{**bare[0], "nvlinks_up": 4}, bare[1]]
    (fault,) = faults.observe(one_down, 10.0)
    assert (fault.fields["gpu"], fault.level) == (1, "warning")
    assert "0 of 4 NVLinks are up" in fault.text
    assert [c.level for c in of_row({**HEALTHY, "nvlinks_up": 11}) if c.check == "gpu.nvlink"] == [
        "warn"
    ]


def test_throttling_counts_from_six_samples_in_ten_minutes() -> None:
    faults = Faults()
    sparse = [
        observed(faults, 130.0 * n, throttle_bits=0x40, throttle=["HW thermal"]) for n in range(20)
    ]
    assert not any(sparse)
    dense = [
        observed(faults, 5000 + 10.0 * n, throttle_bits=0x8, throttle=["HW slowdown"])
        for n in range(8)
    ]
    assert [len(s) for s in dense] == [0, 0, 0, 0, 0, 1, 0, 0]
    assert dense[5][0].level == "warning"
    assert [f.name for f in observed(faults, 6000.0)] == ["gpu_recovered"]


@pytest.mark.parametrize("bits", [0x1, 0x4, 0x1 | 0x4])
def test_idle_and_the_software_power_cap_are_everyday(bits: int) -> None:
    faults = Faults()
    assert not any(
        observed(faults, 10.0 * n, throttle_bits=bits, throttle=["x"]) for n in range(50)
    )


def test_a_narrow_link_must_be_seen_twice_and_under_load() -> None:
    faults = Faults()
    assert not any(
        observed(faults, 10.0 * n, pcie_width=8, utilization_ratio=0.0) for n in range(5)
    )
    assert not observed(faults, 100.0, pcie_width=8)
    assert not observed(faults, 110.0)
    assert not observed(faults, 120.0, pcie_width=8)
    assert [f.name for f in observed(faults, 130.0, pcie_width=8)] == ["gpu_fault"]


@pytest.mark.parametrize(
    ("xid", "level"), [(79, "critical"), (48, "critical"), (94, "warning"), (31, "warning")]
)
@pytest.mark.parametrize("state", ["ok", "lost", "gone"])
def test_an_xid_is_a_fault_of_its_weight_also_of_a_gpu_that_is_lost(
    xid: int, level: str, state: str
) -> None:
    (fault,) = of_events([{**HEALTHY, "state": state, "xids": [xid]}])
    assert fault.level == level
    assert f"Xid {xid}" in fault.text


@pytest.mark.parametrize(
    "field", [n for n in HEALTHY if n not in ("index", "state", "unread", "xids")]
)
def test_an_unreadable_value_is_neither_healthy_nor_a_fault(field: str) -> None:
    paired = {
        "throttle_bits": ["throttle"],
        "remap_pending": ["rows_corrected", "rows_uncorrected", "remap_failed"],
    }
    unread = dict.fromkeys([field, *paired.get(field, [])])
    with_ok = {c.check for c in of_row(HEALTHY)}
    checks = {
        c.check: c
        for c in of_row({**HEALTHY, **unread, "unread": {field: "Insufficient Permissions"}})
    }
    assert checks["gpu.state"].level == "unknown"
    assert field in checks["gpu.state"].seen
    assert {c.level for n, c in checks.items() if n != "gpu.state"} <= {"ok"}
    assert set(checks) <= with_ok
