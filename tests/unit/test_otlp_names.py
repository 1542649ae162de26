"""Names in OpenTelemetry: one for every metric in /metrics, following the conventions where they
apply."""

from __future__ import annotations

import pytest

from miner_guard.eventlog.catalog import LEVELS
from miner_guard.eventlog.status_document import StatusDocument
from miner_guard.reporting import metrics, otlp_names

GPU = {"index": 0, "uuid": "GPU-1", "state": "ok", "memory_used_bytes": 3, "temperature_c": 60.0}
STATUS = StatusDocument.from_json(
    {
        "run_id": "r1",
        "state": "running",
        "steps": {"inner_step": 7, "loss": "NaN", "p50_s": 1.5, "goodput": {"training": 0.9}},
        "health": {
            "gpus": {"gpus": [GPU]},
            "host": {"cpu_pct": 50.0, "network_sent_bytes": 5, "network_received_bytes": 6},
            "guard": {"cpu_s": 2.0, "memory_bytes": 60},
        },
        "metrics": {"events": {"slow_step": 2}},
    }
)


def points() -> list[otlp_names.MetricPoint]:
    return list(otlp_names.points(STATUS, version="1", age_s=0.5))


def test_every_metric_has_a_point_and_no_two_are_alike() -> None:
    samples = [
        sample
        for family in metrics.families(STATUS, version="1", age_s=0.5)
        if family.type != "info"
        for sample in family.samples
    ]
    seen = points()
    assert len(seen) == len(samples)
    assert len({(p.name, *sorted(p.attributes.items())) for p in seen}) == len(seen)


@pytest.mark.parametrize(
    ("name", "unit", "counter", "value", "attributes"),
    [
        ("system.cpu.utilization", "1", False, 0.5, {}),
        ("system.network.io", "By", True, 5, {"network.io.direction": "transmit"}),
        ("process.cpu.time", "s", True, 2.0, {}),
        (
            "hw.gpu.memory.usage",
            "By",
            False,
            3,
            {"hw.type": "gpu", "hw.name": "0", "hw.id": "GPU-1"},
        ),
        ("miner_guard.step_p50", "s", False, 1.5, {}),
        ("miner_guard.inner_step", "1", False, 7, {}),
        ("miner_guard.events", "1", True, 2, {"miner_guard.event": "slow_step"}),
    ],
)
def test_names_units_and_attributes(
    name: str, unit: str, counter: bool, value: float, attributes: dict[str, str]
) -> None:
    point = next(p for p in points() if p.name == name and p.attributes == attributes)
    assert (point.unit, point.counter, point.value) == (unit, counter, value)


def test_no_name_carries_its_unit() -> None:
    """The conventions forbid `…_seconds` in seconds."""
    assert [p.name for p in points() if p.name.endswith(("_seconds", "_bytes", "_ratio"))] == []


def test_an_events_fields_are_attributes_and_what_is_unknown_is_absent() -> None:
    record = {
        "ts": "2026-01-02T03:04:05.678901Z",
        "level": "error",
        "event": "incident",
        "msg": "…",
        "run_id": "r1",
        "host": "h",
        "rank": None,
        "label": "cuda_oom",
        "fix": None,
        "ranks": [{"rank": 0, "loss": None}, None],
    }
    assert otlp_names.attributes(record) == {
        "miner_guard.label": "cuda_oom",
        "error.type": "cuda_oom",
        "miner_guard.ranks": [{"rank": 0}, ""],
    }


def test_every_level_has_a_severity_in_the_same_order() -> None:
    by_level = sorted(LEVELS, key=lambda level: LEVELS[level])
    assert sorted(otlp_names.SEVERITIES, key=lambda level: otlp_names.SEVERITIES[level]) == by_level
